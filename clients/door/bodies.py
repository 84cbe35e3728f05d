"""Bodies of requests: read within their limits, checked, turned into texts.

Fields that a form has and the door does not know are passed over, as clients send what their own service takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import Receive

from clients.door.problems import Problem, invalid
from clients.door.token_ids import REMEDY, TokenIds

Truncation = Literal["end", "start", "error", "chunk"]


class ClientGone(Exception):  # noqa: N818 - nobody is left to be told of an error
    """The client closed its connection."""


class Body(BaseModel):
    """What every body may have."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    model: str | None = None
    """Entry model, alias, or NAME of encode_NAME; left out, the only model of the task, or `encode`."""
    truncate: Truncation | None = None
    """The door's own field: as `truncate` of the clients; left out, the door's setting."""


class EmbeddingsBody(Body):
    """https://platform.openai.com/docs/api-reference/embeddings/create; `prompt_name` is TEI's."""

    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=0, le=65_536)
    """0, which infinity's client sends by itself, and none are the model's own size."""
    user: str | None = None
    prompt_name: str | None = None


class RerankBody(Body):
    """Rerank as infinity, Cohere, Jina and vLLM have it: https://docs.cohere.com/reference/rerank."""

    query: str
    documents: list[Any]
    top_n: int | None = Field(default=None, ge=0, le=1_000_000_000)
    """0 and none are all, as in vLLM."""
    return_documents: bool = False
    raw_scores: bool = False


class ClassifyBody(Body):
    """Classify as infinity and vLLM have it."""

    input: Any
    raw_scores: bool = False


class TeiBody(BaseModel):
    """What TEI's bodies share: RerankRequest and PredictRequest of its router."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    model: str | None = None
    """Not of TEI, which serves one model."""
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"
    raw_scores: bool = False

    @property
    def way(self) -> Truncation:
        """As the clients name it: without `truncate` a text that is too long is refused."""
        if not self.truncate:
            return "error"
        return "start" if self.truncation_direction.lower() == "left" else "end"


class TeiRerankBody(TeiBody):
    """RerankRequest."""

    query: str
    texts: list[Any]
    return_text: bool = False


class TeiPredictBody(TeiBody):
    """PredictRequest."""

    inputs: Any


_Form = TypeVar("_Form", bound=BaseModel)


async def read_body(
    receive: Receive, headers: Mapping[str, str], limit: int, timeout: float, hold: Callable[[int], None]
) -> bytes:
    """The whole body.

    Args:
        receive: of ASGI.
        headers: of the request.
        limit: most bytes.
        timeout: most seconds until the last of them.
        hold: told the bytes of each piece before it is kept; may raise.

    Raises:
        Problem: 413, it is too large; 408, it took too long; 415, it says that it is no JSON, or is compressed.
        ClientGone: the client went away.
    """
    _check_kind(headers)
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    # One array, not a list of pieces: a client chooses how small its pieces are.
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(timeout):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece, more = message.get("body", b""), message.get("more_body", False)
                if len(body) + len(piece) > limit:
                    raise _too_large(limit)
                hold(len(piece))
                body += piece
    except TimeoutError:
        raise Problem(408, "body_timeout", f"the body did not arrive in time; limit: {timeout:g} s") from None
    return bytes(body)


def _check_kind(headers: Mapping[str, str]) -> None:
    """Refuses a body that is said to be something else than JSON, such as a form; where nothing is said it is read."""
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise _wrong_kind("the body is compressed; send it as it is", "content-encoding")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise _wrong_kind("the body is no JSON; send `Content-Type: application/json`", "content-type")


def _wrong_kind(message: str, header: str) -> Problem:
    return Problem(415, "unsupported_media_type", message, param=header)


def _too_large(limit: int) -> Problem:
    return Problem(413, "body_too_large", f"the body is too large; limit: {limit} bytes; send fewer texts a request")


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        Problem: 400, it is none.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is no JSON (UTF-8): {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise invalid("the body is no JSON object")
    return value


def parse(form: type[_Form], value: dict[str, Any]) -> _Form:
    """A body in its form.

    Raises:
        Problem: 400, naming the first field that is wrong, and not what stands in it.
    """
    try:
        return form.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise invalid(f"{name}: {first['msg']}{more}", str(first["loc"][0]) if first["loc"] else None) from None


async def texts_of(value: object, ids: TokenIds | None, most: int) -> list[str]:
    """OpenAI's `input`: a text, texts, the token ids of one text, or those of several.

    Args:
        value: what stands in the field.
        ids: what token ids are read with; None refuses them.
        most: texts of one request.

    Raises:
        Problem: 400, it is something else, empty, too many, or ids that cannot be read.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid(f"input is {'empty' if value == [] else 'of a wrong type'}; limit: {_INPUT}", "input")
    if not isinstance(value[0], str):
        # A body holds millions of ids, and reading them takes seconds: other requests go on meanwhile.
        return await asyncio.to_thread(_texts_of_ids, value, ids, most)
    if not all(isinstance(one, str) for one in within(value, most, "input")):
        raise _mixed()
    return value


_INPUT = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _texts_of_ids(value: list[Any], ids: TokenIds | None, most: int) -> list[str]:
    items = [value] if type(value[0]) is int else within(value, most, "input")
    if not all(isinstance(one, list) and all(type(id_) is int for id_ in one) for one in items):
        raise _mixed()
    if ids is None:
        raise invalid(
            f"input is token ids, and this door has no tokenizer to read them with; {REMEDY}, or start the door with "
            "--tokenizer, the tokenizer.json that the ids are of",
            "input",
        )
    return [ids.text(one, position) for position, one in enumerate(items)]


def _mixed() -> Problem:
    return invalid(f"input mixes types or has a wrong one; limit: {_INPUT}", "input")


def plain_texts(value: object, most: int, name: str) -> list[str]:
    """A list of texts, which may be one text, or objects with a `text`.

    Raises:
        Problem: 400, it is something else, empty, or too many.
    """
    if isinstance(value, str):
        return [value]
    given = within(value, most, name) if isinstance(value, list) else []
    items: list[Any] = [one.get("text") if isinstance(one, dict) else one for one in given]
    if not items or not all(isinstance(one, str) for one in items):
        wrong = next((str(at) for at, one in enumerate(items) if not isinstance(one, str)), "")
        what = f"{name}.{wrong} is no text" if wrong else f"{name} is empty or no list"
        raise invalid(f"{what}; limit: strings, or objects with a string `text`", name)
    return items


def within(items: list[Any], most: int, name: str) -> list[Any]:
    """The items, if they are not too many.

    Raises:
        Problem: 400.
    """
    if len(items) > most:
        raise invalid(f"{name} has {len(items)} items; limit: {most} a request; send several", name)
    return items


def no_raw_scores(asked: bool) -> None:
    """The activation is part of the model's graph, so that scores without it are not there to be had.

    Raises:
        Problem: 400, they were asked for.
    """
    if asked:
        raise invalid("raw_scores is true; limit: false; the model's activation is built into it", "raw_scores")
