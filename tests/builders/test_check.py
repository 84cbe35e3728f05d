"""`check`: what is said of a model before it is built, and what is refused with which reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from builders.check import check_model, check_settings
from builders.cli import app
from builders.cost import MEASURED, Size
from builders.errors import BuilderError
from builders.samples import write_sample


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tagger")
    write_sample(folder, "distilbert", "tagging", positions=300)
    return folder


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout


def test_family_task_limits_and_buckets_are_told_when_a_folder_is_checked(tagger: Path) -> None:
    found = check_model(check_settings(str(tagger)))
    assert (found.family, found.task, found.output) == ("distilbert", "tagging", "TAGS FP32 [b, L, 3]")
    assert (found.labels, found.head) == (("LABEL_0", "LABEL_1", "LABEL_2"), "activation softmax")
    assert (found.positions, [bucket.length for bucket in found.buckets]) == (300, [128, 256])
    assert "512, 1024, 2048" in str(found.notice)
    import torch
    from safetensors.torch import load_file

    stored = load_file(tagger / "model.safetensors")
    assert found.parameters == sum(tensor.numel() for tensor in stored.values())
    assert found.weight_bytes == {
        "fp32": 4 * found.parameters,
        "fp16": 2 * found.parameters,
        "bf16": 2 * found.parameters,
    }
    assert all(isinstance(tensor, torch.Tensor) for tensor in stored.values())


def test_table_and_json_say_the_same_when_the_command_is_asked(tagger: Path) -> None:
    code, text = run(str(tagger))
    assert code == 0
    for words in ("distilbert", "tagging", "LABEL_2", "GFLOP", "can be built", "H200"):
        assert words in text
    code, text = run(str(tagger), "--json")
    document = json.loads(text)
    assert (code, document["can_be_built"], document["task"]) == (0, True, "tagging")
    assert [bucket["length"] for bucket in document["buckets"]] == [128, 256]


def test_operators_and_times_are_told_when_it_is_exported(tagger: Path) -> None:
    found = check_model(check_settings(str(tagger)), export=True)
    assert found.export is not None
    assert found.export.fused["LayerNormalization"] == 7
    assert found.export.least_cosine > 0.9999
    assert all(bucket.measured_ms is not None and bucket.measured_ms > 0 for bucket in found.buckets)


def change(folder: Path, **config: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "t5"}, "t5"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "custom code"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"is_decoder": True}, "is_decoder"),
    ],
    ids=["decoder-only", "encoder-decoder", "custom code", "quantised", "decoder"],
)
def test_refused_with_the_reason_when_the_config_is_of_another_kind(
    config: dict[str, Any], words: str, tagger: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tagger, folder)
    change(folder, **config)
    code, text = run(str(folder))
    assert code == 1
    assert "cannot be built" in text
    assert words in text
    code, text = run(str(folder), "--json")
    document = json.loads(text)
    assert (code, document["can_be_built"]) == (1, False)
    assert words in document["reason"]


def test_refused_when_there_is_no_tokenizer_json(tagger: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tagger, folder)
    (folder / "tokenizer.json").unlink()
    code, text = run(str(folder))
    assert code == 1
    assert "tokenizer.json" in text
    (folder / "tokenizer.json").write_text("{}")
    code, text = run(str(folder))
    assert code == 1
    assert "tokenizer.json" in text


def test_refused_when_the_weights_lack_a_tensor_and_the_export_is_tried(tagger: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tagger, folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop("classifier.bias")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BuilderError, match=r"classifier\.bias"):
        check_model(check_settings(str(folder)), export=True)


def test_every_model_of_the_settings_is_checked_when_no_model_is_named(tagger: Path, tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text(
        f"model: {{source: {tagger}}}\nbuckets: [32, 300]\nengine: {{kind: onnxruntime, precision: fp32}}\n"
    )
    code, text = run("--config", str(path), "--json")
    document = json.loads(text)
    assert (code, document["engine"]) == (0, "onnxruntime")
    assert [bucket["length"] for bucket in document["buckets"]] == [32, 300]
    assert "MiniLM" in document["estimated_from"]


def test_nothing_to_check_is_said_when_no_model_is_there(tmp_path: Path) -> None:
    code, text = run(str(tmp_path / "nowhere"))
    assert code == 1
    assert "no folder" in text


def test_estimate_is_the_measured_time_when_the_model_is_the_measured_one() -> None:
    for measured in MEASURED.values():
        for tokens, milliseconds in measured.milliseconds.items():
            assert measured.estimate(measured.size, tokens) == pytest.approx(milliseconds)
        between = [measured.estimate(measured.size, tokens) for tokens in range(16, 2048, 16)]
        assert between == sorted(between)


def test_operations_are_those_of_bert_base_when_counted_by_hand() -> None:
    base = Size(layers=12, hidden=768, heads=12, inner=3072, products=12 * (4 * 768**2 + 2 * 768 * 3072))
    assert base == MEASURED["tensorrt"].size
    assert base.flops(128) == pytest.approx(2 * 128 * 84_934_656 + 4 * 128**2 * 768 * 12)
    assert base.activation_bytes(2, 128, "fp16") == 2 * base.activation_bytes(1, 128, "fp16")
