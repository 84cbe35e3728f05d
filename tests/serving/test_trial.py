"""A trial: who takes a request, that each is answered exactly once, and that the candidate's faults reach nobody."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.serving.entry import trial as trial_module
from builders.serving.entry.config import BucketRoute, EntryConfig
from builders.serving.entry.dispatch import Dispatcher
from builders.serving.entry.errors import LaneError, Refusal
from builders.serving.entry.group import LaneInputs
from builders.serving.entry.metrics import CANDIDATE_REQUESTS, CANDIDATE_SECONDS, Tally
from builders.serving.entry.tokenise import Tokeniser
from builders.serving.entry.trial import EDGES, Answer, Arm, Asked, Trial, place_of
from tests.serving.parts import DIM, PATIENCE_S, config, route
from tests.tools.waiting import until

pytestmark = pytest.mark.timeout(60)

BUCKETS = (route(16), route(64, "late"), route(128, "long"))
CONFIG = config(*BUCKETS, pad_id=0)
TEXT = "a short text"
LONG = "a long text of many words " * 15
SERVED, CANDIDATE = 1.0, 2.0


class Lane:
    """Answers with its version's number; fails or waits on request."""

    def __init__(self, number: float) -> None:
        self.number = number
        self.error: Exception | None = None
        self.free = threading.Event()
        self.free.set()

    def __call__(self, _: BucketRoute, inputs: LaneInputs) -> np.ndarray:
        assert self.free.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return np.full((len(inputs["length"]), DIM), self.number, dtype=np.float32)


