"""Texts as vectors: how often each n-gram of letters occurs, n-grams folded into a fixed number of places."""

import json
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.n = int(config["parameters"]["NGRAM"]["string_value"])
        self.places = int(pb_utils.get_output_config_by_name(config, "VECTOR")["dims"][0])
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: {self.n}-grams in {self.places} places")

    def execute(self, requests):
        """Answer a batch: the texts of all requests are counted into one array, which is scaled at once."""
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel() for request in requests]
        counts = np.zeros((sum(map(len, texts)), self.places), np.float32)
        for row, text in enumerate(np.concatenate(texts)):
            self.count(text.decode("utf-8", "replace").lower(), counts[row])
        lengths = np.linalg.norm(counts, axis=1, keepdims=True)
        vectors = np.divide(counts, lengths, out=counts, where=lengths > 0)
        ends = np.cumsum([len(text) for text in texts])
        return [self.answer(rows) for rows in np.split(vectors, ends[:-1])]

    def count(self, text, row):
        padded = f" {text} "
        for start in range(len(padded) - self.n + 1):
            row[zlib.crc32(padded[start : start + self.n].encode()) % self.places] += 1

    def answer(self, vectors):
        if not vectors.any(axis=1).all():
            error = pb_utils.TritonError(f"a text has less than {self.n - 2} letters", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        return pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", vectors)])
