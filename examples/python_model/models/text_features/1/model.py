"""Turns texts into vectors by hashing the groups of three letters in them; similar texts get similar vectors."""

import numpy as np
import triton_python_backend_utils as pb_utils
from hashing import features  # hashing.py is beside this file


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(64)
        config.set_dynamic_batching()
        config.add_input({"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "FEATURES", "data_type": "TYPE_FP32", "dims": [256]})
        return config

    def initialize(self, args):
        pb_utils.Logger.log_info(f"{args['model_instance_name']} is ready")

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        decoded = [text.decode("utf-8", errors="replace") for text in texts[:, 0]]
        if not all(text.strip() for text in decoded):
            # Only this request gets the error; the others of its batch get their answers.
            error = pb_utils.TritonError("TEXT: expected some letters, got none", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        vectors = np.stack([features(text, 256) for text in decoded])
        return pb_utils.InferenceResponse([pb_utils.Tensor("FEATURES", vectors)])
