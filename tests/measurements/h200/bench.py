"""The whole serving measurement on one machine with a GPU, where all packages are installed: `make bench-gpu`.

Prepares graphs and texts, builds the plans, measures a service that nobody has tuned, each technique in turn and the
product, and prints the tables; half an hour. What is done is not done again, so an interrupted run goes on.

The Python needs the project's packages with tensorrt, cuda-python and nvidia-pytriton, and torch with CUDA for
"before"; cupti-python for the kernels. Where these do not fit into one Python, `--python` and `--torch-python` name
others. Nothing else may run on the GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

PHASES = (
    "answers", "fill", "build", "publish", "check", "first", "max", "short", "kernels", "slicing", "before", "rate",
    "windows", "techniques", "spans", "minilm", "kill", "soak",
)  # fmt: skip


def server_environment(work: Path) -> dict[str, str]:
    """This environment, with the wheel's tritonserver where none is on the PATH yet."""
    environment = dict(os.environ)
    if shutil.which("tritonserver") is None or "TRITON_BACKENDS" not in environment:
        from builders.triton_wheel import locate_triton

        install = locate_triton()
        run = install.lay_out(work / "triton")
        environment = install.environment(run, environment)
        environment["PATH"] = f"{install.binary.parent}{os.pathsep}{environment['PATH']}"
        environment["TRITON_BACKENDS"] = str(run.backends)
    return environment


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="make bench-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phases", nargs="*", metavar="PHASE", help=f"some of: {', '.join(PHASES)}; default: all")
    parser.add_argument("--work", type=Path, default=Path("build/bench-gpu"), help="folder for everything")
    parser.add_argument("--seconds", type=float, default=3000, help="time in all; phases that do not fit are left out")
    parser.add_argument("--before-seconds", type=float, default=130, help="of each load on four workers")
    parser.add_argument("--window-seconds", type=float, default=70, help="of each load on a window")
    parser.add_argument("--python", default=sys.executable, help="a Python with TensorRT and tritonserver")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with torch, transformers and grpcio")
    parser.add_argument("--tiny", action="store_true", help="a small seeded model")
    parser.add_argument("--dry", action="store_true", help="ONNX Runtime in place of plans, short loads: no GPU needed")
    options = parser.parse_args()
    unknown = sorted(set(options.phases) - set(PHASES))
    if unknown:
        parser.error(f"no such phase: {', '.join(unknown)}; there are: {', '.join(PHASES)}")
    work: Path = options.work.resolve()
    prepared, out = work / "prepared", work / "out"
    out.mkdir(parents=True, exist_ok=True)
    if not (prepared / "minilm.answers.npz").exists():
        command = [sys.executable, "-m", "tests.measurements.h200.prepare_serving", str(prepared)]
        command += [f"--{name}" for name in ("tiny", "dry") if getattr(options, name)]
        subprocess.run(command, check=True)
    command = [options.python, "-m", "tests.measurements.h200.visit_serving", *(options.phases or PHASES)]
    command += ["--folder", str(prepared), "--work", str(work / "work"), "--out", str(out)]
    for name in ("seconds", "before_seconds", "window_seconds", "torch_python"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    done = subprocess.run(command, env=server_environment(work), check=False)
    if (out / "results.json").exists():
        command = [sys.executable, "-m", "tests.measurements.h200.tables", str(out / "results.json"), "--markdown"]
        subprocess.run(command, check=True)
        print(f"written: {out / 'results.json'}", flush=True)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
