from typing import Any

import pytest

from charonia.tools.perf import statistics


def entry(name: str, count: int, version: str = "1", fail: int = 0) -> dict[str, Any]:
    """Statistics of a model that answered so many requests of 1000 ns, 100 of them in the queue."""

    def duration(ns: int) -> dict[str, int]:
        return {"count": count, "ns": count * ns}

    return {
        "name": name,
        "version": version,
        "inference_count": count * 2,
        "execution_count": count,
        "inference_stats": {
            "success": duration(1000),
            "fail": {"count": fail, "ns": 0},
            "queue": duration(100),
            "compute_input": duration(50),
            "compute_infer": duration(700),
            "compute_output": duration(50),
        },
    }


def test_the_difference_is_what_happened_in_between() -> None:
    before, after = (statistics.reading([entry("m", count)]) for count in (10, 30))

    model, note = statistics.difference(before, after, "m")

    assert note == ""
    assert model is not None
    assert (model.success_count, model.inference_count, model.execution_count) == (20, 40, 20)
    assert (model.request_ns, model.overhead_ns, model.cache_hit_count) == (1000.0, 100.0, 0)
    computing = (model.compute_input_ns, model.compute_infer_ns, model.compute_output_ns)
    assert (*computing, model.queue_ns, model.queue_count, model.fail_count) == (1000, 14_000, 1000, 2000, 20, 0)


def test_the_version_that_did_something_is_taken() -> None:
    before = statistics.reading([entry("m", 5, "1"), entry("m", 5, "2"), entry("m", 5, "10")])
    after = statistics.reading([entry("m", 5, "1"), entry("m", 9, "2"), entry("m", 5, "10")])

    model, note = statistics.difference(before, after, "m")
    assert model is not None
    assert (model.version, model.success_count, note) == ("2", 4, "")

    named, _ = statistics.difference(before, after, "m", "1")
    assert named is not None
    assert named.success_count == 0


def test_several_busy_versions_are_said() -> None:
    before = statistics.reading([entry("m", 0, version) for version in ("9", "10", "11")])
    after = statistics.reading([entry("m", 5, "9"), entry("m", 7, "10"), entry("m", 0, "11")])

    model, note = statistics.difference(before, after, "m")

    assert model is not None
    assert model.success_count == 7
    assert note == "Several versions of 'm' were busy; these are the statistics of version 10."


def test_a_model_that_is_not_there_has_no_statistics() -> None:
    assert statistics.difference({}, {}, "m") == (None, "")


def test_a_model_that_was_loaded_in_between_counts_from_zero() -> None:
    model, _ = statistics.difference(statistics.reading([entry("m", 50)]), statistics.reading([entry("m", 3)]), "m")

    assert model is not None
    assert model.success_count == 0


MORE = "The server counted {} requests and this client {}: so its times include other clients."
LESS = "The server counted only {} of this client's {} requests."


@pytest.mark.parametrize(
    ("counted", "ended", "in_flight", "note"),
    [
        (24_688, 1824, 1, MORE),
        (104, 100, 1, ""),  # a few in any case
        (105, 100, 1, MORE),
        (96, 100, 1, ""),
        (95, 100, 1, LESS),
        (1032, 1000, 16, ""),  # those on their way
        (1033, 1000, 16, MORE),
        (1_020_000, 1_000_000, 1, ""),  # a share
        (1_020_001, 1_000_000, 1, MORE),
        (0, 100, 1, ""),
    ],
)
def test_other_clients_are_seen_by_the_count(counted: int, ended: int, in_flight: int, note: str) -> None:
    failed = counted // 5
    model, _ = statistics.difference({}, statistics.reading([entry("m", counted - failed, fail=failed)]), "m")

    side = statistics.server_side(model, [], ["A note."], ended=ended, in_flight=in_flight)

    assert side.other_traffic == (note == MORE)
    assert side.notes == ("A note.", *([note.format(counted, ended)] if note else []))


def test_composing_models_come_along() -> None:
    whole, _ = statistics.difference({}, statistics.reading([entry("e", 4)]), "e")
    part, _ = statistics.difference({}, statistics.reading([entry("p", 4)]), "p")
    assert part is not None

    model = statistics.server_side(whole, [part], [], 4, 1).model

    assert model is not None
    assert model.composing == (part,)
    assert statistics.server_side(None, [part], ["No."], 4, 1).notes == ("No.",)


def test_an_ensemble_s_configuration_names_its_models_once() -> None:
    steps = [{"model_name": "a", "model_version": -1}, {"model_name": "b", "model_version": 3}, {"model_name": "a"}]

    assert statistics.composing_models({"ensemble_scheduling": {"step": steps}}) == [("a", ""), ("b", "3")]
    assert statistics.composing_models({}) == []


PAGE = """\
# HELP nv_gpu_utilization GPU utilization rate
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.25
nv_gpu_power_usage{gpu_uuid="GPU-1"} 41.5
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 1e9
nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 2e9
nv_inference_count{model="a b",version="1"} 7 1700000000000
nv_broken NaN
nv_word word
what is this
"""


def test_a_metrics_page_is_read_by_name_and_labels() -> None:
    page = statistics.parse_page(PAGE)

    assert page['nv_inference_count{model="a b",version="1"}'] == 7
    assert len(page) == 5


def test_gpus_are_the_mean_and_the_most_of_several_pages() -> None:
    pages = [statistics.parse_page(text) for text in (PAGE, PAGE.replace("0.25", "0.75").replace("1e9", "1.5e9"))]

    (gpu,) = statistics.gpus(pages)

    assert (gpu.uuid, gpu.utilization, gpu.power_watts) == ("GPU-1", 0.5, 41.5)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (1.5e9, 2e9)


def test_a_page_without_gpus_has_none() -> None:
    assert statistics.gpus([statistics.parse_page("up 1\n"), {}]) == ()
