import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.runs import synthetic_run

from charonia.cli.perf import ExitStatus, parse, status_of
from charonia.cli.perf_run import EXPORT_ELEMENTS_MAX, exported_inputs, plain, settings_text
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.tensor import Array, Tensor, to_bfloat16
from charonia.tools.perf.api import LoadPlan, MeasuredTarget, RunSettings, SequencePlan
from charonia.tools.perf.data.load import InputBatches
from charonia.tools.perf.data.spec import InputStep, ModelSpec, TensorSpec
from charonia.tools.perf.options import target
from charonia.tools.results.records import ErrorKind, LoadMode, Verdict
from charonia.wire.tensors import bytes_array
from charonia.wire.transport import TlsOptions

SEQUENCE: dict[str, object] = {"sequence_batching": {}}
DECOUPLED: dict[str, object] = {"model_transaction_policy": {"decoupled": True}}


def settings(*arguments: str, config: dict[str, object] | None = None) -> RunSettings:
    return parse(["-m", "resnet", *arguments]).settings(config or {})


def target_of(*arguments: str) -> MeasuredTarget:
    return target(parse(["-m", "resnet", *arguments]).options)


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ((), "http://localhost:8000"),
        (("-i", "grpc"), "grpc://localhost:8001"),
        (("-u", "host:80"), "http://host:80"),
        (("-u", "https://host/path"), "https://host/path"),
        (("-i", "grpc", "-u", "http://host:81"), "grpc://host:81"),
        (("-i", "grpc", "-u", "host:81", "--ssl-grpc-use-ssl"), "grpcs://host:81"),
        (("-i", "grpc", "-u", "https://host:81"), "grpcs://host:81"),
    ],
)
def test_the_protocol_and_the_url_make_the_address(arguments: tuple[str, ...], url: str) -> None:
    assert target_of(*arguments).url == url


def test_a_url_of_another_protocol_is_refused() -> None:
    with pytest.raises(ServingError, match=r"-u: expected HOST:PORT, http:// or https:// with -i http, got 'grpc://x'"):
        target_of("-u", "grpc://x")


