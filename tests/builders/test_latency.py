"""What a version takes: every bucket timed with full texts, within a time of its own, and listed."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from builders import latency
from builders.bucket import Bucket, BucketPlan
from builders.contract import Contract
from builders.latency import measure
from builders.machine import processor_name
from builders.manifest import BucketTime, Latency
from builders.serving.entry.group import LaneInputs
from builders.settings import DeploySettings, load_settings
from builders.version_table import latency_table
from builders.versions import VersionRow, list_versions
from tests.builders.test_publish import manifest, plan
from tests.builders.test_versions import publish_three
from tests.tools.repositories import settings_file


def test_every_bucket_timed_with_one_text_and_with_a_full_batch_that_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "BUDGET_S", 0.02)
    seen: list[tuple[int, int]] = []

    def run(bucket: Bucket, inputs: LaneInputs) -> None:
        ids, length, start = inputs["input_ids"], inputs["length"], inputs["segment_start"]
        assert ids.dtype == length.dtype == start.dtype == np.int32
        assert ids.shape == (len(length), bucket.length)
        assert (length == bucket.length).all()
        seen.append((bucket.length, len(ids)))
        time.sleep(0.002 * len(ids))

    found = measure(plan(16, 32), Contract(segment=True), run, "an engine")
    assert found.how == "an engine"
    assert [(one.length, one.batch) for one in found.buckets] == [(16, 8), (32, 8)]
    for one in found.buckets:
        assert 2 <= one.one_ms < 100
        assert one.batch_ms is not None
        assert 16 <= one.batch_ms < 600
    assert list(dict.fromkeys(seen)) == [(16, 1), (16, 8), (32, 1), (32, 8)]
    # The first is left out; then a few, or as many as fit.
    assert seen.count((16, 1)) <= latency.RUNS + 1
    assert seen.count((16, 8)) <= 4


def test_batch_that_would_take_too_long_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "LONGEST_S", 0.05)
    sizes = []

    def run(_: Bucket, inputs: LaneInputs) -> None:
        sizes.append(len(inputs["length"]))
        time.sleep(0.01)

    (found,) = measure(plan(16), Contract(), run, "").buckets
    assert found.batch_ms is None
    assert set(sizes) == {1}
    single = BucketPlan((Bucket(16, 0, "long", 1, (1,), False),), 16, (), 16)
    assert measure(single, Contract(), run, "").buckets[0].batch_ms is None


def test_times_listed_by_bucket_with_how_they_were_measured(tmp_path: Path) -> None:
    def row(version: int, *buckets: BucketTime) -> VersionRow:
        made = manifest().model_copy(update={"latency": Latency(how="an engine", buckets=buckets) if buckets else None})
        return VersionRow(version, made, "", served=False, previous=False, loaded=False)

    assert latency_table([row(1)]) is None
    rows = [
        row(1, BucketTime(length=16, batch=8, one_ms=1.234, batch_ms=9.876)),
        row(2),
        row(3, BucketTime(length=16, batch=8, one_ms=1.2), BucketTime(length=128, batch=1, one_ms=12.34)),
    ]
    console = Console(width=120, record=True)
    console.print(latency_table(rows))
    head, first, third = console.export_text().splitlines()
    assert head.split()[:3] == ["version", "16", "128"]
    assert first.split() == ["1", "1.23", "/", "9.88", "-", "an", "engine"]
    assert third.split() == ["3", "1.2", "12.3", "an", "engine"]


def test_version_published_without_times_is_read(tmp_path: Path) -> None:
    settings: DeploySettings = load_settings(settings_file(tmp_path, "deploy.cpu.yaml"))
    rows = list_versions(publish_three(settings, tmp_path))
    assert [row.manifest.latency for row in rows if row.manifest] == [None] * 3


def test_processor_named_as_the_kernel_does(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nprocessor\t: 1\n")
    assert processor_name(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
    assert processor_name(tmp_path / "none")
