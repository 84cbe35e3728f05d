"""The loads of a bench: the same texts for every server, drawn once."""

from __future__ import annotations

from dataclasses import dataclass

from builders.source import EncoderSource
from clients.errors import InvalidInput
from clients.load.plan import LoadClass, Plan, Segment, closed_plan, open_plan
from clients.load.run import LoadOptions
from clients.load.texts import DEFAULT_MIX, Mix, TextSource

#: Half of the requests are people who wait, half are jobs that do not.
CLASSES = (LoadClass("interactive", 0.5, 1), LoadClass("background", 0.5, 2))


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
        closed_plan(texts, 1000, spec.closed_s, CLASSES, mix, seed=2 * number + 1000 * spec.seed)
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
