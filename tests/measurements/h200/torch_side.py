"""The side of PyTorch: FP32 answers, and the server "before". For a Python with torch, transformers and grpcio.

`before` is a service that nobody has tuned: a front that puts each request into one queue, worker processes that
take one at a time, tokenise its texts in a loop, copy tensor by tensor and wait, and run the model eagerly in FP16.

    python3 -m tests.measurements.h200.torch_side answers FOLDER
    python3 -m tests.measurements.h200.torch_side before FOLDER --workers 4 --port 9001
    python3 -m tests.measurements.h200.torch_side peak FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.measurements.h200.seeded import weight

#: Tokens of the longest text that "before" takes, special tokens included.
LONGEST = 512


class Encoder:
    """BERT with the seeded weights, mean pooling, normalised."""

    def __init__(self, folder: Path, *, half: bool):
        import torch
        from transformers import BertConfig, BertModel

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.set_num_threads(1)
        shape = json.loads((folder / "facts.json").read_text())["shape"]
        model = BertModel(BertConfig(**shape), add_pooling_layer=False).eval()
        state = {
            name: torch.from_numpy(weight(name, tuple(value.shape), 0.05))
            for name, value in model.state_dict().items()
            if value.is_floating_point()
        }
        model.load_state_dict(state, strict=False)
        self.model = model.to(self.device, torch.float16 if half and self.device == "cuda" else torch.float32)

    def vectors(self, tensors: dict[str, Any]) -> Any:
        """FP32 [n, dim], on the host; `tensors` are on the host and are copied one by one, each waited for."""
        torch = self.torch
        with torch.inference_mode():
            moved = {}
            for name, tensor in tensors.items():
                moved[name] = tensor.to(self.device)
                if self.device == "cuda":
                    torch.cuda.synchronize()
            hidden = self.model(**moved).last_hidden_state.float()
            mask = moved["attention_mask"][..., None].float()
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


def answers(folder: Path) -> None:
    """bert.answers.npz: the FP32 vector of every text, without padding beyond the longest of its batch."""
    encoder = Encoder(folder, half=False)
    torch = encoder.torch
    corpus = json.loads((folder / "bert.json").read_text(encoding="utf-8"))["ids"]
    found = {}
    for kind, rows in corpus.items():
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        out: list[Any] = [None] * len(rows)
        size = max(1, 16384 // int(kind))
        for first in range(0, len(order), size):
            part = order[first : first + size]
            width = max(len(rows[number]) for number in part)
            ids = torch.zeros(len(part), width, dtype=torch.long)
            mask = torch.zeros(len(part), width, dtype=torch.long)
            for place, number in enumerate(part):
                ids[place, : len(rows[number])] = torch.tensor(rows[number])
                mask[place, : len(rows[number])] = 1
            for number, vector in zip(part, encoder.vectors({"input_ids": ids, "attention_mask": mask}), strict=True):
                out[number] = vector
        found[kind] = np.stack(out)
        print(f"FP32 answers of class {kind}: {found[kind].shape}", flush=True)
    np.savez(folder / "bert.answers.npz", **found)


def peak(folder: Path) -> None:
    """GPU memory of an eager FP16 process that runs the same batches: the largest of every bucket; JSON."""
    encoder = Encoder(folder, half=True)
    torch = encoder.torch
    for length, batch in json.loads((folder / "facts.json").read_text())["buckets"].items():
        ids = torch.randint(1000, 2000, (batch, int(length)))
        encoder.vectors({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    used = torch.cuda.mem_get_info() if encoder.device == "cuda" else (0, 0)
    held = torch.cuda.max_memory_reserved() if encoder.device == "cuda" else 0
    print(json.dumps({"torch_reserved_bytes": held, "device_used_bytes": used[1] - used[0]}), flush=True)
    time.sleep(1.0)  # for nvidia-smi


def _work(folder: str, requests: Any, replies: Any, ready: Any) -> None:
    """One worker process: takes a request, answers it, takes the next."""
    from transformers import PreTrainedTokenizerFast

    encoder = Encoder(Path(folder), half=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "bert.tokenizer.json"))
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    busy = {"tokenise": 0.0, "rest": 0.0}

    def answer(texts: list[str]) -> Any:
        begin = time.perf_counter()
        # One text at a time, as such services do; padded by hand to the longest of the request.
        rows = [tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"] for text in texts]
        width = max(len(row) for row in rows)
        ids = encoder.torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = encoder.torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        kinds = encoder.torch.zeros_like(ids)
        middle = time.perf_counter()
        vectors = encoder.vectors({"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds})
        busy["tokenise"] += middle - begin
        busy["rest"] += time.perf_counter() - middle
        return vectors

    # Every length first: PyTorch loads and picks kernels for each new one, which takes it some 50 ms.
    for number in (*range(1, LONGEST - 1), *(3, 100, 500) * 5):
        answer(["word " * number])
    busy.update(tokenise=0.0, rest=0.0)
    ready.put(1)
    while (item := requests.get()) is not None:
        number, texts = item
        try:
            replies.put((number, answer(texts), dict(busy)))
        except Exception as error:  # the request's own
            replies.put((number, f"{type(error).__name__}: {error}", dict(busy)))


def before(folder: Path, workers: int, port: int) -> None:
    """Serve until killed; prints `ready`, and the share of preprocessing each 5 s."""
    import grpc

    from tests.measurements.h200 import kserve

    context = multiprocessing.get_context("spawn")
    requests, replies, ready = context.Queue(), context.Queue(), context.Queue()
    processes = [
        context.Process(target=_work, args=(str(folder), requests, replies, ready), daemon=True) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.get(timeout=300)
    waiting: dict[int, asyncio.Future[Any]] = {}
    shares: dict[str, float] = {}

    async def infer(content: bytes, context: Any) -> bytes:
        number = next(numbers)
        waiting[number] = asyncio.get_running_loop().create_future()
        requests.put((number, kserve.texts_of(content)))
        try:
            got = await waiting[number]
        finally:
            del waiting[number]
        if isinstance(got, str):
            await context.abort(grpc.StatusCode.INTERNAL, got)
        return kserve.response_bytes(got)

    numbers = iter(range(1 << 60))

    async def serve() -> None:
        loop = asyncio.get_running_loop()

        def settle(item: Any) -> None:
            number, got, busy = item
            shares.update(busy)
            if number in waiting and not waiting[number].done():
                waiting[number].set_result(got)

        def pump() -> None:
            while True:
                item = replies.get()
                loop.call_soon_threadsafe(settle, item)

        import threading

        threading.Thread(target=pump, daemon=True).start()
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.unary_unary_rpc_method_handler(infer)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(kserve.SERVICE, {"ModelInfer": handler}),)
        )
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        print("ready", flush=True)
        while True:
            await asyncio.sleep(2)
            whole = sum(shares.values())
            if whole:
                print(f"preprocessing {shares['tokenise'] / whole:.4f}", flush=True)

    asyncio.run(serve())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["answers", "before", "peak"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--port", type=int, default=9001)
    options = parser.parse_args()
    if options.what == "answers":
        answers(options.folder)
    elif options.what == "peak":
        peak(options.folder)
    else:
        before(options.folder, options.workers, options.port)


if __name__ == "__main__":
    main()
