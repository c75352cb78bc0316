"""The command lines of measurements, and what is read from their results."""

import json
from pathlib import Path

import pytest

from charonia.cli import perf_options, tune_options
from charonia.core.errors import ServingError
from charonia.platform.jobs.commands import PerfJob, TuneJob, levels, recommendation, seconds_left

BETTER = {
    "conclusion": "better",
    "sentences": ["Use it."],
    "best": {"variant": {"changes": [4]}, "gain": {"value": 1.5}},
}


@pytest.mark.parametrize(
    "job", [PerfJob("m"), PerfJob("m", "4", "grpc", 2), PerfJob("m", "1:8", is_language_model=True)]
)
def test_perf_understands_its_command(job: PerfJob, tmp_path: Path) -> None:
    name, *arguments = job.command("http://127.0.0.1:9000", str(tmp_path), "secret")

    assert name == "perf"
    assert perf_options.LINE.parse(arguments)


def test_tune_understands_its_command(tmp_path: Path) -> None:
    name, *arguments = TuneJob("m", 3, minutes=0.5, latency_budget_ms=20).command(str(tmp_path))

    assert name == "tune"
    assert "30s" in arguments
    assert tune_options.PROFILE.parse(arguments)


@pytest.mark.parametrize("concurrency", ["", "0", "8:1", "1:2000", "1:1000", "1:8:0", "a"])
def test_levels_that_cannot_be_are_refused(concurrency: str) -> None:
    with pytest.raises(ServingError, match="concurrency: expected"):
        PerfJob("m", concurrency)


def test_all_problems_of_a_search_are_reported_at_once() -> None:
    with pytest.raises(ServingError) as raised:
        TuneJob("m", 1, minutes=1000, latency_budget_ms=-1)

    assert len(raised.value.message.splitlines()) == 2


def test_levels_are_read_from_the_table_by_load() -> None:
    text = "Concurrency,Inferences/Second,Client Send,p50 latency,p99 latency\n8,900,0,2000,9000\n1,100.5,0,900,1200\n"

    assert levels(text) == [
        {"load": 1.0, "throughput": 100.5, "p50": 0.9, "p99": 1.2},
        {"load": 8.0, "throughput": 900.0, "p50": 2.0, "p99": 9.0},
    ]


def test_the_time_left_is_read_from_a_line() -> None:
    line = "[2] mlp_config_default, concurrency 2: 6,575 infer/s, p99 1.78 ms; best so far a (6,778 infer/s), 11 s left"

    assert seconds_left(line) == 11
    assert seconds_left("Model,Batch") is None


def test_a_recommendation_is_that_of_the_best_variant() -> None:
    variants = [
        {"variant": {"changes": [n]}, "configs": [{"text": f"max_batch_size: {n}\ninstance_group {{ count: {n} }}"}]}
        for n in (2, 4)
    ]
    decision = {
        "conclusion": "better",
        "sentences": ["Use it."],
        "best": {"variant": {"changes": [4]}, "gain": {"value": 1.5}},
    }

    found = recommendation(json.dumps({"groups": [{"decision": decision, "variants": variants}]}))

    assert (found["instances"], found["max_batch_size"], found["max_queue_delay_us"], found["gain"]) == (4, 4, 0, 1.5)


def test_a_search_without_a_best_configuration_has_its_sentences() -> None:
    decision = {"conclusion": "nothing", "sentences": ["None."], "best": None}

    assert recommendation(json.dumps({"groups": [{"decision": decision, "variants": []}]})) == {
        "conclusion": "nothing",
        "sentences": ["None."],
    }
