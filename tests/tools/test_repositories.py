"""The cache of graphs that the tests share."""

from __future__ import annotations

from pathlib import Path

from tests.tools.repositories import share_graphs


def test_graphs_of_the_same_bytes_become_one_file_and_others_stay(tmp_path: Path) -> None:
    contents = {"one": b"weights", "two": b"WEIGHTS", "three": b"weights", "four": b"weights", "five": b"more of them"}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.onnx").write_bytes(content)
    for _ in range(2):
        share_graphs(tmp_path)
        found = {name: tmp_path / name / "model.onnx" for name in contents}
        assert {name: path.read_bytes() for name, path in found.items()} == contents
        assert {name: path.stat().st_nlink for name, path in found.items()} == {
            **dict.fromkeys(("one", "three", "four"), 3),
            **dict.fromkeys(("two", "five"), 1),
        }
        assert [path.name for path in tmp_path.glob("*/*")] == ["model.onnx"] * 5
