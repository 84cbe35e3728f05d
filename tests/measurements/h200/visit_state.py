"""The state of a serving visit: what was prepared, what was found, the running server, and a load on it."""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.measurements.h200.load import Plan, as_dict, load, short
from tests.measurements.h200.server import Sampler, Server, clean_environment, cpu_times, used_cores


class VisitState:
    """What the phases of a visit share."""

    def __init__(self, options: argparse.Namespace):
        self.folder: Path = options.folder.resolve()
        self.work: Path = options.work.resolve()
        self.out: Path = options.out.resolve()
        self.options = options
        self.end = time.monotonic() + options.seconds
        self.facts = json.loads((self.folder / "facts.json").read_text())
        self.dry = bool(self.facts["dry"])
        self.buckets = {int(length): batch for length, batch in self.facts["buckets"].items()}
        for place in (self.work, self.out):
            place.mkdir(parents=True, exist_ok=True)
        # The corpus is read beside its answers, which are made here.
        for name in ("bert.json", "minilm.json", "minilm.answers.npz", "facts.json", "bert.tokenizer.json"):
            shutil.copy(self.folder / name, self.work / name)
        self.store = self.work / "results.json"
        self.results: dict[str, Any] = json.loads(self.store.read_text()) if self.store.exists() else {}
        self.server: Server | None = None
        self.without: list[str] = list(self.options.without)
        self.variant = ""

    def left(self) -> float:
        """Seconds left."""
        return float(self.end - time.monotonic())

    def keep(self, name: str, value: Any) -> None:
        """Write a result down at once."""
        self.results[name] = value
        text = json.dumps(self.results, indent=1)
        self.store.write_text(text)
        (self.out / "results.json").write_text(text)

    def load(self, name: str, plan: Plan, url: str | None = None, corpus: str = "bert") -> dict[str, Any]:
        """Run a load, with what the GPU did meanwhile; printed and kept."""
        plan.processes = plan.processes or self.options.senders
        if self.dry:
            plan.seconds, plan.processes = max(2.0, plan.seconds * 0.15), 1
            plan.rate, plan.clients = min(plan.rate, 8.0), min(plan.clients, 8)
            plan.mix = {kind: share for kind, share in plan.mix.items() if int(kind) in self.buckets}
        address = url or self.triton().grpc
        before, senders = cpu_times(), _children()
        with Sampler() as sampler:
            result = load(address, self.work, corpus, plan)
        # Over the load's own time. The senders' start is among theirs.
        seconds = max(result.seconds, 0.1)
        cores = {**used_cores(before, cpu_times(), seconds), "senders": round((_children() - senders) / seconds, 2)}
        found = {**as_dict(result), **sampler.summary(), "cores": cores}
        print(f"{name}: {short(result)}, {sampler.line()}, cores {cores}", flush=True)
        self.keep(name, found)
        return found

    def triton(self, variant: str = "product") -> Server:
        """The running server; started with a variant where none runs."""
        if self.server is None:
            self.start(self.work / "repository", self.folder, "triton.log", variant)
            self.variant = variant
        assert self.server is not None
        return self.server

    def start(self, repository: Path, base: Path, log: str, variant: str = "product") -> None:
        """Start the server; where it does not, once more without what may be at fault, so that a visit is not lost."""
        models = sorted(path.name for path in repository.iterdir())
        while True:
            self.configure(variant, repository, base)
            self.server = Server(repository, models, self.out / log)
            try:
                seconds = self.server.start(timeout=120)
            except RuntimeError as error:
                self.server = None
                untried = [name for name in ("luck", "warm-up", "native", "gpu-kind") if name not in self.without]
                if self.dry or not untried or self.left() < 60:
                    raise
                print(f"{error}\nONCE MORE WITHOUT: {untried[0]}", flush=True)
                self.without.append(untried[0])
                continue
            # The first time it is tried again as it is.
            missing = [name for name in self.without if name != "luck"]
            without = f", without {missing}" if missing else ""
            print(f"tritonserver ready after {seconds:.1f} s with {', '.join(models)}{without}", flush=True)
            return

    def configure(self, variant: str, repository: Path | None = None, base: Path | None = None) -> list[str]:
        """Put a variant's configurations in place; the models whose text changed."""
        repository, base = repository or self.work / "repository", base or self.folder
        changed = []
        for path in sorted((base / "configs" / variant).iterdir()):
            target = repository / path.stem / "config.pbtxt"
            text = path.read_text().replace("@SPANS@", str(self.work / "spans"))
            if "native" in self.without:  # TensorRT's own allocations uncounted
                text = text.replace('\\"profile\\": 0', '\\"profile\\": 0, \\"native_allocations\\": false')
            # The entry's stays: its processes make their first calls, and count as warm, after it.
            if "warm-up" in self.without and path.stem != "encode":
                text = re.sub(r"^model_warmup \{\n(?: .*\n)*\}\n", "", text, flags=re.M)
            if "gpu-kind" in self.without:
                text = text.replace("  gpus: 0\n", "").replace("KIND_GPU", "KIND_CPU")
            if not target.exists() or target.read_text() != text:
                target.write_text(text)
                changed.append(path.stem)
        return changed

    def change(self, variant: str) -> None:
        """Let the running server serve another variant: lanes first, then the entry."""
        server = self.triton()
        changed = self.configure(variant)
        for model in sorted(changed, key="encode".__eq__):
            server.load_model(model)
        self.variant = variant
        print(f"variant {variant}: {', '.join(changed) or 'nothing'} loaded again", flush=True)

    def stop(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.stop()
            self.server = None

    def torch(self, *arguments: str, log: Path, wait: bool = True) -> subprocess.Popen[bytes]:
        """Run `torch_side` under the machine's own Python."""
        command = [self.options.torch_python, "-m", "tests.measurements.h200.torch_side", *arguments]
        with log.open("ab") as file:
            process = subprocess.Popen(
                command, env=clean_environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        if wait and process.wait(timeout=max(10, self.left())) != 0:
            raise RuntimeError(f"torch_side {arguments[0]} failed:\n{log.read_text()[-2000:]}")
        return process


def _children() -> float:
    """CPU time of the processes that this one has started and that have ended, seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
