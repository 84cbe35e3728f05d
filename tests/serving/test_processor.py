"""Which processors may get int8 products wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from builders.serving.lane.processor import int8_saturates


@pytest.mark.parametrize(
    ("flags", "machine", "careful"),
    [
        ("fpu avx2 avx512f", "x86_64", True),
        ("fpu avx2", "x86_64", True),
        ("fpu avx2 avx512f avx512_vnni", "x86_64", False),
        ("fpu avx2 avx_vnni", "x86_64", False),
        ("asimd fphp", "aarch64", False),
    ],
)
def test_careful_on_x86_without_vnni_only(tmp_path: Path, flags: str, machine: str, careful: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: a processor\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert int8_saturates(path, machine) is careful


def test_careful_when_the_processor_is_not_known(tmp_path: Path) -> None:
    assert int8_saturates(tmp_path / "absent", "x86_64")
