"""ONNX graphs as files: read without ties to their place, written whole, checked for the lanes' contract.

Weights of a large graph lie in a file beside it, which the graph names. A model that merely names that file cannot be
run, saved elsewhere or compiled; `load_graph` maps the file into memory, and everything behind it sees plain tensors.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from builders.contract import Contract
from builders.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

# Protobuf ends at 2 GiB, and writing one file costs five times its weights in memory (0.5 GB + 5.2 x measured, MiniLM
# and MPNet); weights beside the graph are streamed. So the peak of an export stays at about 6 GB, or twice the weights.
EXTERNAL_ABOVE = 1_000_000_000


def load_graph(path: Path) -> onnx_ir.Model:
    """Read a graph; weights beside it are mapped, not copied.

    The model does not depend on the files any more: they may be moved, deleted or replaced (by another file of their
    name, as `save_graph` does; not overwritten in place).

    Args:
        path: the ONNX file; its external data lies where it says, in its folder or below.

    Raises:
        ExportError: no such file, no ONNX graph, or its external data is missing, too short or outside its folder.
    """
    import onnx_ir

    if not path.is_file():
        raise ExportError("no such ONNX file", value=str(path), remedy="correct the path")
    try:
        model = onnx_ir.load(path)
    except Exception as error:  # protobuf and onnx_ir each raise their own kinds
        raise ExportError(
            f"the file is no ONNX graph: {error}", value=str(path), remedy="correct the path, or export it again"
        ) from error
    map_weights(model)
    return model


def map_weights(model: onnx_ir.Model) -> None:
    """Turn every tensor that names a file into one mapped from it, in place; the numbers stay the same.

    Raises:
        ExportError: see `load_graph`.
    """
    import onnx_ir

    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, onnx_ir.ExternalTensor):
                value.const_value = _mapped(value.const_value)
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        for name, attribute in list(node.attributes.items()):
            if attribute.type == onnx_ir.AttributeType.TENSOR and isinstance(attribute.value, onnx_ir.ExternalTensor):
                node.attributes[name] = onnx_ir.AttrTensor(name, _mapped(attribute.value))


def save_graph(
    model: onnx_ir.Model,
    path: Path,
    *,
    external_above: int = EXTERNAL_ABOVE,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Write a graph whole or not at all; a failure leaves what was there.

    A graph and the data beside it cannot be replaced in one step. Where there is data, old or new, the old graph goes
    first and the new one comes last: a process that is killed in between leaves no graph, never one with the weights
    of another.

    Args:
        model: the graph; its tensors are in memory or mapped afterwards (`map_weights`), so that it outlives a file
            that is replaced here.
        path: file to write; its folder is made if it is missing.
        external_above: weights of more bytes than this go to `NAME.data` beside it; a smaller graph leaves none there.
        check: called with the finished draft before it takes the name; what it raises stops the save.

    Returns:
        `path`.

    Raises:
        ExportError: the model names a data file that cannot be used.
    """
    import onnx_ir

    map_weights(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = data_file(path)
    external = weight_bytes(model) > external_above
    # A folder of its own, not another name: a model names its external data by file name.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        draft = Path(folder) / path.name
        onnx_ir.save(model, draft, external_data=data.name if external else None)
        if check is not None:
            check(draft)
        beside = data_file(draft)
        if data.exists():
            path.unlink(missing_ok=True)
        # None beside it where all tensors are small: those stay in the graph.
        if beside.exists():
            beside.replace(data)
        else:
            data.unlink(missing_ok=True)
        draft.replace(path)
    return path


def data_file(path: Path) -> Path:
    """Where `save_graph` puts the weights of a large graph."""
    return path.with_name(f"{path.name}.data")


def weight_bytes(model: onnx_ir.Model) -> int:
    """Size of all weights."""
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def graph_bytes(path: Path) -> int:
    """Size of a graph as `save_graph` writes it: the file and the data beside it; 0 where there is none."""
    return sum(file.stat().st_size for file in (path, data_file(path)) if file.exists()) if path.exists() else 0


def sha256_of_graph(path: Path) -> str:
    """Hash of a graph's bytes, followed by those of the data files that it names, in the order of their names.

    A damaged graph and missing data are no error here (`load_graph` refuses them): the hash is another one then, so
    that it can be asked whether a file is still what it was.

    Raises:
        OSError: the graph itself cannot be read.
    """
    total = hashlib.sha256()
    for file in (path, *(file for file in _data_files(path) if file.is_file())):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def check_contract(model: onnx_ir.Model, contract: Contract, *, positions: int | None = None) -> None:
    """Refuse a graph that the lanes cannot serve.

    It must have the inputs and the output of the contract, with b and L free whatever their names, and standard
    operators only.

    Args:
        model: the graph.
        contract: what the lanes of its task take and give.
        positions: tokens that L has to reach, for the message.

    Raises:
        ExportError: with what was found, what was expected and what to do.
    """
    import onnx_ir

    foreign = {
        f"{node.domain}::{node.op_type}": f"{node.domain}::{node.op_type} (node {node.name})"
        for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph)
        if node.domain not in ("", "ai.onnx")
    }
    named = [foreign[kind] for kind in sorted(foreign)] + [f"function {name}" for name in model.functions]
    if named:
        raise ExportError(
            "the graph holds operators outside the ONNX standard",
            value=named,
            limit="the domain ai.onnx",
            remedy="export it without an optimiser that fuses (onnxruntime.transformers, ...), functions inlined",
        )
    wanted: dict[str, tuple[str, tuple[int | None, ...]]] = {
        name: ("INT32", (None, None) if name == "input_ids" else (None, 1)) for name in contract.inputs
    }
    wanted[contract.output] = ("FLOAT", (None, None, contract.size) if contract.per_token else (None, contract.size))
    graph = model.graph
    names = (sorted(str(v.name) for v in graph.inputs), [str(v.name) for v in graph.outputs])
    values = (*graph.inputs, *graph.outputs)
    if names != (sorted(contract.inputs), [contract.output]) or any(
        _signature(value) != wanted[str(value.name)] for value in values
    ):
        reach = "" if positions is None else f" (L from 1 to {positions})"
        ones = " and ".join(f"{name} INT32 [b, 1]" for name in contract.inputs[1:])
        row = f"[b, L, {contract.size}]" if contract.per_token else f"[b, {contract.size}]"
        raise ExportError(
            "the graph has not the lanes' contract",
            value={str(value.name): _shape(value) for value in values},
            limit=f"inputs input_ids INT32 [b, L]{reach} and {ones}, output {contract.output} FLOAT {row}; "
            "b and L free (docs/architecture.md)",
            remedy="export it with mask, positions and head inside the graph, or give the model's folder",
        )


