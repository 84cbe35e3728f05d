"""A test for each kind of fault that users of such systems reported; `test_cases_server.py` has those of a server.

Each is small. Where another file proves the same at length, the docstring names it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch

from builders.encoder import load_encoder
from builders.errors import FuseError, ManifestError
from builders.fuse import block_outputs
from builders.graph import make_graph, recipe_for, runner_of
from builders.graph_file import data_file, load_graph, save_graph, sha256_of_graph
from builders.manifest import Machine, check_fits
from builders.matrix import own_answer
from builders.precision import convert
from builders.samples import FIRST_WORD, WORDS, write_sample
from builders.serving.entry.errors import Refusal
from builders.serving.entry.group import Group, rows_by_bucket
from builders.serving.entry.request import Options, Question
from builders.serving.entry.tokenise import Tokeniser
from builders.settings import ModelSettings
from builders.source import open_source
from builders.verify.gate import Gate, GateError, GateReport, GateSettings, require
from builders.verify.runner import Ids
from tests.cases.conftest import Sample
from tests.serving.parts import route, ticket
from tests.verify.graphs import Edit, edited, narrow_layer_norm, norms, raise_channel, widen_mask

BUCKETS = {16: 4, 64: 2}


def cosine(a: Any, b: Any) -> float:
    one, other = np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def random_ids(length: int, seed: int = 0) -> Ids:
    ids: Ids = np.random.default_rng(seed).integers(FIRST_WORD, WORDS, length).astype(np.int32)
    return ids


def gate_of(reference: onnx_ir.Model, tokenise: Tokeniser) -> Gate:
    settings = GateSettings(buckets=BUCKETS, stream=random_ids(2000, 3), tokenise=tokenise)
    return Gate(runner_of(reference, "fp32"), settings)


def in_fp16(gate: Gate, graph: onnx_ir.Model, *edits: Edit) -> GateReport:
    copy = edited(graph)
    convert(copy, "fp16")
    for edit in edits:
        edit(copy)
    return gate.run(runner_of(copy, "fp16"), "fp16")


def test_01_limit_is_positions_without_the_pads_rows_when_numbering_is_robertas(roberta: Sample) -> None:
    """Long proof: tests/families, tests/serving/test_tokenise.py."""
    stored = json.loads((roberta.source.transformer / "config.json").read_text())["max_position_embeddings"]
    assert (stored, roberta.source.positions) == (514, 512)
    tokenise, text = Tokeniser(roberta.tokenizer, roberta.source.positions), "w5 " * 1000
    (tokens,) = tokenise([text])
    assert (len(tokens.ids), tokens.cut) == (512, 490)
    assert np.isfinite(roberta.run(tokens.ids)).all()
    (refused,) = tokenise.read([Question((text,), None, Options(truncate="error"))])
    assert isinstance(refused, Refusal)
    assert "1002" in refused.message
    assert "512" in refused.message


def test_02_batch_of_two_lengths_equals_its_singles_when_positions_start_behind_pad(roberta: Sample) -> None:
    """Long proof: tests/families/test_graphs.py; frozen positions: tests/fuse/test_steps.py."""
    assert roberta.source.architecture.first_position == 2
    rows = random_ids(5, 1), random_ids(40, 2)
    together = roberta.run(*rows)
    model = load_encoder(roberta.source).model
    for row, answer in zip(rows, together, strict=True):
        assert cosine(roberta.run(row), answer) > 0.999999
        # The library numbers the positions by itself here.
        assert cosine(own_answer(model, roberta.source, row, None), answer) > 0.9999


def test_03_mask_stays_finite_in_fp16_and_another_one_is_refused(bert: Sample) -> None:
    """Long proof: tests/builders/test_precision.py, tests/verify/test_with_steps.py."""
    gate = gate_of(bert.graph, Tokeniser(bert.tokenizer, 64))
    sound = edited(bert.graph)
    convert(sound, "fp16")
    ids = np.stack([np.resize(random_ids(302, 4), 302), np.resize(random_ids(3, 5), 302)]).astype(np.int32)
    answer = runner_of(sound, "fp16").run(ids, np.array([[302], [3]], np.int32))
    assert all(np.isfinite(array).all() for array in answer.values())

    def lowest(model: onnx_ir.Model) -> None:
        for value in model.graph.initializers.values():
            array = None if value.const_value is None else value.const_value.numpy()
            if array is not None and array.size == 1 and abs(float(array.astype(np.float64).item()) + 1e4) < 10:
                value.const_value = onnx_ir.tensor(np.full(array.shape, -np.inf, array.dtype), name=value.name)

    report = in_fp16(gate, bert.graph, lowest)
    assert not report.finite
    with pytest.raises(GateError, match="not finite"):
        require(report, "the graph")
    widened = edited(bert.graph, widen_mask)
    convert(widened, "fp16")
    assert gate.run(runner_of(widened, "fp16"), "fp16").finite  # -3.4e38 is replaced, not narrowed


def test_04_layer_norm_is_named_when_its_sums_are_fp16_beside_a_large_channel(bert: Sample) -> None:
    """Long proof: tests/verify/test_parity.py, tests/builders/test_precision.py."""
    outlier = edited(bert.graph, raise_channel)
    gate = gate_of(outlier, Tokeniser(bert.tokenizer, 64))
    sound = edited(outlier)
    convert(sound, "fp16")
    assert all(node.attributes["stash_type"].as_int() == 1 for node in norms(sound) if "stash_type" in node.attributes)
    assert gate.run(runner_of(sound, "fp16"), "fp16").passed
    broken = edited(outlier)
    blocks = {block.name: block.value for block in block_outputs(broken)}
    narrow_layer_norm(broken)
    from builders.verify.runner import OnnxRunner

    report = gate.run(OnnxRunner(broken, blocks, optimise=False, threads=1), "fp16")
    assert report.parity.first_below is not None
    assert report.parity.first_below.name == "layer.0.attention.norm"


@pytest.mark.parametrize("family", ["mpnet", "deberta-v2"])
def test_05_inputs_are_the_models_own_when_it_takes_no_token_types(family: str, tmp_path: Path) -> None:
    """The lane reads its inputs from the graph: tests/serving/test_onnx_engine.py."""
    model = write_sample(tmp_path, family, "reranking")
    source = open_source(ModelSettings(source=str(tmp_path)))
    assert source.task.contract.inputs == ("input_ids", "length")
    ids, row = np.full((1, 16), 9, np.int32), random_ids(11)
    ids[0, :11] = row
    answer = load_encoder(source)(torch.from_numpy(ids), torch.tensor([[11]], dtype=torch.int32))
    assert abs(answer.numpy() - own_answer(model, source, row, None)).max() < 1e-5


@pytest.mark.parametrize(("truncate", "last"), [("end", 43), ("start", 299)])
def test_06_segments_are_those_of_what_is_left_when_a_pair_is_cut(truncate: Any, last: int, bert: Sample) -> None:
    """Long proof: tests/serving/test_tokenise.py, against the library."""
    document = " ".join(f"w{5 + number % 295}" for number in range(2000))
    tokenise = Tokeniser(bert.tokenizer, 512, segment=True)
    ((tokens,),) = tokenise.read([Question(("w5 w6",), (document,), Options(truncate=truncate))])  # type: ignore[misc]
    piece = tokens.pieces[0]
    # [CLS] w5 w6 [SEP] before it, [SEP] behind it.
    assert (len(piece.ids), piece.segment_start, tokens.cut) == (512, 4, 2000 - 507)
    assert (piece.ids[:4].tolist(), piece.ids[-1]) == ([2, 5, 6, 3], 3)
    words = [5 + number % 295 for number in range(2000)]
    kept = words[:507] if truncate == "end" else words[-507:]
    assert piece.ids[4:-1].tolist() == kept


@pytest.mark.parametrize(("words", "length", "cut"), [(509, 511, 0), (510, 512, 0), (511, 512, 1)])
def test_07_text_is_answered_one_below_at_and_one_above_the_limit(
    words: int, length: int, cut: int, bert: Sample
) -> None:
    """Through the server: tests/integration/test_answers.py."""
    (tokens,) = Tokeniser(bert.tokenizer, 512)(["w7 " * words])
    assert (len(tokens.ids), tokens.cut) == (length, cut)
    answer = bert.run(tokens.ids, width=512)
    assert np.isfinite(answer).all()
    model = load_encoder(bert.source).model
    assert cosine(answer, own_answer(model, bert.source, tokens.ids, None)) > 0.9999


def test_08_sixteen_threads_agree_when_each_has_its_tokeniser(bert: Sample) -> None:
    """A tokeniser is never shared: tests/serving/test_tokenise.py."""
    texts = [f"w{5 + number} " * (1 + 40 * number % 900) for number in range(40)]
    expected = [tokens.ids.tolist() for tokens in Tokeniser(bert.tokenizer, 512)(texts)]
    found: list[list[list[int]]] = []

    def work() -> None:
        own = Tokeniser(bert.tokenizer, 512)
        for _ in range(5):
            found.append([tokens.ids.tolist() for tokens in own(texts)])

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 80
    assert all(each == expected for each in found)


def test_09_plan_is_refused_with_both_machines_when_the_manifest_is_of_another() -> None:
    """Long proof: tests/builders/test_manifest.py, tests/integration/test_promote.py."""
    from tests.builders.test_publish import manifest

    made = Machine(gpu="NVIDIA H200", compute_capability="9.0", tensorrt="10.14.1")
    here = made.model_copy(update={"tensorrt": "10.13.0"})
    plan = manifest().model_copy(update={"engine": "tensorrt", "machine": made})
    check_fits(plan, made)
    with pytest.raises(ManifestError, match=r"10\.14\.1.*10\.13\.0.*make build-engines|10\.13\.0.*10\.14\.1.*make"):
        check_fits(plan, here)


def test_10_weights_beside_the_graph_are_hashed_with_it_and_missed_when_lost(bert: Sample, tmp_path: Path) -> None:
    """Copied into every lane: tests/builders/test_publish.py; the whole way: tests/builders/test_graph_file.py."""
    path = save_graph(bert.graph, tmp_path / "model.onnx", external_above=0)
    beside = data_file(path)
    assert beside.is_file()
    assert path.stat().st_size < beside.stat().st_size
    before = sha256_of_graph(path)
    ids = random_ids(9)[None]
    answer = runner_of(load_graph(path), "fp32").run(ids, np.array([[9]], np.int32))["EMBEDDING"]
    assert cosine(answer, bert.run(ids[0])) > 0.999999
    content = bytearray(beside.read_bytes())
    content[-1] ^= 1
    beside.write_bytes(bytes(content))
    assert sha256_of_graph(path) != before
    beside.unlink()
    with pytest.raises(Exception, match=r"model\.onnx\.data"):
        runner_of(load_graph(path), "fp32").run(ids, np.array([[9]], np.int32))


def test_11_every_layer_is_fused_or_the_build_stops_when_there_are_twelve(tmp_path: Path) -> None:
    """An export with SDPA and every other pattern: tests/fuse/test_counts.py, test_steps.py."""
    from builders.export import export_onnx
    from builders.fuse import fuse

    write_sample(tmp_path, "bert", "embedding", layers=12)
    source = open_source(ModelSettings(source=str(tmp_path)))
    reference = load_graph(export_onnx(source, tmp_path / "model.onnx").path)
    recipe = recipe_for("tensorrt-10.14", "fp32")
    made = make_graph(reference, source, recipe, longest=40, gate=None, progress=lambda _: None)
    assert made.fusion.found["attention"] == made.fusion.expected["attention"] == 12
    assert sum(node.op_type == "Attention" for node in made.model.graph) == 12
    with pytest.raises(FuseError, match="found"):
        fuse(reference.clone(), family="bert", layers=13)


def test_12_texts_of_many_lengths_share_one_call_when_they_share_a_bucket() -> None:
    """The lanes' own counts: test_cases_server.py; tests/serving/test_group.py."""
    buckets = (route(16, batch=64), route(64, batch=64))
    rows = rows_by_bucket([ticket(length) for length in range(5, 37)], buckets)
    assert {bucket.length: len(own) for bucket, own in rows.items()} == {16: 12, 64: 20}
    group = Group(buckets[0], tuple(rows[buckets[0]]))
    assert group.tensors(pad_id=0)["input_ids"].shape == (12, 16)


