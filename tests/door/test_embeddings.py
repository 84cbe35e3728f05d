"""/v1/embeddings, with the official client of OpenAI and without."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.clients.fake_triton import DIM, FakeTriton, vector
from tests.door.doors import RunningDoor, running

TEXTS = [f"text {number}" for number in range(70)]


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_openai_client_gets_every_vector_in_order_when_a_list_spans_requests(
    openai: OpenAI, triton: FakeTriton, form: Any
) -> None:
    given = {} if form is None else {"encoding_format": form}
    answer = openai.embeddings.create(model="encode", input=TEXTS, **given)
    rows = [
        np.frombuffer(base64.b64decode(one.embedding), "<f4") if isinstance(one.embedding, str) else one.embedding  # type: ignore[arg-type]
        for one in answer.data
    ]
    assert np.array_equal(np.array(rows, np.float32), np.stack([vector(text.encode()) for text in TEXTS]))
    assert [one.index for one in answer.data] == list(range(70))
    tokens = sum(len(text) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "encode", "embedding")
    assert sorted(len(seen.texts) for seen in triton.seen) == [6, 32, 32]


def test_single_string_and_user_are_taken(openai: OpenAI) -> None:
    answer = openai.embeddings.create(model="encode", input="the moon", user="somebody", encoding_format="float")
    assert answer.data[0].embedding == pytest.approx(vector(b"the moon").tolist())


def test_prompt_and_truncation_reach_the_server_when_given_as_extra_fields(openai: OpenAI, triton: FakeTriton) -> None:
    extra = {"prompt_name": "query", "truncate": "error", "unknown": 1}
    openai.embeddings.create(model="encode", input="a", extra_body=extra)
    assert triton.seen[-1].parameters["prompt"] == "query"
    assert triton.seen[-1].parameters["truncate"] == "error"


def test_own_size_is_no_dimensions_and_others_are_refused_by_name(openai: OpenAI, triton: FakeTriton) -> None:
    for own in (DIM, 0):  # 0 is what infinity's client sends
        assert len(openai.embeddings.create(model="encode", input="a", dimensions=own).data[0].embedding) == DIM
        assert "dimensions" not in triton.seen[-1].parameters
    with pytest.raises(openai_error(400)) as caught:
        openai.embeddings.create(model="encode", input="a", dimensions=4)
    assert caught.value.body["param"] == "dimensions"  # type: ignore[index]
    assert "limit: 8 " in caught.value.message


def openai_error(status: int) -> type[openai.APIStatusError]:
    return {400: openai.BadRequestError, 404: openai.NotFoundError}[status]


def test_model_is_found_by_entry_name_short_name_or_alias(triton: FakeTriton) -> None:
    with running(triton.url, models="encode,encode_topics", aliases="text-embedding-3-small=encode") as door:
        for name in ("encode", "text-embedding-3-small", None):
            reply = door.post("/v1/embeddings", {"model": name, "input": "a"})
            assert (reply.status, reply.json["model"]) == (200, "encode")
        assert door.post("/v1/classify", {"model": "topics", "input": "a"}).json["model"] == "encode_topics"


def test_unknown_model_is_not_found_and_one_of_another_task_is_refused(openai: OpenAI) -> None:
    with pytest.raises(openai_error(404)) as caught:
        openai.embeddings.create(model="gpt-4", input="a")
    assert caught.value.code == "model_not_found"
    assert "one of encode" in caught.value.message
    with pytest.raises(openai_error(400), match="for reranking, this path for embedding"):
        openai.embeddings.create(model="encode_rerank", input="a")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b'["a"]', None),
        (b'{"input": "\\ud800"}', None),
        (b'{"input": "\xff"}', None),
        (b"{}", "input"),
        (b'{"input": []}', "input"),
        (b'{"input": null}', "input"),
        (b'{"input": ["a", 1]}', "input"),
        (b'{"input": [true]}', "input"),
        (b'{"input": [["a"]]}', "input"),
        (b'{"input": [1, 2]}', "input"),
        (b'{"input": "a", "encoding_format": "int8"}', "encoding_format"),
        (b'{"input": "a", "dimensions": -1}', "dimensions"),
        (b'{"input": "a", "dimensions": "4"}', "dimensions"),
        (b'{"input": "a", "model": 3}', "model"),
        (b'{"input": "a", "truncate": "middle"}', "truncate"),
    ],
)
def test_bad_body_is_refused_in_openais_form_and_reaches_no_server(
    shared: tuple[RunningDoor, FakeTriton], body: bytes, param: str | None
) -> None:
    door, triton = shared
    reply = door.call("POST", "/v1/embeddings", body)
    assert reply.status == 400
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", param)
    assert triton.seen == []


# Token ids


@contextmanager
def small_tokenizer() -> Iterator[Path]:
    """A file with a small tokenizer of BERT's kind, with a cut and padding set, as models have them."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "moon", "##s", "'", "is", "far"]
    made = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))  # noqa: S106
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(words[:4])
    made.decoder = decoders.WordPiece()
    made.enable_truncation(4)
    made.enable_padding(length=4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        made.save(str(path))
        yield path


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Path]:
    with small_tokenizer() as path:
        yield path


@pytest.fixture
def reader(triton: FakeTriton, tokenizer: Path) -> Iterator[RunningDoor]:
    with running(triton.url, models="encode", tokenizer=tokenizer) as door:
        yield door


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        ([4, 5, 6, 7, 8], [b"the moons ' is"]),
        ([2, 4, 5, 8, 9, 3], [b"the moon is far"]),
        ([[4, 5], [2, 4, 1, 3]], [b"the moon", b"the [UNK]"]),
        ([[]], [b""]),
    ],
)
def test_token_ids_become_the_text_that_has_them(
    reader: RunningDoor, triton: FakeTriton, ids: Any, texts: list[bytes]
) -> None:
    assert reader.embed(ids).status == 200
    assert [one.replace(b"moons'", b"moons '") for one in triton.seen[-1].texts] == texts


@pytest.mark.parametrize(
    ("ids", "what"), [([4, 10], "token id 10"), ([-1], "token id -1"), ([6, 6], "not of the door's tokenizer")]
)
def test_token_ids_of_another_tokenizer_are_refused_with_what_to_do(
    reader: RunningDoor, triton: FakeTriton, ids: list[int], what: str
) -> None:
    reply = reader.embed(ids)
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert what in reply.error["message"]
    assert "check_embedding_ctx_length=False" in reply.error["message"]
    assert triton.seen == []


def test_token_ids_are_refused_with_what_to_do_when_the_door_has_no_tokenizer(door: RunningDoor) -> None:
    assert "--tokenizer" in door.embed([[1, 2], [3]]).error["message"]
