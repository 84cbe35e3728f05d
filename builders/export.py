"""The ONNX graph with the lanes' contract: one file, standard operators only, compared with torch before it is kept."""

from __future__ import annotations

import logging
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.contract import INPUTS as INPUTS
from builders.contract import OUTPUT as OUTPUT
from builders.errors import ExportError
from builders.graph_file import (
    EXTERNAL_ABOVE,
    check_contract,
    data_file,
    graph_bytes,
    save_graph,
    sha256_of_graph,
)
from builders.source import EncoderSource

if TYPE_CHECKING:
    import onnx_ir

    from builders.encoder import ContractEncoder

_LEAST_COSINE = 0.99999
# Of scores and logits, which are no directions.
_LARGEST_ERROR = 1e-3
# Batches of the comparison as (L, lengths): one alone, and mixed lengths with an empty row of padding.
_COMPARED = ((24, (24,)), (40, (40, 1, 17, 0, 33)))


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how close it came to torch."""

    path: Path
    """The ONNX file."""
    sha256: str
    """Hash of the ONNX file's bytes, followed by those of its external data where there is any."""
    bytes: int
    """Size of both together."""
    opset: int
    """Version of the standard operators."""
    nodes: dict[str, int]
    """Nodes by operator, most frequent first."""
    seconds: float
    """Time taken, loading and comparison included."""
    least_cosine: float
    """Smallest cosine between a row of the graph (ONNX Runtime, CPU) and of the torch module."""
    largest_error: float
    """Largest absolute difference of one value between the two."""
    external: Path | None
    """Weights beside the file, for a model above 1 GB; it must stay in the same folder under its name."""


def export_onnx(
    source: EncoderSource, destination: Path, *, opset: int = 20, external_above: int = EXTERNAL_ABOVE
) -> ExportReport:
    """Write a source as ONNX, with the inputs and the output of its `Contract`.

    b is free, L runs from 1 to `source.positions`. The file appears under its name only when it has passed the
    checks; a failed export leaves what was there.

    Args:
        source: the model.
        destination: file to write; its folder is made if it is missing.
        opset: version of the standard operators; from 20 on GELU is a single operator.
        external_above: weights of more bytes than this go to `DESTINATION.data`.

    Raises:
        ExportError: torch cannot export the model, or the graph breaks the contract or differs from torch.
        SourceError: the weights cannot be loaded.
    """
    import onnx

    from builders.encoder import load_encoder

    start = time.perf_counter()
    encoder = load_encoder(source)
    model = _trace(encoder, source, opset)
    _strip(model)
    check_contract(model, source.task.contract, positions=source.positions)
    if model.graph.opset_imports.get("") != opset:
        raise ExportError("the graph has another opset", value=model.graph.opset_imports.get(""), limit=f"{opset}")
    nodes = dict(Counter(node.op_type for node in model.graph).most_common())
    compared = []

    def check(draft: Path) -> None:
        try:
            onnx.checker.check_model(str(draft))
        except onnx.checker.ValidationError as error:
            raise ExportError(f"the exported graph is invalid: {error}", value=str(source.folder)) from error
        compared.append(_compare(draft, encoder, source))

    save_graph(model, destination, external_above=external_above, check=check)
    ((cosine, largest),) = compared
    external = data_file(destination)
    return ExportReport(
        path=destination,
        sha256=sha256_of_graph(destination),
        bytes=graph_bytes(destination),
        opset=opset,
        nodes=nodes,
        seconds=time.perf_counter() - start,
        least_cosine=cosine,
        largest_error=largest,
        external=external if external.exists() else None,
    )