def test_14_tokeniser_and_engine_start_no_threads_of_their_own_when_they_are_capped(bert: Sample) -> None:
    """Instances are processes, and each must not take all cores. In a process of its own: both caps are read once."""
    code = f"""
import threading, psutil, numpy as np, onnxruntime
from builders.serving.entry.tokenise import Tokeniser
own = psutil.Process()
tokenise = Tokeniser({str(bert.tokenizer)!r}, 512, threads=1)
before = own.num_threads()
tokenise(["w7 w8 " * 50] * 500)
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession({str(bert.path)!r}, options, providers=["CPUExecutionProvider"])
session.run(None, {{"input_ids": np.full((8, 64), 9, np.int32), "length": np.full((8, 1), 64, np.int32)}})
print(own.num_threads() - before)
"""
    environment = {"PATH": "/usr/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert int(done.stdout) == 0


def test_17_lane_never_sees_a_request_whose_client_has_gone() -> None:
    """Through Triton's queue: test_cases_server.py; on every way through the entry: tests/serving/test_dispatch.py."""
    gone, kept = ticket(3, cancelled=lambda: True), ticket(3)
    (rows,) = rows_by_bucket([gone, kept], (route(16),)).values()
    group = Group(route(16), tuple(rows)).without_given_up()
    assert [row.ticket for row in group.rows] == [kept]
    assert gone.refusal is not None
    assert gone.refusal.kind == "cancelled"
    assert gone.complete
    assert not kept.complete


@pytest.mark.parametrize(("mode", "normalize"), [("cls", True), ("mean", False), ("lasttoken", True)])
def test_18_vectors_are_the_librarys_when_its_folder_says_how_to_pool(
    mode: str, normalize: bool, tmp_path: Path
) -> None:
    """All modes, Dense and prompts: tests/builders; MiniLM and MPNet: tests/integration."""
    from sentence_transformers import SentenceTransformer, models

    write_sample(tmp_path / "bare", "bert", "embedding")
    (tmp_path / "bare" / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": 40,
                "pad_token": "[PAD]",
                "unk_token": "[UNK]",
                "cls_token": "[CLS]",
                "sep_token": "[SEP]",
            }
        )
    )
    body = models.Transformer(str(tmp_path / "bare"))
    parts = [body, models.Pooling(body.get_word_embedding_dimension(), pooling_mode=mode)]
    library = SentenceTransformer(modules=[*parts, *([models.Normalize()] if normalize else [])], device="cpu")
    library.save(str(tmp_path / "whole"))
    source = open_source(ModelSettings(source=str(tmp_path / "whole")))
    encoder = load_encoder(source)
    texts = ["w7", "w8 w9 w10 w11 w250", "w30 " * 36]
    expected = library.encode(texts, batch_size=2)
    for text, wanted in zip(texts, expected, strict=True):
        (tokens,) = Tokeniser(source.transformer / "tokenizer.json", 40)([text])
        ids = np.full((1, 40), 9, np.int32)
        ids[0, : len(tokens.ids)] = tokens.ids
        with torch.no_grad():
            answer = encoder(torch.from_numpy(ids), torch.tensor([[len(tokens.ids)]], dtype=torch.int32))
        assert cosine(answer.numpy(), wanted) >= 0.9999
        assert np.isclose(np.linalg.norm(answer.numpy()), 1, atol=1e-5) is np.bool_(normalize)
