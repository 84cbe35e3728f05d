"""The lines of tritonserver's log as events, and the reason why a server ended."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal[
    "loading", "warm-up", "loaded", "unloaded", "failed", "endpoint", "warning", "error", "stopping", "healed"
]

# What Triton says on every machine without a GPU, two of them as errors; none means anything there.
_NO_GPU_NOISE = ("CudaDriverHelper has not been initialized", "Unable to allocate pinned system memory", "DCGM unable")
_LINE = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.+-]+:\d+\] *(.*)", re.DOTALL)
_PROTOBUF_ERROR = re.compile(r"\[libprotobuf ERROR [^\]]*\] (.*)")
_ABOUT_MODELS: tuple[tuple[EventKind, re.Pattern[str]], ...] = (
    ("loading", re.compile(r"loading: (?P<model>.+):(?P<version>-?\d+)$")),
    ("warm-up", re.compile(r"model '(?P<model>[^']+)' instance \S+ is running warmup sample")),
    ("loaded", re.compile(r"successfully loaded '(?P<model>[^']+)'")),
    ("unloaded", re.compile(r"successfully unloaded '(?P<model>[^']+)' version (?P<version>\d+)")),
    ("failed", re.compile(r"failed to load '(?P<model>[^']+)' version (?P<version>\d+): (?P<text>.*)", re.DOTALL)),
    ("failed", re.compile(r"failed to load model '(?P<model>[^']+)': (?P<text>.*)", re.DOTALL)),
    ("failed", re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<text>.*)", re.DOTALL)),
    ("failed", re.compile(r"failed to poll model '(?P<model>[^']+)': (?P<text>.*)", re.DOTALL)),
)
_ENDPOINT = re.compile(r"Started (?P<what>\w+)(?: Service)? at (?P<where>\S+)")
_HINTS = (
    ("unable to find backend library", "the wheel has the Python backend only: serve deploy.cpu.yaml, or a container"),
    ("ModuleNotFoundError", f"install it into {sys.prefix}, which the models use"),
    ("is not healthy", "the model's process died in native code or was killed: look for memory, then run it alone"),
    ("already in use", "choose other ports, or stop what listens there"),
)


@dataclass(frozen=True)
class ServerEvent:
    """One thing that tritonserver said in its log.

    Attributes:
        kind: what it is about.
        text: the message, possibly of several lines.
        seconds: when it was read, since the server's start.
        model: the model it is about, if it names one.
        version: that model's version, where Triton says it.
    """

    kind: EventKind
    text: str
    seconds: float = 0.0
    model: str | None = None
    version: int | None = None


def parse_log_line(line: str, *, gpu: bool = True) -> ServerEvent | None:
    """The event that a line of tritonserver's log (default format) tells, or None.

    Warm-up is told by a server with `--log-verbose=1` only; otherwise it is inside the time from loading to loaded.

    Args:
        line: without its line end.
        gpu: False drops the errors and warnings that every machine without GPU gives.
    """
    if line.startswith("Signal ("):
        return ServerEvent("stopping", line)
    if found := _PROTOBUF_ERROR.match(line):
        return ServerEvent("error", found[1])
    if not (found := _LINE.match(line)):
        return None
    severity, text = found[1], _unquote(found[2].rstrip())
    for kind, pattern in _ABOUT_MODELS:
        if told := pattern.match(text):
            parts = told.groupdict()
            version = int(parts["version"]) if parts.get("version") else None
            return ServerEvent(kind, (parts.get("text") or text).strip(), model=parts["model"], version=version)
    if severity == "I":
        return ServerEvent("endpoint", text) if _ENDPOINT.match(text) else None
    if not gpu and text.startswith(_NO_GPU_NOISE):
        return None
    return ServerEvent("warning" if severity == "W" else "error", text.strip())


def explain(faults: Iterable[ServerEvent], log: str) -> str:
    """The reason why a server ended, in as few lines as tell it.

    Args:
        faults: the events of kind "failed" and "error", in order.
        log: the end of the log, for a server that died without any.
    """
    faults = list(faults)
    told = [fault for fault in faults if fault.kind == "failed"]
    # Protobuf tells the line of a configuration that "Poll failed" merely names; the rest repeats what failed.
    told += [fault for fault in faults if fault.kind == "error" and (not told or "text-format" in fault.text)]
    reasons = []
    for fault in told:
        text = _compact(fault.text)
        where = "" if fault.version is None else f" version {fault.version}"
        reasons.append(text if fault.model is None else f"model {fault.model!r}{where}: {text}")
    if not reasons:
        # Only the words after "creating server" or the last lines remain.
        _, found, last = log.rpartition("\nerror: ")
        lines = (last if found else log).strip().splitlines()
        reasons = [_compact("\n".join(lines if found else lines[-5:]))] if lines else ["it wrote no log"]
    return "; ".join(dict.fromkeys(reasons))


def remedy_for(reason: str) -> str | None:
    """What to do about a reason of `explain`, where it is known."""
    return next((remedy for sign, remedy in _HINTS if sign in reason), None)


def _unquote(text: str) -> str:
    if not (text.startswith('"') and text.endswith('"')):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text[1:-1]


def _compact(text: str) -> str:
    """A message of Triton on one line; of a Python traceback, only the user's own places stay."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith("<frozen ")]
    return re.sub(r" At: ", " at ", re.sub(r"^(Internal|Invalid argument): ", "", " ".join(kept))).rstrip("; ")
