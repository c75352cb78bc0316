"""The probabilities of the recognition become text."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from decoding import decode  # decoding.py is beside this file


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        # The blank comes first and the space last; the rest is from the recogniser's file.
        self.characters = ["", *(folder / "characters.txt").read_text(encoding="utf-8").split("\n"), " "]
        self.score_min = float(json.loads(args["model_config"])["parameters"]["SCORE_MIN"]["string_value"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        probability = pb_utils.get_input_tensor_by_name(request, "PROBABILITY").as_numpy()
        boxes = pb_utils.get_input_tensor_by_name(request, "LINE_BOXES").as_numpy()
        if probability.shape[2] != len(self.characters):
            message = f"PROBABILITY: expected {len(self.characters)} characters, got {probability.shape[2]}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
        # A page without text comes as one empty line and no box.
        texts, scores = decode(probability[: len(boxes)], self.characters)
        (kept,) = np.nonzero(scores >= self.score_min)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("TEXT", np.array([texts[number].encode() for number in kept], np.object_)),
                pb_utils.Tensor("SCORE", scores[kept]),
                pb_utils.Tensor("BOX", boxes[kept]),
                pb_utils.Tensor("LINE", kept.astype(np.int32)),
            ]
        )
