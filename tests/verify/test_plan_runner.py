"""The plan runner on fakes; tests/tensorrt/test_plan_runner_gpu.py runs a real plan."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import builders.verify.cuda as cuda_module
import builders.verify.plan_runner as plan_runner
from builders.errors import CompileError
from builders.tensorrt.gpu import Gpu
from builders.verify.plan_runner import PlanRunner, padded
from builders.verify.runner import VerifyError
from tests.verify.fake_gpu import HIDDEN, FakeDriver, FakeEngine, fake_tensorrt, write_plans


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(cuda_module, "_driver", lambda: made)
    monkeypatch.setattr(cuda_module, "find_gpu", lambda number: Gpu("fake", (9, 0)))
    return made


def batch(*lengths: int, width: int) -> tuple[Any, Any]:
    ids = np.arange(1, len(lengths) * width + 1, dtype=np.int32).reshape(len(lengths), width)
    return ids, np.array(lengths, np.int32)[:, None]


def test_batch_is_padded_to_the_shortest_bucket_and_blocks_are_cut_back(driver: FakeDriver, tmp_path: Path) -> None:
    engines = {b"a": FakeEngine([(8, 4)]), b"b": FakeEngine([(16, 2)])}
    short, long = write_plans(tmp_path, engines)
    with PlanRunner({16: (long, 0), 8: (short, 0)}, tensorrt=fake_tensorrt(engines)) as runner:
        ids, length = batch(3, 5, 0, width=5)
        found = runner.run(ids, length)
        assert list(found) == ["layer.0", "EMBEDDING"]
        assert [array.dtype for array in found.values()] == [np.float32, np.float32]
        assert found["layer.0"].shape == (3, 5, HIDDEN)
        assert (found["layer.0"] == ids[:, :, None]).all()
        assert found["EMBEDDING"][:, 0].tolist() == [ids[0, :3].sum(), ids[1].sum(), 0]
        runner.run(*batch(9, width=9))
    assert engines[b"a"].batches == [(0, 3, 8)]
    assert engines[b"b"].batches == [(0, 1, 16)]


def test_rows_beyond_the_profile_are_run_in_parts(driver: FakeDriver, tmp_path: Path) -> None:
    engines = {b"a": FakeEngine([(8, 2)])}
    (path,) = write_plans(tmp_path, engines)
    with PlanRunner({8: (path, 0)}, tensorrt=fake_tensorrt(engines)) as runner:
        ids, length = batch(8, 1, 7, 2, 8, width=8)
        found = runner.run(ids, length)["EMBEDDING"][:, 0]
    assert found.tolist() == [int(row[:n].sum()) for row, n in zip(ids, length[:, 0], strict=True)]
    assert [rows for _, rows, _ in engines[b"a"].batches] == [2, 2, 1]


def test_segments_reach_the_plan_in_parts_when_it_takes_them(driver: FakeDriver, tmp_path: Path) -> None:
    engines = {b"a": FakeEngine([(8, 2)], segment=True)}
    (path,) = write_plans(tmp_path, engines)
    with PlanRunner({8: (path, 0)}, tensorrt=fake_tensorrt(engines)) as runner:
        ids, length = batch(8, 4, 6, width=8)
        start = np.array([[2], [4], [0]], np.int32)
        paired = runner.run(ids, length, start)["EMBEDDING"][:, 0]
        alone = runner.run(ids, length)["EMBEDDING"][:, 0]
    # The fake counts tokens of a second text ten times.
    assert paired.tolist() == [
        int(row[:s].sum() + 10 * row[s:n].sum()) for row, n, s in zip(ids, length[:, 0], start[:, 0], strict=True)
    ]
    assert alone.tolist() == [int(row[:n].sum()) for row, n in zip(ids, length[:, 0], strict=True)]


def test_profile_is_switched_when_one_plan_has_all_buckets(driver: FakeDriver, tmp_path: Path) -> None:
    engines = {b"a": FakeEngine([(8, 4), (16, 2)])}
    (path,) = write_plans(tmp_path, engines)
    with PlanRunner({8: (path, 0), 16: (path, 1)}, tensorrt=fake_tensorrt(engines)) as runner:
        for width in (16, 4, 12):
            runner.run(*batch(2, width=width))
    assert engines[b"a"].batches == [(1, 1, 16), (0, 1, 8), (1, 1, 16)]
    with pytest.raises(VerifyError, match=r"profile 0 of 0.plan is not for this bucket: 16; limit: 8 to 8"):
        PlanRunner({16: (path, 0)}, tensorrt=fake_tensorrt(engines))
    with pytest.raises(VerifyError, match=r"no such profile: 2"):
        PlanRunner({16: (path, 2)}, tensorrt=fake_tensorrt(engines))


def test_unwritten_outputs_are_seen_as_not_finite(driver: FakeDriver, tmp_path: Path) -> None:
    engines = {b"a": FakeEngine([(8, 4)], lazy=True)}
    (path,) = write_plans(tmp_path, engines)
    with PlanRunner({8: (path, 0)}, tensorrt=fake_tensorrt(engines)) as runner:
        found = runner.run(*batch(8, width=8))
    assert all(np.isnan(array).all() for array in found.values())


def test_batches_no_plan_can_take_are_refused(driver: FakeDriver, tmp_path: Path) -> None:
    engines = {b"a": FakeEngine([(8, 4)])}
    (path,) = write_plans(tmp_path, engines)
    with PlanRunner({8: (path, 0)}, tensorrt=fake_tensorrt(engines)) as runner:
        with pytest.raises(VerifyError, match=r"no plan takes such a batch: 'L 9'; limit: 8 tokens"):
            runner.run(*batch(9, width=9))
        with pytest.raises(VerifyError, match=r"lengths do not fit.*0 to 4"):
            runner.run(*batch(5, width=4))
        with pytest.raises(VerifyError, match="nothing was run"):
            runner.repeat()
    with pytest.raises(VerifyError, match="closed"):
        runner.run(*batch(8, width=8))


def test_memory_is_given_back_when_closed_or_when_a_plan_is_refused(driver: FakeDriver, tmp_path: Path) -> None:
    engines = {b"a": FakeEngine([(8, 4)])}
    (path,) = write_plans(tmp_path, engines)
    runner = PlanRunner({8: (path, 0)}, tensorrt=fake_tensorrt(engines))
    runner.run(*batch(8, width=8))
    runner.run(*batch(8, 8, 8, width=8))  # larger buffers in place of the first ones
    assert len(driver.memory) == 4
    runner.close()
    runner.close()
    assert driver.memory == {}
    assert driver.called.count("cuDevicePrimaryCtxRelease") == 1
    path.write_bytes(b"of another machine")
    with pytest.raises(
        VerifyError, match=r"8\.6\.0 does not take the plan: engine plan file is not compatible.*compile"
    ):
        PlanRunner({8: (path, 0)}, tensorrt=fake_tensorrt(engines))
    assert driver.called.count("cuDevicePrimaryCtxRelease") == 2
    with pytest.raises(VerifyError, match="cannot be read: No such file"):
        PlanRunner({8: (tmp_path / "none.plan", 0)}, tensorrt=fake_tensorrt(engines))


def test_failed_cuda_call_is_named(driver: FakeDriver, tmp_path: Path) -> None:
    engines = {b"a": FakeEngine([(8, 4)])}
    (path,) = write_plans(tmp_path, engines)
    with PlanRunner({8: (path, 0)}, tensorrt=fake_tensorrt(engines)) as runner:
        driver.fail = "cuMemAlloc"
        with pytest.raises(VerifyError, match=r"cuMemAlloc failed: 'CUDA_ERROR_OUT_OF_MEMORY'.*nvidia-smi"):
            runner.run(*batch(8, width=8))


def test_first_error_is_told_when_closing_fails_too(driver: FakeDriver, tmp_path: Path) -> None:
    engines = {b"a": FakeEngine([(8, 4)])}
    (path,) = write_plans(tmp_path, engines)
    failing = PlanRunner({8: (path, 0)}, tensorrt=fake_tensorrt(engines))
    driver.fail = "cuStreamDestroy"
    with pytest.raises(ZeroDivisionError), failing:
        raise ZeroDivisionError
    driver.fail = ""
    runner = PlanRunner({8: (path, 0)}, tensorrt=fake_tensorrt(engines))
    driver.fail = "cuStreamDestroy"
    with pytest.raises(VerifyError, match="cuStreamDestroy failed"):
        runner.close()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def absent(name: str) -> Any:
        asked.append(name)
        raise ImportError(name)

    native = fake_tensorrt({})
    monkeypatch.setattr(cuda_module, "find_gpu", lambda number: None)
    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(VerifyError, match=r"cuda-python is not installed; to do: pip install cuda-python"):
        PlanRunner({8: (tmp_path, 0)}, tensorrt=native)
    assert asked == ["cuda.bindings.driver", "cuda.cuda"]
    monkeypatch.setattr(importlib, "import_module", lambda name: FakeDriver())
    with pytest.raises(VerifyError, match="no NVIDIA GPU"):
        PlanRunner({8: (tmp_path, 0)}, tensorrt=native)

    def no_tensorrt(flavour: str) -> Any:
        raise CompileError("TensorRT is not installed", value=flavour, remedy="install it")

    monkeypatch.setattr(plan_runner, "open_tensorrt", no_tensorrt)
    with pytest.raises(VerifyError, match=r"TensorRT is not installed: 'tensorrt'; to do: install it"):
        PlanRunner({8: (tmp_path, 0)})


def test_rows_are_padded_with_token_0() -> None:
    assert padded(np.array([[5, 6]], np.int32), 4).tolist() == [[5, 6, 0, 0]]
