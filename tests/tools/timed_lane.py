"""A bucket model of a known service time: sleeps per batch and text, like a GPU that the CPU only waits for.

Copied over a version's model.py by `repositories.timed_repository`. Each answer is a function of the text's tokens
alone, so that a swapped answer shows.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

SERVICE_S = 0.0  # replaced when the file is copied
PER_TEXT_S = 0.0


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self._metrics = None  # as a lane without metrics of its own, for the queued one that inherits
        self._dim = int(config["output"][0]["dims"][0])

    def execute(self, requests):
        texts = sum(pb_utils.get_input_tensor_by_name(request, "length").as_numpy().shape[0] for request in requests)
        time.sleep(SERVICE_S + PER_TEXT_S * texts)
        responses = []
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
            length = pb_utils.get_input_tensor_by_name(request, "length").as_numpy()
            vectors = np.zeros((ids.shape[0], self._dim), dtype=np.float32)
            vectors[:, 0] = ids.sum(axis=1)
            vectors[:, 1] = length[:, 0]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", vectors)]))
        return responses

    def finalize(self):
        """Nothing to end."""
