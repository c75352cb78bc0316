"""Completes the texts of a batch together. New requests wait until the longest is done."""

import json
from pathlib import Path

from answers import begin, send
from language import Language


class TritonPythonModel:
    def initialize(self, args):
        rows = json.loads(args["model_config"])["max_batch_size"]
        self.language = Language(Path(__file__).parent, rows)

    def execute(self, requests):
        pairs = [(request, begin(self.language, request, row)) for row, request in enumerate(requests)]
        running = [(request, text) for request, text in pairs if text is not None]
        while running:
            self.language.step([text for _, text in running])
            for request, text in running:
                send(request, text)
            running = [(request, text) for request, text in running if not text.is_done]
