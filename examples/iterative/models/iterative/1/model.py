"""Adds one token to each text that is running. New texts join with the next execution, complete ones leave."""

import json
from pathlib import Path

import triton_python_backend_utils as pb_utils
from answers import begin, send
from language import Language


class TritonPythonModel:
    def initialize(self, args):
        rows = json.loads(args["model_config"])["max_batch_size"]
        self.language = Language(Path(__file__).parent, rows)
        self.texts = {}  # by row of the batch, which a text keeps while it runs

    def execute(self, requests):
        running = []
        for row, request in enumerate(requests):
            if not is_set(request, "READY"):
                continue  # an empty row
            if is_set(request, "START"):
                self.texts[row] = begin(self.language, request, row)
            if self.texts[row] is not None:
                running.append((request, self.texts[row]))
        self.language.step([text for _, text in running])
        for request, text in running:
            send(request, text)
            if not text.is_done:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)


def is_set(request, control):
    return pb_utils.get_input_tensor_by_name(request, control).as_numpy().item()
