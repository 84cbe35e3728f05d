"""The ASGI application: the routes, and what starts and ends with the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clients.door.call import Call, Door
from clients.door.catalog import Catalog, Model
from clients.door.classify import classify, classify_vllm, predict_tei
from clients.door.embeddings import embeddings
from clients.door.endpoint import Endpoint, record
from clients.door.keys import KeyRing
from clients.door.limits import RateLimits
from clients.door.log import LOGGER
from clients.door.metrics import DoorMetrics
from clients.door.problems import Problem
from clients.door.rerank import rerank, rerank_objects
from clients.door.settings import DoorSettings
from clients.door.token_ids import TokenIds


def make_app(settings: DoorSettings) -> Starlette:
    """The application, for any ASGI server with lifespan.

    /health asks each model, now, whether it is ready, and is 200 or 503; /health/ready is 200 when a server answers at
    all, so that one ill model does not take the door of the others away; /health/live says that the process answers;
    /metrics is Prometheus' page. These four ask for no key and are not logged.

    Args:
        settings: of the door.

    Raises:
        InvalidInput: the keys or the tokenizer cannot be read, or an address or certificate of Triton is wrong.

    Example:
        >>> from clients.door.app import make_app
        >>> from clients.door.settings import DoorSettings
        >>> app = make_app(DoorSettings(triton="127.0.0.1:8001"))
        >>> sorted({route.path for route in app.routes if route.path.startswith("/v1/")})
        ['/v1/classify', '/v1/embeddings', '/v1/models', '/v1/models/{model:path}', '/v1/rerank']
    """
    metrics = DoorMetrics()
    door = Door(
        settings=settings,
        metrics=metrics,
        catalog=Catalog(settings, metrics),
        limits=RateLimits(settings),
        keys=None if settings.keys is None else KeyRing(settings.keys),
        ids=None if settings.tokenizer is None else TokenIds(settings.tokenizer),
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(door.catalog.watch())
        if door.keys is None:
            logging.getLogger(LOGGER).warning("no keys: whoever reaches the door may call it")
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await door.catalog.close()

    async def not_found(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        what = f"there is nothing for {request.method} at this path; limit: {', '.join(paths)}"
        problem = Problem(status, "not_found", what)
        # One label for all of them: a path is whatever a client makes up.
        call = Call(door, "other", request.headers)
        record(call, status, problem)
        allowed = dict(getattr(error, "headers", None) or {})
        return _json(problem.body("openai"), status, {**allowed, "x-request-id": call.id})

    async def health(request: Request) -> Response:
        ready = await door.catalog.ready()
        well = bool(ready) and all(ready.values())
        return _json({"status": "ready" if well else "not ready", "models": ready}, 200 if well else 503)

    async def admits(request: Request) -> Response:
        reached = await door.catalog.reachable()
        return _json({"status": "ready" if reached else "no server"}, 200 if reached else 503)

    async def live(request: Request) -> Response:
        return _json({"status": "live"})

    async def page(request: Request) -> Response:
        return Response(door.metrics.page(), headers={"content-type": door.metrics.content_type})

    computing = [
        Endpoint(door, "/v1/embeddings", embeddings),
        Endpoint(door, "/v1/rerank", rerank),
        Endpoint(door, "/v2/rerank", rerank_objects),
        Endpoint(door, "/rerank", rerank, "tei"),
        Endpoint(door, "/v1/classify", classify),
        Endpoint(door, "/classify", classify_vllm),
        Endpoint(door, "/predict", predict_tei, "tei"),
    ]
    routes = [Route(one.route, one, methods=["POST"]) for one in computing]
    routes += [
        Route("/v1/models", Endpoint(door, "/v1/models", _models, body=False), methods=["GET"]),
        Route("/v1/models/{model:path}", Endpoint(door, "/v1/models/{model}", _model, body=False), methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/health/ready", admits, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
        Route("/metrics", page, methods=["GET"]),
    ]
    paths = [route.path for route in routes]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: not_found, 405: not_found})


async def _models(call: Call, body: bytes) -> bytes:
    """GET /v1/models: https://platform.openai.com/docs/api-reference/models/list."""
    return orjson.dumps({"object": "list", "data": [_described(one) for one in call.door.catalog.models]})


async def _model(call: Call, body: bytes) -> bytes:
    """GET /v1/models/NAME: https://platform.openai.com/docs/api-reference/models/retrieve."""
    return orjson.dumps(_described(await call.find(call.path["model"])))


def _described(model: Model) -> dict[str, object]:
    """OpenAI's model object, with the door's own `task`, `size` and `dimensions`."""
    facts = model.facts
    return {
        "id": model.name,
        "object": "model",
        "created": model.since,
        "owned_by": "encoder-lanes",
        "task": facts.task,
        "size": facts.size,
        "dimensions": facts.dimensions,
        "max_tokens": facts.limits.get("max_tokens"),
    }


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")
