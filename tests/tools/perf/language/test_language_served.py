"""Streams of `charonia serve` as language models: generate, inference over HTTP and gRPC."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.models import write_model
from tests.support.process import ServeProcess

from charonia.cli.perf import run
from charonia.tools.results.json_form import from_json
from charonia.tools.results.language import LanguageFigures, TokenCounter

SPEAKING = '''
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def text(name, value):
    return pb_utils.Tensor(name, np.array([[value]], object))


class TritonPythonModel:
    """Says a word as often as it is asked to, and counts two tokens for each."""

    def execute(self, requests):
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "sampling_parameters")
            count = json.loads(given.as_numpy().ravel()[0])["max_tokens"] % 10
            counts = pb_utils.get_input_tensor_by_name(request, "return_num_output_tokens") is not None
            sender = request.get_response_sender()
            for _ in range(count):
                outputs = [text("text_output", b" word")]
                if counts:
                    outputs.append(pb_utils.Tensor("num_output_tokens", np.array([[2]], np.uint32)))
                sender.send(pb_utils.InferenceResponse(outputs))
                time.sleep(0.02)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
CONFIG = """
backend: "python"
max_batch_size: 4
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true },
  { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }
]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "speak", SPEAKING, config=CONFIG)
    with ServeProcess(repository) as process:
        yield process


def measured(tmp_path: Path, *arguments: str) -> LanguageFigures:
    result = tmp_path / "run.json"
    common = ("-m", "speak", "--llm", "--output-tokens", "4", "--input-tokens", "6", "--request-count", "4", "--quiet")
    assert run([*common, "--json", str(result), *arguments]) == 0
    (level,) = from_json(result.read_bytes()).levels
    assert level.server.model is not None  # the server's own statistics are beside them
    assert level.language is not None
    return level.language


@pytest.mark.parametrize("endpoint", ["generate", "infer", "grpc"])
def test_pieces_and_tokens_are_those_that_the_model_sent(server: ServeProcess, tmp_path: Path, endpoint: str) -> None:
    if endpoint == "grpc":
        figures = measured(tmp_path, "-u", server.grpc, "-i", "grpc", "--endpoint", "infer")
    else:
        figures = measured(tmp_path, "-u", server.http, "--endpoint", endpoint)

    assert figures.inter_chunk is not None
    assert figures.inter_chunk.count == 4 * 3
    assert figures.inter_chunk.mean >= 2_000_000
    assert figures.output_tokens is not None
    assert (figures.output_tokens.mean, figures.output_counted_by) == (8, TokenCounter.SERVER)
    assert (figures.input_tokens, figures.input_counted_by) == (None, TokenCounter.NOBODY)


def test_a_stream_without_a_response_is_a_failed_request(server: ServeProcess, tmp_path: Path) -> None:
    result = tmp_path / "run.json"
    url = ("-u", server.grpc, "-i", "grpc", "--endpoint", "infer")

    status = run(
        [
            "-m",
            "speak",
            "--llm",
            "--output-tokens",
            "10",
            "--request-count",
            "2",
            "--quiet",
            "--json",
            str(result),
            *url,
        ]
    )

    (level,) = from_json(result.read_bytes()).levels
    assert [(error.kind, error.count) for error in level.errors] == [("EMPTY", 2)]
    assert status == 3
