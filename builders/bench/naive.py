"""Driver of the naive server."""

from __future__ import annotations

import sys
from pathlib import Path

from builders.bench.driver import Child, grpc_ready, log_file, plain_pooling, text_limit
from builders.ports import free_ports
from builders.source import EncoderSource
from clients.load.target import Target


class NaiveDriver:
    """`naive_server` on a model, in a process of its own.

    Args:
        source: the model; texts are cut at its own positions, not at tiled ones.
        logs: folder of its log; a temporary file by default.
        gpu: compute on the GPU, in FP16: beside a product that does. Else on the CPU, in FP32.

    Raises:
        BenchError: it is no embedding model pooled by mean or cls.
    """

    def __init__(self, source: EncoderSource, logs: Path | None = None, *, gpu: bool = False):
        """See the class."""
        self.name, place = "naive", "on the GPU, FP16" if gpu else "on the CPU, FP32"
        self.about = f"one request at a time, Python-loop tokenisation, eager PyTorch {place}, gRPC"
        self.gpus = 0
        self._url = f"127.0.0.1:{free_ports().grpc}"
        pooling, own = plain_pooling(source), text_limit(source)
        command = [sys.executable, "-m", "builders.bench.naive_server", "--model", str(source.transformer)]
        command += ["--port", self._url.rpartition(":")[2], "--pooling", pooling, "--max-tokens", str(own)]
        command += ["--device", "cuda" if gpu else "cpu"]
        command += ["--normalize"] if source.task.normalize else []
        self._child = Child(
            command,
            lambda: grpc_ready(self._url),
            environment={"HF_HUB_OFFLINE": "1"},
            log=log_file(logs, self.name),
        )

    @property
    def metrics_url(self) -> None:
        """None: it has none."""
        return

    @property
    def pid(self) -> int | None:
        """See `Driver`."""
        return self._child.pid

    def start(self) -> Target:
        """See `Driver`."""
        self._child.start()
        return Target(self._url)

    def ended(self) -> str | None:
        """See `Driver`."""
        return self._child.ended()

    def stop(self) -> None:
        """See `Driver`."""
        self._child.stop()
