"""TritonServer against the real tritonserver: starting, answering, failing, stopping, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from builders.errors import ServerError
from builders.ports import free_ports
from builders.server import TritonServer
from builders.server_checks import SHARED_MEMORY, has_gpu
from builders.triton_log import ServerEvent
from tests.tools.waiting import until

psutil = pytest.importorskip("psutil")
grpc_client = pytest.importorskip("tritonclient.grpc")

PROBE = """
import json, os, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}
    def execute(self, requests):
        answers = []
        for request in requests:
            time.sleep(float(pb_utils.get_input_tensor_by_name(request, "SECONDS").as_numpy()[0]))
            told = {{"path": sys.path, "prefix": sys.prefix, "python": sys.executable, "numpy": np.__version__,
                    "work": os.listdir("."), "threads": os.environ["OMP_NUM_THREADS"], "mine": os.environ.get("MINE")}}
            tensor = pb_utils.Tensor("TOLD", np.array([json.dumps(told).encode()], dtype=object))
            answers.append(pb_utils.InferenceResponse([tensor]))
        return answers
"""
CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 0
input [{{ name: "SECONDS", data_type: TYPE_FP32, dims: [1] }}]
output [{{ name: "TOLD", data_type: TYPE_STRING, dims: [1] }}]
instance_group [{{ kind: KIND_CPU, count: {count} }}]
"""


def tiny_repository(folder: Path, name: str = "probe", initialize: str = "pass", count: int = 1) -> Path:
    """A repository with one Python model that sleeps for SECONDS and then tells about its process."""
    version = folder / name / "1"
    version.mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(CONFIG.format(name=name, count=count), "utf-8")
    (version / "model.py").write_text(PROBE.format(initialize=initialize), "utf-8")
    return folder


def ask(grpc_url: str, seconds: float = 0.0) -> dict[str, object]:
    """Call the model of `tiny_repository`."""
    with grpc_client.InferenceServerClient(grpc_url) as client:
        tensor = grpc_client.InferInput("SECONDS", [1], "FP32")
        tensor.set_data_from_numpy(np.array([seconds], dtype=np.float32))
        told: dict[str, object] = json.loads(client.infer("probe", [tensor]).as_numpy("TOLD")[0])
        return told