def test_the_connection_is_as_asked_for(tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.write_text("")

    made = target_of(
        *("-u", "https://host", "-H", "A:b", "--request-timeout", "500ms", "--ssl-https-verify-peer", "0"),
        *("--ssl-https-client-certificate-file", str(pem), "--ssl-https-private-key-file", str(pem)),
        *("--ssl-https-client-certificate-type", "DER", "--input-tensor-format", "json"),
    )

    assert made.transport.headers == (("A", "b"),)
    assert made.transport.timeout_s == 0.5
    assert made.transport.tls == TlsOptions(
        certificate_file=str(pem), key_file=str(pem), certificate_is_der=True, verify_peer=False
    )
    assert (made.json_inputs, made.json_outputs) == (True, False)


def test_what_only_one_protocol_has_is_left_out_of_the_other() -> None:
    grpc = target_of("-i", "grpc", "--grpc-compression-algorithm", "gzip", "--input-tensor-format", "json")

    assert (grpc.transport.request_compression, grpc.json_inputs) == ("gzip", False)
    assert target_of("--grpc-compression-algorithm", "gzip").transport.request_compression == ""


def test_a_range_without_end_is_infinite() -> None:
    assert settings("--concurrency-range", "2:0:3", "-l", "5").load == LoadPlan(
        start=2.0, end=math.inf, step=3.0, mode=LoadMode.CONCURRENCY
    )


def test_units_become_those_of_the_load_generator(tmp_path: Path) -> None:
    gaps = tmp_path / "gaps"
    gaps.write_text("5\n")

    made = settings("--request-intervals", str(gaps), "-s", "5", "-l", "7", "--goodput", "latency:1.5ms")

    assert made.load.intervals_ns == (5_000,)
    assert made.measure.stability == 0.05
    assert made.measure.latency_limit_ns == 7_000_000
    assert [(one.text, one.limit) for one in made.measure.objectives] == [("latency:1.5ms", 1_500_000)]
    assert made.command == f"charonia perf --model resnet --request-intervals {gaps} --stability-percentage 5 " + (
        "--latency-threshold 7 --goodput latency:1.5ms"
    )


def test_only_a_model_of_sequences_gets_sequences(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text("{}")

    assert settings().sequences is None
    assert settings(config=SEQUENCE).sequences == SequencePlan()
    assert settings("--sequence-id-range", "5:9", config=SEQUENCE).sequences == SequencePlan(first_id=5, id_count=4)
    from_data = settings("--input-data", str(file), config=SEQUENCE).sequences
    given = settings("--input-data", str(file), "--sequence-length", "3", config=SEQUENCE).sequences
    assert from_data is not None
    assert given is not None
    assert (from_data.length_from_data, given.length_from_data, given.length) == (True, False, 3)


def test_the_metrics_page_is_on_the_host_of_the_server() -> None:
    assert settings().server.metrics_url == ""
    assert settings("-u", "host:9", "--collect-metrics").server.metrics_url == "http://host:8002/metrics"
    assert settings("-u", "[::1]:9", "--collect-metrics").server.metrics_url == "http://[::1]:8002/metrics"
    assert settings("--collect-metrics", "--metrics-url", "h:1/m").server.metrics_url == "http://h:1/m"


def test_a_decoupled_model_needs_a_stream() -> None:
    with pytest.raises(ServingError) as caught:
        settings(config=DECOUPLED)

    assert caught.value.message == "model 'resnet' is decoupled: expected --streaming and -i grpc, got -i http"
    assert settings("-i", "grpc", "--streaming", config=DECOUPLED).target.streaming


@pytest.mark.parametrize(
    ("words", "config", "lines"),
    [
        (
            "--concurrency-range 1:4",
            {},
            [
                *("*** Measurement Settings ***", "  Batch size: 1", "  Service Kind: TRITON"),
                '  Using "time_windows" mode for stabilization',
                *("  Stabilizing using average latency and throughput", "  Measurement window: 5000 msec"),
                *("  Latency limit: 0 msec", "  Concurrency limit: 4 concurrent requests"),
                "  Using synchronous calls for inference",
            ],
        ),
        (
            "-b 8 --request-rate-range 100:300:100 --request-distribution poisson -l 5 -a",
            {},
            [
                *("*** Measurement Settings ***", "  Batch size: 8", "  Service Kind: TRITON"),
                '  Using "time_windows" mode for stabilization',
                *("  Stabilizing using average latency and throughput", "  Measurement window: 5000 msec"),
                *("  Latency limit: 5 msec", "  Request Rate limit: 300 requests per seconds"),
                "  Using poisson distribution on request generation",
                "  Using asynchronous calls for inference",
            ],
        ),
        (
            "--request-count 200 --warmup-request-count 5 -i grpc --streaming",
            DECOUPLED,
            [
                *("*** Measurement Settings ***", "  Batch size: 1", "  Service Kind: TRITON"),
                *("  Sending 5 warmup request(s)", "  Sending 200 benchmark requests"),
                "  Using asynchronous calls for inference",
                "  Detected decoupled model, using the last response for measuring latency",
            ],
        ),
        (
            "--measurement-mode count_windows --measurement-request-count 100 --percentile 95",
            SEQUENCE,
            [
                *("*** Measurement Settings ***", "  Batch size: 1", "  Service Kind: TRITON"),
                '  Using "count_windows" mode for stabilization',
                "  Stabilizing using p95 latency and throughput",
                "  Minimum number of samples in each window: 100",
                "  Using asynchronous calls for inference",
            ],
        ),
    ],
)
def test_settings_are_printed_before_the_run(words: str, config: dict[str, object], lines: list[str]) -> None:
    options = parse(["-m", "resnet", *words.split()]).options

    assert settings_text(options, config).splitlines() == lines


def test_the_end_of_a_range_and_a_binary_search_are_printed() -> None:
    options = parse(["-m", "resnet", "--concurrency-range", "1:8", "-l", "9", "--binary-search"]).options

    assert settings_text(options, {}).splitlines()[-4:] == [
        *("  Latency limit: 9 msec", "  Concurrency limit: 8 concurrent requests"),
        *("  Using Binary Search algorithm", "  Using synchronous calls for inference"),
    ]


@pytest.mark.parametrize(
    ("datatype", "array", "value"),
    [
        (DataType.INT32, np.array([[1, 2]], np.int32), [1, 2]),
        (DataType.FP32, np.array([0.5], np.float32), 0.5),
        (DataType.BF16, to_bfloat16(np.array([1.5], np.float32)), 1.5),
        (DataType.BYTES, bytes_array("X", [2], [b"a", b"\xff"]), ["a", "\ufffd"]),
        (DataType.UINT8, np.zeros(EXPORT_ELEMENTS_MAX + 1, np.uint8), None),
    ],
)
def test_inputs_are_exported_as_plain_json(datatype: DataType, array: Array, value: object) -> None:
    assert plain(Tensor("X", datatype, array)) == value


def test_inputs_of_a_request_are_exported_by_name() -> None:
    spec = ModelSpec("m", "", 8, (TensorSpec("X", DataType.INT32, (2,)),))
    source = InputBatches(spec, [[InputStep({"X": np.array([1, 2], np.int32)})]])

    inputs = exported_inputs(source)

    assert json.loads(inputs(0, 0)) == {"X": [1, 2]}
    assert inputs(0, 0) is inputs(0, 0)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([Verdict.STABLE, Verdict.COMPLETE], ExitStatus.MEASURED),
        ([Verdict.STABLE, Verdict.UNSTABLE], ExitStatus.UNSTABLE),
        ([Verdict.UNSTABLE, Verdict.OVERLOADED], ExitStatus.OVERLOADED),
        ([Verdict.OVERLOADED, Verdict.SERVER_LOST], ExitStatus.FAILED_REQUESTS),
        ([Verdict.SERVER_LOST, Verdict.INTERRUPTED], ExitStatus.INTERRUPTED),
    ],
)
def test_the_worst_level_decides_the_exit_status(verdicts: list[Verdict], status: ExitStatus) -> None:
    run = synthetic_run(duration_s=0.2)

    levels = tuple(replace(run.levels[0], verdict=verdict) for verdict in verdicts)

    assert status_of(replace(run, levels=levels)) is status


def test_failed_requests_and_no_requests_have_a_status_of_their_own() -> None:
    run = synthetic_run(duration_s=0.2)
    failed = replace(run.levels[0], errors=(ErrorKind("TIMEOUT", 1, ()),))
    nothing = replace(run.levels[0], verdict=Verdict.NO_REQUESTS, request_count=0)

    assert status_of(replace(run, levels=(run.levels[1], failed))) is ExitStatus.FAILED_REQUESTS
    assert status_of(replace(run, levels=(nothing,))) is ExitStatus.NO_REQUESTS
