"""int8 through the real server: near FP32, and the same whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from builders.build import graph_cache
from builders.engine import reference_graph
from builders.graph import runner_of
from builders.judge import rows_of
from builders.manifest import read_manifest
from builders.ports import free_ports
from builders.server import TritonServer
from builders.serving.entry.tokenise import Tokeniser
from builders.verify.metric import TextEncoder
from builders.verify.parity import LINES
from clients import EncoderClient
from tests.integration.conftest import PATIENT
from tests.integration.test_answers import cosines
from tests.texts import mixed_texts
from tests.tools.load import Call, closed_loop
from tests.tools.repositories import CACHE, repository

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT = 128


def test_answers_within_the_gates_line_alone_and_in_batches(tmp_path: Path) -> None:
    model = {"max_tokens": LIMIT, "tile_positions": None}
    built = repository(tmp_path, "deploy.int8.cpu.yaml", entry=PATIENT, model=model)
    manifest = read_manifest(built.repository, built.version)
    assert (manifest.precision, manifest.steps[-1]) == ("int8", "int8")
    assert manifest.calibration["texts"] > 0
    texts = mixed_texts(100, seed=21)
    with TritonServer(built.repository, built.models, ports=free_ports()) as server:
        with EncoderClient(server.grpc_url) as client:
            alone = np.concatenate([client.encode(text).embeddings for text in texts])
        samples, _ = closed_loop(server.grpc_url, [Call((text,)) for text in texts], clients=32)
    assert [sample.error for sample in samples if sample.error] == []
    together = np.concatenate([sample.vectors for sample in samples if sample.vectors is not None])
    assert cosines(alone, together).min() >= 0.9999
    graph, _ = reference_graph(built.source, None, graph_cache(CACHE), print)
    tokenise = rows_of(Tokeniser(built.repository / "encode" / str(built.version) / "tokenizer.json", LIMIT))
    exact = TextEncoder(runner_of(graph, "fp32"), tokenise, {16: 8, 32: 8, 64: 4, LIMIT: 2})(texts)
    found = cosines(alone, exact)
    assert found.min() >= LINES["int8"].cosine
    assert found.min() < 1 - 1e-6, "served in FP32"
