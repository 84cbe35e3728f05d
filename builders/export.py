"""The ONNX graph with the lanes' contract: one file, standard operators only, compared with torch before it is kept."""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.errors import ExportError
from builders.graph_file import (
    EXTERNAL_ABOVE,
    INPUTS,
    OUTPUT,
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
    """Write a source as ONNX: `input_ids` INT32 [b, L], `length` INT32 [b, 1] -> `EMBEDDING` FP32 [b, dim].

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
    check_contract(model, dim=source.dim, positions=source.positions)
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

    lengths = torch.tensor([[16], [5], [9]], dtype=torch.int32)
    tokens = torch.ones(3, 16, dtype=torch.int32)
    batch, long = torch.export.Dim("b", min=1), torch.export.Dim("L", min=1, max=source.positions)
    try:
        with _quiet_export():
            program = torch.onnx.export(
                encoder,
                (tokens, lengths),
                dynamo=True,
                dynamic_shapes=({0: batch, 1: long}, {0: batch}),
                input_names=list(INPUTS),
                output_names=[OUTPUT],
                opset_version=opset,
                optimize=True,
                verbose=False,
            )
    except Exception as error:  # torch.export, the decompositions and onnxscript each raise their own kinds
        raise ExportError(
            f"torch.onnx cannot export the model: {error}",
            value=str(source.folder),
            remedy="use the torch and transformers versions of pyproject.toml",
        ) from error
    if program is None:  # what the legacy exporter returns
        raise ExportError("torch.onnx returned no program", value=torch.__version__, remedy="use torch 2.9 or newer")
    return program.model


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
    """Smallest cosine and largest absolute difference between the file and the torch module, over `_COMPARED`."""
    import numpy as np
    import torch

    session = _session(path)
    limit = int(encoder.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    random = np.random.default_rng(0)
    cosine, largest = 1.0, 0.0
    for wanted, rows in _COMPARED:
        width = min(wanted, source.positions)
        tokens = random.integers(0, limit, (len(rows), width)).astype(np.int32)
        length = np.minimum(np.array(rows, dtype=np.int32), width)[:, None]
        (got,) = session.run([OUTPUT], {"input_ids": tokens, "length": length})
        with torch.no_grad():
            expected = encoder(torch.from_numpy(tokens), torch.from_numpy(length)).numpy()
        if not (np.isfinite(got).all() and np.isfinite(expected).all()):
            raise ExportError("the model's output is not finite", value=str(source.folder), remedy="use another model")
        largest = max(largest, float(np.abs(got - expected).max()))
        kept = length[:, 0] > 0  # an empty row has no direction
        a, b = got[kept].astype(np.float64), expected[kept].astype(np.float64)
        cosines = (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
        cosine = min(cosine, float(cosines.min()))
    if not cosine >= _LEAST_COSINE:
        raise ExportError(
            "the graph differs from the torch model",
            value=f"cosine {cosine:.7f}, largest error {largest:.3g}",
            limit=f"cosine {_LEAST_COSINE}",
            remedy="use the torch and onnxruntime versions of pyproject.toml",
        )
    return cosine, largest


def _session(path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise ExportError("onnxruntime is not installed", remedy="pip install 'encoder-lanes[serve]'") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
