"""The tasks beside `encode`, and what `encode` may ask, over all four ways."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from clients import InvalidInput, LabelScore, RankedDocument, ServerFailure
from tests.clients.fake_triton import DIM, LABELS, FakeTriton, vector
from tests.clients.ways import Way


def test_classify_gives_scores_with_the_models_labels(server: FakeTriton, way: Way) -> None:
    with way.client(server, model="encode_topics", batch=2) as client:
        result = client.classify(["How far", "Where is", "Who is"], top_k=1)
        assert result.labels == LABELS
        np.testing.assert_allclose(result.scores, [[0.6, 0.1, 0.1], [0.1, 0.6, 0.1], [0.1, 0.1, 0.6]])
        assert [one[0].label for one in result] == ["number", "place", "person"]
        assert result.tokens.tolist() == [7, 8, 6]
        whole = next(iter(client.classify("How far")))
        assert whole == (
            LabelScore("number", pytest.approx(0.6)),
            LabelScore("place", pytest.approx(0.1)),
            LabelScore("person", pytest.approx(0.1)),
        )
    assert server.asked.count("config") == 1  # labels of a version are asked for once


def test_classify_sends_pairs_and_a_single_str_goes_with_all(server: FakeTriton, way: Way) -> None:
    with way.client(server, model="encode_topics", batch=2) as client:
        client.classify(["a", "b", "c"], pairs="x")
        assert sorted((seen.texts, seen.pairs) for seen in server.seen) == [
            ([b"a", b"b"], [b"x"] * 2),
            ([b"c"], [b"x"]),
        ]
        with pytest.raises(InvalidInput, match="2 texts and 3 pairs are no pairs"):
            client.classify(["a", "b"], pairs=["x", "y", "z"])


def test_classify_of_nothing_has_the_labels(server: FakeTriton, way: Way) -> None:
    with way.client(server, model="encode_topics") as client:
        result = client.classify([])
    assert (result.scores.shape, result.labels, server.seen) == ((0, 3), LABELS, [])


def test_labels_follow_the_version_that_answered(server: FakeTriton, way: Way) -> None:
    server.labels = lambda version: {"1": ("a", "b", "c"), "2": ("d", "e", "f")}[version]
    with way.client(server, model="encode_topics", batch=1) as client:
        assert client.classify("x").labels == ("a", "b", "c")
        server.version = lambda texts: "2"
        assert client.classify("x").labels == ("d", "e", "f")
        server.version = lambda texts: texts[0].decode()
        with pytest.raises(ServerFailure, match="different labels"):
            client.classify(["1", "2"])


def test_classify_refuses_labels_that_do_not_fit_and_models_without(server: FakeTriton, way: Way) -> None:
    server.labels = lambda version: ("one",)
    with way.client(server, model="encode_topics") as client:
        with pytest.raises(ServerFailure, match="names 1 labels and gives 3 scores"):
            client.classify("x")
        with pytest.raises(InvalidInput, match="top_k"):
            client.classify("x", top_k=0)
    with way.client(server) as client, pytest.raises(ServerFailure, match="whose task is classification"):
        client.classify("x")


def test_rerank_sorts_by_score_and_keeps_positions(server: FakeTriton, way: Way) -> None:
    documents = ["Paris in spring", "the moon is far", "far", "the moon", "Paris"]
    with way.client(server, model="encode_rerank", batch=2) as client:
        result = client.rerank("how far is the moon", documents)
        assert result.indices.tolist() == [1, 3, 2, 0, 4]  # equal scores in the order of the call
        assert result.documents == tuple(documents[index] for index in result.indices)
        assert (np.diff(result.scores) <= 0).all()
        assert all(seen.texts == [b"how far is the moon"] * len(seen.texts) for seen in server.seen)
        (best,) = client.rerank("how far is the moon", np.array(documents), top_n=1)
        assert best == RankedDocument(1, pytest.approx(0.8), "the moon is far")
        assert len(client.rerank("a query", [])) == 0
        for query, options in ((["a"], {}), (b"a", {}), ("a", {"top_n": 0})):
            with pytest.raises(InvalidInput):
                client.rerank(query, ["x"], **options)


def test_rerank_refuses_a_model_of_several_scores(server: FakeTriton, way: Way) -> None:
    with way.client(server, model="encode_topics") as client, pytest.raises(ServerFailure, match="3 scores a pair"):
        client.rerank("a", ["b"])


def test_tag_gives_entities_with_character_positions(server: FakeTriton, way: Way) -> None:
    with way.client(server, model="encode_names") as client:
        result = client.tag(["Ada lives in Paris", "nobody"], aggregation="first")
        assert [[one.label for one in entities] for entities in result] == [["PER", "LOC"], []]
        ada = result.entities[0][0]
        assert (ada.word, ada.start, ada.end, ada.score) == ("Ada", 0, 3, 0.9)
        assert server.seen[0].parameters["aggregation"] == "first"
        assert len(client.tag([])) == 0
        with pytest.raises(InvalidInput, match="unknown aggregation"):
            client.tag("x", aggregation="best")


def test_answer_gives_spans_of_the_contexts(server: FakeTriton, way: Way) -> None:
    with way.client(server, model="encode_answers") as client:
        result = client.answer(["Where?", "Who?"], "Ada lives in Paris")
        assert [(one.text, one.start, one.end) for one in result] == [("Paris", 13, 18)] * 2
        assert server.seen[0].pairs == [b"Ada lives in Paris"] * 2
        assert len(client.answer([], [])) == 0


def test_similarity_is_the_cosine_of_the_embeddings(client: Any) -> None:
    given = client.similarity(["a", "b"], "a")
    one, other = (vector(text) / np.linalg.norm(vector(text)) for text in (b"a", b"b"))
    np.testing.assert_allclose(given, [[1.0], [one @ other]], rtol=1e-5)
    square = client.similarity(["a", "b"])
    assert (square.shape, square.dtype) == ((2, 2), np.float32)
    np.testing.assert_allclose(np.diag(square), 1, rtol=1e-5)
    assert client.similarity(["a"], []).shape == (1, 0)
    with pytest.raises(InvalidInput, match="text 4: not a str") as caught:
        client.similarity(["a", "b", "c"], ["d", 5])
    assert caught.value.texts == range(4, 5)


def test_options_of_encode_are_sent_as_parameters(server: FakeTriton, client: Any) -> None:
    result = client.encode("a", truncate="chunk", overlap=16, prompt="query", dimensions=4, priority=2, timeout=1)
    assert result.embeddings.shape == (1, 4)
    assert server.seen[0].parameters == {
        "truncate": "chunk", "overlap": 16, "prompt": "query", "dimensions": 4, "priority": 2, "class": "background",
        "timeout": 1_000_000,
    }  # fmt: skip
    client.encode("a", truncate="start", prompt="")
    assert server.seen[1].parameters == {"truncate": "start", "prompt": ""}


@pytest.mark.parametrize(
    "texts",
    [
        np.array(["ä", "b"]),
        np.array(["ä".encode(), b"b"]),
        np.array(["ä", b"b"], dtype=object),
        np.array([["ä"], ["b"]]),
        ("ä", "b"),
    ],
    ids=["U", "S", "object", "column", "tuple"],
)
def test_texts_may_be_arrays_of_str_or_bytes(server: FakeTriton, client: Any, texts: Any) -> None:
    assert client.encode(texts).embeddings.shape == (2, DIM)
    assert server.seen[0].texts == ["ä".encode(), b"b"]


@pytest.mark.parametrize(
    "texts", [np.array([1, 2]), np.array([["a", "b"]]), np.array("a"), np.array([b"a", b"\xff"]), np.array([None])]
)
def test_array_that_is_no_list_of_texts_is_refused(server: FakeTriton, client: Any, texts: Any) -> None:
    with pytest.raises(InvalidInput):
        client.encode(texts)
    assert server.seen == []


def test_progress_is_told_after_each_request(server: FakeTriton, way: Way) -> None:
    told: list[tuple[int, int]] = []
    with way.client(server, batch=2, concurrency=1) as client:
        client.encode(["a"] * 5, progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_error_of_one_task_is_the_kind_of_all(server: FakeTriton, way: Way) -> None:
    server.fail = lambda texts: (grpc.StatusCode.INVALID_ARGUMENT, "text 1 is too long")
    with way.client(server, model="encode_answers") as client, pytest.raises(InvalidInput, match="text 1 is") as caught:
        client.answer(["a", "b"], ["c", "d"])
    assert caught.value.texts == range(1, 2)


def test_facts_are_the_models_parameters(server: FakeTriton, way: Way) -> None:
    with way.client(server, model="encode_topics") as client:
        facts = client.facts()
    assert (facts.name, facts.task, facts.labels) == ("encode_topics", "classification", LABELS)
    assert facts.limits == {"max_tokens": 512, "buckets": [128, 512]}
    with way.client(server) as client:
        assert (client.facts().task, client.facts().size) == ("embedding", DIM)
