"""TensorRT and tritonserver of another Python, for the project's own commands: `visit_bench.py` runs them with it.

TensorRT 8.6 exists for Python 3.10 at most, and this project needs 3.11: on a machine that has both, plans are compiled
and served by the one and everything else is done by the other. Nothing of what is measured changes: lanes and entry run
in tritonserver's own Python in any case.

As a program, under the Python of TensorRT: `python3.10 -m tests.measurements.h200.other_python JOB REPORT` compiles one
profile and pickles the report.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_KEPT = ("ENCODER_LANES_", "GLIBC_TUNABLES")


@dataclass(frozen=True)
class OtherPython:
    """A packed Python: what its `env.sh` sets.

    Attributes:
        environment: of its processes.
        tensorrt: version of its TensorRT; None without (a try on a CPU).
    """

    environment: Mapping[str, str]
    tensorrt: str | None

    @classmethod
    def read(cls, script: Path) -> OtherPython:
        """Sources `script` in a shell of its own and looks what it set."""
        shell = ["bash", "-c", f'source "{script}" && env -0']
        said = subprocess.run(shell, capture_output=True, check=True).stdout.decode()
        environment = dict(item.split("=", 1) for item in said.split("\0") if "=" in item)
        ask = ["python3", "-c", "import tensorrt; print(tensorrt.__version__)"]
        found = subprocess.run(ask, env=environment, capture_output=True, text=True, check=False)
        return cls(environment, found.stdout.strip() or None)

    def install(self) -> None:
        """Put it in the place of this Python's own TensorRT and tritonserver."""
        import builders.engine
        import builders.server
        import builders.tensorrt.adapter as adapter

        builders.server.locate_triton = lambda: _Triton(self)  # type: ignore[assignment, return-value]
        if self.tensorrt is None:
            return
        module = types.ModuleType("tensorrt")
        module.__version__ = self.tensorrt  # type: ignore[attr-defined]
        known = adapter.TensorRT(module)
        builders.engine.open_tensorrt = lambda *_: known
        builders.engine.compile_plan = self.compile  # type: ignore[assignment]

    def compile(
        self, onnx: Path, profiles: Sequence[Any], plan_path: Path, *, timing_cache: Path | None, **options: Any
    ) -> Any:
        """`builders.tensorrt.compile.compile_plan`, each profile in a process of its own, all at once."""
        progress = options.pop("progress", None)
        options.pop("tensorrt", None)
        with tempfile.TemporaryDirectory(dir=plan_path.parent) as folder:
            jobs = []
            for number, profile in enumerate(profiles):
                job, report = Path(folder) / f"{number}.job", Path(folder) / f"{number}.report"
                kept = timing_cache and timing_cache.with_name(f"{timing_cache.name}-{profile.length}")
                job.write_bytes(pickle.dumps((onnx, profile, plan_path, kept, options)))
                command = ["python3", "-m", __name__, str(job), str(report)]
                jobs.append((profile, report, subprocess.Popen(command, env=dict(self.environment))))
            found = []
            for profile, report, process in jobs:
                if process.wait() or not report.exists():
                    raise RuntimeError(f"no plan of bucket {profile.length}: see above")
                found.append(pickle.loads(report.read_bytes()))  # noqa: S301 - written a moment ago
                if progress:
                    progress(f"plan of bucket {profile.length}", len(found), len(jobs))
        plans = tuple(plan for report in found for plan in report.plans)
        return replace(found[0], plans=plans, seconds=max(report.seconds for report in found))


class _Triton:
    """What `builders.triton_wheel.TritonInstall` is, of the other Python."""

    def __init__(self, other: OtherPython):
        self._environment = other.environment
        places = (Path(place) / "tritonserver" for place in other.environment["PATH"].split(os.pathsep))
        self.binary = next(place for place in places if place.is_file())

    def lay_out(self, folder: Path) -> Any:
        """The backends are laid out already."""
        from builders.triton_wheel import RunFolder

        run = RunFolder(Path(self._environment["TRITON_BACKENDS"]), folder / "lib", folder / "work")
        for made in (run.libraries, run.work):
            made.mkdir(parents=True, exist_ok=True)
        return run

    def environment(self, run: Any, base: Mapping[str, str]) -> dict[str, str]:
        """The other Python's, with what the server adds for its models."""
        added = {name: value for name, value in base.items() if name.startswith(_KEPT)}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return {"LC_ALL": "C.UTF-8", **threads, **self._environment, **added}


def main(job: str, report: str) -> None:
    """Compile what `OtherPython.compile` wrote down."""
    from builders.tensorrt.adapter import open_tensorrt
    from builders.tensorrt.compile import compile_plan

    onnx, profile, plan_path, kept, options = pickle.loads(Path(job).read_bytes())  # noqa: S301
    made = compile_plan(onnx, [profile], plan_path, tensorrt=open_tensorrt("tensorrt"), timing_cache=kept, **options)
    Path(report).write_bytes(pickle.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
