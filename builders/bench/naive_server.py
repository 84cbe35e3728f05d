"""The server people write first: one request at a time, texts tokenised in a Python loop, eager PyTorch.

A program of its own: `python -m builders.bench.naive_server --model FOLDER --port 9000`. It speaks the same protocol as
the product, so that the same client measures both.
"""

from __future__ import annotations

import argparse
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor


class NaiveEncoder:
    """A Hugging Face model called as its card shows it.

    Args:
        folder: of the model.
        pooling: "mean" or "cls".
        normalize: scale vectors to length 1.
        max_tokens: longer texts are cut.
        device: "cpu", in FP32, or "cuda", in FP16.
    """

    def __init__(self, folder: Path, pooling: str, normalize: bool, max_tokens: int, device: str = "cpu"):
        """Loads tokeniser and weights."""
        from transformers import AutoModel, AutoTokenizer

        dtype = torch.float16 if device == "cuda" else torch.float32
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder))
        model = AutoModel.from_pretrained(str(folder), attn_implementation="eager", dtype=dtype)
        self._model, self._device = model.to(device).eval(), device
        self._pooling, self._normalize, self._max_tokens = pooling, normalize, max_tokens

    @torch.no_grad()
    def encode(self, text: str) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
        """One text: its vector, float32 [dim], and its tokens."""
        inputs = self._tokenizer(text, truncation=True, max_length=self._max_tokens, return_tensors="pt")
        inputs = inputs.to(self._device)
        hidden = self._model(**inputs).last_hidden_state
        if self._pooling == "cls":
            vector = hidden[:, 0]
        else:
            mask = inputs["attention_mask"].unsqueeze(-1)
            vector = (hidden * mask).sum(1) / mask.sum(1)
        if self._normalize:
            vector = torch.nn.functional.normalize(vector)
        return vector[0].float().cpu().numpy(), int(inputs["input_ids"].shape[1])


class NaiveService(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """ModelInfer and ModelReady of `encode`, one request at a time."""

    def __init__(self, encoder: NaiveEncoder):
        """See the class."""
        self._encoder, self._one_at_a_time = encoder, threading.Lock()

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        return service_pb2.ModelReadyResponse(ready=request.name == "encode")

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: D102, N802
        texts = [raw.decode() for raw in deserialize_bytes_tensor(request.raw_input_contents[0])]
        with self._one_at_a_time:
            encoded = [self._encoder.encode(text) for text in texts]
        answer = service_pb2.ModelInferResponse(model_name=request.model_name)
        vectors = np.stack([vector for vector, _ in encoded]).astype(np.float32)
        tokens = np.array([[count] for _, count in encoded], np.int32)
        for name, datatype, array in (("EMBEDDING", "FP32", vectors), ("TOKENS", "INT32", tokens)):
            answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
            answer.raw_output_contents.append(array.tobytes())
        return answer


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--port", type=int, required=True, help="port of 127.0.0.1")
    parser.add_argument("--pooling", choices=("mean", "cls"), default="mean")
    parser.add_argument("--normalize", action="store_true")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="FP32 on a CPU, FP16 on a GPU")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU: install one built for CUDA, or say --no-naive")
    encoder = NaiveEncoder(options.model, options.pooling, options.normalize, options.max_tokens, options.device)
    encoder.encode("the first call is slow")
    server = grpc.server(ThreadPoolExecutor(64))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(NaiveService(encoder), server)
    if not server.add_insecure_port(f"127.0.0.1:{options.port}"):
        raise SystemExit(f"port {options.port} of 127.0.0.1 is taken")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
