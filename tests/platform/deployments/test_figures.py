"""Figures from metrics pages, and what is kept of them."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from charonia.platform.database.connection import Database
from charonia.platform.database.tables import DeploymentRow, ProjectRow
from charonia.platform.deployments.collector import OTHERS_S, WATCHED_S, Collector, FigureHistory
from charonia.platform.deployments.figures import (
    Figures,
    FiguresPoint,
    KeyFigures,
    Sample,
    point,
    quantile_s,
    read_page,
)

PAGE = """
# HELP nv_inference_request_success text
nv_inference_request_success{{model="m",version="1"}} {successes}
nv_inference_request_failure{{model="m",version="1",reason="BACKEND"}} {failures}
nv_inference_request_failure{{model="m",version="1",reason="OTHER"}} 1
nv_inference_count{{model="m",version="1"}} {inferences}
nv_inference_exec_count{{model="m",version="1"}} {executions}
nv_inference_queue_duration_us{{model="m",version="1"}} {queue_us}
nv_inference_pending_request_count{{model="m",version="1"}} 3
charonia_request_duration_seconds_bucket{{model="m",version="1",le="0.01"}} {fast}
charonia_request_duration_seconds_bucket{{model="m",version="1",le="0.1"}} {successes}
charonia_request_duration_seconds_bucket{{model="m",version="1",le="+Inf"}} {successes}
charonia_instances{{model="m",version="1"}} 1
charonia_load_seconds_total{{model="m",version="1"}} {load_s}
nv_inference_compute_infer_duration_us{{model="m",version="1"}} {compute_us}
charonia_worker_memory_bytes{{model="m",version="1",model_instance="m_0"}} 1000
charonia_model_memory_bytes{{model="m",version="1",type="CPU",device="0",model_instance=""}} 117
charonia_process_resident_memory_bytes{{process="engine"}} 5000
charonia_process_cpu_seconds_total{{process="engine"}} {cpu_s}
charonia_key_requests_total{{key="ci",result="ok"}} {successes}
charonia_key_requests_total{{key="ci",result="error"}} {failures}
charonia_key_tokens_total{{key="ci",kind="prompt"}} {inferences}
charonia_key_tokens_total{{key="ci",kind="completion"}} {executions}
nv_gpu_utilization{{gpu_uuid="a"}} 0.5
nv_gpu_utilization{{gpu_uuid="b"}} 0.75
"""


def page(count: int = 0, cpu_s: float = 1.0) -> str:
    return PAGE.format(
        successes=10 + 100 * count,
        failures=5 * count,
        inferences=800 * count,
        executions=100 * count,
        queue_us=200_000 * count,
        compute_us=400_000 * count,
        load_s=2.5 * count,
        fast=10 + 98 * count,
        cpu_s=cpu_s,
    )


def test_figures_are_what_was_done_between_two_looks() -> None:
    found = point({"a": read_page(page())}, {"a": read_page(page(1, cpu_s=2.5))}, 5.0, 100.0)

    figures = found.versions["m/1"]
    assert (figures.requests_per_s, figures.errors_per_s, figures.batch_size) == (21.0, 1.0, 8.0)
    assert figures.queue_ms == 2.0
    assert figures.p50_ms == pytest.approx(1e3 * 0.01 * 50 / 98)
    assert figures.p99_ms == pytest.approx(10 + 90 * 0.5)
    assert (figures.pending, figures.instances, figures.memory_bytes) == (3.0, 1.0, 117.0)
    assert (figures.busy, figures.waited) == (0.5, 0.4)  # of 0.5 s that count at the least
    assert found.all == figures
    assert (found.memory_bytes, found.cpu_cores, found.gpu_utilization) == (6000.0, 0.3, 0.75)
    assert found.keys == {"ci": KeyFigures(1260.0, 60.0, 0.0, 10_800.0)}


def test_a_server_that_counts_anew_has_done_what_it_has_counted() -> None:
    found = point({"a": read_page(page(5))}, {"a": read_page(page(1))}, 10.0, 100.0)

    assert found.all.requests_per_s == (110 + 6) / 10


def test_the_figures_of_servers_are_summed_and_one_that_was_just_started_counts_from_its_first_look_on() -> None:
    one, two = read_page(page()), read_page(page(3))

    found = point({"a": one, "b": one}, {"a": two, "b": two}, 5.0, 100.0)
    joined = point({"a": one}, {"a": two, "b": two}, 5.0, 100.0)
    left = point({"a": one, "b": one}, {"a": two}, 5.0, 100.0)

    assert found.all.requests_per_s == 2 * left.all.requests_per_s == 2 * joined.all.requests_per_s == 2 * 63.0
    assert (found.all.pending, joined.all.pending, left.all.pending) == (6.0, 6.0, 3.0)
    assert (found.memory_bytes, found.gpu_utilization, found.gpu_memory_bytes) == (
        12000.0,
        one.gpu_utilization,
        one.gpu_memory_bytes,
    )
    assert found.all.p99_ms == left.all.p99_ms


def test_engines_with_too_much_memory_are_counted() -> None:
    line = 'charonia_process_restarts_total{process="engine",reason="memory limit"} 2\n'
    other = 'charonia_process_restarts_total{process="engine",reason="SIGKILL"} 3\n'

    assert point({}, {"a": read_page(line + other), "b": read_page(line)}, 5.0, 0.0).engines_over_memory == 4.0


def test_nothing_done_is_no_percentile() -> None:
    found = point({"a": read_page(page())}, {"a": read_page(page())}, 5.0, 100.0)

    assert (found.all.requests_per_s, found.all.p50_ms, found.all.batch_size) == (0.0, None, None)


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert quantile_s({0.1: 1.0, float("inf"): 10.0}, 0.99) == 0.1
    assert quantile_s({}, 0.5) is None
    assert quantile_s({0.1: 0.0, float("inf"): 0.0}, 0.5) is None


def test_a_page_without_models_is_read() -> None:
    assert read_page("nv_cpu_utilization 1\nrubbish\n") == Sample()


@pytest.fixture
def history(tmp_path: Path) -> Iterator[FigureHistory]:
    database = Database(f"sqlite:///{tmp_path / 'platform.sqlite'}")
    database.migrate()
    with database.transaction() as session:
        session.add(ProjectRow(id=1, name="default", created=0.0))
        session.add(DeploymentRow(id=1, project_id=1, name="reader", target="local", state="ready", created=0.0))
    yield FigureHistory(database)
    database.close()


def test_a_month_of_figures_is_kept_in_a_bounded_number_of_rows(history: FigureHistory) -> None:
    day_s, month_s = 86_400, 32 * 86_400
    for at_s in range(0, month_s, 60):
        if at_s % 3600 == 0 or at_s > month_s - day_s:
            history.keep(float(at_s), may_write=True)
        figures = Figures(requests_per_s=at_s % 3600 / 60, p50_ms=1.0, p99_ms=at_s % 3600 / 60, instances=2.0)
        history.add(1, FiguresPoint(float(at_s), figures, {"m/1": figures}, 5e8, 0.5, None, None))
    recent = [FiguresPoint(month_s - 30.0, Figures(7.0), {}, 5e8, 0.5, None, None)]

    for since_s, step_s, count in ((30 * day_s, 3600, 700), (day_s, 300, 280), (3600, 60, 55)):
        found = history.since(1, float(month_s - since_s), recent, float(month_s))
        times = [point.time for point in found]
        assert count < len(found) < count + 50
        assert times == sorted(set(times))
        assert {late - early for early, late in pairwise(times)} <= {60, 90, 300, step_s}
        assert found[-1] == recent[-1]
        assert found[3].versions["m/1"].instances == 2.0
    hour = history.since(1, float(month_s - 20 * day_s), (), float(month_s))[0].all
    assert (hour.requests_per_s, hour.p99_ms) == (29.5, 59.0)
    assert history.was_busy(1)


def test_deployments_that_somebody_watches_are_looked_at_more_often(history: FigureHistory) -> None:
    looks: list[str] = []

    def fetch(address: str) -> str:
        looks.append(address)
        return page()

    collector = Collector(lambda: {1: ["one"], 2: ["two"], 3: []}, history, fetch)
    collector.since(1, 0.0)

    for second in range(61):
        collector.step(1_000_000.0 + second)
    collector.close()

    assert looks.count("one") == looks.count("two") == 60 / OTHERS_S + 1  # nobody has watched at that time
    assert WATCHED_S < OTHERS_S


def test_a_page_that_does_not_answer_leaves_a_gap(history: FigureHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [page(), page(1), "", page(2), page(3)]
    times = iter(float(number) for number in range(100))
    monkeypatch.setattr("charonia.platform.deployments.collector.time.monotonic", lambda: next(times))

    def fetch(address: str) -> str:
        text = answers.pop(0)
        if not text:
            raise ConnectionRefusedError
        return text

    collector = Collector(lambda: {1: ["one"]}, history, fetch)
    for number in range(5):
        collector.step(number * OTHERS_S)
    points = collector.since(1, 0.0)
    collector.close()

    assert len(points) == 2
    assert collector.latest(1) == points[-1]
