"""Language models: what a measurement is worth, which parameters are tried, and a search against a server."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.fork_server import run_command
from tests.support.models import write_model
from tests.support.runs import synthetic_run

from charonia.config.pbtxt import parse
from charonia.core.latency import LatencyHistogram
from charonia.server.backends.vllm.backend import engine_arguments
from charonia.tools.results.language import LanguageFigures, Spread, TokenCounter
from charonia.tools.tune.api import METRICS, Metric, ModelChange
from charonia.tools.tune.measure import metrics_of
from charonia.tools.tune.space import manual_dimensions
from charonia.tools.tune.tables import HEADERS
from charonia.tools.tune.variants import BaseModel, apply_change

MS = 1_000_000
SPEAKING = '''
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Says three words; the parameter `pause_ms` is the time before each."""

    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.pause_s = float(parameters["pause_ms"]["string_value"]) / 1000

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(3):
                time.sleep(self.pause_s)
                word = pb_utils.Tensor("text_output", np.array([b" word"], object))
                sender.send(pb_utils.InferenceResponse([word]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "pause_ms" value { string_value: "20" } }
"""
YAML = """
model_repository: models
profile_models:
  speak:
    parameters: {concurrency: [1]}
    model_config_parameters: {parameters: {pause_ms: [2]}}
    perf_analyzer_flags: {llm: true, endpoint: generate, input-tokens: 5}
objectives: [output_token_throughput]
constraints: {inter_token_latency_p50: {max: 15}}
"""


def figures() -> LanguageFigures:
    times = np.linspace(20, 40, 2001) * MS
    spread, histogram = Spread.of(times), LatencyHistogram.of(times.astype(np.int64))
    return LanguageFigures(
        input_counted_by=TokenCounter.SERVER,
        output_counted_by=TokenCounter.SERVER,
        output_rate=640.0,
        input_rate=0.0,
        request_rate=10.0,
        first_token=spread,
        second_token=None,
        inter_token=None,
        inter_chunk=None,
        latency=spread,
        user_rate=None,
        input_tokens=None,
        output_tokens=Spread.of(np.array([64.0])),
        first_token_times=histogram,
        inter_token_times=LatencyHistogram(),
        inter_chunk_times=LatencyHistogram(),
    )


def test_a_language_model_has_metrics_of_tokens() -> None:
    level = replace(synthetic_run().levels[0], language=figures())

    found = metrics_of(level, None)

    assert found["time_to_first_token_p50"].value == pytest.approx(30, rel=0.01)
    assert found["time_to_first_token_p99"].value == pytest.approx(39.8, rel=0.01)
    tokens = found["output_token_throughput"]
    assert tokens.value == pytest.approx(640)
    assert tokens.relative_half_width == pytest.approx(level.throughput.relative_half_width)
    assert not any(name.startswith("inter_token") for name in found)


def test_other_models_have_none() -> None:
    assert not any("token" in name for name in metrics_of(synthetic_run().levels[0], None))


def test_every_metric_has_a_name_and_a_header() -> None:
    assert set(METRICS) == set(Metric)
    assert {metric.value for metric in Metric} <= HEADERS.keys()


def test_parameters_of_an_engine_are_tried_and_the_others_stay() -> None:
    own = parse('name: "m" backend: "llama_cpp" parameters { key: "n_ctx" value { string_value: "512" } }')

    text = '{"n_parallel": 4, "warmup": true, "dtype": "auto", "sizes": ["a", 1]}'
    made = apply_change(BaseModel("m", own, own), ModelChange("m", fields=(("parameters", text),)))

    assert made.parameters == {
        "n_ctx": "512",
        "n_parallel": "4",
        "warmup": "true",
        "dtype": "auto",
        "sizes": '["a", 1]',
    }


def test_arguments_of_vllm_are_combined_and_reach_its_engine() -> None:
    own = parse('name: "m" backend: "vllm"')
    (dimension,) = manual_dimensions(
        "m", {"parameters": {"max_num_seqs": [16, 64], "enable_chunked_prefill": [False, True]}}
    )
    made = [
        apply_change(BaseModel("m", own, own), ModelChange("m", fields=(("parameters", str(value)),)))
        for value in dimension.values
    ]
    assert [engine_arguments(config, "{}")[0] for config in made] == [
        {"max_num_seqs": seqs, "enable_chunked_prefill": chunked} for seqs in (16, 64) for chunked in (False, True)
    ]


def test_a_search_under_limits_of_tokens_finds_the_parameter(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "speak", SPEAKING, config=CONFIG)
    (tmp_path / "tune.yaml").write_text(YAML)

    flags = ("--measurement-time", "0.5", "--run-config-search-mode", "brute")
    done = run_command("tune", "-f", "tune.yaml", "-e", "out", *flags, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    results = tmp_path / "out" / "results"
    table = (results / "metrics-model-inference.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(table)))
    kept = {row["Model Config Path"]: row["Satisfies Constraints"] for row in rows if row["Model"]}
    assert kept == {"speak_config_0": "Yes", "speak_config_default": "No"}
    best = json.loads((results / "charonia-tune.json").read_text())["groups"][0]["decision"]["best"]
    assert best["metrics"]["speak"]["output_token_throughput"]["value"] > 0
