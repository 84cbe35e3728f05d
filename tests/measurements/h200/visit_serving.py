"""Plans served by tritonserver with the Python engine, measured; after `prepare_serving.py`. README.md says how.

    python3.10 -m tests.measurements.h200.visit_serving PHASE... --folder PREPARED --work WORK --out OUT --seconds 570

Each phase writes its results into OUT/results.json as it ends; a phase that would not fit into the time is left out and
named. Tables come last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.measurements.h200.load import Plan
from tests.measurements.h200.server import Sampler, engine_metrics, lane_pids
from tests.measurements.h200.visit_making import Making

MIX = {"128": 0.65, "256": 0.20, "512": 0.15}
LONG_MIX = {"128": 0.62, "256": 0.19, "512": 0.14, "1024": 0.03, "2048": 0.02}
TECHNIQUES = ("one-bucket", "buckets", "arena", "pinned", "graphs", "overlap")
WINDOWS = ("window-5", "window-2", "window-0")  # the product has 10 ms
#: Seconds that a phase needs on the H200, about; it is left out when less is left.
NEED = {
    "answers": 45, "fill": 25, "build": 90, "publish": 10, "before": 340, "check": 40, "first": 35, "max": 35,
    "rate": 60, "windows": 60, "techniques": 110, "spans": 40, "kernels": 35, "short": 95,
    "slicing": 35, "soak": 275, "kill": 45, "minilm": 50,
}  # fmt: skip


class Visit(Making):
    """The phases that measure."""

    def before(self) -> None:
        """1, 2 and 4 workers: the most they can take; then 4 workers at 90 % of that."""
        self.stop()  # its memory is not theirs
        for workers in (1, 2, 4):
            if self.left() < 60:
                print(f"before x{workers}: left out, {self.left():.0f} s left", flush=True)
                return
            log = self.out / "before.log"
            mark = log.stat().st_size if log.exists() else 0
            port = 9000 + workers
            arguments = ("before", str(self.work), "--workers", str(workers), "--port", str(port))
            process = self.torch(*arguments, log=log, wait=False)
            try:
                limit = time.monotonic() + 180
                while "ready" not in log.read_bytes()[mark:].decode():
                    if process.poll() is not None or time.monotonic() > limit:
                        raise RuntimeError(f"before x{workers} did not start:\n{log.read_text()[-2000:]}")
                    time.sleep(0.5)
                url = f"127.0.0.1:{port}"
                # As many requests as the figure asks for: at some hundred a second the time is the limit.
                seconds = self.options.before_seconds if workers == 4 else 12
                most = self.load(f"before_{workers}_max", Plan(MIX, seconds=seconds, clients=8 * workers), url)
                if workers == 4:
                    rate = 0.9 * most["throughput"]
                    self.keep("before_rate", rate)
                    self.load("before_4_rate", Plan(MIX, seconds=self.options.before_seconds, rate=rate), url)
                text = log.read_bytes()[mark:].decode()
                shares = [line.split()[1] for line in text.splitlines() if line.startswith("preprocessing")]
                self.keep(f"before_{workers}_preprocessing", float(shares[-1]) if shares else None)
            finally:
                end_session(process)
        self.torch("peak", str(self.work), log=self.out / "torch.log")
        line = next(line for line in reversed((self.out / "torch.log").read_text().splitlines()) if line[:1] == "{")
        self.keep("before_memory", json.loads(line))

    def check(self) -> None:
        """Every text of every bucket once and more, each answer compared with FP32; 1 and 8 texts a request."""
        for kind in [name for name in LONG_MIX if int(name) in self.buckets]:
            count = 1500 if int(kind) <= 512 else 400
            found = self.load(f"check_{kind}", Plan({kind: 1.0}, seconds=12, clients=32, count=count, sample=1.0))
            if not found["compared"]:
                print("NOTHING WAS COMPARED: run the phase `answers` first", flush=True)
        self.load("check_mixed_8", Plan(MIX, seconds=8, clients=16, count=800, texts=8, sample=1.0))
        self.keep("memory_serving", Sampler.once())
        self.keep("engine_after_check", engine_metrics(self.triton()))

    def first(self) -> None:
        """A fresh server: its first 50 requests against the steady state."""
        self.stop()
        self.triton()
        rate = 300.0 if not self.dry else 5.0
        found = self.load("first", Plan(MIX, seconds=14, rate=rate, sample=0.05, seed=3))
        early = found["first"][:50]
        ratio = {
            "median_of_50": float(np.median(early)), "max_of_50": float(np.max(early)), "p50": found["p50"],
            "p99": found["p99"], "median_ratio": float(np.median(early)) / found["p50"],
            "max_ratio": float(np.max(early)) / found["p99"],
        }  # fmt: skip
        print(f"first 50: {ratio}", flush=True)
        self.keep("first_50", ratio)

    def max(self) -> None:
        """The most that the product takes: the mix, and texts of up to 128 tokens."""
        best: dict[str, Any] = {}
        for clients in (128, 256, 384):
            found = self.load(f"max_mix_{clients}", Plan(MIX, seconds=8, clients=clients))
            if not best or found["throughput"] > best["throughput"]:
                best = {**found, "clients": clients}
        self.keep("max_mix", best)
        self.keep("engine_after_max", engine_metrics(self.triton()))

    def short(self) -> None:
        """Texts of up to 128 tokens: how many requests in flight it takes, then what else wins or loses."""
        best: dict[str, Any] = {}
        mix = {"128": 1.0}
        for clients, senders in ((256, 4), (512, 4), (512, 6), (768, 6), (1024, 6)):
            plan = Plan(mix, seconds=6, clients=clients, processes=senders)
            found = self.load(f"short_{clients}_{senders}", plan)
            if not best or found["throughput"] > best["throughput"]:
                best = {**found, "clients": clients, "senders": senders, "variant": "product"}
                self.keep("max_short", best)
        for variant in ("processes-6", "processes-14", "window-2", "overlap"):
            if self.left() < 20:
                print(f"{variant}: left out", flush=True)
                break
            self.change(variant)
            plan = Plan(mix, seconds=6, clients=best["clients"], processes=best["senders"])
            found = self.load(f"short_{variant}", plan)
            if found["throughput"] > self.results["max_short"]["throughput"]:
                told = {"clients": best["clients"], "senders": best["senders"], "variant": variant}
                self.keep("max_short", {**found, **told})
        self.change("product")

    def rate(self) -> None:
        """The product at 90 % of what "before" with four workers takes."""
        rate = self.results.get("before_rate")
        if rate is None:
            print("rate: left out, `before` has not run", flush=True)
            return
        self.load("rate_product", Plan(MIX, seconds=max(20, min(70, 20500 / rate)), rate=rate))

    def windows(self) -> None:
        """The entry's window at that rate."""
        rate = self.results.get("before_rate", 300.0)
        for variant in WINDOWS:
            if self.left() < 25:
                print(f"{variant}: left out", flush=True)
                break
            self.change(variant)
            self.load(
                f"rate_{variant}", Plan(MIX, seconds=max(12, min(self.options.window_seconds, 20500 / rate)), rate=rate)
            )
        self.change("product")

    def techniques(self) -> None:
        """Each technique in turn: the most it takes, and the latency at the rate."""
        rate = self.results.get("before_rate", 300.0)
        for variant in TECHNIQUES:
            if self.left() < 25:
                print(f"{variant}: left out", flush=True)
                break
            self.change(variant)
            self.load(f"technique_{variant}_max", Plan(MIX, seconds=5, clients=384))
            self.load(f"technique_{variant}_rate", Plan(MIX, seconds=6, rate=rate))
        self.change("product")

    def spans(self) -> None:
        """Shares of the request path, and the GPU idle while a request is in decode, tokenise or group."""
        from builders.profile.path import path_shares, read_spans

        shutil.rmtree(self.work / "spans", ignore_errors=True)
        self.change("spans")
        self.load("spans_max", Plan(MIX, seconds=6, clients=384))
        rate = self.results.get("before_rate")
        time.sleep(1.0)
        found = read_spans(self.work / "spans")
        self.keep("spans", path_shares(found))
        print(f"spans at the maximum: {self.results['spans']}", flush=True)
        with (self.out / "spans.json").open("w") as file:
            json.dump([vars(span) for span in found[:60000]], file)
        if rate:
            shutil.rmtree(self.work / "spans", ignore_errors=True)
            self.change("product")
            self.change("spans")
            self.load("spans_rate", Plan(MIX, seconds=6, rate=rate))
            time.sleep(1.0)
            self.keep("spans_at_rate", path_shares(read_spans(self.work / "spans")))
            print(f"spans at the rate: {self.results['spans_at_rate']}", flush=True)
        self.change("product")

    def kernels(self) -> None:
        """The engine alone, in a process of its own: times, kernels, gaps, with each set of techniques."""
        self.stop()
        if self.dry:
            return
        for length in (128, 512):
            command = [sys.executable, "-m", "tests.measurements.h200.alone", "engine"]
            command += [str(self.work / f"repository/encoder_{length}/1/model.plan"), str(length)]
            command += [str(self.buckets[length]), "none" if "native" in self.without else "native"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            print(*(lines or [done.stdout[-500:], done.stderr[-1500:]]), sep="\n", flush=True)
            self.keep(f"kernels_{length}", [json.loads(line) for line in lines])

    def slicing(self) -> None:
        """What processes beside each other cost: two engines, each alone, then both at once."""
        self.stop()
        if self.dry:
            return

        def started(length: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "tests.measurements.h200.alone", "loop"]
            command += [str(self.work / f"repository/encoder_{length}/1/model.plan"), str(length)]
            command += [str(self.buckets[length]), "none" if "native" in self.without else "native"]
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def rates(*lengths: int) -> list[float]:
            running = [started(length) for length in lengths]
            for process in running:
                assert process.stdout is not None
                process.stdout.readline()  # ready
            for process in running:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            return [float(process.communicate(timeout=60)[0]) for process in running]

        alone = [*rates(128), *rates(512)]
        both = rates(128, 512)
        kept = sum(now / before for now, before in zip(both, alone, strict=True))
        print(f"batches/s alone {alone}, together {both}: {kept:.3f} of one GPU's work is left", flush=True)
        self.keep("slicing", {"alone": alone, "together": both, "kept": kept})

    def soak(self) -> None:
        """Four minutes of mixed load, long texts too, at half the maximum of the mix without them: memory, answers."""
        server = self.triton()
        most = self.results.get("max_mix", {}).get("throughput", 1000.0)
        seconds = min(240.0, self.left() - 30)
        memory = [Sampler.once()]
        before = engine_metrics(server)
        timer = threading.Timer(seconds / 2, lambda: memory.append(Sampler.once()))
        timer.start()
        found = self.load("soak", Plan(LONG_MIX, seconds=seconds, rate=0.5 * most))
        timer.cancel()
        memory.append(Sampler.once())
        late = engine_metrics(server).get("late_allocations_total", {})
        self.keep("soak_memory", {"samples": memory, "late_allocations": late, "before": before})
        print(f"soak: {found['compared']} compared, memory {memory}, late allocations {late}", flush=True)

    def kill(self) -> None:
        """Kill the process of the busiest lane under load, then heal it the documented way."""
        server = self.triton()
        model = f"encoder_{min(self.buckets)}"
        steps: dict[str, Any] = {}
        begin = time.time()

        def hurt() -> None:
            pids = lane_pids(self.work / "repository" / model)
            for pid in pids:
                os.kill(pid, 9)
            steps["killed_after_s"], steps["pids"] = time.time() - begin, pids

        def heal() -> None:
            started = time.time()
            os.utime(self.work / "repository" / model / "1/model.py")
            server.load_model(model)
            steps["heal_seconds"], steps["healed_after_s"] = time.time() - started, time.time() - begin

        timers = [threading.Timer(6, hurt), threading.Timer(9, heal)]
        for timer in timers:
            timer.start()
        rate = 400.0 if not self.dry else 8.0
        found = self.load("kill_load", Plan(MIX, seconds=20 / (0.15 if self.dry else 1), rate=rate, sample=0.2))
        for timer in timers:
            timer.join()
        after = self.load("kill_after", Plan(MIX, seconds=5, clients=32, sample=1.0))
        steps |= {"lost": found["sent"] - found["answered"], "errors": found["errors"], "after": after["errors"]}
        print(f"kill: {steps}", flush=True)
        self.keep("kill", steps)

    def minilm(self) -> None:
        """The real model at bucket 128."""
        self.stop()
        self.start(self.work / "repository-minilm", self.folder / "minilm", "triton-minilm.log")
        try:
            plan = Plan({"128": 1.0}, seconds=10, clients=32, count=2000, sample=1.0)
            self.load("minilm_check", plan, corpus="minilm")
            self.load("minilm_max", Plan({"128": 1.0}, seconds=8, clients=256), corpus="minilm")
        finally:
            self.stop()


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process started in a session of its own, with its children."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait(timeout=20)
    time.sleep(1.0)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phases", nargs="+", choices=list(NEED))
    parser.add_argument("--folder", type=Path, required=True, help="of prepare_serving.py")
    parser.add_argument("--work", type=Path, required=True, help="plans, repositories, results; kept between calls")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/visit")))
    parser.add_argument("--seconds", type=float, default=570, help="time of this call")
    parser.add_argument("--torch-python", default="python3", help="a Python with torch, transformers, grpcio")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=["warm-up", "native", "gpu-kind"], help="see Visit.start"
    )
    parser.add_argument("--senders", type=int, default=4, help="processes of the load")
    parser.add_argument("--window-seconds", type=float, default=12, help="of each window's load, at least 12")
    parser.add_argument("--again", action="store_true", help="phases that are done, too")
    parser.add_argument("--before-seconds", type=float, default=50, help="of each load on four workers")
    visit = Visit(parser.parse_args())
    failed = []
    try:
        for name in visit.options.phases:
            if name in visit.results.get("done", []) and not visit.options.again:
                print(f"=== {name}: done before", flush=True)
                continue
            if not visit.dry and visit.left() < NEED[name] * 0.8:
                print(f"=== {name}: left out, {visit.left():.0f} s left", flush=True)
                continue
            print(f"=== {name} ({visit.left():.0f} s left)", flush=True)
            begin = time.monotonic()
            try:
                run: Callable[[], None] = getattr(visit, name)
                run()
                if name not in ("fill", "publish"):
                    visit.keep("done", [*visit.results.get("done", []), name])
            except Exception:  # the other phases are worth having
                traceback.print_exc()
                failed.append(name)
                visit.keep(f"failed_{name}", traceback.format_exc()[-2000:])
            print(f"--- {name}: {time.monotonic() - begin:.1f} s", flush=True)
    finally:
        visit.stop()
        from tests.measurements.h200.tables import tables

        print(tables(visit.results), flush=True)
        shutil.copy(visit.store, visit.out / "results.json") if visit.store.exists() else None
        if failed:
            print(f"FAILED: {', '.join(failed)}", flush=True)


if __name__ == "__main__":
    main()
