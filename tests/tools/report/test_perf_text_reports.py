"""What a run prints and writes as CSV and as export, compared with rows and lines that perf_analyzer prints."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.runs import synthetic_run

from charonia.core.latency import LatencyHistogram
from charonia.tools.report.console import (
    View,
    level_text,
    level_title,
    pass_text,
    summary_text,
)
from charonia.tools.report.csv import csv_files
from charonia.tools.report.run_files import profile_parts, write_profile
from charonia.tools.results.records import (
    ClientTimes,
    ErrorKind,
    Estimate,
    Goodput,
    Gpu,
    LevelResult,
    LoadLevel,
    LoadMode,
    OfferedLoad,
    PerfRun,
    RequestRecord,
    Resources,
    ServerModel,
    ServerSide,
    Verdict,
    Window,
)

US = 1_000
N = 1000
TIMES = LatencyHistogram.of([470 * US] * 900 + [886 * US] * 100)

BASE_COLUMNS = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency"
)


def server_model(name: str = "m", count: int = N, composing: tuple[ServerModel, ...] = ()) -> ServerModel:
    return ServerModel(
        name,
        "1",
        inference_count=count,
        execution_count=count - 1,
        success_count=count,
        fail_count=0,
        success_ns=289 * US * count,
        queue_ns=48 * US * count,
        compute_input_ns=23 * US * count,
        compute_infer_ns=159 * US * count,
        compute_output_ns=56 * US * count,
        queue_count=count,
        composing=composing,
    )


def level(
    value: float = 1, throughput: float = 1778.8, mode: LoadMode = LoadMode.CONCURRENCY, **changes: object
) -> LevelResult:
    result = LevelResult(
        LoadLevel(mode, value),
        Verdict.STABLE,
        (),
        duration_ns=10**9,
        request_count=N,
        throughput=Estimate(throughput, throughput - 10, throughput + 10),
        latency=Estimate(554.3 * US, 550.0 * US, 560.0 * US),
        response_times=TIMES,
        service_times=TIMES,
        first_response_times=None,
        response_count=N,
        sequence_count=0,
        errors=(),
        over_latency_limit=False,
        windows=(Window(0, 10**9, N, 0, throughput, 554.0 * US, True),),
        timeline=(),
        client=ClientTimes(76.9 * US, 0.0, 0.0124, 0.5, 1),
        server=ServerSide(server_model(), False),
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def run(*levels: LevelResult, percentile: float | None = None, **model: object) -> PerfRun:
    made = synthetic_run((LoadLevel(LoadMode.CONCURRENCY, 1),), duration_s=0.1)
    return replace(
        made,
        tool="charonia 1.2.3",
        server=replace(made.server, name="triton"),
        model=replace(made.model, **model),  # type: ignore[arg-type]
        stabilising_percentile=percentile,
        levels=levels,
    )


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def only_file(made: PerfRun, **how: bool) -> str:
    (text,) = csv_files(made, Path("out.csv"), **how).values()
    return text


def test_a_level_is_printed_as_scripts_expect_it() -> None:
    assert level_text(level(), View()).splitlines() == [
        "  Client: ",
        "    Request count: 1000",
        "    Throughput: 1778.8 infer/sec",
        "    Avg latency: 511 usec (standard deviation 124 usec)",
        *(f"    p{p} latency: {TIMES.percentile(p) // US} usec" for p in (50, 90, 95, 99)),
        "    p99.9 latency: 886 usec",
        "    Max latency: 886 usec",
        "    Avg HTTP time: 511 usec (send/recv 76 usec + response wait 434 usec)",
        "    Throughput interval: 1769 to 1789 infer/sec (95% confidence)",
        "    Avg latency interval: 550 to 560 usec (95% confidence)",
        "  Server: ",
        "    Inference count: 1000",
        "    Execution count: 999",
        "    Successful request count: 1000",
        "    Avg request latency: 289 usec (overhead 3 usec + queue 48 usec + compute input 23 usec + "
        "compute infer 159 usec + compute output 56 usec)",
        "  Verdict: stable",
    ]


@pytest.mark.parametrize(
    ("view", "line"),
    [
        (
            View("http", verbose=True),
            "Avg HTTP time: 511 usec (send 76 usec + response wait 434 usec + receive 0 usec)",
        ),
        (View("grpc"), "Avg gRPC time: 511 usec ((un)marshal request/response 76 usec + response wait 434 usec)"),
        (
            View("grpc", verbose=True),
            "Avg gRPC time: 511 usec (marshal 76 usec + response wait 434 usec + unmarshal 0 usec)",
        ),
        (View("http", verbose=True), "Avg client overhead: 1.24%"),
    ],
)
def test_the_time_on_the_wire_is_split(view: View, line: str) -> None:
    assert f"    {line}" in level_text(level(), view).splitlines()


def test_a_percentile_takes_the_place_of_the_mean_and_stands_in_order() -> None:
    lines = level_text(level(), View(percentile=97)).splitlines()

    assert not any("Avg latency:" in line for line in lines)
    assert [line.split()[0] for line in lines if " latency: " in line and line.strip().startswith("p")] == [
        *("p50", "p90", "p95", "p97", "p99", "p99.9"),
    ]


def test_models_that_a_model_is_made_of_have_blocks_of_their_own() -> None:
    top = server_model("ens", composing=(server_model("a"), server_model("b")))

    lines = level_text(level(server=ServerSide(top, False)), View()).splitlines()

    begin = lines.index("  Server: ")
    assert lines[begin + 4] == (
        "    Avg request latency: 289 usec (overhead 0 usec + queue 96 usec + compute 476 usec)"
    )
    assert lines[begin + 5 : begin + 9] == [
        "",
        "  Composing models: ",
        "  a, version: 1",
        "      Inference count: 1000",
    ]
    assert "  b, version: 1" in lines


def test_what_went_wrong_is_said() -> None:
    text = level_text(
        level(
            mode=LoadMode.REQUEST_RATE,
            verdict=Verdict.OVERLOADED,
            reasons=("Requests piled up.", "17 of them waited at the end."),
            errors=(ErrorKind("UNAVAILABLE", 9, ("queue is full",)), ErrorKind("TIMEOUT", 1, ())),
            offered=OfferedLoad(200.0, 199.5, 45.1, 0.2576, 3, 17),
            goodput=Goodput(("latency:50ms",), 500, 500.0, 0.495),
            server=ServerSide(server_model(), True, ("Other clients used the model too.",)),
            resources=Resources(1.5, 1.52, 300 * 2**20, 3),
        ),
        View(),
    )

    for line in (
        "    Avg send request rate: 199.50 requests/sec",
        "    [WARNING] 25.76% of the requests were sent more than 1 ms after their scheduled time. "
        "Their latency counts from the scheduled time. ",
        "    Offered: 200 requests/sec, sent 199.5, answered 45.1, waiting 3 at the start and 17 at the end",
        "    Errors: 10 (0.99% of the requests)",
        "      9 UNAVAILABLE: queue is full",
        "      1 TIMEOUT",
        "    Goodput: 500 requests/sec (49.50% within latency:50ms)",
        "    CPU: 1.52 cores, memory: 300.0 MiB (3 processes)",
        "    Note: Other clients used the model too.",
        "  Verdict: overloaded: Requests piled up. 17 of them waited at the end.",
    ):
        assert line in text.splitlines()


def test_sequences_and_streams_have_lines() -> None:
    text = level_text(
        level(sequence_count=240, response_count=3000, first_response_times=LatencyHistogram.of([100 * US] * 2)),
        View(decoupled=True),
    )

    assert "    Sequence count: 240 (240 seq/sec)" in text
    assert "    Response Throughput: 3000 infer/sec" in text
    assert "    First response: avg 100 usec, p99 100 usec" in text
    assert "Avg HTTP time" not in text


def test_a_cache_has_lines() -> None:
    cached = replace(
        server_model(),
        cache_hit_count=400,
        cache_hit_ns=400 * 10 * US,
        cache_miss_count=600,
        cache_miss_ns=600 * 30 * US,
    )

    text = level_text(level(server=ServerSide(cached, False)), View())

    assert "    Cache hit count: 400\n    Cache miss count: 600\n" in text
    assert "queue 48 usec + cache hit/miss 22 usec + compute input" in text
    assert "    Average Cache Hit Latency: 10 usec\n    Average Cache Miss Latency: 30 usec\n" in text


def test_metrics_of_gpus_have_a_block() -> None:
    gpus = (Gpu("GPU-1", 0.5, 70.0, 2.0**30, None),)

    assert level_text(level(gpus=gpus), View(metrics=True)).splitlines()[-10:-2] == [
        "",
        "  Server Prometheus Metrics: ",
        "    Avg GPU Utilization:",
        "      GPU-1 : 50%",
        "    Avg GPU Power Usage:",
        "      GPU-1 : 70 watts",
        "    Max GPU Memory Usage:",
        "      GPU-1 : 1073741824 bytes",
    ]


def test_a_server_without_statistics_has_no_block() -> None:
    assert "Server:" not in level_text(level(server=ServerSide(None, False)), View())


def test_levels_and_windows_announce_themselves() -> None:
    assert level_title(LoadLevel(LoadMode.CONCURRENCY, 4)) == "Request concurrency: 4"
    assert level_title(LoadLevel(LoadMode.REQUEST_RATE, 37.5)) == "Request Rate: 37.5 inference requests per seconds"
    assert level_title(LoadLevel(LoadMode.INTERVALS, 37.5)) == ""
    window = Window(0, 1, 10, 0, 2103.124, 470.9 * US, True)
    assert pass_text(1, window, 231.0 * US, None) == (
        "  Pass [1] throughput: 2103.12 infer/sec. Avg latency: 470 usec (std 231 usec). "
    )
    assert pass_text(2, window, 0.0, 95.0) == "  Pass [2] throughput: 2103.12 infer/sec. p95 latency: 470 usec"


def test_the_end_has_a_line_for_each_level_and_a_table() -> None:
    p50, p95 = TIMES.percentile(50) // US, TIMES.percentile(95) // US

    text = summary_text(run(level(1), level(2, 90.55, verdict=Verdict.UNSTABLE)))

    assert text.splitlines()[:3] == [
        "Inferences/Second vs. Client Average Batch Latency",
        "Concurrency: 1, throughput: 1778.8 infer/sec, latency 554 usec",
        "Concurrency: 2, throughput: 90.55 infer/sec, latency 554 usec (unstable)",
    ]
    assert text.splitlines()[4:7] == [
        "  Concurrency  infer/sec  p50  p90  p95  p99  p99.9  errors  verdict",
        f"            1     1778.8  {p50}  {p50}  {p95}  {p95}    886       0  stable",
        f"            2       90.5  {p50}  {p50}  {p95}  {p95}    886       0  unstable",
    ]


def test_the_end_of_a_search_names_its_answer() -> None:
    text = summary_text(replace(run(level(1), percentile=95.0), answer=LoadLevel(LoadMode.CONCURRENCY, 1)))

    assert text.startswith("Inferences/Second vs. Client p95 Batch Latency\n")
    assert text.endswith("Highest level within the latency limit: concurrency 1")


def test_the_columns_of_the_csv_begin_with_those_that_are_known() -> None:
    head, row = only_file(run(level())).splitlines()

    assert head == (
        f"{BASE_COLUMNS},p99.9 latency,p99.99 latency,Throughput Low,Throughput High,Errors,Error Share,Verdict"
    )
    p50, p95 = TIMES.percentile(50) // US, TIMES.percentile(95) // US
    assert row == f"1,1778.8,76,148,48,23,159,56,0,{p50},{p50},{p95},{p95},886,,1768.8,1788.8,0,0,stable"


def test_rows_are_sorted_by_throughput() -> None:
    text = only_file(run(level(1, 300.0), level(2, 100.0), level(3, 200.0)))

    assert [row["Concurrency"] for row in rows(text)] == ["2", "3", "1"]


def test_rates_have_their_own_columns() -> None:
    offered = OfferedLoad(100.0, 99.9, 99.9, 0.01, 0, 0)
    text = only_file(run(level(99.5, mode=LoadMode.REQUEST_RATE, offered=offered)))

    (row,) = rows(text)
    assert text.startswith("Request Rate,Inferences/Second,")
    assert (row["Request Rate"], row["Sent Rate"], row["Delayed Share"]) == ("99.5", "99.9", "0.01")


def test_verbose_columns_stand_behind_the_percentiles() -> None:
    assert only_file(run(level()), verbose=True).startswith(
        f"{BASE_COLUMNS},Avg latency,request/response,response wait,p99.9 latency"
    )
    assert only_file(run(level(), percentile=95.0), verbose=True).startswith(
        f"{BASE_COLUMNS},request/response,response wait,p99.9 latency"
    )
    gpus = (Gpu("GPU-1", 0.5, 70.0, 1024.0, None), Gpu("GPU-2", 0.25, None, None, None))
    (row,) = rows(only_file(run(level(gpus=gpus)), verbose=True, metrics=True))
    assert row["Avg GPU Utilization"] == "GPU-1:0.5;GPU-2:0.25;"
    assert (row["Max GPU Memory Usage"], row["Total GPU Memory"]) == ("GPU-1:1024;", "")


def test_special_models_have_their_columns() -> None:
    decoupled = only_file(run(level(response_count=3000), decoupled=True))
    cached = only_file(run(level(), cached=True))
    plain = only_file(run(level(server=ServerSide(None, False)), percentile=97.5))

    assert decoupled.startswith("Concurrency,Inferences/Second,Response Throughput,Client Send,")
    assert rows(decoupled)[0]["Response Throughput"] == "3000"
    assert "Server Compute Output,Server Cache Hit,Server Cache Miss,Client Recv" in cached
    assert plain.startswith(
        "Concurrency,Inferences/Second,Client Send,Client Recv,p50 latency,p90 latency,p95 latency,p97.5 latency,p99"
    )


def test_models_that_a_model_is_made_of_have_files_beside_it() -> None:
    top = server_model("ens", composing=(server_model("a"), server_model("b", count=N // 2)))

    files = csv_files(run(level(server=ServerSide(top, False))), Path("some/folder/out.csv"))

    assert [str(path) for path in files] == [
        "some/folder/out.csv",
        "some/folder/a_v1.out.csv",
        "some/folder/b_v1.out.csv",
    ]
    assert files[Path("some/folder/b_v1.out.csv")] == (
        "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
        "Server Compute Infer,Server Compute Output,Client Recv\n1,889.4,0,3,48,23,159,56,0\n"
    )


def test_there_is_no_file_without_a_successful_request() -> None:
    assert csv_files(run(level(request_count=0)), Path("out.csv")) == {}


def test_the_export_is_json_with_every_request(tmp_path: Path) -> None:
    requests = (RequestRecord(1000, (1500, 1600), 0, 1, 7), RequestRecord(2000, (), 0, 0, error="TIMEOUT"))
    made = run(level(4, requests=requests, epoch_ns=10), level(2.5, mode=LoadMode.REQUEST_RATE))
    file = tmp_path / "profile.json"

    write_profile(file, made, lambda stream, step: json.dumps({"X": [stream, step]}))

    document = json.loads(file.read_text())
    assert document["experiments"][0] == {
        "experiment": {"mode": "concurrency", "value": 4},
        "requests": [
            {
                "timestamp": 1000,
                "sequence_id": 7,
                "request_inputs": {"X": [0, 1]},
                "response_timestamps": [1500, 1600],
            },
            {"timestamp": 2000, "request_inputs": {"X": [0, 0]}, "response_timestamps": [], "error": "TIMEOUT"},
        ],
        "window_boundaries": [10, 10**9 + 10],
    }
    assert document["experiments"][1]["experiment"] == {"mode": "request_rate", "value": 2.5}
    assert (document["version"], document["service_kind"], document["endpoint"]) == ("1.2.3", "triton", "")
    assert list(tmp_path.iterdir()) == [file]


def test_the_export_comes_in_small_pieces() -> None:
    requests = tuple(RequestRecord(index, (index,), 0, 0) for index in range(1000))

    assert max(map(len, profile_parts(run(level(requests=requests))))) < 200


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(stream: int, step: int) -> str:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_profile(tmp_path / "x.json", run(level(requests=(RequestRecord(0, (), 0, 0),))), fail)

    assert list(tmp_path.iterdir()) == []