def _signature(value: onnx_ir.Value) -> tuple[str, tuple[int | None, ...] | None]:
    """Type and sizes, None for a free one; no sizes at all where the graph says none."""
    if value.shape is None:
        return str(value.dtype), None
    return str(value.dtype), tuple(size if isinstance(size, int) else None for size in value.shape)


def _shape(value: onnx_ir.Value) -> str:
    return f"{value.dtype} [{', '.join(str(size) for size in value.shape)}]" if value.shape is not None else "no shape"


def _mapped(tensor: onnx_ir.ExternalTensor) -> onnx_ir.TensorProtocol:
    import onnx_ir

    location = PurePosixPath(str(tensor.location))
    if location.is_absolute() or ".." in location.parts:
        raise ExportError(
            "a weight lies outside the graph's folder",
            value=f"{tensor.name} in {location}",
            limit="a file in the folder of the graph",
            remedy="put both into one folder",
        )
    # Without a base: onnx_ir refuses links otherwise, and a model hub's cache and a copied folder are full of them.
    reader = onnx_ir.ExternalTensor(
        str(tensor.path), tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=str(tensor.name)
    )
    try:
        array: Any = reader.numpy()
    except (OSError, ValueError) as error:  # missing; empty or too short
        raise ExportError(
            f"the graph's data cannot be read: {error}",
            value=f"{tensor.name} in {tensor.path}",
            remedy="put the data file of the same export beside the graph, under the name that it had",
        ) from error
    return onnx_ir.Tensor(
        array, tensor.dtype, shape=tensor.shape, name=str(tensor.name), doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )  # fmt: skip


def _data_files(path: Path) -> list[Path]:
    import onnx
    from google.protobuf.message import DecodeError
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    try:
        proto = onnx.load(str(path), load_external_data=False)
    except DecodeError:
        return []
    names = {ExternalDataInfo(tensor).location for tensor in _tensors(proto.graph) if uses_external_data(tensor)}
    return [path.parent / name for name in sorted(names)]


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)
