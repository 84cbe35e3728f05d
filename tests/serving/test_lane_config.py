"""What the two models read from config.pbtxt, and the engine that it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from builders.serving.entry.config import BucketRoute, EntryConfig
from builders.serving.lane.config import LaneConfig
from builders.serving.lane.engine import open_engine, warm_up

LANE: dict[str, Any] = {
    "engine": "onnxruntime",
    "file": "model.onnx",
    "length": 64,
    "output": "EMBEDDING",
    "per_token": False,
    "segment": True,
    "steps": [1, 2, 4],
    "threads": 2,
    "nice": 19,
}
ENTRY: dict[str, Any] = {
    "max_tokens": 64,
    "max_text_bytes": 1000,
    "max_request_bytes": 10_000,
    "tokenizer_threads": 1,
    "wake_after_ms": 2.0,
    "pad_id": 0,
    "output": "EMBEDDING",
    "size": 384,
    "late_bound": 2,
    "long_workers": 1,
    "long_bound": 64,
    "long_background_every": 5,
    "timeouts_ms": {"interactive": 200.0, "background": 5000.0},
    "degrade": None,
    "task": "classification",
    "pair": "optional",
    "segment": True,
    "labels": ["no", "yes"],
    "dimensions": [],
    "normalize": False,
    "prompts": {"query": "query: "},
    "default_prompt": None,
    "overlap": 8,
    "max_windows": 64,
    "aggregation": "simple",
    "max_answer_tokens": 30,
    "buckets": [{"length": 64, "model": "encoder_64", "batch": 8, "answer": "together"}],
}


def model_config(name: str, parameters: dict[str, Any]) -> str:
    """As Triton hands it to `initialize`, other keys of the model beside it."""
    own = {name: {"string_value": json.dumps(parameters)}}
    return json.dumps({"name": "x", "parameters": own, "instance_group": [{"count": 3}, {"count": 2}]})


def test_lane_read_as_render_wrote_it() -> None:
    assert LaneConfig.from_model_config(model_config("lane", LANE)) == LaneConfig(
        engine="onnxruntime",
        file="model.onnx",
        length=64,
        output="EMBEDDING",
        per_token=False,
        segment=True,
        steps=(1, 2, 4),
        threads=2,
        nice=19,
    )


def test_entry_read_as_render_wrote_it() -> None:
    read = EntryConfig.from_model_config(model_config("entry", ENTRY))
    assert read.buckets == (BucketRoute(64, "encoder_64", 8, "together"),)
    assert read.processes == 5
    assert {key: getattr(read, key) for key in ENTRY if key != "buckets"} == {
        key: tuple(value) if isinstance(value, list) else value for key, value in ENTRY.items() if key != "buckets"
    }
    assert len({*read.buckets}) == 1, "a route must be hashable: groups are kept by it"


@pytest.mark.parametrize("gone", sorted(LANE))
def test_lane_written_by_another_version_refused(gone: str) -> None:
    with pytest.raises((KeyError, TypeError), match=gone):
        LaneConfig.from_model_config(model_config("lane", {k: v for k, v in LANE.items() if k != gone}))
    with pytest.raises(TypeError, match="newer"):
        LaneConfig.from_model_config(model_config("lane", LANE | {"newer": 1}))


@pytest.mark.parametrize("gone", sorted(ENTRY))
def test_entry_written_by_another_version_refused(gone: str) -> None:
    with pytest.raises((KeyError, TypeError), match=gone):
        EntryConfig.from_model_config(model_config("entry", {k: v for k, v in ENTRY.items() if k != gone}))


def test_configuration_without_the_parameter_refused() -> None:
    with pytest.raises(KeyError, match="lane"):
        LaneConfig.from_model_config(json.dumps({"parameters": {}}))
    with pytest.raises(KeyError, match="entry"):
        EntryConfig.from_model_config(json.dumps({"parameters": {}}))


def test_unknown_engine_refused_with_the_known_ones(tmp_path: Path) -> None:
    named = LaneConfig.from_model_config(model_config("lane", LANE | {"engine": "openvino"}))
    with pytest.raises(ValueError, match="engine 'openvino' is not known; known: onnxruntime, tensorrt; render"):
        open_engine(named, tmp_path)


@pytest.mark.parametrize("segment", [False, True])
def test_every_step_warmed_up_at_the_full_length(segment: bool) -> None:
    class Noting:
        def __init__(self) -> None:
            self.seen: list[dict[str, tuple[tuple[int, ...], list[int]]]] = []

        def run(self, inputs: Mapping[str, NDArray[np.int32]]) -> NDArray[np.float32]:
            assert {array.dtype for array in inputs.values()} == {np.dtype(np.int32)}
            self.seen.append({name: (array.shape, np.unique(array).tolist()) for name, array in inputs.items()})
            return np.zeros((len(inputs["length"]), 3), np.float32)

    engine = Noting()
    warm_up(engine, LaneConfig.from_model_config(model_config("lane", LANE | {"segment": segment, "steps": [1, 8]})))
    for seen, rows in zip(engine.seen, (1, 8), strict=True):
        places = {"segment_start": ((rows, 1), [64])} if segment else {}
        assert seen == {"input_ids": ((rows, 64), [0]), "length": ((rows, 1), [64]), **places}
