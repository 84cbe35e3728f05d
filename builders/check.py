"""What a model is and what serving it takes, before anything is built: the command `check`."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from builders.bucket import BucketPlan
from builders.cost import BYTES, MEASURED, Size
from builders.errors import BuilderError, SourceError
from builders.render import bucket_plan
from builders.serving.entry.tokenise import Tokeniser
from builders.settings import DeploySettings, ModelSettings
from builders.source import EncoderSource, open_source
from builders.tokenizer_files import write_tokenizer

if TYPE_CHECKING:
    from builders.tasks import TaskFacts


@dataclass(frozen=True)
class BucketCheck:
    """One bucket that would be served."""

    length: int
    """Tokens."""
    lane: str
    batch: int
    """Largest batch, texts."""
    flops: float
    """Floating point operations of one text."""
    activation_bytes: int
    """Estimate for a whole batch, in the engine's precision (`builders.cost`)."""
    estimated_ms: float
    """One text alone, from the measured model that `ModelCheck.estimated_from` names."""
    measured_ms: float | None = None
    """One text alone on this machine, FP32, one thread; None without the export."""


@dataclass(frozen=True)
class ExportCheck:
    """What the real export gave."""

    operators: Mapping[str, int]
    """Operator -> nodes, as exported."""
    fused: Mapping[str, int]
    """Operator -> nodes, fused for ONNX Runtime."""
    least_cosine: float
    """Smallest cosine to the torch model."""
    largest_error: float
    """Largest difference of one value."""
    seconds: float


@dataclass(frozen=True)
class ModelCheck:
    """A model that can be built, and what it takes."""

    source: str
    """`model.source`."""
    family: str
    task: str
    output: str
    """Name and shape of the lanes' output."""
    labels: tuple[str, ...]
    head: str
    """Pooling and what follows it, or the activation."""
    prompts: tuple[str, ...]
    """Names."""
    default_prompt: str | None
    dimensions: tuple[int, ...]
    """Sizes that a vector may be cut to."""
    positions: int
    """Tokens that the model takes."""
    max_tokens: int
    """Longest text that is not cut, tokens."""
    notice: str | None
    """Buckets left out, a limit lowered."""
    parameters: int
    """Numbers in the weight files."""
    weight_bytes: Mapping[str, int]
    """Precision -> bytes."""
    engine: str
    precision: str
    buckets: tuple[BucketCheck, ...]
    estimated_from: str
    """The measured model behind `estimated_ms`."""
    notes: tuple[str, ...] = ()
    export: ExportCheck | None = None
    """None: the export was not tried."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Layers, hidden, heads, vocabulary."""


def check_settings(model: str) -> DeploySettings:
    """The settings of a model that nothing is said of yet: the defaults.

    Raises:
        BuilderError: no such kind of name.
    """
    return DeploySettings(model=ModelSettings(source=model))


def check_model(settings: DeploySettings, *, export: bool = False) -> ModelCheck:
    """Read a model and say what serving it takes.

    Without `export` nothing of the weights is read but their shapes: the model is made on torch's meta device and run
    once on shapes alone.

    Args:
        settings: the deployment.
        export: export and fuse it for real, and time it on this machine; seconds to minutes.

    Raises:
        BuilderError: it cannot be built; the message says why.
    """
    source = open_source(settings.model)
    plan = bucket_plan(settings, source)
    _check_tokenizer(source, plan.max_tokens)
    shapes = dict(_shapes(source.transformer))
    _check_forward(source)
    size, parameters = _size(source, shapes), sum(int(np.prod(shape)) for shape in shapes.values())
    kind = settings.engine.kind
    precision = settings.engine.precision
    # int8 rounds the inputs of its products, one at a time; what is kept between them is FP32.
    activations = "fp32" if kind == "onnxruntime" else precision
    found, times = _export(source, plan) if export else (None, {})
    buckets = tuple(
        BucketCheck(
            length=bucket.length,
            lane=bucket.lane,
            batch=bucket.batch,
            flops=size.flops(bucket.length),
            activation_bytes=size.activation_bytes(bucket.batch, bucket.length, activations),
            estimated_ms=MEASURED[kind].estimate(size, bucket.length),
            measured_ms=times.get(bucket.length),
        )
        for bucket in plan.buckets
    )
    task = source.task
    return ModelCheck(
        source=settings.model.source,
        family=source.family,
        task=task.name,
        output=f"{task.output} FP32 [b, {'L, ' if task.per_token else ''}{task.size}]",
        labels=task.labels,
        head=_head(task),
        prompts=tuple(task.prompts),
        default_prompt=task.default_prompt,
        dimensions=task.dimensions,
        positions=source.positions,
        max_tokens=plan.max_tokens,
        notice=plan.notice,
        parameters=parameters,
        weight_bytes={name: parameters * each for name, each in BYTES.items()},
        engine=kind,
        precision=precision,
        buckets=buckets,
        estimated_from=MEASURED[kind].what,
        notes=tuple(_notes(source, export)),
        export=found,
        sizes={
            "layers": source.layers,
            "hidden": source.architecture.hidden_size,
            "heads": source.heads,
            "vocabulary": source.architecture.vocab_size,
        },
    )


