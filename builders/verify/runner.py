"""What is compared: anything that answers a padded batch with named arrays."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from builders.contract import INPUTS, SEGMENT
from builders.contract import OUTPUT as OUTPUT
from builders.errors import BuilderError
from builders.graph_file import EXTERNAL_ABOVE, map_weights, save_graph, weight_bytes
from builders.serving.lane.processor import int8_saturates

if TYPE_CHECKING:
    import onnx_ir

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]

OUTPUTS = (OUTPUT, "SCORES", "TAGS", "SPANS")
"""Names of a lane's output, by task (`builders.tasks`); every runner returns the one of its model."""
_PREFIX = "parity::"


class VerifyError(BuilderError):
    """A graph or engine cannot be run, or cannot be compared."""


class Runner(Protocol):
    """A graph or an engine with the lanes' contract."""

    def run(self, input_ids: Ids, length: Ids, segment_start: Ids | None = None) -> Mapping[str, Floats]:
        """Run one padded batch.

        Args:
            input_ids: INT32 [b, L], token numbers; what lies beyond a row's length must not matter.
            length: INT32 [b, 1], tokens of each row, 0 to L.
            segment_start: INT32 [b, 1], first token of the second text, for a model that takes it; None: one text.

        Returns:
            The output, one of `OUTPUTS`, FP32 [b, size] or [b, L, size], and, where the runner shows them, block
            outputs by name: FP32 [b, L, hidden] or [b, hidden], first block first. An engine without marked outputs
            returns its output alone.

        Raises:
            VerifyError: the batch cannot be run.
        """
        ...


def ask(runner: Runner, input_ids: Ids, length: Ids, segment_start: Ids | None) -> Mapping[str, Floats]:
    """Run a batch; a runner of a model without segments is never told of any."""
    return runner.run(input_ids, length) if segment_start is None else runner.run(input_ids, length, segment_start)


def output_of(answer: Mapping[str, object]) -> str | None:
    """Which of `OUTPUTS` an answer holds; None when it holds none."""
    return next((name for name in OUTPUTS if name in answer), None)


class CachedRunner:
    """A runner that keeps its answers: the reference meets the same batches once per candidate.

    Args:
        runner: asked when an answer is not there.
        most: bytes of answers to keep; beyond it nothing is added.
    """

    def __init__(self, runner: Runner, most: int = 512 * 1024 * 1024):
        """See the class."""
        self._runner, self._left = runner, most
        self._kept: dict[bytes, Mapping[str, Floats]] = {}

    def run(self, input_ids: Ids, length: Ids, segment_start: Ids | None = None) -> Mapping[str, Floats]:
        """See `Runner.run`."""
        content = [repr(input_ids.shape).encode(), input_ids.tobytes(), length.tobytes()]
        content += [] if segment_start is None else [segment_start.tobytes()]
        key = hashlib.sha256(b"".join(content)).digest()
        if key in self._kept:
            return self._kept[key]
        answer = ask(self._runner, input_ids, length, segment_start)
        size = sum(array.nbytes for array in answer.values())
        if size <= self._left:
            self._left -= size
            self._kept[key] = answer
        return answer


