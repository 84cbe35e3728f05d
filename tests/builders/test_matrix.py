"""The test matrix: a slice of it here, all of it in the slow tests; a planted fault turns its cells red."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir
import pytest
from typer.testing import CliRunner

from builders.cli import app
from builders.errors import BuilderError
from builders.matrix import LENGTHS, TASKS, run_matrix, run_row
from builders.samples import sample_families


def test_slice_is_green_and_printed_when_the_command_runs() -> None:
    result = CliRunner().invoke(app, ["matrix", "--family", "roberta", "--task", "tagging", "--json"])
    (row,) = json.loads(result.stdout)
    assert result.exit_code == 0, result.stdout
    assert (row["family"], row["task"], row["passed"]) == ("roberta", "tagging", True)
    assert [cell["length"] for cell in row["cells"]] == ["1", "2", "edge-1", "edge", "edge+1", "limit"]
    assert all(cell["error"] < 1e-3 for cell in row["cells"])


def test_cells_fail_with_the_reason_when_the_graph_is_wrong(tmp_path: Path) -> None:
    def spoil(model: onnx_ir.Model) -> None:
        for node in model.graph:
            if node.op_type == "Softmax":  # attention sees each token with equal weight
                node.attributes["axis"] = onnx_ir.AttrInt64("axis", 1)

    row = run_row("bert", "reranking", tmp_path, spoil=spoil)
    assert not row.passed
    assert "off by" in row.cells[-1].reason


def test_every_cell_says_why_when_a_model_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BuilderError("no weights", remedy="write some")

    monkeypatch.setattr("builders.matrix.write_sample", broken)
    row = run_row("bert", "embedding", tmp_path)
    assert [cell.length for cell in row.cells] == [*LENGTHS]
    assert {cell.reason for cell in row.cells} == {"no weights; to do: write some"}
    result = CliRunner().invoke(app, ["matrix", "--family", "bert", "--task", "embedding"])
    assert result.exit_code == 1
    assert "0 of 6 cells are green" in result.stdout
    assert "bert embedding" in result.stdout
    assert "no weights" in result.stdout


def test_refused_when_the_matrix_has_no_such_family() -> None:
    with pytest.raises(BuilderError, match=r"no such family.*gpt2.*bert"):
        list(run_matrix(["gpt2"]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whole_matrix_is_green() -> None:
    rows = list(run_matrix())
    assert {(row.family, row.task) for row in rows} == {
        (family, task) for family in sample_families() for task in TASKS
    }
    assert [f"{row.family} {row.task}: {row.cells}" for row in rows if not row.passed] == []
