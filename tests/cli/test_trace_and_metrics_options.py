"""`--trace-config`, the options that it took the place of, and `--metrics-config`."""

import pytest

from charonia.cli.perf import parse as parse_perf
from charonia.cli.serve import parse
from charonia.core.errors import ServingError
from charonia.core.trace import TraceLevel
from charonia.server.options import MetricsOptions
from charonia.server.tracing.sampling import OtelOptions, TraceMode, TraceOptions


def trace(*settings: str) -> TraceOptions:
    return parse(["models", *settings], {})[0].trace


def metrics(*settings: str) -> MetricsOptions:
    return parse(["models", *(f"--metrics-config={setting}" for setting in settings)], {})[0].metrics


def problems(*arguments: str) -> list[str]:
    with pytest.raises(ServingError) as caught:
        parse(["models", *arguments], {})
    return caught.value.message.splitlines()


def test_settings_of_files_add_up() -> None:
    made = trace(
        "--trace-config=triton,file=t.json",
        "--trace-config=triton,log-frequency=5",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=level=tensors",
        "--trace-config=rate=10",
        "--trace-config=count=100",
    )

    level = TraceLevel.TIMESTAMPS | TraceLevel.TENSORS
    assert made == TraceOptions(level=level, rate=10, count=100, file="t.json", log_frequency=5)


def test_settings_of_a_collector_add_up() -> None:
    made = trace(
        "--trace-config=mode=OpenTelemetry",
        "--trace-config=rate=0",
        "--trace-config=level=on",
        "--trace-config=opentelemetry,url=http://c:4318/v1/traces",
        "--trace-config=opentelemetry,resource=service.name=a=b",
        "--trace-config=opentelemetry,resource=zone=x",
        "--trace-config=opentelemetry,bsp_max_queue_size=100",
        "--trace-config=opentelemetry,bsp_schedule_delay=50",
        "--trace-config=opentelemetry,bsp_max_export_batch_size=10",
    )

    assert (made.mode, made.rate, made.level) == (TraceMode.OPENTELEMETRY, 0, TraceLevel.TIMESTAMPS)
    resource = (("service.name", "a=b"), ("zone", "x"))
    assert made.otel == OtelOptions("http://c:4318/v1/traces", resource, 100, 50, 10)


def test_old_forms_mean_the_same() -> None:
    old = ["--trace-file=t", "--trace-level=min", "--trace-rate=3", "--trace-count=4", "--trace-log-frequency=5"]
    new = ["triton,file=t", "level=TIMESTAMPS", "rate=3", "count=4", "triton,log-frequency=5"]

    assert trace(*old) == trace(*(f"--trace-config={setting}" for setting in new))


def test_the_new_form_counts_where_both_are_given() -> None:
    assert trace("--trace-config=rate=7", "--trace-rate=3").rate == 7


@pytest.mark.parametrize("form", ["--trace-level=", "--trace-config=level="])
def test_off_wins(form: str) -> None:
    assert trace("--trace-file=t", f"{form}TIMESTAMPS", f"{form}OFF").level is TraceLevel.OFF


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("--trace-config=rate", "expected <name>,<key>=<value>"),
        ("--trace-config=speed=1", "expected one of mode, level, rate, count, triton,file"),
        ("--trace-config=triton,rate=1", "expected one of"),
        ("--trace-config=rate=x", "rate: expected an integer from 0"),
        ("--trace-config=count=-2", "count: expected an integer from -1"),
        ("--trace-config=level=MAXIMUM", "level: expected OFF, TIMESTAMPS or TENSORS, got 'MAXIMUM'"),
        ("--trace-config=mode=jaeger", "mode: expected triton or opentelemetry"),
        ("--trace-config=triton,file=", "file: expected a value"),
        ("--trace-config=opentelemetry,resource=x", "resource: expected NAME=VALUE, got 'x'"),
        ("--trace-config=level=TIMESTAMPS", "no file to write to is given"),
        ("--trace-rate=-1", "expected an integer from 0"),
    ],
)
def test_what_cannot_be_understood_is_refused(argument: str, part: str) -> None:
    assert any(part in problem for problem in problems(argument))


def test_numbers_that_do_not_fit_each_other_are_refused() -> None:
    assert problems(
        "--trace-config=triton,file=t",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=0",
        "--trace-config=opentelemetry,bsp_max_export_batch_size=4096",
    ) == [
        "--trace-config rate: expected at least 1, got 0",
        "--trace-config opentelemetry,bsp_max_export_batch_size: expected at most bsp_max_queue_size",
    ]


def test_latencies_are_shown_as_counters_and_histograms_unless_told_otherwise() -> None:
    default = metrics()
    assert (default.counter_latencies, default.histogram_latencies, default.summary_latencies) == (True, True, False)

    made = metrics("counter_latencies=false", "histogram_latencies=0", "summary_latencies=true")
    assert (made.counter_latencies, made.histogram_latencies, made.summary_latencies) == (False, False, True)


def test_quantiles_come_with_errors_that_are_not_needed() -> None:
    assert metrics("summary_quantiles=0.5:0.05,0.99:0.001").summary_quantiles == (0.5, 0.99)


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("speed=1", "expected one of counter_latencies, histogram_latencies"),
        ("triton,counter_latencies=1", "expected one of"),
        ("counter_latencies=maybe", "counter_latencies: expected true or false"),
        ("summary_quantiles=0.5", "summary_quantiles: expected QUANTILE:ERROR, both from 0 to 1, got '0.5'"),
        ("summary_quantiles=2:0.1", "from 0 to 1"),
        ("summary_quantiles=nan:0.1", "from 0 to 1"),
    ],
)
def test_what_is_no_setting_of_metrics_is_refused(setting: str, part: str) -> None:
    (problem,) = problems(f"--metrics-config={setting}")

    assert part in problem


def test_perf_sends_only_what_is_given() -> None:
    arguments = ["-m", "m", "--trace-level", "timestamps", "--trace-level=TENSORS", "--trace-count", "-1"]

    assert parse_perf(arguments).options.server.trace == (
        ("trace_level", ("TIMESTAMPS", "TENSORS")),
        ("trace_count", ("-1",)),
    )
    assert parse_perf(["-m", "m"]).options.server.trace == ()


@pytest.mark.parametrize("argument", ["--trace-level=MIN", "--trace-rate=-1", "--trace-count=-2", "--log-frequency=x"])
def test_perf_refuses_what_no_server_would_take(argument: str) -> None:
    with pytest.raises(ServingError, match=argument.partition("=")[0]):
        parse_perf(["-m", "m", argument])
