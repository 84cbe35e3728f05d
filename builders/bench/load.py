"""The loads of a bench: the same texts for every server, drawn once."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from builders.settings import DeploySettings
from builders.source import EncoderSource
from clients.errors import InvalidInput
from clients.load.plan import LoadClass, Plan, Request, Segment, closed_plan, open_plan
from clients.load.run import LoadOptions
from clients.load.texts import DEFAULT_MIX, Mix, TextSource

#: Half of the requests are people who wait, half are jobs that do not.
CLASSES = (LoadClass("interactive", 0.5, 1), LoadClass("background", 0.5, 2))
#: Requests of a closed loop among which lengths are spread as among all of them.
_BLOCK = 50
#: Clients of a closed loop on a CPU.
_CLIENTS = 32


@dataclass(frozen=True)
class BenchLoad:
    """What every server of a bench gets.

    Attributes:
        closed: plan of the closed loop.
        opened: plan of the open loop, one per round: other texts and times each round, the same for every server.
        clients: of the closed loop.
        processes: of the generator.
        warm_s: first seconds of a closed loop that do not count.
    """

    closed: tuple[Plan, ...]
    opened: tuple[Plan, ...]
    clients: int
    processes: int
    warm_s: float


@dataclass(frozen=True)
class LoadSpec:
    """What the command line says of the load.

    Attributes:
        rounds: of all servers.
        closed_s, open_s: seconds of each closed and open loop.
        rate: of the open loop, texts a second.
        clients: of the closed loop.
        processes: of the generator.
        mix: lengths; empty: the lines of the corpus as they are.
        corpus: the user's own texts; the built-in prose when None.
        seed: of everything drawn.
    """

    rounds: int = 3
    closed_s: float = 20.0
    open_s: float = 30.0
    rate: float = 40.0
    clients: int = 32
    processes: int = 1
    mix: str = DEFAULT_MIX
    corpus: tuple[str, ...] | None = None
    seed: int = 0


def full_load(settings: DeploySettings, batch: int | None = None) -> int:
    """Clients of a closed loop that measures the maximum, where the command line names no number.

    On a CPU 32 keep any engine busy. A GPU waits for its host with so few: there each entry process has a batch in hand
    and another one waiting; more of them only wait longer (docs/measurements/, "bench and tune on an H200").

    Args:
        settings: the deployment.
        batch: texts that an entry process takes at once; the settings' own by default.
    """
    if settings.engine.kind != "tensorrt":
        return _CLIENTS
    return 2 * settings.entry.processes * (batch or settings.entry.batch)


def make_load(spec: LoadSpec, source: EncoderSource) -> BenchLoad:
    """Draws texts and times; lengths are measured with the model's own tokeniser.

    Raises:
        InvalidInput: no request falls into one of the open loops, or there are fewer clients than processes.
    """
    LoadOptions(spec.processes, spec.clients)  # checks them, before servers are started for them
    texts = TextSource(spec.corpus, source.transformer)
    mix = Mix.parse(spec.mix) if spec.mix else None
    segments = (Segment(spec.rate, spec.rate, spec.open_s),)
    closed = tuple(
        evenly(closed_plan(texts, 1000, spec.closed_s, CLASSES, mix, seed=2 * number + 1000 * spec.seed), number)
        for number in range(spec.rounds)
    )
    opened = tuple(
        open_plan(texts, segments, CLASSES, mix, seed=2 * number + 1 + 1000 * spec.seed)
        for number in range(spec.rounds)
    )
    if not all(plan.requests for plan in opened):
        length = f"{spec.rate:g} texts/s for {spec.open_s:g} s"
        raise InvalidInput("an open loop has no request", value=length, remedy="raise the rate or the seconds")
    return BenchLoad(closed, opened, spec.clients, spec.processes, min(2.0, spec.closed_s / 5))


def evenly(plan: Plan, seed: int) -> Plan:
    """The plan with its requests in an order of which every block of 50 has about the lengths of the whole.

    A closed loop takes as many as the server can do: of texts as they were drawn, a server that does half as many gets
    some that are by up to a tenth shorter or longer than another's. Inside a block the order is left to chance: how
    lengths follow each other decides what a padded batch costs.
    """
    chance = random.Random(seed)  # noqa: S311
    by_length = sorted(plan.requests, key=lambda request: request.tokens)
    count = max(1, len(by_length) // _BLOCK)
    blocks: list[list[Request]] = [[] for _ in range(count)]
    for rank, request in enumerate(by_length):  # dealt out to and fro
        row, place = divmod(rank, count)
        blocks[place if row % 2 else -1 - place].append(request)
    chance.shuffle(blocks)
    for block in blocks:
        chance.shuffle(block)
    return replace(plan, requests=tuple(request for block in blocks for request in block))
