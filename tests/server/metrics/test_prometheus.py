"""The metrics page has every family, valid lines and the values of the metrics."""

import re
from collections.abc import Sequence

import pytest

from charonia.core.statistics import TokenUsage, WorkerState
from charonia.server.metrics.model_metrics import NOTES_MAX, FailureReason, ModelMetrics
from charonia.server.metrics.prometheus import InstanceCount, MachineGauges, ModelSample, PageView, metric_names, render
from charonia.server.metrics.tokens import TokenMetrics
from charonia.server.scheduling.api import CloseReason

US = 1000
MACHINE = MachineGauges(0.25, 1000, 400, 300)
WORKERS = [WorkerState("m_0_0", 5000, 2, ""), WorkerState("m_0_1", 0, 7, "it has ended")]
LINE = re.compile(r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-zA-Z_][a-zA-Z0-9_]*="(\\.|[^"\\\n])*",?)*\})? [-+0-9.eE]+')


def metrics() -> ModelMetrics:
    made = ModelMetrics("m", "2")
    made.batch_done(
        arrivals_ns=[100 * US, 200 * US],
        inferences=3,
        batch_size=4,
        reason=CloseReason.DELAY,
        marks_ns=(300 * US, 310 * US, 400 * US, 405 * US),
        wall_ms=77,
    )
    made.failed(FailureReason.BACKEND, 5 * US)
    made.is_cached = True
    made.tokens = TokenMetrics()
    made.tokens.used(TokenUsage(20, 3, 8))
    return made


def page(machine: MachineGauges | None = MACHINE) -> str:
    sample = ModelSample(
        metrics(), {"team": 'a"b\\c\n'}, 6, WORKERS, InstanceCount(1, 4, {"requests_waited": 3, "idle": 2}), 2
    )
    return render([sample], machine, view=PageView(quantiles=(0.5,))).decode()


def test_a_batch_counts_once_and_its_requests_each() -> None:
    statistics = metrics().statistics
    assert (statistics.execution_count, statistics.inference_count, statistics.last_inference_ms) == (1, 3, 77)
    assert (statistics.success.count, statistics.success.ns) == (2, 305 * US + 205 * US)
    assert (statistics.queue.count, statistics.queue.ns) == (2, 200 * US + 100 * US)
    assert (statistics.compute_input.count, statistics.compute_input.ns) == (2, 2 * 10 * US)
    assert (statistics.compute_infer.count, statistics.compute_infer.ns) == (2, 2 * 90 * US)
    assert (statistics.compute_output.count, statistics.compute_output.ns) == (2, 2 * 5 * US)
    assert (statistics.fail.count, statistics.fail.ns) == (1, 5 * US)
    assert statistics.batches[4].compute_infer.count == 1


def test_whichever_counter_is_read_first_has_all_batches() -> None:
    assert metrics().closes[CloseReason.DELAY] == 1
    assert metrics().request_ns.count == metrics().queue_ns.count == metrics().compute_ns.count == 2
    assert metrics().batch_size.count == 1


def test_a_batch_without_a_success_is_an_execution_and_nothing_more() -> None:
    made = ModelMetrics("m", "1")
    made.batch_done(
        arrivals_ns=[], inferences=0, batch_size=4, reason=CloseReason.FULL, marks_ns=(0, 1, 2, 3), wall_ms=1
    )
    assert (made.statistics.execution_count, made.statistics.inference_count, made.statistics.success.count) == (
        1,
        0,
        0,
    )


def test_every_line_is_valid_and_every_family_with_samples_has_its_head() -> None:
    families: dict[str, int] = {}
    for line in page().splitlines():
        if line.startswith("# TYPE "):
            families[line.split()[2]] = 0
        elif not line.startswith("#"):
            assert LINE.fullmatch(line), line
            assert line.startswith(list(families)[-1])
            families[list(families)[-1]] += 1
    assert tuple(families) == tuple(name for name in metric_names() if name in families)
    assert {"nv_inference_count", "charonia_batch_size", "charonia_worker_up"} <= families.keys()
    assert min(families.values()) > 0


def test_a_family_without_samples_is_not_named() -> None:
    assert render([]) == b"\n"
    assert b"nv_inference_request_duration_us" not in render(
        [ModelSample(metrics(), {}, 0)], view=PageView(counters=False)
    )


def test_an_ensemble_has_no_requests_that_wait() -> None:
    labels = 'model="m",version="2"'

    assert f"nv_inference_pending_request_count{{{labels}}} 0\n" in render([ModelSample(metrics(), {}, None)]).decode()


def test_no_label_is_one_that_prometheus_gives_to_what_it_scrapes() -> None:
    labels = set(re.findall(r'[{,](\w+)="', page()))

    assert {"model", "model_instance"} <= labels
    assert not labels & {"instance", "job"}


