"""The figures of docs/guide.md: those that were measured stand in docs/measurements/, the others follow from them."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version

import pytest

from builders.cost import MEASURED
from tests.operations.container import script
from tests.operations.guide import GUIDE
from tests.tools.repositories import ROOT

TEXT = GUIDE.read_text(encoding="utf-8")
MEASUREMENTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "measurements").glob("*.md"))


@pytest.mark.parametrize(
    ("shown", "measured"),
    [
        ("2.35 ms at 128", "**2.353**"), ("10.69 ms at 512", "**10.688**"),
        ("4,649 were served", "| mix, texts/s | at least 3,860 | 4,649 |"),
        ("9,098/s", "| processes-14 | 9098 |"), ("| 5,883 | 8,186 | 9,098 |", "| processes-6 | 5883 |"),
        ("8,186", "| 1024_6 | 8186 |"), ("8,677 texts/s", "| MiniLM, texts up to 128 | 8677 | 28.4 | 46.1 | 18.1% |"),
        ("2.9 cores, the entry's processes 5.6, the lanes 0.4", "server 2.92, entry 5.61, lanes 0.39"),
        ("26 ms at 165/s, 12 ms without", "| rate_window-0 | 6.9 | 12.4 |"), ("8,449 MiB", "8,449 MiB"),
        ("63 texts/s of 89 tokens", "product            62.8"), ("117 texts/s", "product            116.6"),
        ("the FP32 P99 was 460 ms", "42.8     171     460"), ("int8 P99 177 ms", "26.3    69.1     177"),
    ],
)  # fmt: skip
def test_a_figure_is_the_measured_one(shown: str, measured: str) -> None:
    assert shown in " ".join(TEXT.split())
    assert measured in MEASUREMENTS


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_what_a_gpu_takes_follows_from_the_times_of_its_batches() -> None:
    size, times = MEASURED["tensorrt"].size, {128: 2.353 / 32, 512: 10.688 / 32}
    rates = {tokens: size.flops(tokens) / ms for tokens, ms in times.items()}
    times[256] = size.flops(256) / (rates[128] + (rates[512] - rates[128]) / 3)
    shares = {128: 0.65, 256: 0.20, 512: 0.15}
    most = 1000 / sum(share * times[tokens] for tokens, share in shares.items())
    padded = 4649 * sum(share * tokens for tokens, share in shares.items())
    text = " ".join(TEXT.split())
    assert f"about {times[256] * 32:.1f} ms by its operations" in text
    assert f"would be {round(most, -1):,.0f} texts/s" in text
    assert f"hence the {4649 / most:.1f}." in text
    assert f"These are {padded / 1e6:.2f} million tokens" in text
    assert f"0.7 × 4,649 = {0.7 * 4649:,.0f}/s" in text
    assert f"peak twice the mean: {round(400e6 / 86_400 * 2, -1):,.0f}/s. 9,260 / 3,254 = {9260 / 3254:.1f}:" in text
    assert f"BERT-base has {size.flops(128) / 1e9:.1f} at 128 tokens" in text
    assert f"a peak of ten times the mean: {1e6 / 86_400 * 10:.0f}/s" in text


def test_what_a_core_takes_follows_from_what_two_took() -> None:
    text = " ".join(TEXT.split())
    mean = 0.6 * 20 + 0.2 * 100 + 0.15 * 220 + 0.05 * 480
    assert f"| {62.8:.0f} texts/s of {mean:.0f} tokens | {round(62.8 * mean / 2, -2):,.0f} tokens/s |" in text
    assert f"| {116.6:.0f} texts/s | {round(116.6 * mean / 2, -2):,.0f} tokens/s |" in text
    assert f"At 41.5 texts/s, {41.5 / 62.8:.0%} of the most".replace("%", " %") in text
    (peak, tokens, core, share, cores) = map(
        number, re.findall(r"(\d+) texts/s of (\d+) tokens: [\d,]+ / \(([\d,]+) × ([\d.]+)\) = ([\d.]+) core", text)[0]
    )
    assert cores == round(peak * tokens / (core * share))
    (tokens_s, a_core, found, int8) = map(
        number, re.findall(r"89 tokens: ([\d,]+) / ([\d,]+) = ([\d.]+), eleven cores; in int8 ([\d.]+),", text)[0]
    )
    assert (tokens_s, a_core) == (200 * 89, 2800 * 0.6)
    assert (found, int8) == (round(tokens_s / a_core, 1), round(tokens_s / (5200 * 0.6), 1))


def test_the_memory_of_a_bucket_is_what_the_formula_gives() -> None:
    rows = re.findall(r"^\| (\d+), (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", TEXT, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [128, 256, 512, 1024, 2048]
    found = MEASUREMENTS.split("with all five buckets", 1)[1][:120].replace("\n", " ")
    for length, batch, *figures in rows:
        weights, activations, formula, measured = (float(figure.replace(",", "")) for figure in figures)
        assert formula == pytest.approx(500 + weights + 1.2 * activations, abs=2)
        assert formula == pytest.approx(measured, rel=0.04)
        assert f"{length}: {figures[3]}" in found
        assert re.search(rf"^\| {length}, {batch} \| {weights - 0.6:.0f}|{weights:.0f}", MEASUREMENTS, re.MULTILINE)


def test_the_memory_without_a_gpu_is_what_the_formula_gives() -> None:
    (server, entry, bucket) = map(
        int, re.findall(r"`(\d+) \+ (\d+) × entry.processes \+ Σ over buckets \((\d+) \+", TEXT)[0]
    )
    assert f"| tritonserver | {server} |" in MEASUREMENTS
    assert f"| each of two entry processes | {entry} |" in MEASUREMENTS
    rows = re.findall(r"^\| bucket [\d, ]+ \| ([\d, ]+) \|$", MEASUREMENTS, re.MULTILINE)
    for own in (float(figure) for row in rows for figure in row.split(", ")):
        # All but the one of 512 tokens.
        assert own == 237 or own == pytest.approx(bucket + 87, rel=0.18)
    assert 237 - bucket - 87 == pytest.approx(90, abs=1)


def test_the_supported_versions_are_those_that_the_project_names() -> None:
    table = TEXT.split("\n## Supported versions\n", 1)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = script("check_image").OLDEST
    assert f"images below {oldest[0]}.{oldest[1]} (" in table
    assert f"`nvidia-pytriton` {version('nvidia-pytriton')}" in table
    assert f"2.51 ({'24.10'}" in table
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "| Python | 3.11 (all)" in table
    assert version("onnxruntime").startswith(re.findall(r"ONNX Runtime \| ([\d.]+) ", table)[0])
    assert version("numpy").startswith(re.findall(r"\| numpy \| ([\d.]+) ", table)[0])
    (torch, transformers) = re.findall(r"torch, transformers \(build alone\) \| ([\d.]+), ([\d.]+)", table)[0]
    assert version("torch").startswith(torch)
    assert version("transformers").startswith(transformers)
