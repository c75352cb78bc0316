import math
from operator import attrgetter
from pathlib import Path

import pytest

from charonia.cli.command_line import Option
from charonia.cli.perf import LINE, REFUSED, described, parse
from charonia.cli.platform_access import PlatformAccess, connect
from charonia.core.errors import ServingError
from charonia.tools.perf.api import Distribution, MeasurementMode, ServiceObjective, SharedMemory
from charonia.tools.perf.options import CallStyle, PerfOptions, WireProtocol
from charonia.tools.results.records import LoadMode

M = ("-m", "resnet")


def options(*arguments: str) -> PerfOptions:
    return parse([*M, *arguments]).options


def levels(made: PerfOptions) -> tuple[object, ...]:
    return (made.load.mode, made.load.start, made.load.end, made.load.step)


def problems(*arguments: str) -> list[str]:
    with pytest.raises(ServingError) as caught:
        parse(list(arguments))
    return caught.value.message.splitlines()


def test_a_common_line_means_what_it_says(tmp_path: Path) -> None:
    csv = tmp_path / "perf.csv"

    made = options("-u", "host:9000", "-b", "16", "-a", "--concurrency-range", "1:8", "-f", str(csv))

    assert (made.target.model, made.target.url, made.target.batch_size) == ("resnet", "host:9000", 16)
    assert levels(made) == (LoadMode.CONCURRENCY, 1, 8, 1)
    assert made.report.call_style is CallStyle.ASYNC
    assert made.report.csv == csv


def test_a_line_over_grpc_with_data_and_percentile(tmp_path: Path) -> None:
    data = tmp_path / "real_data.json"
    data.write_text('{"data": []}')

    made = options(
        *("-b", "16", "--input-data", str(data), "--measurement-interval", "10000"),
        *("--concurrency-range", "1:10", "--percentile=90", "-i", "grpc"),
    )

    assert made.data.sources == (str(data),)
    assert made.measure.interval_ms == 10_000
    assert made.measure.percentile == 90
    assert made.target.protocol is WireProtocol.GRPC
    assert made.target.address == "localhost:8001"


def test_without_options_it_is_one_request_at_a_time_over_http() -> None:
    made = options()

    assert levels(made) == (LoadMode.CONCURRENCY, 1, 1, 1)
    assert made.target.address == "localhost:8000"
    assert made.data.sources == ("random",)


@pytest.mark.parametrize(
    "arguments",
    [
        ("-b", "8", "--max-trials", "3"),
        ("-b8", "-r3"),
        ("--max-tri=3", "-b", "8"),
        ("--batch-size=8", "--max-trials=3"),
    ],
)
def test_forms_of_the_same_options_are_the_same(arguments: tuple[str, ...]) -> None:
    made = options(*arguments)

    assert (made.target.batch_size, made.measure.trials_max) == (8, 3)


def test_short_options_can_be_joined() -> None:
    made = options("-vva", "-i", "GRPC")

    assert made.report.verbosity == 2
    assert made.report.call_style is CallStyle.ASYNC
    assert made.target.protocol is WireProtocol.GRPC


def test_a_prefix_that_only_perf_analyzer_shares_keeps_its_meaning(tmp_path: Path) -> None:
    made = options("--pro", str(tmp_path / "out.json"))  # --profile-export-file, though there is --processes here

    assert made.report.profile_export == tmp_path / "out.json"


def test_an_ambiguous_prefix_is_refused() -> None:
    assert problems(*M, "--max-t", "3") == ["option '--max-t' is ambiguous: --max-threads, --max-trials"]


def test_negative_values_are_values() -> None:
    assert options("--percentile", "-1").measure.percentile is None
    assert options("--input-range", "X:-5:-1", "--string-data", "-y").data.string_data == "-y"


def test_repeatable_options_add_up() -> None:
    made = options("--shape", "a:b:3,4", "--shape=IDS:8", "-H", "X-Key: a:b", "-H", "Y:2", "--input-range", "IDS:0:100")

    assert made.data.shapes == (("a:b", (3, 4)), ("IDS", (8,)))
    assert made.target.headers == (("X-Key", "a:b"), ("Y", "2"))
    assert made.data.ranges == (("IDS", 0.0, 100.0),)