def processes_of(repository: Path) -> list[psutil.Process]:
    """tritonserver and the model processes that serve from `repository`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(repository) in line and ("tritonserver" in line or "triton_python_backend_stub" in line):
            found.append(process)
    return found


def regions(server: TritonServer) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{server._shm_prefix}*"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def events() -> list[ServerEvent]:
    return []


@pytest.fixture(scope="module")
def running(repository: Path, events: list[ServerEvent]) -> Iterator[TritonServer]:
    with TritonServer(
        repository, ["probe"], ports=free_ports(), on_event=events.append, environment={"MINE": "here"}
    ) as server:
        yield server


@pytest.fixture
def fresh(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository, ["probe"], ports=free_ports()) as server:
        yield server


def test_model_sees_the_packages_of_the_running_environment_when_it_answers(
    running: TritonServer, repository: Path
) -> None:
    told = ask(running.grpc_url)
    assert told["prefix"] == sys.prefix
    assert Path(str(told["python"])).parent == Path(sys.executable).parent
    assert told["numpy"] == np.__version__
    path = told["path"]
    assert isinstance(path, list)
    packages = path.index(str(Path(np.__file__).parent.parent))
    assert path[0] == ""
    assert packages < path.index(str(repository / "probe" / "1"))
    assert (told["work"], told["threads"], told["mine"]) == ([], "1", "here")


def test_tells_loading_loaded_and_endpoints_when_it_starts(running: TritonServer, events: list[ServerEvent]) -> None:
    assert until(lambda: len([event for event in events if event.kind == "endpoint"]) == 3)
    told = [(event.kind, event.model) for event in events if event.model]
    assert told == [("loading", "probe"), ("loaded", "probe")]
    assert events[0].version == 1
    assert [event.seconds for event in events] == sorted(event.seconds for event in events)
    assert has_gpu() or not [event for event in events if event.kind in ("warning", "error")]


def test_names_its_places_when_it_runs(running: TritonServer) -> None:
    assert running.is_running
    assert running.exit_code is None
    assert running.http_url == f"http://127.0.0.1:{running.ports.http}"
    assert running.pid in [process.pid for process in processes_of(running.repository)]
    assert running.log_path is not None
    assert running.log_path.stat().st_size > 0
    assert len(regions(running)) == 1


def test_is_refused_when_it_is_started_twice(running: TritonServer) -> None:
    with pytest.raises(ServerError, match="started before"):
        running.start()


def test_leaves_no_process_region_or_file_and_answers_what_is_in_flight_when_it_stops(tmp_path: Path) -> None:
    server = TritonServer(tiny_repository(tmp_path), ["probe"], ports=free_ports())
    # From a thread that ends: the kernel's "parent has died" is about threads, and must not end the server here.
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    answers: list[dict[str, object]] = []
    try:
        server.wait_ready(30)
        run_folder = Path(psutil.Process(server.pid).cwd()).parent
        asking = threading.Thread(target=lambda: answers.append(ask(server.grpc_url, seconds=1.0)))
        asking.start()
        time.sleep(0.3)
    finally:
        server.stop()
    asking.join(10)
    assert len(answers) == 1
    assert server.exit_code == 0
    assert not server.is_running
    assert processes_of(tmp_path) == []
    assert regions(server) == []
    assert not run_folder.exists()
    assert server.log_path is not None
    assert not server.log_path.exists()
    server.stop()  # once more does no harm


def test_sweeps_processes_and_regions_when_the_server_is_killed(fresh: TritonServer) -> None:
    stubs = psutil.Process(fresh.pid).children()
    assert len(stubs) == 1
    assert fresh.pid is not None
    os.kill(fresh.pid, signal.SIGKILL)
    with pytest.raises(ServerError, match="killed by SIGKILL"):
        until(lambda: bool(fresh.raise_if_ended()))
    assert all(not stub.is_running() or stub.status() == psutil.STATUS_ZOMBIE for stub in stubs)
    assert regions(fresh) == []
    assert fresh.log_path is not None
    fresh.log_path.unlink()


def test_tells_an_error_when_a_model_process_dies(repository: Path) -> None:
    events: list[ServerEvent] = []
    with TritonServer(repository, ["probe"], ports=free_ports(), on_event=events.append) as server:
        time.sleep(2.2)  # the watch has to have seen it alive
        psutil.Process(server.pid).children()[0].kill()
        assert until(lambda: any(event.kind == "error" and event.model == "probe" for event in events))
        assert "probe_0_0" in events[-1].text


def test_gives_the_models_own_message_when_initialize_raises(tmp_path: Path) -> None:
    tiny_repository(tmp_path, initialize='raise ValueError("no plan für 512; 3 of 4")')
    log = tmp_path / "logs" / "triton.log"
    with pytest.raises(ServerError) as caught, TritonServer(tmp_path, ["probe"], ports=free_ports(), log_path=log):
        pass
    message = str(caught.value)
    assert "model 'probe' version 1: ValueError: no plan für 512; 3 of 4" in message
    assert "model.py(8): initialize" in message
    assert str(log) in message
    assert "+----" not in message
    assert len(message) < 500
    assert processes_of(tmp_path) == []


def test_names_the_line_when_a_configuration_cannot_be_parsed(tmp_path: Path) -> None:
    config = tiny_repository(tmp_path) / "probe" / "config.pbtxt"
    config.write_text(config.read_text("utf-8").replace("TYPE_FP32", "TYPE_FP31"), "utf-8")
    with (
        pytest.raises(ServerError, match="TYPE_FP31"),
        TritonServer(tmp_path, ["probe"], ports=free_ports(), log_path=tmp_path / "log"),
    ):
        pass


def test_names_what_is_missing_when_models_are_not_ready_in_time(tmp_path: Path) -> None:
    server = TritonServer(tiny_repository(tmp_path, initialize="time.sleep(1)"), ["probe"], ports=free_ports())
    server.start()
    try:
        with pytest.raises(ServerError, match=r"\['probe'\]; limit: 0.2 s"):
            server.wait_ready(0.2)
        assert server.is_running
    finally:
        server.kill()
    assert processes_of(tmp_path) == []
    assert server.log_path is not None
    server.log_path.unlink()


def test_is_refused_with_a_remedy_when_a_port_is_taken(repository: Path) -> None:
    ports = free_ports()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", ports.metrics))
        holder.listen()
        server = TritonServer(repository, ["probe"], ports=ports)
        with pytest.raises(ServerError, match="METRICS_PORT"):
            server.start()
    assert server.pid is None


def test_goes_away_when_its_parent_is_killed(tmp_path: Path) -> None:
    tiny_repository(tmp_path)
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
            import time
            from pathlib import Path
            from builders.ports import free_ports
            from builders.server import TritonServer
            with TritonServer(Path({str(tmp_path)!r}), ["probe"], ports=free_ports(), log_path=Path("{tmp_path}/log")):
                print("ready", flush=True)
                time.sleep(60)
        """)],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    assert len(processes_of(tmp_path)) == 2
    folder = Path(psutil.Process(parent.pid).children()[0].cwd()).parent
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert until(lambda: processes_of(tmp_path) == [])
    shutil.rmtree(folder)  # links alone; there was nobody left to remove them
