"""Load from several processes on a server of KServe v2 over gRPC: closed loop and open loop, answers sampled.

Open loop counts from the scheduled time. Requests are put together before the clock starts and answers are taken as
bytes, so that one process carries some thousand requests a second; one answer of a hundred is read and compared.

    load(url, corpus, plan, ...) -> Result
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Plan:
    """What to send.

    Attributes:
        mix: share of each class of the corpus.
        seconds: how long; also the end of the measurement where `count` is not reached.
        rate: requests a second in all, Poisson; 0: closed loop.
        clients: requests in flight in all, closed loop.
        count: requests in all, closed loop; 0: until `seconds` are over.
        texts: of one request.
        sample: share of the answers that is compared.
        processes: that send; 0: as many as the visit says.
        seed: of the texts and the times.
    """

    mix: dict[str, float]
    seconds: float = 10.0
    rate: float = 0.0
    clients: int = 64
    count: int = 0
    texts: int = 1
    sample: float = 0.01
    processes: int = 0
    seed: int = 1


@dataclass
class Result:
    """What came of it; times in milliseconds."""

    sent: int = 0
    answered: int = 0
    seconds: float = 0.0
    throughput: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    worst: float = 0.0
    by_class: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    least_cosine: float = 1.0
    wrong: int = 0
    first: list[float] = field(default_factory=list)
    """Latencies of the first requests in the order of their start, at most 200."""
    lag_p99: float = 0.0
    """How late the sender itself was, open loop: more than a few ms means the load, not the server, was measured."""


LINE = 0.9998
"""Cosine to FP32 below which an answer is wrong; the gate's line for FP16."""


class Corpus:
    """Texts by class with their FP32 vectors: corpus.json (class to texts) and answers.npz (class to [n, dim])."""

    def __init__(self, folder: Path, name: str):
        self.texts: dict[str, list[str]] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["texts"]
        answers = folder / f"{name}.answers.npz"
        self.vectors = dict(np.load(answers)) if answers.exists() else {}


def load(url: str, folder: Path, corpus: str, plan: Plan) -> Result:
    """Run a plan in processes of this Python; returns when all have ended."""
    plan.processes = plan.processes or 4
    with tempfile.TemporaryDirectory() as place:
        jobs = []
        for number in range(plan.processes):
            out = Path(place) / f"{number}.npz"
            job = {"url": url, "folder": str(folder), "corpus": corpus, "plan": asdict(plan), "number": number}
            command = [sys.executable, "-m", "tests.measurements.h200.load", json.dumps(job), str(out)]
            pipe = subprocess.PIPE
            jobs.append((subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True), out))
        try:
            for process, _ in jobs:
                if process.stdout is None or process.stdout.readline().strip() != "connected":
                    raise RuntimeError(f"a load process could not connect to {url}")
            start = time.time() + 0.3
            for process, _ in jobs:
                if process.stdin is not None:
                    process.stdin.write(f"{start}\n")
                    process.stdin.flush()
            for process, _ in jobs:
                process.wait(timeout=plan.seconds + 90)
        except subprocess.TimeoutExpired:
            print("a load process did not come to its end in time", flush=True)
        finally:
            for process, _ in jobs:
                process.kill()
        return _summary([out for _, out in jobs if out.exists()], plan)


def _summary(files: list[Path], plan: Plan) -> Result:
    parts = [np.load(file, allow_pickle=False) for file in files]
    result = Result()
    if not parts:
        result.errors = {"no load process came to its end": 1}
        return result
    begin, latency, kind, lag = (np.concatenate([part[name] for part in parts]) for name in ("at", "ms", "kind", "lag"))
    errors: Counter[str] = Counter()
    for part in parts:
        errors.update(json.loads(str(part["errors"])))
        result.compared += int(part["compared"])
        result.wrong += int(part["wrong"])
        result.least_cosine = min(result.least_cosine, float(part["least"]))
    good = ~np.isnan(latency)
    result.sent, result.answered, result.errors = len(latency), int(good.sum()), dict(errors)
    if not good.any():
        return result
    end = float((begin + latency / 1000)[good].max())
    result.seconds = end - float(begin.min())
    result.throughput = result.answered * plan.texts / result.seconds
    result.p50, result.p99, result.worst = (float(np.percentile(latency[good], at)) for at in (50, 99, 100))
    for place, name in enumerate(plan.mix):
        own = latency[good & (kind == place)]
        if own.size:
            result.by_class[name] = [round(float(np.percentile(own, at)), 2) for at in (50, 99)]
    order = np.argsort(begin, kind="stable")
    result.first = [round(float(value), 2) for value in latency[order][:200]]
    result.lag_p99 = float(np.percentile(lag, 99)) if lag.size else 0.0
    return result