def test_values_carry_the_labels_of_the_model() -> None:
    labels = r'_team="a\"b\\c\n",model="m",version="2"'
    text = page()
    assert f"nv_inference_request_success{{{labels}}} 2" in text
    assert f"nv_inference_count{{{labels}}} 3" in text
    assert f"nv_inference_queue_duration_us{{{labels}}} 300" in text
    assert 'nv_inference_request_failure{_team="a\\"b\\\\c\\n",model="m",reason="BACKEND",version="2"} 1' in text
    assert f"nv_inference_pending_request_count{{{labels}}} 6" in text
    assert f'charonia_batches_closed_total{{{labels},reason="delay"}} 1' in text
    assert f'charonia_batch_size_bucket{{{labels},le="4"}} 1' in text
    assert f'charonia_batch_size_bucket{{{labels},le="2"}} 0' in text
    assert f'charonia_request_duration_seconds_bucket{{{labels},le="0.00025"}} 1' in text
    assert f'charonia_request_duration_seconds_bucket{{{labels},le="+Inf"}} 2' in text
    assert f"charonia_request_duration_seconds_sum{{{labels}}} 0.00051" in text
    assert "nv_cpu_utilization 0.25" in text


def test_the_buckets_of_durations_go_from_50_us_to_30_s() -> None:
    bounds = (
        *("5e-05", "0.0001", "0.00025", "0.0005", "0.001", "0.0025", "0.005", "0.01", "0.025", "0.05"),
        *("0.1", "0.25", "0.5", "1", "2.5", "5", "10", "30", "+Inf"),
    )

    for family in ("request", "queue", "compute"):
        assert tuple(re.findall(rf'charonia_{family}_duration_seconds_bucket{{.*le="(.*)"}}', page())) == bounds


def test_the_buckets_of_batch_sizes_are_powers_of_two() -> None:
    bounds = [*(str(2**power) for power in range(11)), "+Inf"]

    assert re.findall(r'charonia_batch_size_bucket{.*le="(.*)"}', page()) == bounds


def test_each_worker_has_its_own_lines() -> None:
    text = page()

    labels = r'_team="a\"b\\c\n",model="m",version="2",model_instance='
    assert f'charonia_worker_up{{{labels}"m_0_0"}} 1\ncharonia_worker_up{{{labels}"m_0_1"}} 0\n' in text
    assert f'charonia_worker_restarts_total{{{labels}"m_0_1"}} 7\n' in text
    assert f'charonia_worker_memory_bytes{{{labels}"m_0_0"}} 5000\n' in text


def test_the_number_of_instances_is_shown_where_it_follows_the_load() -> None:
    labels = r'_team="a\"b\\c\n",model="m",version="2"'
    for line in (
        f"charonia_instances{{{labels}}} 2",
        f"charonia_instances_min{{{labels}}} 1",
        f"charonia_instances_max{{{labels}}} 4",
        f'charonia_instance_changes_total{{{labels},reason="requests_waited"}} 3',
        f'charonia_instance_changes_total{{{labels},reason="idle"}} 2',
    ):
        assert f"\n{line}\n" in page()
    fixed = render([ModelSample(metrics(), {}, 0, instances=3)]).decode()
    assert "charonia_instances{" in fixed
    assert "charonia_instances_m" not in fixed
    assert b"charonia_instance" not in render([ModelSample(metrics(), {}, None)])


def test_a_utilization_that_is_not_known_yet_and_an_unwatched_machine_are_left_out() -> None:
    assert "nv_cpu_utilization" not in page(MachineGauges(None, 1, 1, 1))
    assert "nv_cpu" not in page(None)


def test_looking_often_or_once_gives_the_same_counts() -> None:
    looked_at, left_alone = ModelMetrics("m", "1"), ModelMetrics("m", "1")
    for number in range(3 * NOTES_MAX):
        for each in (looked_at, left_alone):
            each.batch_done(
                arrivals_ns=[number, number + 1],
                inferences=2,
                batch_size=1 + number % 3,
                reason=CloseReason.FULL,
                marks_ns=(number + 10, number + 20, number + 40, number + 70),
                wall_ms=number,
            )
        assert looked_at.statistics.execution_count == number + 1
    assert looked_at.statistics == left_alone.statistics
    assert looked_at.request_ns.counts == left_alone.request_ns.counts
    assert looked_at.closes == left_alone.closes


def loads(batch_max: int, batches: Sequence[tuple[int, int]]) -> float:
    """The share of an instance's time that batches, of a size and a time in ms each, count for in full batches."""
    made = ModelMetrics("m", "1", batch_max=batch_max)
    for size, ms in batches:
        made.batch_done(
            arrivals_ns=[0] * size,
            inferences=size,
            batch_size=size,
            reason=CloseReason.FULL,
            marks_ns=(0, 0, ms * 1000 * US, ms * 1000 * US),
            wall_ms=1,
        )
    return made.statistics.load_ns / sum(ms * 1000 * US for _, ms in batches)


def test_the_load_of_small_batches_is_the_time_of_their_elements_in_full_ones() -> None:
    def took(size: int) -> int:
        return 10 + 2 * size

    several = [(size, took(size)) for size in (1, 2, 3, 4)]

    assert loads(0, [(1, 12)]) == loads(8, [(3, 12)]) == 1.0  # nothing says that larger ones would save time
    assert loads(8, several) == pytest.approx(10 / 8 * took(8) / sum(ms for _, ms in several), rel=1e-6)
    assert loads(8, [(1, 12), (8, took(8))]) == pytest.approx(9 / 8 * took(8) / (12 + took(8)), rel=1e-6)
    assert loads(8, [(1, 10), (4, 40)]) == 1.0  # batches save nothing
    assert loads(8, [(2, 10), (4, 10)]) == pytest.approx(6 / 8 / 2)  # elements cost nothing
    assert loads(8, [(2, 20), (4, 10)]) == 6 / 8 / 2  # nor do they save anything
