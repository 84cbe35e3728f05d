"""The container's health check: `python3 health.py`; exit code 0 is healthy, 1 is not, one line says why.

Several looks, because none is enough alone: the server lives and its model processes do (Triton does not tell), the
launcher knows of no model that hangs, every entry is ready, and each entry answers a real request. `--live` stops
before the entries: what it finds only a new start heals. `--warm` looks at one thing more, for the start: each process
of an entry has made its own first calls, so that no client's request is a process's first.

A full queue is not ill: the server is doing what it can, and taking it away would only load the others more. A request
that the queue rejects therefore counts as healthy as long as other requests are answered meanwhile.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from processes import dead_models, find_server, told_to_load
from repository import LaunchError, Model, read_models
from triton_http import Answer, Triton

#: What Triton's queue answers when there is too much work; anything else with the same status is a failure.
_BUSY = ("Exceeds maximum queue size", "Request timeout expired")
_TRIES, _BETWEEN_S = 3, 0.5
#: The entry's own counter of its warm processes, on the metrics page.
_WARM = re.compile(r"^encoder_lanes_warm_processes_total\{(.*)\} (\S+)$", re.MULTILINE)


def problem(
    models: list[Model],
    triton: Triton,
    metrics: Triton,
    *,
    server: int | None,
    launcher: Triton | None = None,
    live_only: bool = False,
    warm: bool = False,
) -> str | None:
    """Why the server is not healthy, or None.

    Args:
        models: what it serves.
        triton: its HTTP port.
        metrics: its metrics port.
        server: the process id of tritonserver; None where there is none.
        launcher: the launcher's own port; None where it has none.
        live_only: leave out what a new start would not heal.
        warm: ask for the entries' first calls, too.
    """
    if server is None:
        return "tritonserver is not running"
    if not triton.get("/v2/health/live").ok:
        return "tritonserver does not answer /v2/health/live"
    if dead := dead_models(server, models, triton):
        return f"model processes died, and Triton starts no others: {'; '.join(map(str, dead))}"
    told = launcher.get("/healthz") if launcher else None
    if told and (said := _launcher_problem(told)):
        return said
    if live_only:
        return None
    first, served = told_to_load(server), []
    # It remembers what was loaded since.
    expected = first | ({model["model"] for model in told.json()["models"]} if told else set())
    for model in models:
        if not model.is_entry:
            continue
        if triton.get(f"/v2/models/{model.name}/ready").ok:
            served.append(model)
        elif not first or model.name in expected:
            return f"{model.name} is not ready"
        # Else a build published it after the start, and nobody has loaded it yet: no fault of a server.
    # All at once: one that is busy takes up to the client's patience, three times, and who asks here waits 20 s.
    with ThreadPoolExecutor(max(1, len(served))) as pool:
        for said in pool.map(lambda model: _request_problem(model.name, triton, metrics), served):
            if said:
                return said
    return cold_entry(served, metrics.get("/metrics").text) if warm else None


def _launcher_problem(answer: Answer) -> str | None:
    """What its /healthz says is wrong."""
    found = answer.json()
    models = found.get("models") if isinstance(found, dict) else None
    if answer.ok and isinstance(models, list):
        return None
    said = [model["text"] for model in models or () if model["text"]]
    return "; ".join(said) or f"the launcher does not answer /healthz (HEALTH_PORT): {answer.text[:200]}"


def cold_entry(models: list[Model], page: str) -> str | None:
    """The first entry that has a process without its first calls, for people; None when all are warm.

    Args:
        models: what the server serves; an ensemble has no processes of its own.
        page: the server's metrics.
    """
    found: dict[str, list[tuple[float, int]]] = {}
    for text, value in _WARM.findall(page):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
        found.setdefault(labels.get("model", ""), []).append((float(value), int(labels["of"])))
    for model in models:
        if not (model.is_entry and model.processes):
            continue
        # One for each version that is loaded.
        counts = found.get(model.name)
        if not counts:
            return f"{model.name} is not warm: it has told no metrics yet"
        for warm, of in counts:
            if warm < of:
                return f"{model.name} is not warm: {warm:g} of {of} processes have made their first calls"
    return None


def _request_problem(entry: str, triton: Triton, metrics: Triton) -> str | None:
    body = {"parameters": {"priority": 1}, "inputs": _probe_inputs(entry, triton)}
    before = _answered(entry, metrics)
    said = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_BETWEEN_S)
        answer = triton.post(f"/v2/models/{entry}/infer", body)
        if answer.ok:
            return None
        said = f"{entry} answers a request with {answer.status or 'nothing'}: {answer.text.strip()[:200]}"
        # No answer in time is no illness either, as long as others get theirs: a queue's timeout can be longer.
        if not answer.timed_out and not any(busy in answer.text for busy in _BUSY):
            return said
        if _answered(entry, metrics) > before:
            return None
    return f"{said} (and answers nobody else either)"


def _probe_inputs(entry: str, triton: Triton) -> list[dict[str, object]]:
    """One short text for every input that a request must have."""
    config = triton.get(f"/v2/models/{entry}/config").json()
    inputs = config.get("input", []) if isinstance(config, dict) else []
    names = [tensor["name"] for tensor in inputs if not tensor.get("optional")] or ["TEXT"]
    return [{"name": name, "datatype": "BYTES", "shape": [1, 1], "data": ["healthy?"]} for name in names]


def _answered(entry: str, metrics: Triton) -> float:
    """Requests that the entry has answered so far."""
    pattern = rf'^nv_inference_request_success\{{[^}}]*model="{re.escape(entry)}"[^}}]*\}} (\S+)$'
    return sum(float(value) for value in re.findall(pattern, metrics.get("/metrics").text, re.MULTILINE))


def main() -> int:
    """Look once, print one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--live", action="store_true", help="only what a new start would heal")
    parser.add_argument("--warm", action="store_true", help="each process of an entry has made its first calls, too")
    parser.add_argument("--repository", type=Path, default=Path(os.environ.get("MODEL_REPOSITORY", "/models")))
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument(
        "--health-port", type=int, default=int(os.environ.get("HEALTH_PORT") or 8003), help="the launcher's; 0: none"
    )
    parser.add_argument("--pid", type=int, help="process id of tritonserver; by default the only one there is")
    options = parser.parse_args()
    try:
        models = read_models(options.repository)
    except LaunchError as error:
        print(f"not healthy: {error}")
        return 1
    said = problem(
        models,
        Triton(options.http_port),
        Triton(options.metrics_port),
        server=options.pid or find_server(),
        launcher=Triton(options.health_port) if options.health_port else None,
        live_only=options.live,
        warm=options.warm,
    )
    print(f"not healthy: {said}" if said else "healthy")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
