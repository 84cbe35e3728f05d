"""What a bench leaves: every figure, and the latencies that a later run is compared with."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from builders.bench.compare import Floats
from builders.bench.driver import BenchError
from builders.bench.load import LoadSpec
from builders.bench.rounds import Loop, Measurement, cores
from builders.machine import processor_name
from clients.load.records import OK
from clients.load.report import plain_json
from clients.load.summary import percentile_of

_FORMAT = 2
#: Format 1 lacks `Row.cpu_ms`.
_READ = (1, 2)
_PACKAGES = ("numpy", "onnxruntime", "tokenizers", "torch", "transformers", "nvidia-pytriton", "grpcio")


@dataclass(frozen=True)
class Row:
    """One load on one server.

    Attributes:
        driver, round, loop: see `Measurement`.
        throughput: answered texts a second.
        failed: requests without an answer.
        valid: whether the generator kept up.
        cpu_share: of all cores.
        gpu: utilisation, share of 1, or None.
        latencies: of answered requests in the order they were due, milliseconds.
        kinds: class of each.
        tokens: length of each.
        cpu_ms: CPU time of the server's processes for each answered request, milliseconds, 0 when none was; None in
            results of format 1, which do not have it.
    """

    driver: str
    round: int
    loop: Loop
    throughput: float
    failed: int
    valid: bool
    cpu_share: float
    gpu: float | None
    latencies: tuple[float, ...]
    kinds: tuple[str, ...]
    tokens: tuple[int, ...]
    cpu_ms: float | None = None


@dataclass(frozen=True)
class BenchResult:
    """A whole bench.

    Attributes:
        format: of the file.
        date: ISO 8601, UTC.
        machine: processor, cores, Python and packages.
        config: settings file.
        load: what every server got.
        drivers: name -> what it is.
        rows: the measurements.
        speeds: of the machine before each server's turn, see `machine_speed`.
        notes: what made the figures less certain.
        model: of the product, its folder and hash; empty in results of before it was noted.
        settings: of the product, without its repository; likewise.
    """

    format: int
    date: str
    machine: Mapping[str, str]
    config: str
    load: LoadSpec
    drivers: Mapping[str, str]
    rows: tuple[Row, ...]
    speeds: tuple[float, ...]
    notes: tuple[str, ...] = ()
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def of(self, driver: str, loop: Loop) -> list[Row]:
        """Rows of a server and a loop, by round."""
        found = [row for row in self.rows if row.driver == driver and row.loop == loop]
        return sorted(found, key=lambda row: row.round)

    def latencies(self, driver: str, loop: Loop = "open") -> list[Floats]:
        """float64 [n] a round, milliseconds; rounds without an answer are left out."""
        return [np.asarray(row.latencies) for row in self.of(driver, loop) if row.latencies]

    def throughputs(self, driver: str) -> list[float]:
        """Texts a second of the closed loop, one a round."""
        return [row.throughput for row in self.of(driver, "closed")]


_ADAPTER = TypeAdapter(BenchResult)


def make_result(
    measured: Sequence[Measurement],
    *,
    config: Path,
    load: LoadSpec,
    drivers: Mapping[str, str],
    speeds: Sequence[float],
    notes: Sequence[str],
    model: str = "",
    settings: Mapping[str, Any] | None = None,
) -> BenchResult:
    """The result of measurements, made now, on this machine."""
    return BenchResult(
        format=_FORMAT,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=this_machine_in_words(),
        config=str(config),
        load=load,
        drivers=dict(drivers),
        rows=tuple(row_of(one) for one in measured),
        speeds=tuple(speeds),
        notes=tuple(notes),
        model=model,
        settings=settings or {},
    )


def row_of(one: Measurement) -> Row:
    """A measurement as it is stored."""
    kept = one.records.where(one.records.ok())
    return Row(
        driver=one.driver,
        round=one.round,
        loop=one.loop,
        throughput=one.summary.throughput,
        failed=sum(status != OK for status in one.records.status),
        valid=one.summary.valid,
        cpu_share=one.cpu_share,
        gpu=one.gpu,
        latencies=tuple(round(float(value), 2) for value in kept.latency_ms()),
        kinds=tuple(kept.kind),
        tokens=tuple(kept.planned),
        cpu_ms=one.cpu_ms,
    )


class Journal:
    """Each measurement on disk as soon as it is made: a run that is cut short leaves its figures.

    Args:
        path: a file of one JSON object a line, each a `Row`; what is there already is replaced.
        say: told once when a row cannot be written, as on a full disk; the run goes on.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, say: Callable[[str], None]):
        """See the class."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        self._path, self._say, self._failed = path, say, False

    def add(self, row: Row) -> None:
        """Appends a row."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row), allow_nan=False) + "\n")
        except OSError as error:
            if not self._failed:
                self._say(f"{self._path} is not complete: {error.strerror}")
            self._failed = True


def differences(stored: BenchResult, fresh: BenchResult) -> list[str]:
    """What else was different in a stored run: packages, model and settings, `name before -> now`."""
    pairs = [(dict(stored.machine), dict(fresh.machine))]
    if stored.model and fresh.model:
        pairs.append(({"model": stored.model}, {"model": fresh.model}))
    if stored.settings and fresh.settings:
        pairs.append((dict(_flat(stored.settings)), dict(_flat(fresh.settings))))
    return [
        f"{name} {before.get(name)} -> {now.get(name)}"
        for before, now in pairs
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def write_result(path: Path, result: BenchResult) -> None:
    """Writes the result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = asdict(result)
    # One line a measurement: a file of a line a latency would be 100,000 lines long.
    rows = ",\n".join(json.dumps(row, allow_nan=False) for row in document.pop("rows"))
    text = plain_json(document).rstrip().removesuffix("}").rstrip()
    path.write_text(f'{text},\n  "rows": [\n{rows}\n]}}\n', encoding="utf-8")


def read_result(path: Path) -> BenchResult:
    """What `write_result` wrote.

    Raises:
        BenchError: there is none, or it is of another form.
    """
    try:
        result = _ADAPTER.validate_python(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise BenchError(f"no readable result of a bench ({error})", value=str(path), remedy="run a bench") from None
    if result.format not in _READ:
        raise BenchError(
            "the stored result is of another format", value=result.format, limit=" or ".join(map(str, _READ)),
            remedy="compare with the checkout that wrote it, or run that bench again here",
        )  # fmt: skip
    return result


def this_machine_in_words() -> dict[str, str]:
    """Processor, cores, Python and the versions that decide the figures."""
    words = {"processor": processor_name(), "cores": str(cores()), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            words[package] = version(package)
        except PackageNotFoundError:
            continue
    return words


def pooled(rounds: Sequence[Floats], share: float) -> float:
    """A percentile of all rounds together, milliseconds; NaN when nothing was answered."""
    return percentile_of(np.concatenate(rounds) if rounds else np.empty(0), share)


def chosen(rows: Sequence[Row], keep: Any) -> Floats:
    """float64 [n]: latencies of all rows where `keep(kind, tokens)` is true, milliseconds."""
    return np.array(
        [
            latency
            for row in rows
            for latency, kind, tokens in zip(row.latencies, row.kinds, row.tokens, strict=True)
            if keep(kind, tokens)
        ],
        np.float64,
    )
