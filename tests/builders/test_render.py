"""config.pbtxt: read back through Triton's own proto and compared with what the design and the measurements ask for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as proto

from builders.errors import SettingsError
from builders.manifest import Manifest, built_buckets, output_of, requests_of
from builders.render import (
    HEADER,
    bucket_plan,
    facts_of_manifest,
    facts_of_source,
    render_configs,
    render_versions,
    write_configs,
)
from builders.serving.entry.config import BucketRoute, DegradeConfig, EntryConfig
from builders.serving.lane.config import LaneConfig
from builders.serving.lane.tensorrt_engine import TensorRTOptions
from builders.settings import DeploySettings, load_settings
from builders.source import EncoderSource, open_source
from builders.tasks import Task, TaskFacts

ROOT = Path(__file__).parents[2]
LANES = {128: 32, 256: 32, 512: 32, 1024: 16, 2048: 8}


def load(name: str) -> tuple[DeploySettings, EncoderSource]:
    settings = load_settings(ROOT / name)
    return settings, open_source(settings.model)


def parse(texts: dict[str, str]) -> dict[str, Any]:
    return {name: text_format.Parse(text, proto.ModelConfig()) for name, text in texts.items()}


@pytest.fixture(scope="module")
def production() -> tuple[DeploySettings, EncoderSource]:
    return load("deploy.yaml")


@pytest.fixture(scope="module")
def native(production: tuple[DeploySettings, EncoderSource]) -> dict[str, Any]:
    return parse(render_configs(*production))


@pytest.fixture(scope="module")
def cpu() -> dict[str, Any]:
    return parse(render_configs(*load("deploy.cpu.yaml")))


def changed(settings: DeploySettings, **sections: dict[str, Any]) -> DeploySettings:
    """The same deployment with some values changed, checked again."""
    document = settings.model_dump()
    for name, values in sections.items():
        for key, value in values.items():
            old = document[name].get(key)
            document[name][key] = old | value if isinstance(old, dict) else value
    return DeploySettings.model_validate(document)


# Files


def test_checked_in_repository_equals_what_deploy_yaml_renders_now(
    production: tuple[DeploySettings, EncoderSource],
) -> None:
    files = (ROOT / "model_repository").glob("*/config.pbtxt")
    checked_in = {file.parent.name: file.read_text(encoding="utf-8") for file in files}
    assert checked_in == render_configs(*production), "run `make render` and commit the result"


def test_nothing_written_when_rendered_twice(production: tuple[DeploySettings, EncoderSource], tmp_path: Path) -> None:
    configs = render_configs(*production)
    first = write_configs(tmp_path, configs)
    times = {file: file.stat().st_mtime_ns for file in first}
    assert {file.parent.name for file in first} == set(configs)
    assert write_configs(tmp_path, render_configs(*production)) == []
    assert {file: file.stat().st_mtime_ns for file in first} == times
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["config.pbtxt"] * len(configs)


def test_only_what_differs_written_when_one_value_changes(
    production: tuple[DeploySettings, EncoderSource], tmp_path: Path
) -> None:
    settings, source = production
    write_configs(tmp_path, render_configs(settings, source))
    other = changed(settings, lanes={"long": {"window_ms": 7}})
    written = write_configs(tmp_path, render_configs(other, source))
    assert {file.parent.name for file in written} == {"encoder_1024", "encoder_2048"}


def test_configuration_of_a_bucket_that_is_gone_removed(
    production: tuple[DeploySettings, EncoderSource], tmp_path: Path
) -> None:
    settings, source = production
    write_configs(tmp_path, render_configs(settings, source))
    fewer = DeploySettings.model_validate(settings.model_dump() | {"buckets": [128, 512, 1024, 2048]})
    changes = write_configs(tmp_path, render_configs(fewer, source))
    assert {file.parent.name for file in changes} >= {"encoder_256", "encode"}
    assert tmp_path / "encoder_128/config.pbtxt" not in changes
    assert not (tmp_path / "encoder_256/config.pbtxt").exists()
    assert (tmp_path / "encoder_128/config.pbtxt").exists()


def test_folder_of_a_bucket_that_is_gone_removed_when_it_is_empty(
    production: tuple[DeploySettings, EncoderSource], tmp_path: Path
) -> None:
    settings, source = production
    write_configs(tmp_path, render_configs(settings, source))
    fewer = DeploySettings.model_validate(settings.model_dump() | {"buckets": [128, 512, 1024, 2048]})
    write_configs(tmp_path, render_configs(fewer, source))
    assert not (tmp_path / "encoder_256").exists()


def test_other_models_of_the_repository_kept(production: tuple[DeploySettings, EncoderSource], tmp_path: Path) -> None:
    other = tmp_path / "reranker/config.pbtxt"
    other.parent.mkdir()
    other.write_text("mine")
    write_configs(tmp_path, render_configs(*production))
    assert other.read_text() == "mine"


def test_other_model_with_a_like_name_kept(production: tuple[DeploySettings, EncoderSource], tmp_path: Path) -> None:
    other = tmp_path / "encoder_of_another_team/config.pbtxt"
    other.parent.mkdir()
    other.write_text("mine")
    write_configs(tmp_path, render_configs(*production))
    assert other.exists()


@pytest.mark.parametrize("name", ["deploy.yaml", "deploy.cpu.yaml", "deploy.long.cpu.yaml"])
def test_every_text_parsed_by_tritons_proto_and_written_again_alike(name: str) -> None:
    texts = render_configs(*load(name))
    for model, text in texts.items():
        assert text.startswith(HEADER)
        config = text_format.Parse(text, proto.ModelConfig())
        assert config.name == model
        assert HEADER + text_format.MessageToString(config) == text


def test_lanes_come_first_and_the_entry_last(native: dict[str, Any]) -> None:
    assert list(native) == [*(f"encoder_{length}" for length in LANES), "encode"]


def test_every_model_serves_the_versions_asked_for(production: tuple[DeploySettings, EncoderSource]) -> None:
    for config in parse(render_configs(*production, (3, 4))).values():
        assert config.version_policy.WhichOneof("policy_choice") == "specific"
        assert list(config.version_policy.specific.versions) == [3, 4]


# The entry


def test_entry_tensors_follow_the_contract(native: dict[str, Any]) -> None:
    entry = native["encode"]
    assert (entry.backend, entry.max_batch_size) == ("python", 32)
    assert [(item.name, item.data_type, list(item.dims)) for item in entry.input] == [("TEXT", proto.TYPE_STRING, [-1])]
    assert [(item.name, item.data_type, list(item.dims)) for item in entry.output] == [
        ("EMBEDDING", proto.TYPE_FP32, [384]),
        ("TOKENS", proto.TYPE_INT32, [1]),
        ("CUT", proto.TYPE_INT32, [1]),
    ]


def test_entry_queue_has_two_levels_and_2_by_default(native: dict[str, Any]) -> None:
    batching = native["encode"].dynamic_batching
    assert batching.max_queue_delay_microseconds == 10_000
    assert native["encode"].max_batch_size == 32
    assert (batching.priority_levels, batching.default_priority_level) == (2, 2)


@pytest.mark.parametrize(("level", "timeout_us", "size"), [(1, 200_000, 1024), (2, 5_000_000, 8192)])
def test_each_level_rejects_after_its_timeout_and_its_queue_size(
    native: dict[str, Any], level: int, timeout_us: int, size: int
) -> None:
    policies = native["encode"].dynamic_batching.priority_queue_policy
    assert sorted(policies) == [1, 2]
    policy = policies[level]
    assert policy.timeout_action == proto.ModelQueuePolicy.REJECT
    assert policy.default_timeout_microseconds == timeout_us
    assert policy.allow_timeout_override
    assert policy.max_queue_size == size


def test_default_queue_policy_is_that_of_the_background(native: dict[str, Any]) -> None:
    batching = native["encode"].dynamic_batching
    assert batching.default_queue_policy == batching.priority_queue_policy[2]


def test_entry_runs_its_processes_on_the_cpu(native: dict[str, Any]) -> None:
    (group,) = native["encode"].instance_group
    assert (group.count, group.kind) == (8, proto.ModelInstanceGroup.KIND_CPU)


def test_entry_is_warmed_up_by_one_empty_text_which_needs_no_lane(native: dict[str, Any]) -> None:
    (warm,) = native["encode"].model_warmup
    assert (warm.batch_size, warm.count, list(warm.inputs)) == (1, 1, ["TEXT"])
    text = warm.inputs["TEXT"]
    assert (text.data_type, list(text.dims), text.zero_data) == (proto.TYPE_STRING, [1], True)


def model_config_json(config: Any) -> str:
    """The part of what Triton hands to `initialize` that the models read."""
    parameters = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    groups = [{"count": group.count} for group in config.instance_group]
    return json.dumps({"name": config.name, "parameters": parameters, "instance_group": groups})


def test_entry_parameters_read_back_by_the_entry(native: dict[str, Any]) -> None:
    read = EntryConfig.from_model_config(model_config_json(native["encode"]))
    assert read == EntryConfig(
        max_tokens=2048,
        max_text_bytes=65536,
        max_request_bytes=524_288,
        tokenizer_threads=1,
        wake_after_ms=2.0,
        pad_id=0,
        output="EMBEDDING",
        size=384,
        late_bound=2,
        long_workers=1,
        long_bound=64,
        long_background_every=5,
        timeouts_ms={"interactive": 200.0, "background": 5000.0},
        degrade=None,
        buckets=tuple(
            BucketRoute(length, f"encoder_{length}", batch, "long" if length > 512 else "together")
            for length, batch in LANES.items()
        ),
        task="embedding",
        pair="none",
        segment=False,
        labels=(),
        dimensions=(),
        normalize=True,
        prompts={},
        default_prompt=None,
        overlap=256,
        max_windows=64,
        aggregation="simple",
        max_answer_tokens=30,
        processes=8,
    )


@pytest.mark.parametrize(("processes", "interval"), [(1, 0.1), (3, 0.3), (8, 0.5)])
def test_small_batches_read_back_by_the_entry_when_they_are_on(
    processes: int, interval: float, production: tuple[DeploySettings, EncoderSource]
) -> None:
    settings, source = production
    degrade = {"enabled": True, "above": 300, "below": 100, "batch": 4, "metrics_url": "http://127.0.0.1:9/metrics"}
    other = changed(settings, entry={"processes": processes, "degrade": degrade})
    read = EntryConfig.from_model_config(model_config_json(parse(render_configs(other, source))["encode"]))
    assert read.degrade == DegradeConfig(300, 100, 4, "http://127.0.0.1:9/metrics", interval)


def test_limits_told_to_clients(native: dict[str, Any]) -> None:
    parameters = {name: value.string_value for name, value in native["encode"].parameters.items() if name != "entry"}
    assert parameters.pop("task") == "embedding"
    assert {name: json.loads(value) for name, value in parameters.items()} == {
        "labels": [],
        "limits": {
            "max_tokens": 2048,
            "max_texts": 32,
            "max_text_bytes": 65536,
            "max_request_bytes": 524_288,
            "max_windows": 64,
            "buckets": list(LANES),
        },
        "dimensions": [384],
        "prompts": [],
    }


# Tasks


def tasked(source: EncoderSource, name: Task, size: int, **facts: Any) -> EncoderSource:
    """The same encoder with another head."""
    return replace(source, task=TaskFacts(name, size, **facts))


TAGGER: dict[str, Any] = {"name": "tagging", "size": 3, "labels": ("O", "B-X", "I-X")}
RERANKER: dict[str, Any] = {"name": "reranking", "size": 1, "labels": ("score",), "pair": "required", "segment": True}
ANSWERER: dict[str, Any] = {"name": "answering", "size": 2, "pair": "required", "segment": True}
CLASSIFIER: dict[str, Any] = {"name": "classification", "size": 6, "labels": tuple("abcdef"), "pair": "optional"}


@pytest.mark.parametrize(
    ("facts", "lane", "entry"),
    [
        (TAGGER, ("TAGS", [128, 3]), ("ENTITIES", proto.TYPE_STRING, [1])),
        (RERANKER, ("SCORES", [1]), ("SCORES", proto.TYPE_FP32, [1])),
        (ANSWERER, ("SPANS", [128, 2]), ("ANSWERS", proto.TYPE_STRING, [1])),
        (CLASSIFIER, ("SCORES", [6]), ("SCORES", proto.TYPE_FP32, [6])),
    ],
)
def test_tensors_are_those_of_the_task(
    production: tuple[DeploySettings, EncoderSource], facts: dict[str, Any], lane: Any, entry: Any
) -> None:
    settings, source = production
    configs = parse(render_configs(settings, tasked(source, **facts)))
    first = configs["encoder_128"]
    inputs = {item.name: (list(item.dims), item.optional) for item in first.input}
    places = {"segment_start": ([1], False)} if facts.get("segment") else {}
    assert inputs == {"input_ids": ([128], False), "length": ([1], False), **places}
    assert [(item.name, item.data_type, list(item.dims)) for item in first.output] == [
        (lane[0], proto.TYPE_FP32, lane[1])
    ]
    for spec in first.optimization.cuda.graph_spec:
        for shapes in (spec.input, spec.graph_lower_bound.input):
            assert {name: list(shape.dim) for name, shape in shapes.items()} == {n: d for n, (d, _) in inputs.items()}
    assert {name: list(item.dims) for name, item in first.model_warmup[0].inputs.items()} == {
        name: dims for name, (dims, _) in inputs.items()
    }
    output = configs["encode"].output[0]
    assert (output.name, output.data_type, list(output.dims)) == entry
    texts = [(item.name, item.data_type, list(item.dims), item.optional) for item in configs["encode"].input]
    pair = [("TEXT_PAIR", proto.TYPE_STRING, [-1], True)] if facts.get("pair", "none") != "none" else []
    assert texts == [("TEXT", proto.TYPE_STRING, [-1], False), *pair]
    read = EntryConfig.from_model_config(model_config_json(configs["encode"]))
    assert (read.task, read.size, read.output) == (facts["name"], facts["size"], lane[0])
    assert read.labels == facts.get("labels", ())
    assert (read.pair, read.segment) == (facts.get("pair", "none"), facts.get("segment", False))
    assert json.loads(configs["encode"].parameters["labels"].string_value) == list(facts.get("labels", ()))
    assert json.loads(configs["encode"].parameters["dimensions"].string_value) == []


def test_lane_of_the_cpu_told_of_segments_and_rows_for_each_token() -> None:
    settings, source = load("deploy.cpu.yaml")
    for facts, told in ((TAGGER, (True, False)), (ANSWERER, (True, True)), (RERANKER, (False, True))):
        config = parse(render_configs(settings, tasked(source, **facts)))["encoder_16"]
        lane = LaneConfig.from_model_config(model_config_json(config))
        assert (lane.per_token, lane.segment) == told


def test_size_is_free_when_a_request_may_choose_it(production: tuple[DeploySettings, EncoderSource]) -> None:
    settings, source = production
    task = replace(source.task, dimensions=(64, 128), prompts={"query": "query: "}, default_prompt="query")
    configs = parse(render_configs(settings, replace(source, task=task)))
    assert list(configs["encode"].output[0].dims) == [-1]
    assert list(configs["encoder_128"].output[0].dims) == [384]
    read = EntryConfig.from_model_config(model_config_json(configs["encode"]))
    assert (read.dimensions, read.prompts, read.default_prompt) == ((64, 128), {"query": "query: "}, "query")
    told = {name: json.loads(configs["encode"].parameters[name].string_value) for name in ("dimensions", "prompts")}
    assert told == {"dimensions": [64, 128, 384], "prompts": ["query"]}


def test_entry_takes_its_manner_from_the_settings(production: tuple[DeploySettings, EncoderSource]) -> None:
    settings, source = production
    own = changed(
        settings,
        model={"overlap": 100, "aggregation": "max", "max_answer_tokens": 7},
        entry={"max_windows": 5},
    )
    read = EntryConfig.from_model_config(model_config_json(parse(render_configs(own, source))["encode"]))
    assert (read.overlap, read.aggregation, read.max_answer_tokens, read.max_windows) == (100, "max", 7, 5)
    with pytest.raises(SettingsError, match=r"model\.overlap.*2044; limit: at most 2043 with 2048 tokens"):
        render_configs(changed(settings, model={"overlap": 2044}), source)


def test_version_rendered_from_its_manifest_as_it_was_built(
    production: tuple[DeploySettings, EncoderSource],
) -> None:
    settings, source = production
    for facts in (TAGGER, RERANKER):
        built = tasked(source, **facts)
        plan = bucket_plan(settings, built)
        manifest = Manifest.model_validate_json(
            Manifest(
                model="m", model_sha256="0", task=built.task.name, output=output_of(built.task),
                requests=requests_of(built.task), engine="tensorrt", precision="fp16",
                buckets=built_buckets(plan.buckets),
                max_tokens=plan.max_tokens, positions=plan.positions, pad_id=source.pad_id, serving_sha256="0",
                graph_sha256="0", date="2026-01-01", fingerprint="0",
            ).model_dump_json()
        )  # fmt: skip
        rendered = render_versions(settings, {1: facts_of_manifest(settings, manifest)}, 1)
        assert rendered == render_configs(settings, built)


def test_versions_with_other_tensors_refused_in_one_configuration(
    production: tuple[DeploySettings, EncoderSource],
) -> None:
    settings, source = production
    versions = {1: facts_of_source(settings, source), 2: facts_of_source(settings, tasked(source, **TAGGER))}
    with pytest.raises(SettingsError, match=r"encoder_128 has other tensors in each version.*TAGS \[128, 3\]"):
        render_versions(settings, versions, 1)


def test_late_buckets_named_to_the_entry(production: tuple[DeploySettings, EncoderSource]) -> None:
    settings, source = production
    late = changed(settings, lanes={"short": {"late_from": 256}})
    entry = parse(render_configs(late, source))["encode"]
    answers = {
        bucket.length: bucket.answer for bucket in EntryConfig.from_model_config(model_config_json(entry)).buckets
    }
    assert answers == {128: "together", 256: "late", 512: "late", 1024: "long", 2048: "long"}


def test_entry_and_lanes_agree_on_batch_length_and_output(native: dict[str, Any]) -> None:
    for route in EntryConfig.from_model_config(model_config_json(native["encode"])).buckets:
        lane = native[route.model]
        assert lane.max_batch_size == route.batch
        assert list(lane.input[0].dims) == [route.length]
        assert lane.output[0] == native["encode"].output[0]


# The lanes, of either engine


@pytest.mark.parametrize("profile", ["native", "cpu"])
def test_lanes_carry_no_queue_policy_and_no_priority(profile: str, request: pytest.FixtureRequest) -> None:
    lanes = {name: config for name, config in request.getfixturevalue(profile).items() if name != "encode"}
    assert len(lanes) >= 5
    for config in lanes.values():
        batching = config.dynamic_batching
        assert config.HasField("dynamic_batching")
        # The window is all that may be set: anything else could turn Triton's pre-fetching off.
        assert {field.name for field, _ in batching.ListFields()} <= {"max_queue_delay_microseconds"}


def test_windows_are_those_of_the_lanes(native: dict[str, Any]) -> None:
    windows = {name: config.dynamic_batching.max_queue_delay_microseconds for name, config in native.items()}
    assert windows == {
        "encoder_128": 0,
        "encoder_256": 0,
        "encoder_512": 0,
        "encoder_1024": 20_000,
        "encoder_2048": 20_000,
        "encode": 10_000,
    }


@pytest.mark.parametrize("profile", ["native", "cpu"])
def test_lane_tensors_follow_the_contract(profile: str, request: pytest.FixtureRequest) -> None:
    for name, config in request.getfixturevalue(profile).items():
        if name == "encode":
            continue
        length = int(name.removeprefix("encoder_"))
        assert [(item.name, item.data_type, list(item.dims)) for item in config.input] == [
            ("input_ids", proto.TYPE_INT32, [length]),
            ("length", proto.TYPE_INT32, [1]),
        ]
        assert [(item.name, item.data_type, list(item.dims)) for item in config.output] == [
            ("EMBEDDING", proto.TYPE_FP32, [384])
        ]
        assert not any(item.allow_ragged_batch for item in config.input)


# The native lanes


def test_long_buckets_take_16_and_8_texts(native: dict[str, Any]) -> None:
    assert {name: native[name].max_batch_size for name in ("encoder_512", "encoder_1024", "encoder_2048")} == {
        "encoder_512": 32,
        "encoder_1024": 16,
        "encoder_2048": 8,
    }


@pytest.mark.parametrize(("index", "length"), list(enumerate(LANES)))
def test_native_lane_runs_its_own_profile_of_the_shared_plan(native: dict[str, Any], index: int, length: int) -> None:
    config = native[f"encoder_{length}"]
    (group,) = config.instance_group
    assert (config.backend, config.default_model_filename) == ("tensorrt", "model.plan")
    assert (group.count, group.kind) == (1, proto.ModelInstanceGroup.KIND_GPU)
    assert (list(group.profile), list(group.gpus)) == ([str(index)], [0])


@pytest.mark.parametrize(("index", "length"), list(enumerate(LANES)))
def test_plans_are_run_by_the_python_backend_when_it_is_asked_for(
    production: tuple[DeploySettings, EncoderSource], index: int, length: int
) -> None:
    settings, source = production
    given = changed(settings, engine={"backend": "python", "techniques": ("arena", "pinned"), "gpus": (0, 1)})
    config = parse(render_configs(given, source))[f"encoder_{length}"]
    (group,) = config.instance_group
    assert (config.backend, group.count, group.kind) == ("python", 1, proto.ModelInstanceGroup.KIND_GPU)
    assert list(group.gpus) == [0, 1]
    lane = LaneConfig.from_model_config(
        json.dumps({"parameters": {"lane": {"string_value": config.parameters["lane"].string_value}}})
    )
    assert (lane.engine, lane.file, lane.length, lane.spans) == ("tensorrt", "model.plan", length, "")
    options = TensorRTOptions.read(lane.options)
    assert (options.profile, options.techniques, options.arena_factor) == (index, ("arena", "pinned"), 1.2)


@pytest.mark.parametrize("length", LANES)
def test_graphs_cover_every_batch_once_at_the_full_length(native: dict[str, Any], length: int) -> None:
    config = native[f"encoder_{length}"]
    assert config.optimization.cuda.graphs
    covered: list[int] = []
    for spec in config.optimization.cuda.graph_spec:
        covered += range(spec.graph_lower_bound.batch_size, spec.batch_size + 1)
        for shapes in (spec.input, spec.graph_lower_bound.input):
            assert {name: list(shape.dim) for name, shape in shapes.items()} == {"input_ids": [length], "length": [1]}
    assert covered == list(range(1, config.max_batch_size + 1))


def test_graph_steps_are_those_of_the_settings(native: dict[str, Any]) -> None:
    steps = {name: [spec.batch_size for spec in config.optimization.cuda.graph_spec] for name, config in native.items()}
    assert steps["encoder_128"] == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32]
    assert steps["encoder_1024"] == [1, 2, 4, 8, 12, 16]
    assert steps["encoder_2048"] == [1, 2, 4, 8]


def test_output_copy_stream_stays_off_with_graphs(native: dict[str, Any]) -> None:
    for name, config in native.items():
        assert not config.optimization.cuda.output_copy_stream, name
        assert "output_copy_stream" not in text_format.MessageToString(config)


@pytest.mark.parametrize("length", LANES)
def test_native_lane_warmed_up_at_every_step(native: dict[str, Any], length: int) -> None:
    config = native[f"encoder_{length}"]
    assert [warm.batch_size for warm in config.model_warmup] == [
        spec.batch_size for spec in config.optimization.cuda.graph_spec
    ]
    for warm in config.model_warmup:
        assert warm.count == 1
        shapes = {name: (item.data_type, list(item.dims)) for name, item in warm.inputs.items()}
        assert shapes == {"input_ids": (proto.TYPE_INT32, [length]), "length": (proto.TYPE_INT32, [1])}
        assert all(item.WhichOneof("input_data_type") == "zero_data" for item in warm.inputs.values())


def test_stream_priority_is_that_of_the_lane(native: dict[str, Any]) -> None:
    policy = proto.ModelOptimizationPolicy
    priorities = {name: config.optimization.priority for name, config in native.items()}
    assert {priorities[f"encoder_{length}"] for length in (128, 256, 512)} == {policy.PRIORITY_MAX}
    assert {priorities[f"encoder_{length}"] for length in (1024, 2048)} == {policy.PRIORITY_MIN}


def test_several_gpus_given_to_every_lane(production: tuple[DeploySettings, EncoderSource]) -> None:
    settings, source = production
    lanes = parse(render_configs(changed(settings, engine={"gpus": [0, 2]}), source))
    assert all(list(lanes[f"encoder_{length}"].instance_group[0].gpus) == [0, 2] for length in LANES)


def test_output_size_and_padding_taken_from_the_model(production: tuple[DeploySettings, EncoderSource]) -> None:
    settings, source = production
    other = replace(source, architecture=replace(source.architecture, pad_id=1), task=replace(source.task, size=768))
    configs = parse(render_configs(settings, other))
    assert all(list(config.output[0].dims) == [768] for config in configs.values())
    entry = EntryConfig.from_model_config(model_config_json(configs["encode"]))
    assert (entry.size, entry.pad_id) == (768, 1)


# The CPU lanes


def test_cpu_lanes_read_back_by_the_lane(cpu: dict[str, Any]) -> None:
    assert list(cpu) == [*(f"encoder_{length}" for length in (16, 32, 64, 128, 256, 512)), "encode"]
    for name, config in cpu.items():
        if name == "encode":
            continue
        assert config.backend == "python"
        (group,) = config.instance_group
        assert (group.count, group.kind) == (1, proto.ModelInstanceGroup.KIND_CPU)
        assert not config.HasField("optimization")
        # The engine warms itself up in initialize; this is for the way through Triton.
        assert [warm.batch_size for warm in config.model_warmup] == [1]
        assert {name: list(item.dims) for name, item in config.model_warmup[0].inputs.items()} == {
            "input_ids": list(config.input[0].dims),
            "length": [1],
        }
        assert LaneConfig.from_model_config(model_config_json(config)) == LaneConfig(
            engine="onnxruntime",
            file="model.onnx",
            length=int(name.removeprefix("encoder_")),
            output="EMBEDDING",
            per_token=False,
            segment=False,
            steps={"encoder_64": (1, 2, 4), "encoder_128": (1, 2), "encoder_256": (1,), "encoder_512": (1,)}.get(
                name, (1, 2, 4, 8)
            ),
            threads=1,
            nice=0,
        )


def test_long_lane_of_the_cpu_nicer_than_the_short_one() -> None:
    configs = parse(render_configs(*load("deploy.long.cpu.yaml")))
    nice = {
        name: LaneConfig.from_model_config(model_config_json(config)).nice
        for name, config in configs.items()
        if name != "encode"
    }
    assert {name for name, value in nice.items() if value == 19} == {"encoder_1024", "encoder_2048"}
    assert {nice[f"encoder_{length}"] for length in (16, 32, 64, 128, 256, 512)} == {0}


def test_entry_of_the_cpu_keeps_its_own_patience(cpu: dict[str, Any]) -> None:
    batching = cpu["encode"].dynamic_batching
    assert batching.priority_queue_policy[1].default_timeout_microseconds == 2_000_000
    assert cpu["encode"].instance_group[0].count == 2


def test_buckets_above_the_positions_left_out_of_the_files_with_a_notice() -> None:
    settings, source = load("deploy.cpu.yaml")
    assert 1024 in settings.buckets
    configs = parse(render_configs(settings, source))
    assert not {"encoder_1024", "encoder_2048"} & set(configs)
    routed = EntryConfig.from_model_config(model_config_json(configs["encode"])).buckets
    assert [bucket.length for bucket in routed] == [16, 32, 64, 128, 256, 512]
    assert "1024, 2048" in str(bucket_plan(settings, source).notice)


def test_native_lanes_take_the_memory_of_their_own_profile(native: dict[str, Any]) -> None:
    for name, config in native.items():
        if name != "encode":
            strategy = config.parameters["execution_context_allocation_strategy"].string_value
            assert strategy == "ON_PROFILE_CHANGE"
