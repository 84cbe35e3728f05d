"""The GPU engine on a driver and a TensorRT that are none; tests/measurements/h200 runs the real ones."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.serving.lane.answers import Answers, slices
from builders.serving.lane.config import LaneConfig
from builders.serving.lane.cuda import Cuda
from builders.serving.lane.engine import warm_up
from builders.serving.lane.errors import EngineBrokenError, EngineError
from builders.serving.lane.staging import Layout, TensorSpec
from builders.serving.lane.tensorrt_engine import TECHNIQUES, TensorRTEngine, TensorRTOptions
from tests.verify.fake_gpu import HIDDEN, FakeDriver, FakeEngine, fake_tensorrt, write_plans

LENGTH, STEPS = 8, (1, 2, 4)
CONFIG = LaneConfig(
    engine="tensorrt", file="model.plan", length=LENGTH, output="EMBEDDING", per_token=False, segment=False,
    steps=STEPS, threads=1, nice=0,
)  # fmt: skip


class Lane:
    """An engine on fakes."""

    def __init__(self, folder: Path, **given: Any):
        self.driver = FakeDriver()
        fake = {name: given.pop(name) for name in ("outputs", "profiles", "segment") if name in given}
        self.plan = FakeEngine(fake.pop("profiles", [(LENGTH, 4)]), driver=self.driver, **fake)
        self.native = fake_tensorrt({b"a": self.plan})
        (self.path,) = write_plans(folder, {b"a": self.plan})
        self.settings = {"length": LENGTH, "steps": STEPS, "output": "EMBEDDING"}
        for name in ("length", "steps", "output"):
            if name in given:
                self.settings[name] = given.pop(name)
        self.options = TensorRTOptions.read(given)

    def open(self) -> TensorRTEngine:
        cuda = Cuda(driver=self.driver)
        return TensorRTEngine(self.path, options=self.options, cuda=cuda, tensorrt=self.native.module, **self.settings)


def batch(*lengths: int, first: int = 1) -> dict[str, Any]:
    ids = np.arange(first, first + len(lengths) * LENGTH, dtype=np.int32).reshape(len(lengths), LENGTH)
    return {"input_ids": ids, "length": np.array(lengths, np.int32)[:, None]}


def wanted(part: dict[str, Any]) -> list[int]:
    return [int(row[:n].sum()) for row, n in zip(part["input_ids"], part["length"][:, 0], strict=True)]


def test_batch_is_padded_to_the_next_step_and_runs_as_its_graph(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    engine = lane.open()
    engine.seal()
    lane.plan.batches.clear()
    part = batch(8, 3, 0)
    vectors = engine.run(part)
    assert vectors.dtype == np.float32
    assert vectors.shape == (3, HIDDEN)
    assert vectors[:, 0].tolist() == wanted(part)
    assert lane.plan.batches == [(0, 4, LENGTH)]
    told = engine.metrics()
    assert (told["graph_hits_total"], told["graph_misses_total"]) == (1, 0)
    assert (told["batches_total"], told["rows_total"], told["padded_rows_total"]) == (1, 3, 1)
    assert told["copies_total"] == 2, "one copy up and one down, whatever the number of tensors"


def test_padded_rows_do_not_show_and_leave_no_text_behind(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    engine = lane.open()
    for _ in range(3):
        full, small = batch(8, 8, 8, 8, first=100), batch(5)
        assert engine.run(full)[:, 0].tolist() == wanted(full)
        assert engine.run(small)[:, 0].tolist() == wanted(small)


def test_every_allocation_is_made_before_ready(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    engine = lane.open()
    warm_up(engine, CONFIG)
    engine.seal()
    before = engine.metrics()
    for rows in (1, 2, 3, 4) * 5:
        engine.run(batch(*[4] * rows))
    told = engine.metrics()
    assert told["late_allocations_total"] == 0
    assert told["device_bytes"] == before["device_bytes"] == engine.arena.bytes + 500
    assert told["arena_peak_bytes"] == engine.need
    assert engine.arena.bytes >= 1.2 * engine.need
    assert lane.driver.called.count("cuMemAlloc") == 2, "the plan's weights and the arena"


def test_next_batch_is_started_while_one_is_under_way(tmp_path: Path) -> None:
    engine = Lane(tmp_path).open()
    first, second, third = batch(3, 4), batch(8, 1, 2, first=50), batch(2, first=90)
    one = engine.submit([first])
    two = engine.submit([second])
    started = threading.Event()

    def later() -> None:
        pending = engine.submit([third])
        started.set()
        assert engine.collect(pending)[:, 0].tolist() == wanted(third)

    thread = threading.Thread(target=later)
    thread.start()
    assert not started.wait(0.1), "two slots: the third batch waits, and Triton's queue grows meanwhile"
    assert engine.collect(one)[:, 0].tolist() == wanted(first)
    assert started.wait(5)
    thread.join()
    assert engine.collect(two)[:, 0].tolist() == wanted(second)


def test_requests_of_a_batch_are_packed_without_joining_them_first(tmp_path: Path) -> None:
    engine = Lane(tmp_path).open()
    parts = [batch(1), batch(7, 2, first=30)]
    rows = engine.collect(engine.submit(parts))[:, 0]
    assert [rows[part].tolist() for part in slices([1, 2])] == [wanted(part) for part in parts]


@pytest.mark.parametrize("count", range(len(TECHNIQUES) + 1))
def test_answers_are_the_same_with_fewer_techniques(tmp_path: Path, count: int) -> None:
    lane = Lane(tmp_path, techniques=TECHNIQUES[:count], outputs=("EMBEDDING", "layer.0"))
    engine = lane.open()
    engine.seal()
    for rows in (1, 3, 4):
        part = batch(*range(rows))
        assert engine.run(part)[:, 0].tolist() == wanted(part)
    told = engine.metrics()
    assert told["late_allocations_total"] == (0 if count else 12), "four tensors a batch without the arena"
    assert told["copies_total"] == (6 if count > 1 else 12)
    assert told["graph_hits_total"] == (3 if count > 2 else 0)
    assert engine.overlaps == (count > 3)


def test_output_of_several_axes_is_served(tmp_path: Path) -> None:
    engine = Lane(tmp_path, output="layer.0").open()
    part = batch(2, 8, 1)
    assert (engine.run(part) == part["input_ids"][:, :, None]).all()


def test_profile_of_a_plan_with_several_is_chosen(tmp_path: Path) -> None:
    lane = Lane(tmp_path, profiles=[(4, 2), (LENGTH, 4)], profile=1)
    part = batch(3, 8)
    assert lane.open().run(part)[:, 0].tolist() == wanted(part)
    assert {profile for profile, *_ in lane.plan.batches} == {1}
    with pytest.raises(EngineError, match=r"profile 0 of .*0\.plan is not for this bucket: 8 tokens; limit: 4 to 4"):
        Lane(tmp_path, profiles=[(4, 2), (LENGTH, 4)]).open()
    with pytest.raises(EngineError, match="no profile 2; limit: 0 to 1"):
        Lane(tmp_path, profiles=[(4, 2), (LENGTH, 4)], profile=2).open()


def test_too_little_memory_at_start_is_told_with_numbers(tmp_path: Path) -> None:
    lane = Lane(tmp_path, native_allocations=False)
    lane.driver.fail = "cuMemAlloc"
    with pytest.raises(
        EngineError, match=r"does not hold the arena: \d+ bytes, 1\.2 times the need of \d+; limit: 1000 bytes free of"
    ):
        lane.open()


def test_failed_launch_fails_its_batch_alone(tmp_path: Path) -> None:
    lane = Lane(tmp_path, techniques=TECHNIQUES[:2])
    engine = lane.open()
    lane.plan.refuses = True
    for _ in range(5):  # more often than there are slots
        with pytest.raises(EngineError, match="refuses the batch"):
            engine.run(batch(3))
    lane.plan.refuses = False
    part = batch(3)
    assert engine.run(part)[:, 0].tolist() == wanted(part)
    assert engine.metrics()["failed_batches_total"] == 5
    assert engine.broken is None


def test_harmless_error_of_the_driver_leaves_the_engine_usable(tmp_path: Path) -> None:
    lane = Lane(tmp_path)
    engine = lane.open()
    lane.driver.fail = "cuGraphLaunch"
    with pytest.raises(EngineError, match="CUDA_ERROR_OUT_OF_MEMORY; this batch failed, the lane goes on"):
        engine.run(batch(3))
    lane.driver.fail = ""
    part = batch(3)
    assert engine.run(part)[:, 0].tolist() == wanted(part)


@pytest.mark.parametrize("call", ["cuGraphLaunch", "cuEventQuery", "cuMemcpyHtoDAsync"])
def test_broken_context_refuses_every_batch_with_the_way_to_heal_it(tmp_path: Path, call: str) -> None:
    lane = Lane(tmp_path)
    engine = lane.open()
    lane.driver.fail, lane.driver.code = call, 700
    for _ in range(4):
        with pytest.raises(EngineBrokenError, match=r"not ready.*ILLEGAL_ADDRESS.*touch a file of the model"):
            engine.run(batch(3))
    lane.driver.fail = ""
    with pytest.raises(EngineBrokenError):
        engine.run(batch(3))
    assert engine.metrics()["broken"] == 1
    engine.close()  # gives nothing back, raises nothing


def test_batch_that_never_ends_is_given_up(tmp_path: Path) -> None:
    lane = Lane(tmp_path, timeout_s=0.05)
    engine = lane.open()
    lane.driver.pending = -1
    with pytest.raises(EngineBrokenError, match=r"not done after 0\.05 s"):
        engine.run(batch(3))
    lane.driver.pending = 3
    with pytest.raises(EngineBrokenError):
        engine.run(batch(3))


def test_second_texts_reach_a_plan_that_takes_them(tmp_path: Path) -> None:
    engine = Lane(tmp_path, segment=True).open()
    part = batch(8, 3, 5)
    start = np.array([[2], [3], [1]], np.int32)
    first = np.arange(LENGTH) < start
    real = np.where(np.arange(LENGTH) < part["length"], part["input_ids"], 0)
    got = engine.run({**part, "segment_start": start})
    assert got[:, 0].tolist() == np.where(first, real, 10 * real).sum(1).tolist()
    with pytest.raises(EngineError, match=r"segment_start is None; limit: .*segment_start \[1\]"):
        engine.run(part)


def test_batches_the_plan_cannot_take_are_refused(tmp_path: Path) -> None:
    engine = Lane(tmp_path).open()
    with pytest.raises(EngineError, match="a batch of 5 rows; limit: 1 to 4"):
        engine.run(batch(1, 1, 1, 1, 1))
    with pytest.raises(EngineError, match=r"length is \[3\]; limit"):
        engine.run({**batch(1, 2, 3), "length": np.array([1, 2, 3], np.int32)})
    part = batch(4)
    assert engine.run(part)[:, 0].tolist() == wanted(part)
    with pytest.raises(EngineError, match="built for 4 texts at once"):
        Lane(tmp_path, steps=(1, 8)).open()
    with pytest.raises(EngineError, match="has no output SCORES; limit: EMBEDDING"):
        Lane(tmp_path, output="SCORES").open()


def test_techniques_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="each needs those before it"):
        TensorRTOptions.read({"techniques": ["graphs"]})


def test_memory_is_given_back_when_closed(tmp_path: Path) -> None:
    lane = Lane(tmp_path, native_allocations=False)
    engine = lane.open()
    engine.run(batch(3))
    engine.close()
    assert lane.driver.memory == {}


def test_layout_puts_small_tensors_first_and_keeps_the_alignment() -> None:
    layout = Layout([TensorSpec("ids", np.int32, (100,)), TensorSpec("n", np.int32, (1,))], 3)
    assert layout.offsets == {"n": 0, "ids": 256}
    assert layout.bytes == 256 + 1200
    views = layout.views(np.zeros(layout.bytes, np.uint8))
    assert views["ids"].shape == (3, 100)
    views["ids"][:] = 7
    assert not views["n"].any()


def test_answers_come_in_order_and_a_failed_one_stops_nobody() -> None:
    got: list[Any] = []
    lost: list[Exception] = []

    def collect(pending: int) -> int:
        if pending == 1:
            raise EngineError("of batch 1")
        return pending * 10

    answers = Answers(collect, lost.append)
    for number in range(4):

        def answer(rows: Any, failure: Exception | None, number: int = number) -> None:
            if number == 2:
                raise OSError("its client is gone")
            got.append(str(failure) if failure else rows)

        answers.put(number, answer)
    answers.close()
    assert got == [0, "of batch 1", 30]
    assert [str(error) for error in lost] == ["its client is gone"]
