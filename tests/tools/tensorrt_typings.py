"""Repaired copies of tensorrt-stubs for mypy: `python -m tests.tools.tensorrt_typings build/typings` (`make lint`).

Every release of tensorrt-stubs so far (10.8 to 10.13) has five lines that are no Python: generated signatures with a
parameter named `in`, and one with a required parameter behind optional ones. mypy stops at the first; and the package
has no py.typed where its stubs lie, so that mypy would not look at them anyway. `mypy_path` names the copies.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_REPAIRS = (
    (re.compile(r"(\(|, )in: "), r"\1in_: "),
    (re.compile(r"(def add_scale_nd\(.*channel_axis: int)\)"), r"\1 = ...)"),
)


def write_typings(destination: Path) -> int:
    """Write the stubs of the installed tensorrt-stubs, repaired.

    Returns:
        Lines that were repaired.

    Raises:
        SystemExit: the package is not installed.
        SyntaxError: a release with other faults.
    """
    try:
        stubs = [file for file in files("tensorrt-stubs") or () if file.suffix == ".pyi"]
    except PackageNotFoundError:
        raise SystemExit("tensorrt-stubs is not installed: pip install -e '.[dev]'") from None
    repaired = 0
    for file in stubs:
        lines = Path(str(file.locate())).read_text(encoding="utf-8").splitlines()
        fixed = [_repair(line) for line in lines]
        repaired += sum(a != b for a, b in zip(lines, fixed, strict=True))
        text = "\n".join(fixed) + "\n"
        ast.parse(text, str(file))
        path = destination / str(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return repaired


def _repair(line: str) -> str:
    # Signatures only: docstrings hold the same words.
    if line.lstrip().startswith("def "):
        for pattern, replacement in _REPAIRS:
            line = pattern.sub(replacement, line)
    return line


if __name__ == "__main__":
    write_typings(Path(sys.argv[1]))