class _Sender:
    """One process's part of a plan."""

    def __init__(self, job: dict[str, Any]):
        from tests.measurements.h200 import kserve

        plan = self.plan = Plan(**job["plan"])
        self.kserve, self.job = kserve, job
        corpus = Corpus(Path(job["folder"]), job["corpus"])
        self.vectors = corpus.vectors
        self.random = np.random.default_rng([plan.seed, job["number"]])
        self.kinds = list(plan.mix)
        self.bodies = {
            kind: [
                kserve.request_bytes([texts[(first + k) % len(texts)] for k in range(plan.texts)])
                for first in range(len(texts))
            ]
            for kind, texts in corpus.texts.items()
            if kind in plan.mix
        }
        self.rows: list[tuple[float, float, int, float]] = []
        self.errors: Counter[str] = Counter()
        self.compared = self.wrong = 0
        self.least = 1.0
        share = np.array(list(plan.mix.values()))
        self.share = share / share.sum()
        self.start = 0.0

    async def one(self, call: Any, at: float, late: float, kind: int, text: int, look: bool) -> None:
        name = self.kinds[kind]
        try:
            answer = await call(self.bodies[name][text])
        except Exception as error:  # every kind of failure is counted
            code = getattr(error, "code", lambda: None)()
            told = getattr(error, "details", None)
            details = (told() if told else str(error)) or ""
            self.errors[f"{getattr(code, 'name', type(error).__name__)}: {details[:160]}"] += 1
            self.rows.append((at, float("nan"), kind, late))
            return
        self.rows.append((at, (time.time() - at) * 1000, kind, late))
        if look and name in self.vectors:
            self.compare(self.kserve.output_of(answer), name, text)

    def compare(self, got: Any, name: str, text: int) -> None:
        reference = self.vectors[name]
        want = reference[[(text + k) % len(reference) for k in range(self.plan.texts)]].astype(np.float64)
        norms = np.linalg.norm(got, axis=1) * np.linalg.norm(want, axis=1)
        cosine = (got * want).sum(1) / np.maximum(norms, 1e-12)
        least = float(np.nan_to_num(cosine, nan=-1.0).min())
        self.compared += len(got)
        self.wrong += int((~(cosine >= LINE)).sum())
        self.least = min(self.least, least)

    async def run(self) -> None:
        import grpc

        plan, random = self.plan, self.random
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self.job["url"], options=options) as channel:
            call = channel.unary_unary(f"/{self.kserve.SERVICE}/ModelInfer")
            await asyncio.wait_for(channel.channel_ready(), 20)
            print("connected", flush=True)
            # In a thread: a blocked loop would let the channel's keep-alive lapse.
            self.start = float(await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline))
            await asyncio.sleep(max(0.0, self.start - time.time()))
            end = self.start + plan.seconds
            if plan.rate:
                await self.open_loop(call, plan.rate / plan.processes)
                return
            left = iter(range(-(-plan.count // plan.processes) if plan.count else 1 << 60))

            async def client() -> None:
                for _ in left:
                    now = time.time()
                    if now > end:
                        return
                    kind = int(random.choice(len(self.kinds), p=self.share))
                    text = int(random.integers(len(self.bodies[self.kinds[kind]])))
                    await self.one(call, now, 0.0, kind, text, random.random() < plan.sample)

            await asyncio.gather(*(client() for _ in range(max(1, plan.clients // plan.processes))))

    async def open_loop(self, call: Any, rate: float) -> None:
        plan, random = self.plan, self.random
        number = int(rate * plan.seconds * 1.3) + 50
        times = self.start + np.cumsum(random.exponential(1 / rate, number))
        times = times[times < self.start + plan.seconds]
        kinds = random.choice(len(self.kinds), len(times), p=self.share)
        looks = random.random(len(times)) < plan.sample
        tasks: set[Any] = set()
        for at, kind, look in zip(times.tolist(), kinds.tolist(), looks.tolist(), strict=True):
            wait = at - time.time()
            if wait > 0:
                await asyncio.sleep(wait)
            late = max(0.0, (time.time() - at) * 1000)
            text = int(random.integers(len(self.bodies[self.kinds[kind]])))
            task = asyncio.ensure_future(self.one(call, at, late, kind, text, look))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks, timeout=60)


def main() -> None:
    """One process: the job as JSON, the file for its numbers."""
    sender = _Sender(json.loads(sys.argv[1]))
    try:
        asyncio.run(sender.run())
    finally:
        rows = np.array(sender.rows, dtype=float).reshape(-1, 4)
        np.savez(
            sys.argv[2], at=rows[:, 0], ms=rows[:, 1], kind=rows[:, 2].astype(int), lag=rows[:, 3],
            errors=json.dumps(dict(sender.errors)), compared=sender.compared, wrong=sender.wrong, least=sender.least,
        )  # fmt: skip


def short(result: Result) -> str:
    """One line."""
    parts = [
        f"{result.answered} of {result.sent} answered", f"{result.throughput:.0f} texts/s", f"P50 {result.p50:.1f}",
        f"P99 {result.p99:.1f} ms", f"compared {result.compared}, wrong {result.wrong}",
        f"cosine {result.least_cosine:.6f}",
    ]  # fmt: skip
    if result.errors:
        parts.append(f"errors {result.errors}")
    if result.lag_p99 > 5:
        parts.append(f"THE SENDER WAS LATE: P99 {result.lag_p99:.1f} ms")
    return ", ".join(parts)


def as_dict(result: Result) -> dict[str, Any]:
    """For JSON."""
    return {item.name: getattr(result, item.name) for item in fields(result)}


if __name__ == "__main__":
    main()
