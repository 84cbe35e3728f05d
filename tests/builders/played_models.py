"""A server whose models do what a test says."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from builders.canary import CanarySettings
from builders.http_api import HttpApi
from tests.tools.played import HOST, playing

TEXT = {"name": "TEXT", "datatype": "BYTES", "shape": [-1, -1]}
QUICK = CanarySettings(every_s=0, deadline_s=0.3)


@dataclass
class Played:
    """A server whose models do what the test says.

    Attributes:
        status: of an answer to a request.
        error: its text.
        delay_s: before it, seconds.
        answered: requests so far.
        others: requests of others that are answered with each of ours.
        asked: paths of our requests.
        loads: models that were loaded.
        load_error: why none can be.
        versions: of each model that are loaded.
        lanes: what the entry's configuration names.
        silent: versions that never answer.
        answered_by: requests that a version has answered, beside `answered`.
    """

    port: int = 0
    status: int = 200
    error: str = ""
    delay_s: float = 0.0
    answered: int = 0
    others: int = 0
    asked: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    load_error: str = ""
    versions: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"encode": (1,)})
    lanes: tuple[str, ...] = ("encoder_8",)
    silent: set[int] = field(default_factory=set)
    answered_by: dict[int, int] = field(default_factory=dict)

    def api(self) -> HttpApi:
        return HttpApi(HOST, self.port)

    def answer(self, method: str, path: str) -> tuple[int, object]:
        if path.endswith("/load"):
            self.loads.append(path.split("/")[-2])
            return (400, {"error": self.load_error}) if self.load_error else (200, None)
        found = re.search(r"models/(\w+)/versions/(\d+)/", path)
        version = int(found[2]) if found else 0
        if path.endswith("/infer"):
            self.asked.append(path)
        if found and version not in self.versions[found[1]]:
            return 400, {"error": "unknown version"}
        if path.endswith("/stats"):
            answered = self.answered + sum(self.answered_by[one] for one in self.answered_by if version in (0, one))
            return 200, {"model_stats": [{"inference_stats": {"success": {"count": answered}}}]}
        if path.endswith("/config"):
            facts = {"buckets": [{"model": lane} for lane in self.lanes]}
            return 200, {"parameters": {"entry": {"string_value": json.dumps(facts)}}}
        if path.endswith("/infer"):
            if version in self.silent:
                time.sleep(QUICK.deadline_s * 2)
                return 500, None
            time.sleep(self.delay_s)
            self.answered += self.others + (self.status == 200 and self.delay_s < QUICK.deadline_s)
            return (200, {}) if self.status == 200 else (self.status, {"error": self.error})
        assert method == "GET"
        loaded = [str(version) for version in self.versions.get(path.split("/")[3], ())]
        return 200, {"versions": loaded, "inputs": [TEXT], "outputs": [{"name": "TOKENS"}]}


@contextmanager
def playing_models() -> Iterator[Played]:
    """Runs one."""
    server = Played()
    with playing(lambda asked: server.answer(asked.method, asked.path)) as server.port:
        yield server
