"""The command lines of measurements, and what is read from their results."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.tune_runs import synthetic_tune_run

from charonia.cli import perf, tune
from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError
from charonia.platform.deployments.spec import read_spec
from charonia.platform.deployments.workloads import configured
from charonia.platform.jobs.commands import PerfJob, TuneJob, level_begun, levels, recommendation, seconds_left
from charonia.tools.report.quantities import clock
from charonia.tools.tune.result import to_json


@pytest.mark.parametrize(
    "job",
    [
        PerfJob(model="m"),
        PerfJob(model="m", concurrency="4", protocol="grpc", batch_size=2),
        PerfJob(model="m", concurrency="1:8", is_language_model=True),
        PerfJob(model="m", concurrency="4", requests=9),
    ],
)
def test_perf_understands_its_command(job: PerfJob, tmp_path: Path) -> None:
    name, *arguments = job.command("http://127.0.0.1:9000", str(tmp_path))

    assert name == "perf"
    assert perf.LINE.parse(arguments)


def test_tune_understands_its_command(tmp_path: Path) -> None:
    name, *arguments = TuneJob(model="m", version=3, minutes=0.5, latency_budget_ms=20).command(
        str(tmp_path / "repository"), str(tmp_path)
    )

    assert name == "tune"
    assert "30s" in arguments
    assert tune.PROFILE.parse(arguments)


@pytest.mark.parametrize("concurrency", ["", "0", "8:1", "1:2000", "1:1000", "1:8:0", "a"])
def test_levels_that_cannot_be_are_refused(concurrency: str) -> None:
    with pytest.raises(ServingError, match="concurrency: expected"):
        PerfJob(model="m", concurrency=concurrency)


@pytest.mark.parametrize(("concurrency", "requests"), [("4", 2 * 10**9), ("1:8", 9)])
def test_requests_are_those_of_a_single_level(concurrency: str, requests: int) -> None:
    with pytest.raises(ServingError, match="expected"):
        PerfJob(model="m", concurrency=concurrency, requests=requests)


def test_all_problems_of_a_search_are_reported_at_once() -> None:
    with pytest.raises(ServingError) as raised:
        TuneJob(model="m", version=1, minutes=1000, latency_budget_ms=1e10)

    assert len(raised.value.message.splitlines()) == 2


def test_levels_are_read_from_the_table_by_load() -> None:
    text = "Concurrency,Inferences/Second,Client Send,p50 latency,p99 latency,Verdict\n"
    text += "8,900,0,2000,9000,disturbed\n1,100.5,0,900,1200,stable\n"

    assert levels(text) == [
        {"load": 1.0, "throughput": 100.5, "p50": 0.9, "p99": 1.2, "verdict": "stable"},
        {"load": 8.0, "throughput": 900.0, "p50": 2.0, "p99": 9.0, "verdict": "disturbed"},
    ]


def test_the_level_that_is_measured_is_read_from_a_line() -> None:
    assert level_begun("Request concurrency: 11\n") == 11
    assert level_begun("  Concurrency limit: 16 concurrent requests") is None
    assert [PerfJob(model="m", concurrency=text).level_count for text in ("8", "1:4", "1:16:5")] == [1, 4, 4]


def test_the_time_left_is_read_from_a_line() -> None:
    line = "[2] mlp_default, concurrency 2: 6,575 infer/s, p99 1.78 ms; best so far a (6,778 infer/s); at most {} left"

    for seconds in (0, 11, 60, 185, 3720):
        assert seconds_left(line.format(clock(seconds))) == seconds
    assert seconds_left("Model,Batch") is None


def search_result(change: dict[str, Any] | None) -> str:
    """Return the JSON of a search with a best variant that changes this, None for the configuration as it is."""
    nothing: dict[str, Any] = dict.fromkeys(("instance_count", "max_batch_size", "queue_delay_us"))
    nothing |= {"model": "m", "thread_count": None, "fields": []}
    variant = {"changes": [] if change is None else [{**nothing, "model": "other"}, {**nothing, **change}]}
    text = "" if change is None else "max_batch_size: 4 dynamic_batching { }"
    decision = {"conclusion": "better", "sentences": ["Use it."], "best": {"variant": variant, "gain": {"value": 1.5}}}
    variants = [{"variant": {"changes": [9]}, "configs": []}, {"variant": variant, "configs": [{"text": text}]}]
    return json.dumps({"groups": [{"decision": decision, "variants": variants}]})


def test_a_recommendation_is_that_of_the_best_variant() -> None:
    change = {"instance_count": 2, "max_batch_size": 4, "thread_count": 1, "fields": [["optimization", "{}"]]}

    found = recommendation(search_result(change), "m")

    assert (found["conclusion"], found["sentences"], found["gain"]) == ("better", ["Use it."], 1.5)
    assert found["config"] == "max_batch_size: 4 dynamic_batching { }"
    assert found["change"] == {
        "instances": {"min": 2},
        "batching": {"max_batch_size": 4},
        "config": {
            "optimization": {},
            "dynamic_batching": {},
            "parameters": {"intra_op_thread_count": {"string_value": "1"}},
        },
    }


def test_a_deployment_with_what_was_found_has_the_configuration_that_was_measured() -> None:
    change = {
        "max_batch_size": 4,
        "queue_delay_us": 50,
        "fields": [["dynamic_batching", '{"preferred_batch_size": [2]}']],
    }
    found = recommendation(search_result(change), "m")["change"]
    spec = read_spec({"name": "d", "models": [{"name": "m", **found}]})

    config = parse(configured("max_batch_size: 8", spec.models[0], [1]))

    assert config.max_batch_size == 4
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.max_queue_delay_microseconds == 50
    assert config.dynamic_batching.preferred_batch_size == (2,)


def test_all_variants_are_listed_with_the_best_load_of_each_and_can_be_deployed() -> None:
    run = synthetic_tune_run()
    found = recommendation(to_json(run), "mlp")["variants"]
    names = {json.dumps(plain["variant"]) for plain in json.loads(to_json(run))["groups"][0]["variants"]}

    assert len(found) == len(names)
    assert [each["throughput"] for each in found] == sorted((each["throughput"] for each in found), reverse=True)
    (best,) = [each for each in found if each["is_best"]]
    assert best["title"] == "4 instances, batches up to 16, 1 thread"
    assert best["change"]["instances"] == {"min": 4}
    assert best["load"] == 32
    assert 2000 < best["throughput"] < 4000
    (default,) = [each for each in found if each["title"] == "default configuration"]
    assert default["change"] == {}


def test_where_nothing_is_better_there_is_nothing_to_change() -> None:
    assert recommendation(search_result(None), "m")["change"] == {}


def test_a_search_without_a_best_configuration_has_its_sentences() -> None:
    decision = {"conclusion": "nothing", "sentences": ["None."], "best": None}

    assert recommendation(json.dumps({"groups": [{"decision": decision, "variants": []}]}), "m") == {
        "conclusion": "nothing",
        "sentences": ["None."],
    }
