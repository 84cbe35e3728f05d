"""This project's own commands where TensorRT and tritonserver live in another Python: `python -m builders …`.

    python3 -m tests.measurements.h200.visit_bench --python PYTHON/env.sh -- bench -c deploy.h200.yaml --rate 1000

From the checkout's root. Where one Python has everything, the commands need none of this.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from tests.measurements.h200.other_python import OtherPython


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="env.sh of that other Python")
    parser.add_argument("--graphs", type=Path, help="graphs that were exported elsewhere, a folder of a cache")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and what follows `python -m builders`")
    options = parser.parse_args()
    other = OtherPython.read(options.python)
    print(f"TensorRT {other.tensorrt or 'is not there'}; this Python {sys.version.split()[0]}", flush=True)
    other.install()
    from builders.build import graph_cache
    from builders.cli import main as command_line

    if options.graphs is not None:
        shutil.copytree(options.graphs, graph_cache(Path("build/cache")), dirs_exist_ok=True)
    sys.argv = ["python -m builders", *options.command[options.command[:1] == ["--"] :]]
    command_line()


if __name__ == "__main__":
    main()
