"""The test matrix: every family in every task at every class of length, the fused graph against the model itself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from builders.errors import BuilderError
from builders.samples import FIRST_WORD, WORDS, sample_families, write_sample
from builders.tasks import Task
from builders.verify.runner import Floats, Runner, VerifyError, ask, output_of

if TYPE_CHECKING:
    import torch

    from builders.source import EncoderSource

#: Buckets of the matrix, tokens; the longer one is the models' limit.
EDGE, LIMIT = 16, 40
LENGTHS = {"1": 1, "2": 2, "edge-1": EDGE - 1, "edge": EDGE, "edge+1": EDGE + 1, "limit": LIMIT}
"""Class of length -> tokens of the text."""
TASKS: tuple[Task, ...] = get_args(Task)
#: Smallest cosine and largest difference of scores; both sides compute in FP32.
_COSINE, _ERROR = 0.9999, 1e-3


@dataclass(frozen=True)
class Cell:
    """One family in one task at one class of length."""

    family: str
    task: str
    length: str
    """A key of `LENGTHS`."""
    passed: bool
    reason: str = ""
    """Why it failed."""
    error: float | None = None
    """Largest difference of one value; None where nothing could be compared."""


@dataclass(frozen=True)
class Row:
    """One family in one task at all lengths."""

    family: str
    task: str
    cells: tuple[Cell, ...]
    seconds: float
    nodes: int = 0
    """Nodes of the fused graph."""

    @property
    def passed(self) -> bool:
        """Every cell is green."""
        return all(cell.passed for cell in self.cells)


def run_matrix(
    families: Sequence[str] = (), tasks: Sequence[str] = (), progress: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """Run the matrix, or the part of it that is named; yields each row when it is done.

    A random model is written, read, exported, fused for ONNX Runtime and run at padded lengths; each row of the answer
    is compared with what the transformers model says to the same tokens alone and unpadded.

    Args:
        families: `model_type`s; all when left out.
        tasks: tasks; all when left out.
        progress: told of each row before it runs.

    Raises:
        BuilderError: a name that the matrix does not have.
    """
    chosen = _chosen("family", families, sample_families()), _chosen("task", tasks, TASKS)
    for family in chosen[0]:
        for task in TASKS:
            if task in chosen[1]:
                progress(f"{family} {task}")
                with tempfile.TemporaryDirectory(prefix="matrix.") as folder:
                    yield run_row(family, task, Path(folder))


def _chosen(what: str, names: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    if unknown := [name for name in names if name not in known]:
        raise BuilderError(
            f"the matrix has no such {what}", value=unknown, limit=", ".join(known), remedy=f"correct --{what}"
        )
    return names or known


def run_row(family: str, task: Task, folder: Path, *, spoil: Callable[[Any], None] | None = None) -> Row:
    """Run one family in one task; a model that cannot be built fails every cell with the reason.

    Args:
        family: `model_type`.
        task: the task.
        folder: where the model and its graph are written.
        spoil: changes the fused graph before it is run; for tests of the matrix.
    """
    began = time.perf_counter()
    try:
        model = write_sample(folder, family, task, positions=LIMIT)
        source, runner, nodes = _built(folder, task, spoil)
        cells = tuple(_cell(family, source, model, runner, name) for name in LENGTHS)
    except BuilderError as error:
        failed = tuple(Cell(family, task, name, False, str(error)) for name in LENGTHS)
        return Row(family, task, failed, time.perf_counter() - began)
    return Row(family, task, cells, time.perf_counter() - began, nodes)


def _built(folder: Path, task: Task, spoil: Callable[[Any], None] | None) -> tuple[EncoderSource, Runner, int]:
    from builders.export import export_onnx
    from builders.graph import make_graph, recipe_for, runner_of
    from builders.graph_file import load_graph
    from builders.settings import ModelSettings
    from builders.source import open_source

    source = open_source(ModelSettings(source=str(folder)))
    if source.task.name != task:
        raise VerifyError("the folder is read as a model of another task", value=source.task.name, limit=task)
    reference = load_graph(export_onnx(source, folder / "model.onnx").path)
    recipe = recipe_for("onnxruntime", "fp32")
    made = make_graph(reference, source, recipe, longest=LIMIT, gate=None, progress=lambda _: None)
    if spoil is not None:
        spoil(made.model)
    return source, runner_of(made.model, "fp32"), made.model.graph.num_nodes()


def _cell(family: str, source: EncoderSource, model: torch.nn.Module, runner: Runner, name: str) -> Cell:
    """A text of this length beside a short one, in the bucket that it belongs to."""
    task, tokens = source.task.name, LENGTHS[name]
    random = np.random.default_rng(tokens)
    width = EDGE if tokens <= EDGE else LIMIT
    ids = random.integers(FIRST_WORD, WORDS, (2, width)).astype(np.int32)
    length = np.array([[tokens], [min(tokens, 7)]], dtype=np.int32)
    start = length // 2 if source.task.segment else None
    try:
        answer = ask(runner, ids, length, start)
    except VerifyError as failed:
        return Cell(family, task, name, False, str(failed))
    output = output_of(answer)
    if output != source.task.output:
        return Cell(family, task, name, False, f"the output is {output}, not {source.task.output}")
    found, error, cosine = answer[output], 0.0, 1.0
    if not np.isfinite(found).all():
        return Cell(family, task, name, False, "not finite")
    for row, count in enumerate(length[:, 0]):
        expected = own_answer(model, source, ids[row, :count], None if start is None else int(start[row, 0]))
        got = found[row, :count] if source.task.per_token else found[row]
        error = max(error, float(np.abs(got - expected).max()))
        cosine = min(cosine, _cosine(got.ravel(), expected.ravel()))
    # A vector is a direction; scores, tags and logits are numbers of their own.
    passed = cosine >= _COSINE if task == "embedding" else error <= _ERROR
    reason = "" if passed else f"cosine {cosine:.6f} (least {_COSINE}), off by {error:.3g} (most {_ERROR} of scores)"
    return Cell(family, task, name, passed, reason, error)


def own_answer(model: torch.nn.Module, source: EncoderSource, ids: Any, start: int | None) -> Floats:
    """What the transformers model says to one unpadded text, with the task's own last step.

    Args:
        model: the model.
        source: for the task and its activation.
        ids: INT32 [tokens].
        start: first token of the second text; None when the model is not told of one.

    Returns:
        FP32 [size] or, with a row for each token, [tokens, size]; of an embedding the mean of the token vectors.
    """
    import torch

    tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if start is not None:
        inputs["token_type_ids"] = (torch.arange(tokens.shape[1]) >= start).long()[None]
    with torch.no_grad():
        said = model(**inputs)
    task = source.task
    if task.name == "embedding":
        result = said.last_hidden_state[0].mean(0)
    elif task.name == "answering":
        result = torch.stack((said.start_logits[0], said.end_logits[0]), dim=-1)
    else:
        logits = said.logits[0]
        result = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "none": logits}[task.activation]
    found: Floats = result.numpy()
    return found


def _cosine(a: Floats, b: Floats) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else float(np.array_equal(a, b))