def _trace(encoder: ContractEncoder, source: EncoderSource, opset: int) -> onnx_ir.Model:
    import torch

    contract = source.task.contract
    lengths = torch.tensor([[16], [5], [9]], dtype=torch.int32)
    tokens = torch.ones(3, 16, dtype=torch.int32)
    # Half of each text: a start that equals the length would be traced as one value.
    example = (tokens, lengths, lengths // 2)[: len(contract.inputs)]
    batch, long = torch.export.Dim("b", min=1), torch.export.Dim("L", min=1, max=source.positions)
    try:
        with _quiet_export():
            program = torch.onnx.export(
                encoder,
                example,
                dynamo=True,
                dynamic_shapes=({0: batch, 1: long}, *[{0: batch}] * (len(example) - 1)),
                input_names=list(contract.inputs),
                output_names=[contract.output],
                opset_version=opset,
                optimize=True,
                verbose=False,
            )
    except Exception as error:  # torch.export, the decompositions and onnxscript each raise their own kinds
        raise ExportError(
            f"torch.onnx cannot export the model: {_reason(error)}",
            value=str(source.folder),
            remedy="use the torch and transformers versions of pyproject.toml, or another model; "
            f"the whole report: {_keep_report(error)}",
        ) from error
    if program is None:  # what the legacy exporter returns
        raise ExportError("torch.onnx returned no program", value=torch.__version__, remedy="use torch 2.9 or newer")
    return program.model


def _reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom: the exporter wraps it in pages on its own steps."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {line}"


def _keep_report(error: BaseException) -> str:
    """Write all of it, tracebacks included, where it outlives a failed build; returns the file."""
    with tempfile.NamedTemporaryFile("w", prefix="export.", suffix=".txt", encoding="utf-8", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    return file.name


@contextmanager
def _quiet_export() -> Iterator[None]:
    """Drop torch.onnx's progress lines and its warnings (torchvision is not installed, ...); exceptions pass."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _strip(model: onnx_ir.Model) -> None:
    """Drop stack traces and the like: they name this machine's paths, so that equal models would differ in bytes.

    `namespace`, the module a node came from, stays: it says which layer a node belongs to.
    """
    for props in _metadata(model):
        for key in [key for key in props if key != "namespace"]:
            del props[key]


def _metadata(model: onnx_ir.Model) -> Iterator[dict[str, str]]:
    yield model.metadata_props
    yield model.graph.metadata_props
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        yield value.metadata_props
    for node in model.graph:
        yield node.metadata_props
        for output in node.outputs:
            yield output.metadata_props


def _compare(path: Path, encoder: ContractEncoder, source: EncoderSource) -> tuple[float, float]:
    """Smallest cosine and largest absolute difference between the file and the torch module, over `_COMPARED`.

    Of an output for each token, the real tokens' rows are compared, each as its own.
    """
    import numpy as np
    import torch

    contract = source.task.contract
    session = _session(path)
    random = np.random.default_rng(0)
    cosine, largest = 1.0, 0.0
    for wanted, rows in _COMPARED:
        width = min(wanted, source.positions)
        tokens = random.integers(0, source.architecture.vocab_size, (len(rows), width)).astype(np.int32)
        length = np.minimum(np.array(rows, dtype=np.int32), width)[:, None]
        feed = dict(zip(contract.inputs, (tokens, length, _starts(length)), strict=False))
        (got,) = session.run([contract.output], feed)
        with torch.no_grad():
            expected = encoder(*(torch.from_numpy(array) for array in feed.values())).numpy()
        if not (np.isfinite(got).all() and np.isfinite(expected).all()):
            raise ExportError("the model's output is not finite", value=str(source.folder), remedy="use another model")
        if got.shape != expected.shape:
            raise ExportError("the graph's output has another shape", value=got.shape, limit=f"{expected.shape}")
        # An empty row has no direction, and what stands beyond a text's end has no meaning.
        kept = np.arange(width)[None] < length if contract.per_token else length[:, 0] > 0
        a, b = got[kept].astype(np.float64), expected[kept].astype(np.float64)
        largest = max(largest, float(np.abs(a - b).max()))
        if contract.size > 1:
            cosine = min(cosine, _cosine(a, b))
    # One number has no direction but its sign: there the difference alone says something.
    if not cosine >= _LEAST_COSINE or (contract.output != OUTPUT and largest > _LARGEST_ERROR):
        raise ExportError(
            "the graph differs from the torch model",
            value=f"cosine {cosine:.7f}, largest error {largest:.3g}",
            limit=f"cosine {_LEAST_COSINE}" + ("" if contract.output == OUTPUT else f", error {_LARGEST_ERROR}"),
            remedy="use the torch and onnxruntime versions of pyproject.toml",
        )
    return cosine, largest


def _starts(length: Any) -> Any:
    """Where second texts begin: in the middle, at the end (none there), at the first token, in turn."""
    starts = length // 2
    starts[1::3], starts[2::3] = length[1::3], 0
    return starts


def _cosine(a: Any, b: Any) -> float:
    """The smallest cosine of two rows; two rows of nothing but zeros are equal."""
    import numpy as np

    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    same = (a == b).all(-1)
    cosines = (a * b).sum(-1) / np.where(norms > 0, norms, 1.0)
    return float(np.where(same, 1.0, cosines).min())


def _session(path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise ExportError("onnxruntime is not installed", remedy="pip install 'encoder-lanes[serve]'") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
