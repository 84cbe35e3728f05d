"""Reranking and classification in the public forms: Cohere's, infinity's, vLLM's, TEI's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.fake_triton import LABELS, FakeTriton
from tests.door.doors import RunningDoor

QUERY = "the far moon"
DOCUMENTS = ["nothing here", "the moon", "the far moon"]


def test_rerank_answers_in_infinitys_form_and_in_coheres(door: RunningDoor) -> None:
    body = {"model": "encode_rerank", "query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    for path, objects in (("/v1/rerank", False), ("/rerank", False), ("/v2/rerank", True)):
        reply = door.post(path, body)
        answer = reply.json
        assert reply.status == 200
        assert [one["index"] for one in answer["results"]] == [2, 1]
        assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([3 / 4, 2 / 3])
        shown = [{"text": text} if objects else text for text in (DOCUMENTS[2], DOCUMENTS[1])]
        assert [one["document"] for one in answer["results"]] == shown
        assert answer["usage"] == {"prompt_tokens": 3 * len(QUERY), "total_tokens": 3 * len(QUERY)}
        assert (answer["model"], answer["object"]) == ("encode_rerank", "rerank")


def test_model_need_not_be_named_by_infinitys_client(door: RunningDoor) -> None:
    body = {"model": "default/not-specified", "query": QUERY, "documents": DOCUMENTS}
    assert door.post("/v1/rerank", body).json["model"] == "encode_rerank"
    assert door.post("/v1/classify", {"model": body["model"], "input": ["a"]}).json["model"] == "encode_topics"


def test_documents_may_be_objects_and_are_not_given_back_unasked(door: RunningDoor) -> None:
    body = {"query": QUERY, "documents": [{"text": one, "title": "t"} for one in DOCUMENTS], "top_n": 0}
    results = door.post("/v1/rerank", body).json["results"]
    assert [one["index"] for one in results] == [2, 1, 0]
    assert all(set(one) == {"index", "relevance_score"} for one in results)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_rerank_answers_in_teis_form(door: RunningDoor, triton: FakeTriton, path: str) -> None:
    extras: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "error"),
        ({"truncate": True}, "end"),
        ({"truncate": True, "truncation_direction": "Left"}, "start"),
    )
    for extra, truncate in extras:
        answer = door.post(path, {"query": QUERY, "texts": DOCUMENTS, "return_text": True, **extra}).json
        assert [one["index"] for one in answer] == [2, 1, 0]
        assert [one["text"] for one in answer] == [DOCUMENTS[2], DOCUMENTS[1], DOCUMENTS[0]]
        assert answer[0]["score"] == pytest.approx(3 / 4)
        assert triton.seen[-1].parameters["truncate"] == truncate
    plain = door.post(path, {"query": QUERY, "texts": DOCUMENTS}).json
    assert all(set(one) == {"index", "score"} for one in plain)


def test_classify_answers_in_infinitys_form(door: RunningDoor) -> None:
    answer = door.post("/v1/classify", {"model": "topics", "input": ["Where is it?", "Who is it?"]}).json
    assert answer["object"] == "classify"
    assert [one["label"] for one in answer["data"][0]] == ["place", "number", "person"]
    assert answer["data"][1][0] == {"label": "person", "score": pytest.approx(0.6)}
    assert answer["usage"]["total_tokens"] == len("Where is it?Who is it?")


def test_classify_answers_in_vllms_form(door: RunningDoor) -> None:
    answer = door.post("/classify", {"input": "Where is it?"}).json
    assert answer["object"] == "list"
    assert answer["data"] == [
        {"index": 0, "label": "place", "probs": pytest.approx([0.1, 0.6, 0.1]), "num_classes": len(LABELS)}
    ]


@pytest.mark.parametrize("path", ["/predict", "/v1/classify", "/classify"])
def test_predict_answers_in_teis_form_for_a_text_a_pair_and_a_batch_of_both(
    door: RunningDoor, triton: FakeTriton, path: str
) -> None:
    assert door.post(path, {"inputs": "How far?"}).json[0]["label"] == "number"
    assert door.post(path, {"inputs": ["Who is it?", "a pair"]}).json[0]["label"] == "person"
    assert (triton.seen[-1].texts, triton.seen[-1].pairs) == ([b"Who is it?"], [b"a pair"])
    batch = door.post(path, {"inputs": [["How far?"], ["Where?", "there"], ["Who?"]]}).json
    assert [one[0]["label"] for one in batch] == ["number", "place", "person"]
    assert door.post(path, {"inputs": [["How?"]]}).json[0][0]["label"] == "number"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"title": "b"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "raw_scores": True}, "raw_scores"),
        ("/v1/classify", {"input": [1]}, "input"),
        ("/classify", {"input": "a", "raw_scores": True}, "raw_scores"),
    ],
)
def test_bad_body_is_refused_in_openais_form(
    shared: tuple[RunningDoor, FakeTriton], path: str, body: dict[str, Any], param: str
) -> None:
    reply = shared[0].post(path, body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert shared[1].seen == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": "a"}),
        ("/rerank", {"query": "a", "texts": []}),
        ("/rerank", {"query": "a", "texts": ["a"], "raw_scores": True}),
        ("/v1/rerank", {"query": "a", "texts": []}),
        ("/v1/classify", {"inputs": []}),
        ("/predict", {"inputs": []}),
        ("/predict", {"inputs": ["a", "b", "c"]}),
        ("/predict", {"inputs": [["a", "b", "c"]]}),
        ("/predict", {"inputs": [["a"], "b"]}),
    ],
)
def test_bad_body_is_refused_in_teis_form(
    shared: tuple[RunningDoor, FakeTriton], path: str, body: dict[str, Any]
) -> None:
    reply = shared[0].post(path, body)
    assert reply.status == 400
    assert reply.json["error_type"] == "Validation"
    assert isinstance(reply.json["error"], str)