def test_parameters_have_their_types() -> None:
    made = options(
        *("--request-parameter", "n:5:int", "--request-parameter", "on:true:bool"),
        *("--request-parameter", "s:a:b:string"),
    )

    assert made.target.parameters == (("n", 5), ("on", True), ("s", "a:b"))


def test_times_take_units() -> None:
    made = options("--request-timeout", "1.5", "--goodput", "latency:50ms")

    assert made.target.timeout_s == 1.5
    assert made.measure.objectives == (ServiceObjective("latency:50ms", 50_000_000),)
    assert options("--request-timeout", "250us").target.timeout_s == 0.00025


def test_rates_and_their_distribution() -> None:
    made = options("--request-rate-range=20:40.5:10", "--request-distribution", "poisson", "--seed", "7")

    assert levels(made) == (LoadMode.REQUEST_RATE, 20.0, 40.5, 10.0)
    assert made.load.distribution is Distribution.POISSON
    assert made.load.seed == 7


def test_intervals_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "gaps.txt"
    file.write_text("100000\n50000\n\n0\n")

    made = options("--request-intervals", str(file))

    assert made.load.mode is LoadMode.INTERVALS
    assert made.load.intervals_ns == (100_000_000, 50_000_000, 0)


def test_a_file_without_gaps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gaps.txt"
    file.write_text("0\n0\n")
    monkeypatch.setattr("charonia.cli.perf_values.INTERVALS_MAX", 2)

    (empty,) = problems(*M, "--request-intervals", str(file))
    file.write_text("1\n2\n3\n")
    (long,) = problems(*M, "--request-intervals", str(file))

    assert empty.endswith("expected a line with the microseconds to the next request, got none above 0")
    assert long.endswith("gaps.txt: expected at most 2 lines")


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    pem = tmp_path / "x.pem"
    pem.write_text("")

    assert problems(*M, "-u", "https://x", "--ssl-https-private-key-file", str(pem)) == [
        "--ssl-https-...: expected a client certificate and its key, got one of them"
    ]


def test_several_sources_are_json_files(tmp_path: Path) -> None:
    assert problems(*M, "--input-data", str(tmp_path), "--input-data", "zero") == [
        f"--input-data: expected JSON files where there is more than one, got {tmp_path}"
    ]


def test_a_file_of_intervals_names_the_line_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "gaps.txt"
    file.write_text("100\nfast\n")

    assert problems(*M, "--request-intervals", str(file)) == [
        f"--request-intervals: {file}: line 2: expected an integer from 0 to 2147483647, got 'fast'"
    ]


def test_sequences() -> None:
    made = options(
        *("--sequence-length", "5", "--sequence-length-variation", "0", "--sequence-id-range", "10:20"),
        "--serial-sequences",
    )

    assert (made.sequences.length, made.sequences.length_from_data) == (5, False)
    assert (made.sequences.first_id, made.sequences.id_count) == (10, 10)
    assert made.sequences.serial
    assert made.sequences.variation == 0


def test_tls_of_either_protocol(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("")

    made = options(
        *("-u", "https://host", "--ssl-https-ca-certificates-file", str(ca), "--ssl-https-verify-host", "0"),
        *("--ssl-grpc-use-ssl", "--ssl-grpc-root-certifications-file", str(ca)),
    )

    assert (made.target.http_tls.ca_file, made.target.http_tls.verify_host) == (str(ca), False)
    assert made.target.grpc_uses_tls
    assert made.target.grpc_tls.ca_file == str(ca)


def test_other_kinds_of_values() -> None:
    made = options(
        *("--measurement-mode", "adaptive", "--shared-memory", "system", "--bls-composing-models", "a:1, b"),
    )

    assert made.measure.mode is MeasurementMode.ADAPTIVE
    assert made.target.shared_memory is SharedMemory.SYSTEM
    assert made.server.composing == (("a", "1"), ("b", ""))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-t", "4"), (4, 4, 1)),
        (("-d", "-t", "2", "-c", "8"), (2, 8, 1)),
        (("-d", "-l", "50"), (1, math.inf, 1)),
    ],
)
def test_old_names_of_the_concurrency_are_understood(arguments: tuple[str, ...], expected: tuple[float, ...]) -> None:
    parsed = parse([*M, *arguments])

    assert levels(parsed.options) == (LoadMode.CONCURRENCY, *expected)
    assert parsed.notes
    assert all("is an old name: use --concurrency-range" in note for note in parsed.notes)


