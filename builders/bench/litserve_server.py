"""sentence-transformers under LitServe, as its documentation shows it: batches of what arrived within a window.

Runs in the environment of the peers and imports nothing of this project:
`PEERS/bin/python litserve_server.py --model FOLDER --max-tokens 512 --port 9000 --batch 4`.
"""

from __future__ import annotations

import argparse
import base64
from typing import Any

import litserve  # type: ignore[import-not-found]  # in the peers' environment alone
import numpy as np


class Embeddings(litserve.LitAPI):  # type: ignore[misc]
    """POST {"input": [text], "encoding_format": "base64" or "float"}, the answer in OpenAI's form."""

    def __init__(self, folder: str, max_tokens: int, **options: Any):
        """Keeps the folder and where texts are cut; the weights are loaded in the worker."""
        super().__init__(**options)
        self._folder, self._max_tokens = folder, max_tokens

    def setup(self, device: str) -> None:
        """Loads the model."""
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(self._folder, device=device)
        self._model.max_seq_length = self._max_tokens

    # Without annotations: LitServe hands them to FastAPI, which would then look for a query parameter.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        """The text and the encoding."""
        texts = request["input"]
        return (texts if isinstance(texts, str) else texts[0]), request.get("encoding_format", "float")

    def predict(self, inputs: Any, **_: Any) -> Any:
        """Vectors of a batch, float32 [n, dim], with each request's encoding."""
        batch = inputs if isinstance(inputs, list) else [inputs]
        vectors = self._model.encode([text for text, _ in batch], batch_size=len(batch), show_progress_bar=False)
        return list(zip(vectors, [encoding for _, encoding in batch], strict=True))

    def batch(self, inputs: Any) -> Any:
        """A batch as a list."""
        return list(inputs)

    def unbatch(self, output: Any) -> Any:
        """One answer per request."""
        return list(output)

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        """OpenAI's form."""
        vector, encoding = output[0] if isinstance(output, list) else output
        numbers = np.asarray(vector, np.float32)
        shown = base64.b64encode(numbers.tobytes()).decode() if encoding == "base64" else numbers.tolist()
        return {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": shown}]}


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a sentence-transformers model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True, help="longer texts are cut")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=float, default=0.01, help="seconds that a batch waits to be full")
    options = parser.parse_args()
    batches = {"max_batch_size": options.batch, "batch_timeout": options.window}
    api = Embeddings(options.model, options.max_tokens, api_path="/embeddings", **batches)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=120)
    server.run(host="127.0.0.1", port=options.port, generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
