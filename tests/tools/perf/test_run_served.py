"""Whole runs against `charonia serve`: gRPC, streams, ensembles, and what the server says of itself."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
from tests.support.models import chain_pbtxt, identity_pbtxt, streaming, write_model
from tests.support.process import ServeProcess

from charonia.client.sync_client import Client
from charonia.tools.perf import pool
from charonia.tools.perf.api import (
    LoadPlan,
    MeasuredTarget,
    MeasurementMode,
    MeasurePlan,
    RunSettings,
    ServerPlan,
)
from charonia.tools.perf.data.load import InputBatches
from charonia.tools.perf.data.spec import InputStep, model_spec
from charonia.tools.perf.pool import PrepareLoad
from charonia.tools.perf.run import ask, run
from charonia.tools.perf.worker import ABANDONED_S_MAX
from charonia.tools.results.records import LoadLevel, LoadMode, PerfRun, Verdict

ANSWERED = MeasurePlan(MeasurementMode.COUNT_WINDOWS, window_request_count=1, trials_max=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "same", "", config=identity_pbtxt(dims=(4,), max_batch_size=8))
    decoupled = "model_transaction_policy { decoupled: true }"
    repeating = identity_pbtxt("python", dims=(4,), max_batch_size=0, more=decoupled)
    write_model(repository, "again", streaming("[array] * 3", pause_s=0.002), config=repeating)
    write_model(repository, "both", "", config=chain_pbtxt("same", "same", dims=(4,), max_batch_size=8))
    with ServeProcess(repository) as process:
        yield process


def measured(served: ServeProcess, model: str, load: LoadPlan, plan: MeasurePlan, **more: Any) -> PerfRun:
    streaming, batch = more.pop("streaming", False), more.pop("batch", 1)
    url = f"http://{served.http}" if more.pop("http", False) else f"grpc://{served.grpc}"
    target = MeasuredTarget(url, model, streaming=streaming)
    with Client(url) as client:
        subject = ask(client, target)
        spec = model_spec(subject.metadata, subject.config)
        source = InputBatches(spec, [[InputStep({"INPUT0": np.arange(4, dtype=np.float32)})]], batch)
        return run(RunSettings(target, load, plan, **more), source, client, subject)


@pytest.mark.parametrize("http", [True, False])
def test_both_protocols_are_measured_with_batches(server: ServeProcess, http: bool) -> None:
    load = LoadPlan(start=2, end=2)
    (found,) = measured(server, "same", load, MeasurePlan(request_count=200), http=http, batch=4).levels

    assert (found.verdict, found.request_count, found.errors) == (Verdict.COMPLETE, 200, ())
    assert found.throughput.value == pytest.approx(4 * 200 / (found.duration_ns / 1e9))
    model = found.server.model
    assert model is not None
    assert (model.success_count, model.inference_count) == (200, 800)
    assert found.client.send_ns > 0
    assert found.client.receive_ns > 0


def test_the_server_s_processes_are_found_and_watched(server: ServeProcess) -> None:
    # So many take CPU time that is seen in the system's coarse ticks, however fast the machine is.
    (found,) = measured(server, "same", LoadPlan(start=4, end=4), MeasurePlan(request_count=5000)).levels

    assert found.resources is not None
    assert found.resources.cpu_seconds > 0
    assert found.resources.cpu_cores * found.duration_ns / 1e9 == pytest.approx(found.resources.cpu_seconds)
    assert found.resources.rss_bytes > 20 * 2**20
    assert found.resources.process_count >= 2


def test_all_responses_of_a_stream_are_counted_and_the_first_is_timed(server: ServeProcess) -> None:
    made = measured(
        server, "again", LoadPlan(start=2, end=2), MeasurePlan(request_count=50), streaming=True, keep_requests=True
    )

    (found,) = made.levels
    assert made.model.decoupled
    assert (found.request_count, found.response_count, found.errors) == (50, 150, ())
    assert found.first_response_times is not None
    assert found.first_response_times.mean < found.service_times.mean
    assert all(len(record.response_ns) == 3 for record in found.requests)
    assert len(found.requests) == 50


def test_load_grows_as_the_responses_of_those_before_come(server: ServeProcess) -> None:
    load = LoadPlan(LoadMode.PERIODIC, start=2, end=10, step=4, request_period=2)

    (found,) = measured(server, "again", load, MeasurePlan(), streaming=True).levels

    assert (found.verdict, found.request_count, found.response_count) == (Verdict.COMPLETE, 10, 30)


def test_an_ensemble_brings_the_models_it_is_made_of(server: ServeProcess) -> None:
    made = measured(server, "both", LoadPlan(start=2, end=2), MeasurePlan(request_count=100), http=True)

    model = made.levels[0].server.model
    assert model is not None
    assert made.model.platform == "ensemble"
    assert (model.success_count, [part.name for part in model.composing]) == (100, ["same"])
    assert model.composing[0].success_count == 200


def test_the_metrics_page_is_read(server: ServeProcess) -> None:
    plan = ServerPlan(metrics_url=f"{server.metrics}/metrics", metrics_interval_ms=100)
    counted = replace(ANSWERED, warmup_request_count=1)
    (found,) = measured(server, "same", LoadPlan(), counted, server=plan).levels

    assert found.metrics['nv_inference_request_success{model="same",version="1"}'] > 0
    assert found.gpus == ()


def test_a_metrics_page_that_is_not_there_is_said(server: ServeProcess) -> None:
    plan = ServerPlan(metrics_url="127.0.0.1:1/metrics", metrics_interval_ms=100)
    (found,) = measured(server, "same", LoadPlan(), ANSWERED, server=plan).levels

    assert any("http://127.0.0.1:1/metrics could not be read" in note for note in found.server.notes)


def test_an_open_loop_over_grpc_keeps_its_schedule(server: ServeProcess) -> None:
    load = LoadPlan(LoadMode.REQUEST_RATE, start=200, end=200)
    (found,) = measured(server, "same", load, MeasurePlan(request_count=200), keep_requests=True).levels

    assert found.request_count == 200
    assert found.offered is not None
    assert found.offered.sent_rate * found.duration_ns / 1e9 == pytest.approx(200)
    assert found.offered.sent_rate <= 200 / 0.995  # the last is sent 0.995 s after the first, or later
    sent_ns = mean(record.begin_ns - found.epoch_ns for record in found.requests)
    late_ns = found.response_times.mean - found.service_times.mean
    assert sent_ns - late_ns == pytest.approx(mean(range(0, 1_000_000_000, 5_000_000)), abs=1)


def test_a_worker_ends_with_the_measuring_process_whatever_it_waits_for(server: ServeProcess) -> None:
    with Client(f"grpc://{server.grpc}") as client:
        subject = ask(client, MeasuredTarget(f"grpc://{server.grpc}", "same"))
    source = InputBatches(
        model_spec(subject.metadata, subject.config), [[InputStep({"INPUT0": np.arange(4, dtype=np.float32)})]], 1
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never greets
        target = MeasuredTarget(f"grpc://127.0.0.1:{silent.getsockname()[1]}", "same")
        settings = RunSettings(target, LoadPlan(), ANSWERED)
        workers = pool.WorkerPool(settings, source, 1)
        workers._send_all(PrepareLoad(LoadLevel(LoadMode.CONCURRENCY, 1)))
        with silent.accept()[0]:
            for connection in (*workers._commands, *workers._answers):
                connection.close()  # as the system does for a process that is killed

            assert workers._processes[0].wait(ABANDONED_S_MAX + 4) == 0
