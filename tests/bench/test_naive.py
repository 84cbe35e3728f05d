"""The servers of comparison, and which models they can be asked to serve."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders.bench.driver import BenchError, plain_pooling
from builders.bench.naive import NaiveDriver
from builders.bench.product import QUESTION, question_for
from builders.settings import load_settings
from builders.source import open_source
from tests.tools.repositories import ROOT


def test_model_that_is_no_plain_embedding_is_refused_with_what_to_do() -> None:
    source = open_source(load_settings(ROOT / "deploy.cpu.yaml").model)
    assert (plain_pooling(source), question_for(source)) == ("mean", "")
    ranker = replace(source, task=replace(source.task, name="reranking", pooling=(), pair="required"))
    with pytest.raises(BenchError, match=r"reranking, pooling none.*--no-naive"):
        NaiveDriver(ranker)
    assert question_for(ranker) == QUESTION
    several = replace(source, task=replace(source.task, pooling=("mean", "max")))
    with pytest.raises(BenchError, match="mean \\+ max"):
        NaiveDriver(several)


def test_naive_server_computes_where_the_product_does_and_says_what_is_missing() -> None:
    source = open_source(load_settings(ROOT / "deploy.cpu.yaml").model)
    for gpu, device, words in ((False, "cpu", "on the CPU, FP32"), (True, "cuda", "on the GPU, FP16")):
        driver = NaiveDriver(source, gpu=gpu)
        command = driver._child.command
        assert command[command.index("--device") + 1] == device
        assert words in driver.about
    if torch.cuda.is_available():
        return
    with pytest.raises(BenchError, match=r"sees no GPU: install one built for CUDA.*--no-naive"):
        NaiveDriver(source, gpu=True).start()
