"""Every task through one real server, compared with the models' own libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from builders.ports import free_ports
from builders.server import TritonServer
from clients import InvalidInput
from tests.clients.ways import WAYS, Way
from tests.door.doors import RunningDoor, running
from tests.integration.conftest import PATIENT
from tests.integration.test_readme import DOOR, TASK_MODELS, at, blocks
from tests.tools.repositories import ROOT, repositories
from tests.tools.tiny import LIMIT, TAGS, TASKS, WIDTH, tiny_model
from tests.tools.waiting import until

TEXTS = [
    "Wolfgang Amadeus Mozart lived in Salzburg, unbelievably far away.",
    "Grüße aus Köln! Élodie's naïve 🚲 cost $5.00",
    "שלום עולם 中文分词 a\0b",
    "short",
    "many words to be cut " * 30,
]
QUESTIONS = ["Who lived in Salzburg?", "What did it cost?", "שלום?", "How long?", "How many words?"]


@dataclass(frozen=True)
class Served:
    """One server with a model of each task, and the folders they were made from."""

    server: TritonServer
    folders: dict[str, Path]

    def ask(
        self, task: str, texts: list[str], pairs: list[str] | None = None, **parameters: Any
    ) -> dict[str, NDArray[Any]]:
        """All outputs of a request, by name."""
        inputs = [tensor("TEXT", texts)] + ([] if pairs is None else [tensor("TEXT_PAIR", pairs)])
        with grpc.InferenceServerClient(self.server.grpc_url) as client:
            result = client.infer(f"encode_{task}", inputs, parameters=parameters or None)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}

    def refused(self, task: str, texts: list[str], pairs: list[str] | None = None, **parameters: Any) -> str:
        """Why a request is refused as invalid."""
        with pytest.raises(InferenceServerException) as caught:
            self.ask(task, texts, pairs, **parameters)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        return str(caught.value.message())


def tensor(name: str, texts: list[str]) -> grpc.InferInput:
    own = grpc.InferInput(name, [len(texts), 1], "BYTES")
    own.set_data_from_numpy(np.array([[text.encode()] for text in texts], dtype=np.object_))
    return own


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tasks")
    folders = {task: tiny_model(folder / task, task) for task in TASKS}
    models: list[dict[str, Any]] = [{"name": task, "model": {"source": str(folders[task])}} for task in TASKS]
    models[0]["model"] |= {"dimensions": [8], "prompts": {"query": "query: "}}
    built = repositories(folder, models, buckets=[LIMIT], entry={"processes": 1, "max_windows": 8, **PATIENT})
    names = [model for each in built for model in each.models]
    with TritonServer(built[0].repository, names, ports=free_ports()) as server:
        yield Served(server, folders)


def of_tasks(language: str, served: Served) -> str:
    """README's example in a language, asked of this server's models."""
    (code,) = blocks(language, of_tasks=True)
    for shown, own in TASK_MODELS.items():
        code = code.replace(shown, own)
    return at(code, served.server).replace('"dimensions": 128', '"dimensions": 8')


def test_readme_curl_examples_of_the_tasks_run(served: Served) -> None:
    # One JSON document behind the other.
    code = of_tasks("sh", served)
    done = subprocess.run(code, shell=True, capture_output=True, text=True, timeout=60)  # noqa: S602 - README's own
    assert done.returncode == 0, done.stderr
    for output in ('"name":"SCORES"', '"name":"ENTITIES"'):
        assert output in done.stdout.replace(" ", "")
    assert done.stdout.count('"outputs"') == 3
    assert "error" not in done.stdout


def test_readme_python_example_of_the_tasks_runs(served: Served) -> None:
    code = of_tasks("python", served)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "'answer':" in done.stdout
    assert done.stdout.endswith("(1, 8)\n")


def documents(column: NDArray[Any]) -> list[Any]:
    assert column.shape[1] == 1
    return [json.loads(document) for document in column[:, 0]]


# Embedding


def test_vectors_equal_sentence_transformers_with_prompts_and_dimensions(served: Served) -> None:
    from sentence_transformers import SentenceTransformer

    library = SentenceTransformer(str(served.folders["embedding"]), device="cpu")
    for options, own in (({}, {}), ({"prompt": "query"}, {"prompt": "query: "})):
        got = served.ask("embedding", TEXTS, **options)
        expected = library.encode(TEXTS, **own)
        assert np.allclose(got["EMBEDDING"], expected, atol=1e-5)
        assert got["TOKENS"][-1, 0] == LIMIT
        assert got["CUT"][-1, 0] > 0
    small = served.ask("embedding", TEXTS, dimensions=8)["EMBEDDING"]
    assert small.shape == (len(TEXTS), 8)
    expected = library.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
    assert np.allclose(small, expected, atol=1e-5)


def test_start_is_cut_when_a_request_asks_for_it(served: Served) -> None:
    text = "first " * 200 + "last " * (LIMIT - 2)
    got = served.ask("embedding", [text, "last " * (LIMIT - 2)], truncate="start")
    assert np.allclose(*got["EMBEDDING"], atol=1e-6)
    assert got["CUT"].tolist() == [[200], [0]]


def test_windows_are_averaged_when_a_request_asks_for_chunks(served: Served) -> None:
    words = [f"{number}" for number in range(150)]
    room, overlap = LIMIT - 2, 10
    starts = range(0, 150 - overlap, room - overlap)
    windows = [words[start : start + room] for start in starts]
    apart = served.ask("embedding", [" ".join(window) for window in windows])
    mean = np.average(apart["EMBEDDING"], axis=0, weights=[len(window) for window in windows])
    whole = served.ask("embedding", [" ".join(words)], truncate="chunk", overlap=overlap)
    assert np.allclose(whole["EMBEDDING"][0], mean / np.linalg.norm(mean), atol=1e-5)
    assert whole["EMBEDDING"].shape == (1, WIDTH)
    assert (whole["TOKENS"].item(), whole["CUT"].item()) == (apart["TOKENS"].sum(), 0)


# Classification and reranking


def test_scores_equal_transformers_pipeline_for_texts_and_pairs(served: Served) -> None:
    from transformers import pipeline

    library = pipeline("text-classification", model=str(served.folders["classification"]), device="cpu")
    got = served.ask("classification", TEXTS)["SCORES"]
    expected = [{one["label"]: one["score"] for one in own} for own in library(TEXTS, top_k=None, truncation=True)]
    assert np.allclose(got, [[own[name] for name in ("calm", "glad", "sad")] for own in expected], atol=1e-5)
    pairs = [{"text": text, "text_pair": pair} for text, pair in zip(QUESTIONS, TEXTS, strict=True)]
    got = served.ask("classification", QUESTIONS, TEXTS)["SCORES"]
    cut = library(pairs, top_k=None, truncation="only_second")
    expected = [{one["label"]: one["score"] for one in own} for own in cut]
    assert np.allclose(got, [[own[name] for name in ("calm", "glad", "sad")] for own in expected], atol=1e-5)


def test_scores_equal_cross_encoder_with_its_segments(served: Served) -> None:
    from sentence_transformers import CrossEncoder

    library = CrossEncoder(str(served.folders["reranking"]), device="cpu")
    got = served.ask("reranking", QUESTIONS, TEXTS)["SCORES"]
    expected = library.predict(list(zip(QUESTIONS, TEXTS, strict=True)))
    assert got.shape == (len(TEXTS), 1)
    assert np.allclose(got[:, 0], expected, atol=1e-5)
    assert np.ptp(got) > 0.01, "scores that do not differ compare nothing"


# Tagging


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_entities_equal_transformers_pipeline(served: Served, aggregation: str) -> None:
    from transformers import pipeline

    library = pipeline(
        "token-classification",
        model=str(served.folders["tagging"]),
        aggregation_strategy=aggregation,
        device="cpu",
    )
    got = documents(served.ask("tagging", TEXTS, aggregation=aggregation)["ENTITIES"])
    count = 0
    for own, expected in zip(got, library(TEXTS), strict=True):
        keys = ["entity" if aggregation == "none" else "entity_group", "word", "start", "end"]
        assert [[one[key] for key in keys] for one in own] == [[one[key] for key in keys] for one in expected]
        assert np.allclose([one["score"] for one in own], [one["score"] for one in expected], atol=1e-4)
        count += len(own)
    assert count > len(TAGS)


def test_entities_of_the_whole_text_given_when_it_is_chunked(served: Served) -> None:
    text = TEXTS[0] + " " + "and then some more words " * 30
    got = served.ask("tagging", [text], truncate="chunk", aggregation="none")
    (entities,) = documents(got["ENTITIES"])
    assert got["CUT"].item() == 0
    assert max(entity["end"] for entity in entities) > len(text) // 2
    assert [entity["start"] for entity in entities] == sorted(entity["start"] for entity in entities)


# Answering


def test_answers_equal_the_model_and_transformers_span_rules(served: Served) -> None:
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer
    from transformers.pipelines.document_question_answering import select_starts_ends

    folder = str(served.folders["answering"])
    model, tokenizer = (
        AutoModelForQuestionAnswering.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    got = documents(served.ask("answering", QUESTIONS, TEXTS)["ANSWERS"])
    for question, context, own in zip(QUESTIONS, TEXTS, got, strict=True):
        encoded = tokenizer(question, context, truncation="only_second", return_tensors="pt")
        with torch.no_grad():
            output = model(**encoded)
        context_only = np.array([which == 1 for which in encoded.sequence_ids(0)], dtype=int)
        context_only[0] = 1
        starts, ends, scores, _ = select_starts_ends(
            output.start_logits.numpy(), output.end_logits.numpy(), 1 - context_only, None, max_answer_len=30
        )
        words = [encoded.token_to_word(int(np.ravel(place)[0])) for place in (starts, ends)]
        start = encoded.word_to_chars(words[0], sequence_index=1)[0]
        end = encoded.word_to_chars(words[1], sequence_index=1)[1]
        assert (own["answer"], own["start"], own["end"]) == (context[start:end], start, end)
        assert np.isclose(own["score"], np.ravel(scores)[0], atol=1e-4)


# What is refused


@pytest.mark.parametrize(
    ("task", "pairs", "parameters", "words"),
    [
        ("reranking", None, {}, ["TEXT_PAIR is missing", "reranking"]),
        ("answering", None, {}, ["TEXT_PAIR is missing", "answering"]),
        ("reranking", ["x"], {"aggregation": "first"}, ["aggregation", "tagging"]),
        ("tagging", None, {"aggregation": "last"}, ["'last'", "'average'"]),
        ("embedding", None, {"dimensions": 9}, ["dimensions is 9", "8 or 32"]),
        ("embedding", None, {"dimensions": "8"}, ["'8'", "whole number"]),
        ("embedding", None, {"dimensions": True}, ["True", "whole number"]),
        ("embedding", None, {"prompt": "passage"}, ["'passage'", "'query'"]),
        ("embedding", None, {"truncate": "middle"}, ["'end', 'start', 'error' or 'chunk'"]),
        ("embedding", None, {"truncate": "chunk", "overlap": -1}, ["overlap is -1"]),
        ("embedding", None, {"truncate": "chunk", "overlap": LIMIT - 3}, ["windows", "limit: 8", "entry.max_windows"]),
    ],
)
def test_request_is_refused_with_what_is_allowed(
    served: Served, task: str, pairs: list[str] | None, parameters: dict[str, Any], words: list[str]
) -> None:
    message = served.refused(task, ["word " * 100], pairs, **parameters)
    assert all(word in message for word in words), message


def test_pair_is_refused_when_its_first_text_leaves_no_room(served: Served) -> None:
    message = served.refused("reranking", ["word " * 100], ["a document"])
    assert "the first text of pair 0 has 103 tokens" in message
    assert f"limit: {LIMIT - 1}" in message


def test_more_rows_of_one_text_are_refused_and_the_queue_still_wakes(served: Served) -> None:
    with pytest.raises(InferenceServerException):
        served.ask("reranking", ["a", "b"], ["c"])
    for _ in range(3):
        assert served.ask("reranking", ["a", "b"], ["c", "d"])["SCORES"].shape == (2, 1)


# Through the clients: what the raw answers are worth is tested above, here that they arrive whole and in order.


def is_close(one: Any, other: Any) -> bool:
    """But for batches, and sums with them."""
    return np.shape(one) == np.shape(other) and np.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_client_gives_vectors_with_prompt_size_and_windows(served: Served, way: Way) -> None:
    with way.client(served.server, model="encode_embedding", batch=2) as client:
        facts = client.facts()
        assert (facts.task, facts.size, facts.dimensions) == ("embedding", WIDTH, (8, WIDTH))
        assert "query" in facts.prompts
        assert (client.dim(), client.encode([]).embeddings.shape) == (WIDTH, (0, WIDTH))
        for given in (
            {"prompt": "query", "dimensions": 8},
            {"truncate": "start"},
            {"truncate": "chunk", "overlap": 10},
        ):
            result, raw = client.encode(TEXTS, **given), served.ask("embedding", TEXTS, **given)
            assert is_close(result.embeddings, raw["EMBEDDING"])
            assert (result.tokens.tolist(), result.cut.tolist()) == (
                raw["TOKENS"][:, 0].tolist(),
                raw["CUT"][:, 0].tolist(),
            )
        with pytest.raises(InvalidInput, match="8 or 32"):
            client.encode(TEXTS, dimensions=9)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_client_gives_labels_and_ranks(served: Served, way: Way) -> None:
    with way.client(served.server, model="encode_classification", batch=2) as client:
        result, raw = client.classify(QUESTIONS, pairs=TEXTS, top_k=1), served.ask("classification", QUESTIONS, TEXTS)
        assert is_close(result.scores, raw["SCORES"])
        names = ("calm", "glad", "sad")
        assert [[one.label for one in own] for own in result] == [[names[at]] for at in raw["SCORES"].argmax(axis=1)]
    with way.client(served.server, model="encode_reranking", batch=2) as client:
        scores = served.ask("reranking", QUESTIONS[:1] * len(TEXTS), TEXTS)["SCORES"][:, 0]
        best = np.argsort(-scores, kind="stable")[:3]
        ranked = client.rerank(QUESTIONS[0], TEXTS, top_n=3)
        assert [(one.index, one.document) for one in ranked] == [(at, TEXTS[at]) for at in best]
        assert is_close(ranked.scores, scores[best])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_client_gives_entities_and_answers(served: Served, way: Way) -> None:
    with way.client(served.server, model="encode_tagging", batch=2) as client:
        for given in ({"aggregation": "first"}, {"truncate": "chunk", "aggregation": "none"}):
            raw = documents(served.ask("tagging", TEXTS, **given)["ENTITIES"])
            label = "entity" if given["aggregation"] == "none" else "entity_group"
            expected = [[(one[label], one["word"], one["start"], one["end"]) for one in own] for own in raw]
            tagged = client.tag(TEXTS, **given)
            assert [[(one.label, one.word, one.start, one.end) for one in own] for own in tagged] == expected
    with way.client(served.server, model="encode_answering", batch=2) as client:
        raw = documents(served.ask("answering", QUESTIONS, TEXTS)["ANSWERS"])
        answers = list(client.answer(QUESTIONS, TEXTS))
        assert [(one.text, one.start, one.end) for one in answers] == [(r["answer"], r["start"], r["end"]) for r in raw]
        assert is_close([one.score for one in answers], [one["score"] for one in raw])


# Through the door: every public form, with the numbers of the models themselves.


@pytest.fixture(scope="module")
def door(served: Served) -> Iterator[RunningDoor]:
    with running(served.server.grpc_url) as made:
        assert until(lambda: made.get("/health").status == 200)
        yield made


def test_door_reranks_in_every_form_as_the_model_scores(served: Served, door: RunningDoor) -> None:
    documents = TEXTS * 20  # four requests of the server's
    raw = served.ask("reranking", [QUESTIONS[0]] * len(TEXTS), TEXTS)
    scores = np.tile(raw["SCORES"][:, 0], 20)
    best = np.argsort(-scores, kind="stable")
    body = {"query": QUESTIONS[0], "documents": documents, "return_documents": True}
    for path, objects in (("/v1/rerank", False), ("/rerank", False), ("/v2/rerank", True)):
        answer = door.post(path, {**body, "model": "reranking", "top_n": 7}).json
        ranked = answer["results"]
        assert len(ranked) == 7
        assert {one["index"] % len(TEXTS) for one in ranked} == {best[0] % len(TEXTS)}
        assert is_close([one["relevance_score"] for one in ranked], scores[best[:7]])
        given = [one["document"]["text"] if objects else one["document"] for one in ranked]
        assert given == [documents[one["index"]] for one in ranked]
        assert answer["usage"]["total_tokens"] == 20 * raw["TOKENS"].sum()
    everything = door.post("/v1/rerank", {"query": QUESTIONS[0], "documents": TEXTS}).json["results"]
    order = np.argsort(-scores[: len(TEXTS)], kind="stable")
    assert [one["index"] for one in everything] == order.tolist()
    assert "document" not in everything[0]
    for path in ("/rerank", "/v1/rerank"):
        tei = door.post(path, {"query": QUESTIONS[0], "texts": TEXTS, "truncate": True, "return_text": True}).json
        assert [one["text"] for one in tei] == [TEXTS[at] for at in order]
        assert is_close([one["score"] for one in tei], scores[order])
    too_long = door.post("/rerank", {"query": QUESTIONS[0], "texts": TEXTS})
    assert (too_long.status, too_long.json["error_type"]) == (400, "Validation")
    refused = door.post("/v1/rerank", {**body, "raw_scores": True})
    assert (refused.status, refused.error["param"]) == (400, "raw_scores")


def test_door_classifies_in_every_form_as_the_model_scores(served: Served, door: RunningDoor) -> None:
    names = ("calm", "glad", "sad")
    raw = served.ask("classification", TEXTS)
    answer = door.post("/v1/classify", {"model": "classification", "input": TEXTS * 20}).json
    expected = [[names[at] for at in np.argsort(-row, kind="stable")] for row in raw["SCORES"]]
    assert [[one["label"] for one in row] for row in answer["data"]] == expected * 20
    assert is_close([row[0]["score"] for row in answer["data"]], np.tile(raw["SCORES"].max(axis=1), 20))
    assert answer["usage"]["total_tokens"] == 20 * raw["TOKENS"].sum()
    data = door.post("/classify", {"input": TEXTS}).json["data"]
    assert is_close([one["probs"] for one in data], raw["SCORES"])
    assert [one["label"] for one in data] == [row[0] for row in expected]
    pairs = served.ask("classification", QUESTIONS, TEXTS)["SCORES"]
    batch = [[question, text] for question, text in zip(QUESTIONS, TEXTS, strict=True)] + [[TEXTS[0]]]
    for path in ("/predict", "/v1/classify"):
        tei = door.post(path, {"inputs": batch, "truncate": True}).json
        assert is_close([row[0]["score"] for row in tei[:-1]], pairs.max(axis=1))
        assert is_close(tei[-1][0]["score"], raw["SCORES"][0].max())


def test_door_names_models_by_task_and_passes_prompt_size_and_limits_on(served: Served, door: RunningDoor) -> None:
    listed = {one["id"]: one["task"] for one in door.get("/v1/models").json["data"]}
    assert listed == {f"encode_{task}": task for task in TASKS}
    body = {"model": "embedding", "input": TEXTS, "prompt_name": "query", "dimensions": 8}
    got = [one["embedding"] for one in door.post("/v1/embeddings", body).json["data"]]
    assert is_close(got, served.ask("embedding", TEXTS, prompt="query", dimensions=8)["EMBEDDING"])
    refused = door.post("/v1/embeddings", {**body, "dimensions": 9})
    assert (refused.status, refused.error["param"]) == (400, "dimensions")
    refused = door.post("/v1/embeddings", {**body, "prompt_name": "passage"})
    assert (refused.status, "'passage'" in refused.error["message"]) == (400, True)


def test_curl_examples_of_the_page_of_the_door_run(door: RunningDoor) -> None:
    page = (ROOT / "docs" / "door.md").read_text(encoding="utf-8")
    (code,) = blocks("sh", of_tasks=True, of_door=True, page=page)
    for shown, own in TASK_MODELS.items():
        code = code.replace(shown, own)
    code = code.replace(f"http://{DOOR}", door.url)
    done = subprocess.run(code, shell=True, capture_output=True, text=True, timeout=60)  # noqa: S602 - the page's own
    assert done.returncode == 0, done.stderr
    assert '"relevance_score":' in done.stdout
    assert '"label":' in done.stdout
    assert "error" not in done.stdout
