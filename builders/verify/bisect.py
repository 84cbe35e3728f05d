"""Which step of a build broke it, found by halving.

The search keeps to one invariant: a set of steps that passes and the same set with one more step that fails. So the
step it names did break the build in that company, whether or not the steps are monotone (a broken build stays broken
when steps are added, as Zeller's delta debugging, "Yesterday, my program worked", 1999, assumes); only how many
builds it takes, and that no second cause stays hidden, rests on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from builders.errors import BuilderError

Model = TypeVar("Model")


@dataclass(frozen=True)
class Trial:
    """One build that was judged."""

    steps: tuple[str, ...]
    passed: bool
    error: str = ""
    """What the build itself said when it could not be made; that counts as failed."""


@dataclass(frozen=True)
class Cause:
    """Steps that together break the build; fewer of them do not."""

    steps: tuple[str, ...]
    """In build order. More than one: each is right alone (a mask constant that only FP16 cannot hold)."""

    def __str__(self) -> str:
        """The named step, or the steps with `together`."""
        return self.steps[0] if len(self.steps) == 1 else f"{' and '.join(self.steps)} together"


@dataclass(frozen=True)
class BisectReport:
    """What was found, and every build it took."""

    causes: tuple[Cause, ...]
    """Independent causes; empty when all steps together pass, or when no step is to blame."""
    base_fails: bool
    """The build fails without any step: the export or the data are at fault."""
    monotone: bool
    """False: a build passed although it contains a cause, so every prefix was judged one by one as well."""
    trials: tuple[Trial, ...]

    @property
    def builds(self) -> int:
        """Builds made."""
        return len(self.trials)

    def summary(self) -> str:
        """One line for the terminal."""
        if self.base_fails:
            return f"the build fails without any step ({self.builds} builds): look at the export and the data"
        if not self.causes:
            return f"no step is at fault: all steps together pass ({self.builds} builds)"
        odd = "" if self.monotone else "; some steps hide what others break, so each was judged in turn"
        return f"at fault: {', '.join(map(str, self.causes))} ({self.builds} builds{odd})"


def bisect(
    steps: Sequence[str], build: Callable[[Sequence[str]], Model], check: Callable[[Model], bool]
) -> BisectReport:
    """Find the steps that break a build, with about log2(n) + 4 builds for one bad step.

    Args:
        steps: all steps of the failed build, in order, none twice (fusions and precision).
        build: makes the model with these steps only, in this order. A `BuilderError` counts as a failed build.
        check: True when the model passes the gate.

    Raises:
        ValueError: a step is named twice.
    """
    if len(set(steps)) != len(steps):
        raise ValueError(f"steps are named twice: {list(steps)}")
    return _Search(tuple(steps), build, check).run()


class _Search(Generic[Model]):
    def __init__(self, steps: tuple[str, ...], build: Callable[[Sequence[str]], Model], check: Callable[[Model], bool]):
        self._steps, self._build, self._check = steps, build, check
        self._trials: dict[tuple[str, ...], Trial] = {}

    def run(self) -> BisectReport:
        """Causes one after the other, each taken out before the next is looked for."""
        causes: list[Cause] = []
        left = self._steps
        if self._passes(left):
            return self._report(causes, base_fails=False)
        if not self._passes(()):
            return self._report(causes, base_fails=True)
        while not self._passes(left):
            cause = self._cause(left)
            causes.append(cause)
            # Its first step goes: the last is often the precision, which has to stay to show the next cause.
            left = tuple(step for step in left if step != cause.steps[0])
        if not self._monotone(causes):
            causes = self._one_by_one(causes)
        return self._report(causes, base_fails=False)

    def _cause(self, steps: tuple[str, ...]) -> Cause:
        """A least set that fails: its last step first, then the earlier ones that this one needs."""
        last = self._boundary(steps, ())
        needed = [steps[last]]
        while not self._fails(needed):
            before = steps[: steps.index(needed[0])]
            needed.insert(0, before[self._boundary(before, tuple(needed))])
        return Cause(tuple(needed))

    def _boundary(self, steps: tuple[str, ...], after: tuple[str, ...]) -> int:
        """Place of the step with which `steps[:place + 1] + after` fails while `steps[:place] + after` passes."""
        low, high = 0, len(steps)  # passes with `low` steps, fails with `high`
        while high - low > 1:
            middle = (low + high) // 2
            if self._passes(steps[:middle] + after):
                low = middle
            else:
                high = middle
        return high - 1

    def _monotone(self, causes: list[Cause]) -> bool:
        passed = [set(trial.steps) for trial in self._trials.values() if trial.passed]
        return not any(set(cause.steps) <= steps for cause in causes for steps in passed)

    def _one_by_one(self, causes: list[Cause]) -> list[Cause]:
        """Add every step at which a passing prefix starts to fail."""
        named = {step for cause in causes for step in cause.steps}
        for place in range(len(self._steps)):
            breaks = self._passes(self._steps[:place]) and not self._passes(self._steps[: place + 1])
            if breaks and self._steps[place] not in named:
                causes.append(Cause((self._steps[place],)))
        return causes

    def _fails(self, steps: Sequence[str]) -> bool:
        return not self._passes(tuple(steps))

    def _passes(self, steps: tuple[str, ...]) -> bool:
        if steps not in self._trials:
            try:
                self._trials[steps] = Trial(steps, self._check(self._build(steps)))
            except BuilderError as error:
                self._trials[steps] = Trial(steps, passed=False, error=str(error))
        return self._trials[steps].passed

    def _report(self, causes: list[Cause], *, base_fails: bool) -> BisectReport:
        monotone = self._monotone(causes)
        return BisectReport(tuple(causes), base_fails, monotone, tuple(self._trials.values()))