def test_old_names_of_the_data_are_understood(tmp_path: Path) -> None:
    assert options("-z").data.sources == ("zero",)
    assert options("--data-directory", str(tmp_path)).data.sources == (str(tmp_path),)


def test_options_without_effect_are_noted() -> None:
    parsed = parse([*M, "--max-threads", "8", "--verbose-csv", "--ssl-https-verify-peer", "0"])

    assert parsed.notes == (
        "--max-threads has no effect: an event loop sends, not threads",
        "--ssl-https-... has no effect without a URL such as -u https://HOST:PORT",
        "--verbose-csv has no effect without -f",
    )


@pytest.mark.parametrize("option", REFUSED, ids=lambda option: option.name)
def test_what_has_no_meaning_here_is_refused_with_a_reason(option: Option) -> None:
    shown = f"{option.name}=x" if option.metavar else option.name
    assert problems(*M, option.name, *(["x"] if option.metavar else [])) == [f"{shown}: {option.unsupported}"]


@pytest.mark.parametrize("kind", ["tfserving", "triton_c_api", "torchserve"])
def test_other_services_are_refused(kind: str) -> None:
    assert problems(*M, "--service-kind", kind) == [f"--service-kind: expected triton or openai, got '{kind}'"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--streaming",), "--streaming: expected -i grpc with it, got -i http"),
        (("--sync", "-a"), "--sync and --async: expected one of them, got both"),
        (
            ("-i", "grpc", "--streaming", "--sync"),
            "--streaming: expected --async with it, got --sync (hint: leave --sync out)",
        ),
        (
            ("--concurrency-range", "2", "--request-rate-range", "5"),
            "--concurrency-range and --request-rate-range: expected one way to send requests, got 2",
        ),
        (
            ("--concurrency-range", "1:0"),
            "--concurrency-range: expected --latency-threshold with a range without end, got none",
        ),
        (("--concurrency-range", "4:2"), "--concurrency-range: expected an end of at least 4, got 2"),
        (
            ("--binary-search", "--concurrency-range", "1:8"),
            "--binary-search: expected --latency-threshold with it, got none",
        ),
        (
            ("--binary-search", "-l", "5"),
            "--binary-search: expected --concurrency-range or --request-rate-range with start and end, got 1:1",
        ),
        (("--percentile", "101"), "--percentile: expected a number above 0 and at most 100, got '101'"),
        (("--percentile", "100"), "--percentile: expected a number below 100, or -1 for the mean, got '100'"),
        (
            ("--request-count", "9", "--concurrency-range", "1:4"),
            "--request-count: expected a single level with it, got a range",
        ),
        (
            ("--request-count", "3", "--concurrency-range", "4"),
            "--request-count: expected at least the level, 4, got 3",
        ),
        (("--metrics-interval", "5"), "--metrics-interval: expected --collect-metrics with it, got none"),
        (
            ("--sequence-id-range", "1:3", "--concurrency-range", "4"),
            "--sequence-id-range: expected at least 4 ids, one for each sequence at a time, got 2",
        ),
        (
            ("--periodic-concurrency-range", "1:4"),
            "--periodic-concurrency-range: expected --streaming and --profile-export-file with it",
        ),
        (("--shape", "X:0"), "--shape: expected NAME:D1,D2,... with dimensions of at least 1, got 'X:0'"),
        (("--input-range", "X:2:1"), "--input-range: expected NAME:LOW:HIGH with LOW not above HIGH, got 'X:2:1'"),
        (("-c", "4"), "-c: expected -d with it, got none (hint: --concurrency-range START:END)"),
        (
            ("--concurrency-range", "1:2:3:4"),
            "--concurrency-range: expected START, START:END or START:END:STEP, got '1:2:3:4'",
        ),
        (
            ("--request-rate-range", "1:2:3:4"),
            "--request-rate-range: expected START, START:END or START:END:STEP, got '1:2:3:4'",
        ),
        (("--request-rate-range", "0"), "--request-rate-range: expected a number above 0 and at most 1e+09, got '0'"),
        (
            ("--periodic-concurrency-range", "3"),
            "--periodic-concurrency-range: expected START:END or START:END:STEP, got '3'",
        ),
        (
            ("--periodic-concurrency-range", "3:0"),
            "--periodic-concurrency-range: expected an END of at least 1, got '3:0'",
        ),
        (("--sequence-id-range", "9:3"), "--sequence-id-range: expected an end above 9, got '9:3'"),
        (("--stability-percentage", "-1"), "--stability-percentage: expected a number of at least 0, got '-1'"),
        (("--request-timeout", "soon"), "--request-timeout: expected a time such as 50ms or 2s, got 'soon'"),
        (("-H", "novalue"), "--header: expected Name:Value, got 'novalue'"),
        (
            ("--request-parameter", "n:x:int"),
            "--request-parameter: expected NAME:VALUE:TYPE with a TYPE of bool, int or string, got 'n:x:int'",
        ),
        (
            ("--goodput", "rate:5"),
            "--goodput: expected latency:TIME, e.g. latency:50ms, or ttft:TIME, itl:TIME, got 'rate:5'",
        ),
        (("--goodput", "latency:0"), "--goodput: expected a time above 0, got 'latency:0'"),
        (("--shared-memory", "disk"), "--shared-memory: expected none or system, got 'disk'"),
        (
            ("--shared-memory", "system", "--input-tensor-format", "json"),
            "--shared-memory: expected binary tensors with it, got a tensor format of json",
        ),
        (("-f", "/"), "--csv: expected a file, got the folder '/'"),
        (
            ("--ssl-grpc-private-key-file", "/no/such"),
            "--ssl-grpc-private-key-file: expected a file, got '/no/such', which is not one",
        ),
        (("--shape", "X:a"), "--shape: expected NAME:D1,D2,... with dimensions of at least 1, got 'X:a'"),
        (("--input-range", "X:a:b"), "--input-range: expected NAME:LOW:HIGH with LOW not above HIGH, got 'X:a:b'"),
        (
            ("--concurrency-range", "1:2", "-t", "3"),
            "--concurrency-range: expected none of its old names, got -t",
        ),
        (
            ("--periodic-concurrency-range", "1:4:2"),
            "--periodic-concurrency-range: expected a step that divides the range, got 1:4:2",
        ),
        (("--", "x", "y"), "unexpected argument 'y' (hint: one file, or a model with -m)"),
        (("-b", "0"), "--batch-size: expected an integer from 1 to 2147483647, got '0'"),
        (
            ("--shared-memory", "cuda"),
            "--shared-memory: expected none or system, got 'cuda': GPU memory is not supported",
        ),
        (("--measurement-modus", "x"), "unknown option '--measurement-modus' (hint: did you mean --measurement-mode?)"),
        (("-w",), "unknown option '-w' (hint: charonia perf --help lists the options)"),
        (("a.onnx", "b.onnx"), "unexpected argument 'b.onnx' (hint: one file, or a model with -m)"),
        (("a.onnx", "-u", "a:1"), "--url: expected none, as 'a.onnx' is served for the measurement"),
        (("--seed",), "--seed: expected a value behind it, got none"),
        (("--async=1",), "--async: expected no value, got '1'"),
        (
            ("-f", "/no/such/folder/x.csv"),
            "--csv: expected a file in a folder that exists, got '/no/such/folder/x.csv'",
        ),
        (
            ("--input-data", "/no/such"),
            "--input-data: expected random, zero, a folder or a JSON file, got '/no/such', which does not exist",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_one_line(arguments: tuple[str, ...], problem: str) -> None:
    assert problem in problems(*M, *arguments)


def test_all_problems_come_at_once() -> None:
    assert problems("--streaming", "--percentile", "x", "--seed=-1", "--foo") == [
        "unknown option '--foo' (hint: charonia perf --help lists the options)",
        "--seed: expected an integer from 0 to 2147483647, got '-1'",
        "--percentile: expected a number above 0 and at most 100, got 'x'",
        "-m: expected the name of a model, got none (hint: charonia perf -m NAME -u HOST:PORT)",
        "--streaming: expected -i grpc with it, got -i http",
    ]


def test_what_follows_from_an_unreadable_option_is_not_reported() -> None:
    assert problems("-m", "", "--streaming", "-i", "grcp") == [
        "--model: expected a value, got ''",
        "--protocol: expected http or grpc, got 'grcp'",
    ]


def test_an_export_never_replaces_a_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text("")

    assert problems(*M, "--profile-export-file", str(file)) == [
        f"--profile-export-file: expected a file that does not exist yet, got '{file}'"
    ]


def test_two_reports_do_not_share_a_file(tmp_path: Path) -> None:
    file = str(tmp_path / "out")

    assert problems(*M, "-f", file, "--json", file) == [f"--json: expected a separate file, got that of -f, {file}"]


def test_the_options_in_force_are_described() -> None:
    text = described(parse([*M, "-b", "4"]).named)

    assert text["model"] == "resnet"
    assert text["batch-size"] == "4"
    assert text["measurement-interval"] == "5000"
    assert "html" not in text


def test_the_command_line_is_kept_without_secrets() -> None:
    parsed = parse([*M, "-a", "-H", "Authorization: Bearer abc", "--string-data", "two words"])

    assert (
        parsed.command == "charonia perf --model resnet --async --header 'Authorization:***' --string-data 'two words'"
    )
    assert "abc" not in str(described(parsed.named))
    assert parsed.options.target.headers == (("Authorization", "Bearer abc"),)


@pytest.mark.parametrize("option", [o for o in LINE.options() if o.field and o.default], ids=lambda option: option.name)
def test_a_default_that_is_written_down_is_that_of_the_field(option: Option) -> None:
    words = {"newest", "none", "the system's", "the server's", "a running server"}
    if option.default not in words and not str(option.default).startswith(("localhost", "-1, ", "port ")):
        assert option.read(option.default) == attrgetter(option.field)(LINE.record)


def test_a_header_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("x-api-key: secret\n")

    parsed = parse(["-m", "resnet", "-H", f"@{file}"])

    assert parsed.options.target.headers == (("x-api-key", "secret"),)
    assert "secret" not in parsed.command


@pytest.mark.parametrize("content", ["secret", "a: b\nc: d", ": secret"])
def test_a_file_without_a_header_is_named_but_not_shown(content: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(content)

    with pytest.raises(ServingError) as raised:
        parse(["-m", "resnet", "-H", f"@{file}"])
    assert f"expected Name:Value in '{file}'" in str(raised.value)
    assert "secret" not in str(raised.value)
    with pytest.raises(ServingError, match="cannot be read"):
        parse(["-m", "resnet", "-H", f"@{tmp_path / 'none'}"])


def test_the_key_of_the_environment_counts_where_no_other_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_API_KEY", "secret\n")

    assert parse(["-m", "resnet", "-H", "a:b"]).options.target.headers == (("a", "b"), ("x-api-key", "secret"))
    assert parse(["-m", "resnet", "-H", "X-Api-Key:k"]).options.target.headers == (("X-Api-Key", "k"),)
    assert parse(["-m", "resnet", "-H", "Authorization:k"]).options.target.headers == (("Authorization", "k"),)
    assert "secret" not in parse(["-m", "resnet"]).command


def test_a_key_that_no_header_can_have_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_API_KEY", "secret\nx: y")

    with pytest.raises(ServingError, match="CHARONIA_API_KEY: expected printable") as raised:
        parse(["-m", "resnet"])
    assert "secret" not in str(raised.value)
    with pytest.raises(ServingError, match="the API key: expected printable"):
        connect(PlatformAccess(server="http://localhost:1", key="é"), {})
    with pytest.raises(ServingError, match="CHARONIA_PLATFORM_KEY: expected printable"):
        connect(PlatformAccess(server="http://localhost:1"), {"CHARONIA_PLATFORM_KEY": "é"})