class Client:
    """Takes the answer of one request, and would notice a second one."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def asks(self, text: str = TEXT, parameters: str = "", cancelled: Callable[[], bool] = lambda: False) -> Asked:
        texts = np.array([[text.encode()]], dtype=np.object_)
        return Asked(texts, None, parameters, cancelled, self.answers.append)

    @property
    def version(self) -> float:
        """The version that answered."""
        assert until(lambda: bool(self.answers))
        (answer,) = self.answers
        assert isinstance(answer, dict), answer
        return float(answer["EMBEDDING"][0, 0])

    @property
    def refusal(self) -> Refusal:
        assert until(lambda: bool(self.answers))
        (answer,) = self.answers
        assert isinstance(answer, Refusal)
        return answer


class Site:
    """A trial with two versions that say who they are; the clock stands until it is moved."""

    def __init__(self, tokenizer: Path, candidate: EntryConfig = CONFIG) -> None:
        self.served, self.candidate = Lane(SERVED), Lane(CANDIDATE)
        self.tally, self.now = Tally(), 0.0
        self.dispatcher = Dispatcher(CONFIG, self.served)
        self.arms = {
            "candidate": Arm(
                "candidate", candidate, Tokeniser(tokenizer, 128), Dispatcher(candidate, self.candidate, Tally())
            ),
            "control": Arm("control", CONFIG, Tokeniser(tokenizer, 128), self.dispatcher),
        }
        self.trial = Trial(
            2, 0.2, 5.0, self.arms["candidate"], self.arms["control"], self.tally, clock=lambda: self.now
        )

    def send(self, arm: str, client: Client, *args: Any, **options: Any) -> Client:
        self.trial.hand_over([(self.arms[arm], client.asks(*args, **options))], self.now)
        return client

    def counted(self) -> dict[tuple[str, str], float]:
        taken = self.tally.taken()
        return {(a, o): n for (name, (a, o)), n in taken.items() if name == CANDIDATE_REQUESTS.name}


@pytest.fixture
def site(minilm_tokenizer: Path) -> Iterator[Site]:
    made = Site(minilm_tokenizer)
    yield made
    made.candidate.free.set()
    assert until(lambda: made.trial.idle)
    made.trial.close()
    made.dispatcher.close()


def test_each_arm_gets_its_share_and_the_same_id_always_falls_to_the_same_one(site: Site) -> None:
    taken = Counter(arm.name if (arm := site.trial.takes(f"id-{number}")) else "" for number in range(5000))
    for name in ("candidate", "control"):
        assert abs(taken[name] / 5000 - 0.2) < 0.03, taken
    assert all(site.trial.takes(f"id-{number}") is site.trial.takes(f"id-{number}") for number in range(100))
    without = Counter(arm.name if (arm := site.trial.takes("")) else "" for _ in range(5000))
    assert abs(without["candidate"] / 5000 - 0.2) < 0.03
    assert {0.0 <= place_of(name) < 1.0 for name in ("", "a", "ü", "x" * 1000)} == {True}


@pytest.mark.parametrize("text", [TEXT, "a text of some more words " * 4, LONG], ids=["together", "late", "long"])
def test_each_arm_answers_with_its_own_version_whatever_the_lane(site: Site, text: str) -> None:
    assert site.send("candidate", Client(), text).version == CANDIDATE
    assert site.send("control", Client(), text).version == SERVED
    assert site.counted() == {("candidate", "answered"): 1, ("control", "answered"): 1}


@pytest.mark.parametrize("error", [LaneError("failed", "planted"), LaneError("overloaded", "gone"), ValueError("bug")])
def test_served_version_answers_when_the_candidate_fails(site: Site, error: Exception) -> None:
    site.candidate.error = error
    assert site.send("candidate", Client()).version == SERVED
    assert site.counted() == {("candidate", "failed"): 1}


def test_served_version_answers_when_the_candidate_is_late_and_the_late_answer_is_dropped(site: Site) -> None:
    site.candidate.free.clear()
    client = site.send("candidate", Client())
    site.now = 4.9
    site.trial.look()
    assert client.answers == []
    site.now = 5.0
    site.trial.look()
    assert client.version == SERVED
    assert not site.trial.idle
    site.candidate.free.set()
    assert until(lambda: site.trial.idle)
    assert client.version == SERVED
    assert site.counted() == {("candidate", "late"): 1}


def test_own_error_told_when_the_served_version_fails(site: Site) -> None:
    site.served.error = LaneError("failed", "planted")
    assert "planted" in site.send("control", Client()).refusal.message
    site.candidate.error = LaneError("failed", "planted too")
    assert site.send("candidate", Client()).refusal.kind == "failed"
    assert site.counted() == {("control", "failed"): 1, ("candidate", "failed"): 1}


@pytest.mark.parametrize("arm", ["candidate", "control"])
def test_request_at_fault_refused_and_not_held_against_the_version(site: Site, arm: str) -> None:
    client = site.send(arm, Client(), parameters='{"truncate": "middle"}')
    assert "truncate is 'middle'" in client.refusal.message
    assert site.counted() == {(arm, "refused"): 1}


def test_refusal_of_what_the_served_version_takes_is_the_candidates_failure(minilm_tokenizer: Path) -> None:
    strict = config(*BUCKETS, pad_id=0, max_text_bytes=5)
    site = Site(minilm_tokenizer, strict)
    assert site.send("candidate", Client()).version == SERVED
    assert site.counted() == {("candidate", "failed"): 1}
    assert until(lambda: site.trial.idle)
    site.trial.close()
    site.dispatcher.close()


def test_others_of_the_batch_answered_when_one_is_refused_or_cancelled(site: Site) -> None:
    clients = [Client() for _ in range(3)]
    arm = site.arms["candidate"]
    asked = [
        clients[0].asks(),
        clients[1].asks(parameters='{"truncate": "middle"}'),
        clients[2].asks(cancelled=lambda: True),
    ]
    site.trial.hand_over([(arm, one) for one in asked], 0.0)
    assert clients[0].version == CANDIDATE
    assert clients[1].refusal.kind == "invalid"
    assert clients[2].refusal.kind == "cancelled"
    assert site.counted() == {("candidate", "answered"): 1, ("candidate", "refused"): 2}


def test_request_left_to_its_batch_when_an_arm_is_full(site: Site) -> None:
    name = next(name for name in map(str, range(1000)) if place_of(name) < 0.2)
    site.candidate.free.clear()
    clients = [site.send("candidate", Client()) for _ in range(trial_module.BOUND)]
    assert site.trial.takes(name) is None
    site.now = 10.0
    site.trial.look()
    # Nobody waits for them, but the candidate still has them.
    assert site.trial.takes(name) is None
    assert [client.version for client in clients] == [SERVED] * len(clients)
    assert site.counted() == {("candidate", "late"): len(clients), ("candidate", "skipped"): 2}
    site.candidate.free.set()
    assert until(lambda: site.trial.takes(name) is not None)


def test_bug_in_an_arm_costs_an_error_and_nobody_waits_for_ever(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(site.arms["candidate"]._tokenise, "read", broken)
    assert site.send("candidate", Client()).version == SERVED
    monkeypatch.setattr(site.arms["control"]._tokenise, "read", broken)
    assert "RuntimeError: planted" in site.send("control", Client()).refusal.message


@pytest.mark.parametrize("text", [TEXT, "a text of some more words " * 4, LONG], ids=["together", "late", "long"])
def test_request_answered_all_the_same_when_the_trial_was_closed_meanwhile(minilm_tokenizer: Path, text: str) -> None:
    site = Site(minilm_tokenizer)
    site.trial.close()
    assert site.send("candidate", Client(), text).version in (SERVED, CANDIDATE)
    assert site.send("control", Client(), text).version == SERVED
    assert until(lambda: site.trial.idle)
    site.dispatcher.close()


def test_trial_is_never_idle_while_a_request_is_handed_from_one_arm_to_the_other(site: Site) -> None:
    site.candidate.error = LaneError("failed", "planted")
    site.served.free.clear()
    client = site.send("candidate", Client())
    assert until(lambda: site.arms["control"].under_way == 1)
    assert not site.trial.idle
    site.served.free.set()
    assert client.version == SERVED


def test_times_counted_as_a_histogram_has_them(site: Site) -> None:
    site.candidate.free.clear()
    client = site.send("candidate", Client())
    site.now = 0.0205
    site.candidate.free.set()
    assert client.version == CANDIDATE
    assert until(lambda: site.trial.idle)
    within = {
        labels[1]: number for (name, labels), number in site.tally.taken().items() if name == CANDIDATE_SECONDS.name
    }
    assert within == {f"{edge:g}": 1 for edge in EDGES if edge >= 0.0205} | {"+Inf": 1}
    assert EDGES[0] == 0.001
    assert EDGES[-1] > 60
    assert list(EDGES) == sorted(set(EDGES))
