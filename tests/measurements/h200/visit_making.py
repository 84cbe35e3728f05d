"""What a serving visit makes on the machine itself: answers, weights, plans, repositories."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.measurements.h200.seeded import weight
from tests.measurements.h200.visit_state import VisitState


class Making(VisitState):
    """The phases that make something."""

    def answers(self) -> None:
        """FP32 vectors of every text, by PyTorch."""
        self.torch("answers", str(self.work), log=self.out / "torch.log")

    def fill(self) -> None:
        """The seeded weights back into the graph."""
        import onnx_ir as ir

        recipe = self.folder / "graphs/bert.weights.json"
        if not recipe.exists():
            return
        model = ir.load(self.folder / "graphs/bert.onnx")

        def made(item: tuple[str, dict[str, Any]]) -> tuple[str, Any]:
            name, part = item
            array = weight(part["name"], tuple(part["shape"]), 0.05)
            array = np.ascontiguousarray((array.T if part["transposed"] else array).astype(np.float16))
            if hashlib.sha256(array.tobytes()).hexdigest() != part["sha256"]:
                raise RuntimeError(f"weight {part['name']} came out otherwise here than where the graph was made")
            return name, array

        with ThreadPoolExecutor(8) as pool:
            for name, array in pool.map(made, json.loads(recipe.read_text()).items()):
                model.graph.initializers[name].const_value = ir.tensor(array, name=name)
        ir.save(model, self.work / "bert.onnx")
        print(f"bert.onnx: {(self.work / 'bert.onnx').stat().st_size / 1e6:.0f} MB", flush=True)

    def build(self) -> None:
        """All plans side by side, each in a process of its own."""
        if self.dry:
            return
        graph = self.work / "bert.onnx"
        jobs = [("bert", graph, length, batch) for length, batch in self.buckets.items()]
        jobs.append(("minilm", self.folder / "graphs/minilm.onnx", 128, 32))
        running = []
        for name, source, length, batch in jobs:
            plan = self.work / f"{name}_{length}.plan"
            if plan.exists():
                continue
            command = [sys.executable, "-m", "tests.measurements.h200.alone", "plan", str(source)]
            cache = plan.with_suffix(".timing")
            kept = self.folder / "timing" / cache.name
            if kept.exists():
                shutil.copy(kept, cache)
            command += [str(plan), str(length), str(batch), str(cache)]
            log = (self.work / f"{plan.stem}.log").open("wb")
            running.append((plan, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
        begin = time.monotonic()
        for plan, process in running:
            process.wait(timeout=max(10, self.left()))
            log_path = self.work / f"{plan.stem}.log"
            text = log_path.read_text(errors="replace").strip()
            if process.returncode or not plan.exists():
                raise RuntimeError(f"{plan.name} was not built:\n{text[-1500:]}")
            print(text.splitlines()[-1], flush=True)
        self.keep("build_seconds", time.monotonic() - begin)
        # One file, since few come back; unpacked into PREPARED/timing it saves the next visit the timing of kernels.
        with tarfile.open(self.out / "timing.tar.xz", "w:xz", preset=1) as archive:
            for cache in sorted(self.work.glob("*.timing")):
                archive.add(cache, cache.name)

    def publish(self) -> None:
        """The repositories: code, plan, tokenizer, configuration."""
        for base, name, target in (
            (self.folder, "bert", self.work / "repository"),
            (self.folder / "minilm", "minilm", self.work / "repository-minilm"),
        ):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(base / "repository", target)
            refresh_code(target)
            for lane in target.glob("encoder_*"):
                length = lane.name.removeprefix("encoder_")
                if self.dry:
                    shutil.copy(self.folder / f"graphs/{name}.onnx", lane / "1/model.onnx")
                else:
                    os.link(self.work / f"{name}_{length}.plan", lane / "1/model.plan")
            self.configure("product", target, base)


def refresh_code(repository: Path) -> None:
    """The code of this checkout in place of what was prepared, perhaps earlier."""
    from builders import serving

    root = Path(serving.__file__).parent
    for model in repository.iterdir():
        kind = "entry" if model.name == "encode" else "lane"
        package = model / "1" / f"lanes_{kind}"
        for file in (root / kind).rglob("*.py"):
            target = model / "1/model.py" if file.name == "model.py" else package / file.relative_to(root / kind)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
        shutil.copyfile(root / "spans.py", package / "spans.py")