class OnnxRunner:
    """An ONNX graph on ONNX Runtime's CPU provider, its block outputs exposed as FP32.

    Args:
        model: the graph; it is not changed.
        blocks: block name -> value name in this graph (`builders.fuse.blocks.block_outputs`), first block first; a
            block that is the graph's output itself is left out, the output is always returned.
        optimise: let ONNX Runtime rewrite the graph. Off for a graph whose FP16 is made visible by casts: the
            optimiser would take those pairs of casts out again.
        threads: threads of the session; 0 takes as many as OMP_NUM_THREADS says, as torch does, else every core.

    Raises:
        VerifyError: a value is not in the graph, or ONNX Runtime does not take the graph.
        ExportError: the graph names a file of weights that cannot be read.
    """

    def __init__(
        self, model: onnx_ir.Model, blocks: Mapping[str, str] | None = None, *, optimise: bool = True, threads: int = 0
    ):
        """See the class."""
        try:
            import onnxruntime
        except ImportError:
            raise VerifyError("onnxruntime is not installed", remedy="pip install 'encoder-lanes[serve]'") from None
        self._output = _output(value.name for value in model.graph.outputs)
        self._segment = SEGMENT in {value.name for value in model.graph.inputs}
        self._blocks = {name: value for name, value in (blocks or {}).items() if value != self._output}
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or _wanted_threads()
        if int8_saturates():
            # As the engine does: what is judged is what is served.
            options.add_session_config_entry("session.x64quantprecision", "1")
        level = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
        exposed = _exposed(model, self._blocks)
        try:
            self._session = _session(onnxruntime, exposed, options)
        except Exception as error:  # onnxruntime raises a class per status code, all directly below Exception
            raise VerifyError(f"ONNX Runtime does not take the graph: {error}") from error
        self._names = [self._output, *(_PREFIX + name for name in self._blocks)]

    def run(self, input_ids: Ids, length: Ids, segment_start: Ids | None = None) -> Mapping[str, Floats]:
        """See `Runner.run`."""
        feeds = dict(zip(INPUTS, (input_ids, length), strict=True))
        if self._segment:
            feeds[SEGMENT] = length if segment_start is None else segment_start
        try:
            output, *found = self._session.run(self._names, feeds)
        except Exception as error:  # see __init__
            shape = f"batch {input_ids.shape[0]}, L {input_ids.shape[1]}"
            raise VerifyError(f"the graph cannot run {shape}: {error}") from error
        return {**dict(zip(self._blocks, found, strict=True)), self._output: np.asarray(output, dtype=np.float32)}


def _output(names: Iterable[str | None]) -> str:
    found = list(names)
    output = next((name for name in OUTPUTS if name in found), None)
    if output is None:
        raise VerifyError("the graph has no such output", value=found, limit=" or ".join(OUTPUTS))
    return output


def _exposed(model: onnx_ir.Model, blocks: Mapping[str, str]) -> onnx_ir.Model:
    """A copy whose outputs are the graph's own and one FP32 cast per block; weights are shared with the original."""
    import onnx_ir

    copy = model.clone()
    map_weights(copy)  # a graph in memory has no folder that a data file could lie in
    values = {value.name: value for node in copy.graph for value in node.outputs}
    values |= {value.name: value for value in copy.graph.inputs}
    for name, source in blocks.items():
        if source not in values:
            raise VerifyError(
                f"block {name} names a value that is not in the graph",
                value=source,
                remedy="take the block outputs from the same graph",
            )
        # The cast gives the output a known type, whatever the graph computes in and even where no type is noted.
        cast_node = onnx_ir.node(
            "Cast",
            inputs=[values[source]],
            attributes={"to": onnx_ir.DataType.FLOAT},
            outputs=[onnx_ir.Value(name=_PREFIX + name, type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT))],
        )
        copy.graph.append(cast_node)
        copy.graph.outputs.append(cast_node.outputs[0])
    return copy


def _wanted_threads() -> int:
    """OMP_NUM_THREADS; 0 where it is not set, or no plain number."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _session(onnxruntime: Any, model: onnx_ir.Model, options: Any) -> Any:
    import onnx_ir

    if weight_bytes(model) <= EXTERNAL_ABOVE:
        content = cast(Any, onnx_ir.to_proto(model)).SerializeToString()
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    # Through a folder: at 1.2 GB of weights 1 s instead of 5, and half the memory; protobuf ends at 2 GiB anyway.
    with tempfile.TemporaryDirectory(prefix="verify.") as folder:
        path = save_graph(model, Path(folder) / "model.onnx", external_above=0)
        # The session has read its weights when the constructor returns.
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
