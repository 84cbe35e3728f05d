"""The entry models behind the door: which there are, what each does, how each is called."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from clients.async_client import AsyncEncoderClient
from clients.door.log import LOGGER
from clients.door.metrics import DoorMetrics
from clients.door.problems import Problem, from_encoder_error, invalid
from clients.door.settings import DoorSettings
from clients.errors import EncoderError
from clients.model import ModelFacts

ENTRY = "encode"
_ENTRY_NAME = re.compile(rf"^{ENTRY}(_.+)?$")
_ASK_S = 5.0
_READY_S = 2.0
#: How long an answer about health holds, seconds: these questions are open to everybody.
_KEPT_S = 0.5
#: A model that the server has no longer counts as not ready for so long, seconds.
_GONE_S = 600.0
#: Questions at once whether a server lives. Of several servers behind one name each gets some, so that one of them that
#: does not answer does not speak for the others.
_LIVE_ASKED = 3
#: An unknown name is looked for on the server at most this often, whoever asks.
_LOOK_S = 1.0
#: Texts a request where a model does not say; the entry's own default.
_BATCH = 32
#: What infinity's client sends as the model when its caller names none.
_UNNAMED = "default/not-specified"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Model:
    """An entry model that the server has."""

    name: str
    facts: ModelFacts
    client: AsyncEncoderClient
    since: int
    """When the door first saw it, seconds since 1970."""


class _Kept(Generic[_T]):
    """An answer that is asked for again only when it is older than `_KEPT_S`, and by one at a time."""

    def __init__(self, ask: Callable[[], Awaitable[_T]]) -> None:
        self._ask, self._lock = ask, asyncio.Lock()
        self._answer: tuple[float, _T] | None = None

    async def get(self) -> _T:
        async with self._lock:
            if self._answer is None or time.monotonic() - self._answer[0] >= _KEPT_S:
                answer = await self._ask()
                self._answer = time.monotonic(), answer
            return self._answer[1]


class Catalog:
    """The models, asked for when the door starts, every `refresh_s`, and when a name is unknown.

    Args:
        settings: of the door.
        metrics: where readiness is written.
    """

    def __init__(self, settings: DoorSettings, metrics: DoorMetrics) -> None:
        """Contacts nobody; a wrong address or certificate is an InvalidInput now."""
        self._settings, self._metrics = settings, metrics
        self._aliases = settings.alias_names
        self._clients: dict[tuple[str, int], AsyncEncoderClient] = {}
        self._models: dict[str, Model] = {}
        self._unreachable: EncoderError | None = None
        self._missing: dict[str, EncoderError] = {}
        self._lock = asyncio.Lock()
        self._looked = -_LOOK_S
        #: Name -> when the server last had it, on the clock of time.monotonic.
        self._told: dict[str, float] = {}
        self._ready, self._live = _Kept(self._ask_ready), _Kept(self._ask_live)
        self._client(ENTRY, _BATCH)

    @property
    def models(self) -> tuple[Model, ...]:
        """Those known now, by name."""
        return tuple(self._models[name] for name in sorted(self._models))

    async def watch(self) -> None:
        """Refreshes for ever, and tells the metrics which models are ready, whoever asks."""
        while True:
            try:
                await self.refresh()
                await self.ready()
            except Exception:
                logging.getLogger(LOGGER).exception("catalog failed")
            await asyncio.sleep(self._settings.refresh_s)

    async def close(self) -> None:
        """Closes the connections; requests under way fail."""
        for client in self._clients.values():
            await client.close()

    async def refresh(self, oldest: float = 0.0) -> None:
        """Asks the server for its models; keeps what is known when it does not answer.

        Args:
            oldest: seconds; what was learnt less long ago, by a refresh under way too, is good enough.
        """
        async with self._lock:
            if time.monotonic() - self._looked < oldest:
                return
            try:
                await self._ask_models()
            finally:
                self._looked = time.monotonic()

    async def _ask_models(self) -> None:
        try:
            names = self._settings.model_names or await self._loaded()
            self._unreachable = None
        except EncoderError as error:
            self._unreachable = error
            _warn(error)
            return
        found = await asyncio.gather(*(self._describe(name) for name in names), return_exceptions=True)
        models: dict[str, Model] = {}
        self._missing = {}
        for name, one in zip(names, found, strict=True):
            if isinstance(one, Model):
                models[name] = one
            elif not isinstance(one, EncoderError):
                raise one
            else:
                self._missing[name] = one
                _warn(one)
                if name in self._models:  # not there for a moment; a request will say how it is
                    models[name] = self._models[name]
        if sorted(models) != sorted(self._models):
            logging.getLogger(LOGGER).info("models", extra={"door": {"models": sorted(models)}})
        self._models = models

    async def find(self, name: str | None, tasks: tuple[str, ...]) -> Model:
        """The model of a request.

        Args:
            name: as the request has it.
            tasks: what the route computes; none: anything.

        Raises:
            Problem: 404, no such model; 400, it does something else; 503, the server is not there.
        """
        if name == _UNNAMED and name not in self._aliases:
            name = None
        model = self._known(name, tasks)
        if model is None:
            await self.refresh(_LOOK_S)
            model = self._known(name, tasks)
        if model is None and (error := self._why_not(name)) is not None:
            raise from_encoder_error(error, self._settings.retry_after_s)
        if model is None and name is None:
            raise invalid(f"no model was named, and none is the obvious one; limit: {self._listed(tasks)}", "model")
        if model is None:
            what = f"there is no model {name[:80]!r}; limit: {self._listed(tasks)}"  # type: ignore[index]
            raise Problem(404, "model_not_found", what, param="model")
        if tasks and model.facts.task not in tasks:
            what = f"model {model.name!r} is for {model.facts.task}, this path for {' or '.join(tasks)}"
            raise invalid(f"{what}; limit: {self._listed(tasks)}", "model")
        return model

    async def ready(self) -> dict[str, bool]:
        """Asks for each model whether it is ready; empty when there is none. An answer holds for half a second."""
        return await self._ready.get()

    async def reachable(self) -> bool:
        """Asks whether a server answers at all, whatever it has loaded. An answer holds for half a second."""
        return await self._live.get()

    async def _ask_live(self) -> bool:
        async def one() -> bool:
            try:
                return await self._client(ENTRY, _BATCH).live(deadline=_READY_S)
            except EncoderError:
                return False

        asked = [asyncio.ensure_future(one()) for _ in range(_LIVE_ASKED)]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
            return False
        finally:
            for task in asked:
                task.cancel()

    async def _ask_ready(self) -> dict[str, bool]:
        names = self._settings.model_names
        if not names:
            if not self._models:
                await self.refresh(_LOOK_S)
            names = tuple(self._models)

        async def one(name: str) -> bool:
            try:
                return await self._client(name, _BATCH).ready(deadline=_READY_S)
            except EncoderError:
                return False

        answers = dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))
        for name, answer in answers.items():
            self._metrics.ready.labels(name).set(answer)
        now = time.monotonic()
        self._told |= dict.fromkeys(answers, now)
        for name, seen in list(self._told.items()):
            # One that is not loaded any more is not ready: told for long enough that an alert can fire, then forgotten.
            if now - seen >= _GONE_S:
                self._metrics.ready.remove(name)
                del self._told[name]
            elif name not in answers:
                self._metrics.ready.labels(name).set(0)
        return answers

    def _known(self, name: str | None, tasks: tuple[str, ...]) -> Model | None:
        if name is not None:
            name = self._aliases.get(name, name)
            return self._models.get(name) or self._models.get(f"{ENTRY}_{name}")
        fit = [model for model in self._models.values() if model.facts.task in tasks]
        return fit[0] if len(fit) == 1 else next((model for model in fit if model.name == ENTRY), None)

    def _listed(self, tasks: tuple[str, ...]) -> str:
        names = [model.name for model in self.models if not tasks or model.facts.task in tasks]
        return f"one of {', '.join(names)}" if names else f"the server has no model for {' or '.join(tasks) or 'it'}"

    async def _loaded(self) -> tuple[str, ...]:
        status = await self._client(ENTRY, _BATCH).status(deadline=_ASK_S)
        named = {one.name for one in status.models if one.state in ("", "READY") and _ENTRY_NAME.match(one.name)}
        return tuple(sorted(named))

    async def _describe(self, name: str) -> Model:
        facts = await self._client(name, _BATCH).facts(deadline=_ASK_S)
        # A request larger than the entry's batch is refused by the server; the client splits a list into such requests.
        batch = facts.limits.get("max_texts")
        client = self._client(name, batch if isinstance(batch, int) and 1 <= batch <= 1024 else _BATCH)
        known = self._models.get(name)
        return Model(name, facts, client, known.since if known else int(time.time()))

    def _client(self, name: str, batch: int) -> AsyncEncoderClient:
        """One connection for each model, kept."""
        if (name, batch) not in self._clients:
            token = self._settings.triton_token
            self._clients[name, batch] = AsyncEncoderClient(
                self._settings.triton,
                model=name,
                batch=batch,
                retry=None,  # who called the door decides; retries here would add to an overload
                token=None if token is None else token.get_secret_value(),
                tls=self._settings.tls,
            )
        return self._clients[name, batch]

    def _why_not(self, name: str | None) -> EncoderError | None:
        """Why a model that should be there is not; None for a name that nobody promised."""
        if name is None:
            return self._unreachable or next(iter(self._missing.values()), None)
        name = self._aliases.get(name, name)
        return self._unreachable or self._missing.get(name) or self._missing.get(f"{ENTRY}_{name}")


def _warn(error: EncoderError) -> None:
    logging.getLogger(LOGGER).warning("server", extra={"door": {"error": str(error)}})
