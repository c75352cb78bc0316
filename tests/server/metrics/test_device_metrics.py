from charonia.core.statistics import MemoryUsage
from charonia.server.metrics.devices import (
    GpuGauges,
    MemoryAccount,
    PinnedMemory,
    gpu_families,
    gpu_pool_families,
    memory_families,
    pinned_families,
)
from charonia.server.metrics.model_metrics import ModelMetrics
from charonia.server.metrics.prometheus import ModelSample, render


def test_a_gpu_has_a_line_for_each_thing_that_it_says() -> None:
    gpus = [GpuGauges("GPU-1", 0.5, 1000, 250, 70.5, 300.0, 12.5), GpuGauges("GPU-2", memory_total_bytes=8)]

    page = render([], families=gpu_families(gpus)).decode()

    assert 'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5' in page
    assert 'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 250' in page
    assert 'nv_gpu_memory_total_bytes{gpu_uuid="GPU-2"} 8' in page
    assert 'nv_gpu_power_usage{gpu_uuid="GPU-1"} 70.5' in page
    assert 'nv_gpu_power_limit{gpu_uuid="GPU-1"} 300' in page
    assert '# TYPE nv_energy_consumption counter\nnv_energy_consumption{gpu_uuid="GPU-1"} 12.5' in page
    assert 'nv_gpu_utilization{gpu_uuid="GPU-2"}' not in page


def test_without_a_gpu_there_is_no_such_metric() -> None:
    assert gpu_families([]) == []


def test_pinned_memory_is_shown_with_its_limit() -> None:
    page = render([], families=pinned_families(PinnedMemory(1000, 10))).decode()

    assert "nv_pinned_memory_pool_total_bytes 1000\n" in page
    assert "nv_pinned_memory_pool_used_bytes 10\n" in page


def test_pools_of_gpus_are_shown_by_device() -> None:
    page = render([], families=gpu_pool_families({1: MemoryAccount(1000, 10, 20)})).decode()

    assert 'charonia_gpu_pool_limit_bytes{device="1"} 1000\n' in page
    assert 'charonia_gpu_pool_used_bytes{device="1"} 10\n' in page
    assert 'charonia_gpu_pool_idle_bytes{device="1"} 20\n' in page
    assert gpu_pool_families({}) == []


def test_memory_of_a_model_is_shown_by_device_and_instance() -> None:
    metrics = ModelMetrics("m", "1")
    metrics.statistics.memory = [MemoryUsage("GPU", 1, 500, "m_0"), MemoryUsage("GPU", 1, 500, "m_1")]

    [found] = memory_families([ModelSample(metrics, {}, 0)])

    assert [(sample.value, sample.labels["model_instance"], sample.labels["device"]) for sample in found.samples] == [
        (500, "m_0", "1"),
        (500, "m_1", "1"),
    ]
    assert memory_families([]) == []