def _head(task: TaskFacts) -> str:
    if task.name == "embedding":
        steps = [type(step).__name__.lower() for step in task.steps]
        return ", ".join([f"pooling {' + '.join(task.pooling)}", *steps])
    return "start and end logits" if task.name == "answering" else f"activation {task.activation}"


def _notes(source: EncoderSource, export: bool) -> Iterator[str]:
    if source.task.name in ("classification", "reranking", "answering"):
        kind = "segment_start goes to the lanes" if source.task.segment else "the model has no segments"
        yield f"pairs: {source.task.pair}; {kind}"
    if source.architecture.local_window is not None:
        window = source.architecture.local_window
        yield f"some layers see {window} tokens only; the operations count them as if they saw all"
    if source.tiled:
        yield f"positions are tiled from {source.architecture.positions} to {source.positions}"
    if source.architecture.generic and not export:
        yield "a family without a row of its own: whether its graph holds is seen by the export alone (--export)"
    if not export:
        yield "the weights were not read and nothing was exported: --export tries it for real"


def _check_tokenizer(source: EncoderSource, max_tokens: int) -> None:
    with tempfile.TemporaryDirectory(prefix="check.") as folder:
        path = write_tokenizer(source, Path(folder))
        try:
            Tokeniser(path, max_tokens, segment=source.task.segment)
        except Exception as error:  # the tokenizers library raises plain Exception
            raise SourceError(
                f"tokenizer.json cannot be used: {error}", value=str(source.transformer),
                remedy="save the tokenizer again with transformers",
            ) from None  # fmt: skip


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all stored tensors; the header of a safetensors file says them."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        except (OSError, ValueError) as error:
            raise SourceError(
                f"the weights cannot be read ({error})", value=str(path), remedy="fetch or save the model again"
            ) from None
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, tuple(entry["shape"])


def _size(source: EncoderSource, shapes: Mapping[str, tuple[int, ...]]) -> Size:
    """From the stored matrices; those of look-up tables multiply nothing."""
    architecture = source.architecture
    products = {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == 2 and "embeddings" not in name and shape[0] != architecture.vocab_size
    }
    inner = max((max(shape) for shape in products.values()), default=architecture.hidden_size)
    count = sum(int(np.prod(shape)) for shape in products.values())
    return Size(architecture.layers, architecture.hidden_size, architecture.heads, inner, count)


def _check_forward(source: EncoderSource) -> None:
    """Run the model on shapes alone: a forward that does not take the lanes' inputs shows at once."""
    import torch
    import transformers

    from builders.backbone import Backbone

    try:
        config = transformers.AutoConfig.from_pretrained(
            str(source.transformer), local_files_only=True, trust_remote_code=False
        )
        config._attn_implementation = "eager"
        with torch.device("meta"):
            model = getattr(transformers, source.task.auto_class).from_config(config)
            ids = torch.ones(2, min(8, source.positions), dtype=torch.int32)
            length = torch.ones(2, 1, dtype=torch.int32)
            starts = (length,) if source.task.segment else ()
            Backbone(model.eval(), source.architecture)(ids, length, *starts)
    except BuilderError:
        raise
    except Exception as error:  # each model raises its own kinds
        raise SourceError(
            f"the model cannot be run with the lanes' inputs: {error}", value=str(source.folder),
            limit="input_ids, attention mask, positions and, where the model has them, token types",
            remedy="use another model",
        ) from error  # fmt: skip


def _export(source: EncoderSource, plan: BucketPlan) -> tuple[ExportCheck, dict[int, float]]:
    from builders.export import export_onnx
    from builders.graph import make_graph, recipe_for
    from builders.graph_file import load_graph, save_graph

    longest = plan.buckets[-1].length
    with tempfile.TemporaryDirectory(prefix="check.") as name:
        folder = Path(name)
        report = export_onnx(source, folder / "model.onnx")
        reference = load_graph(report.path)
        recipe = recipe_for("onnxruntime", "fp32")
        made = make_graph(reference, source, recipe, longest=longest, gate=None, progress=lambda _: None)
        path = save_graph(made.model, folder / "fused.onnx")
        times = _times(path, source, plan)
    operators = dict(Counter(node.op_type for node in made.model.graph).most_common())
    found = ExportCheck(report.nodes, operators, report.least_cosine, report.largest_error, report.seconds)
    return found, times


def _times(path: Path, source: EncoderSource, plan: BucketPlan) -> dict[int, float]:
    """Bucket -> best of three runs of one text, ms."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = {}
    for bucket in plan.buckets:
        length = np.array([[bucket.length]], dtype=np.int32)
        ids = np.ones((1, bucket.length), dtype=np.int32)
        feeds = dict(zip(source.task.contract.inputs, (ids, length, length), strict=False))
        runs = []
        for _ in range(3):
            began = time.perf_counter()
            session.run(None, feeds)
            runs.append(time.perf_counter() - began)
        found[bucket.length] = 1000 * min(runs)
    return found


def as_json(check: ModelCheck) -> dict[str, Any]:
    """Plain values for `--json`."""
    from dataclasses import asdict

    return {"can_be_built": True, **asdict(check)}
