"""Drivers of public servers. They clash with this project's packages, so each lives in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from builders.bench.driver import BenchError, Child, http_ready, log_file, plain_pooling, text_limit
from builders.ports import free_ports
from builders.source import EncoderSource
from clients.load.target import Target

Engine = Literal["torch", "optimum"]
_EXPORT_S = 900
# No calls home, nothing from a hub: the model is on disk.
_QUIET = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
_BESIDE = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling")


class PeerDriver:
    """A public server as a child process that speaks OpenAI's protocol over HTTP.

    Args:
        name: for the table.
        about: engine and batch.
        command: with `{port}` where the port goes.
        health: path that answers 200 once the model is loaded.
        folder: working directory.
        logs: folder of its log; a temporary file by default.
    """

    def __init__(
        self,
        name: str,
        about: str,
        command: Sequence[str],
        health: str,
        folder: Path | None = None,
        logs: Path | None = None,
    ):
        """See the class."""
        self.name, self.about, self.gpus = name, about, 0
        port = free_ports().http
        self._url = f"http://127.0.0.1:{port}"
        self._child = Child(
            [part.replace("{port}", str(port)) for part in command],
            lambda: http_ready(f"{self._url}{health}"),
            environment=_QUIET,
            folder=folder,
            log=log_file(logs, name),
        )

    @property
    def metrics_url(self) -> None:
        """None: not Triton's."""
        return

    @property
    def pid(self) -> int | None:
        """See `Driver`."""
        return self._child.pid

    def start(self) -> Target:
        """See `Driver`."""
        self._child.start()
        return Target(f"{self._url}/embeddings", "openai", "model")

    def ended(self) -> str | None:
        """See `Driver`."""
        return self._child.ended()

    def stop(self) -> None:
        """See `Driver`."""
        self._child.stop()


def infinity(
    venv: Path, source: EncoderSource, engine: Engine, batch: int, work: Path, logs: Path | None = None
) -> PeerDriver:
    """infinity-emb with its torch or its ONNX engine.

    For ONNX the model is exported and optimised once by optimum, the tool infinity-emb itself relies on: of its own
    `--no-onnx-disable-optimize` infinity-emb 0.0.78 says that it fails with today's optimum. It also looks for the
    file by a path that today's optimum does not take, except from inside the folder: hence `.`.

    Args:
        venv: environment that holds `infinity-emb[torch,optimum,server]`.
        source: the model.
        engine: as above.
        batch: its largest batch; on a CPU small ones win.
        work: folder that keeps the exported graph, and the model's folder with the product's limit in it.
        logs: see `PeerDriver`.

    Raises:
        BenchError: the environment lacks the program, or the export failed.
    """
    program = _program(venv, "infinity_emb")
    folder = _limited(source, work) if engine == "torch" else _exported(venv, source, work)
    command = [str(program), "v2", "--model-id", ".", "--served-model-name", "model", "--engine", engine]
    command += ["--device", "cpu", "--batch-size", str(batch), "--host", "127.0.0.1", "--port", "{port}"]
    command += ["--pooling-method", plain_pooling(source), "--log-level", "warning"]
    command += ["--no-compile", "--dtype", "float32"] if engine == "torch" else []
    label = "torch" if engine == "torch" else "ONNX"
    about = f"infinity-emb, {label} engine on the CPU, FP32, batch {batch}, HTTP"
    return PeerDriver(f"infinity {label} b{batch}", about, command, "/health", folder, logs)


def litserve(venv: Path, source: EncoderSource, batch: int, logs: Path | None = None) -> PeerDriver:
    """sentence-transformers under LitServe.

    Args:
        venv: environment that holds `litserve` and `sentence-transformers`.
        source: the model.
        batch: its largest batch.
        logs: see `PeerDriver`.

    Raises:
        BenchError: the environment lacks Python or LitServe.
    """
    python, script = _program(venv, "python"), Path(__file__).with_name("litserve_server.py")
    _program(venv, "litserve")
    command = [str(python), str(script), "--model", str(source.folder), "--max-tokens", str(text_limit(source))]
    command += ["--port", "{port}", "--batch", str(batch)]
    about = f"sentence-transformers under LitServe on the CPU, FP32, batch {batch}, HTTP"
    return PeerDriver(f"LitServe b{batch}", about, command, "/health", logs=logs)


def installed(venv: Path, program: str) -> bool:
    """Whether an environment has a program."""
    return os.access(venv / "bin" / program, os.X_OK)


def _program(venv: Path, name: str) -> Path:
    if not installed(venv, name):
        raise BenchError(
            f"{name} is not in the peers' environment",
            value=str(venv),
            remedy="install the peer there (docs/measuring.md), or correct --peer-venv",
        )
    return (venv / "bin" / name).absolute()  # not resolved: a venv's python is a link


def _limited(source: EncoderSource, work: Path) -> Path:
    """A copy of the model's folder whose sentence_bert_config.json says the product's limit; made once a model.

    infinity-emb has no option for it: its torch engine cuts where sentence-transformers reads that it should.
    """

    def make(folder: Path) -> None:
        shutil.copytree(source.folder, folder)
        config = folder / source.inner / "sentence_bert_config.json"
        said = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        config.write_text(json.dumps(said | {"max_seq_length": text_limit(source)}), encoding="utf-8")

    return _made_once(work / f"limited-{source.sha256[:12]}-{text_limit(source)}", make)


def _exported(venv: Path, source: EncoderSource, work: Path) -> Path:
    """The model as an optimised ONNX graph, beside what its sentence-transformers folder says; made once a model."""

    def make(fast: Path) -> None:
        optimum, plain = str(_program(venv, "optimum-cli")), fast.with_name("plain")
        export = ["export", "onnx", "--model", str(source.transformer), "--task", "feature-extraction"]
        # Told the library: by itself it would export sentence-transformers' outputs, which infinity-emb does not read.
        _run([optimum, *export, "--library", "transformers", str(plain)])
        _run([optimum, "onnxruntime", "optimize", "--onnx_model", str(plain), "-O2", "-o", str(fast)])
        for name in _BESIDE:
            origin = source.folder / name
            if origin.is_dir():
                shutil.copytree(origin, fast / name)
            elif origin.is_file():
                shutil.copy(origin, fast / name)
        # infinity-emb cuts texts at this number of the configuration; the graph itself holds its positions.
        config = json.loads((fast / "config.json").read_text(encoding="utf-8"))
        (fast / "config.json").write_text(json.dumps(config | {"max_position_embeddings": text_limit(source)}))

    return _made_once(work / f"optimum-{source.sha256[:12]}-{text_limit(source)}", make)


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that is there whole or not at all."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".peer-") as drafts:
            draft = Path(drafts) / "whole"
            make(draft)
            draft.replace(folder)
    return folder


def _run(command: Sequence[str]) -> None:
    environment = {**os.environ, **_QUIET}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_EXPORT_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise BenchError("optimum did not finish", value=" ".join(command), limit=f"{_EXPORT_S} s") from None
    if done.returncode:
        lines = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise BenchError("optimum could not make the ONNX graph", value=" ".join(command), limit=lines)
