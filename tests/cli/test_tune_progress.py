import io

from charonia.cli.tune_run import TunePrinter
from charonia.tools.results.records import Estimate, LoadMode
from charonia.tools.tune.api import LoadPoint, Measured, Metric, ModelChange, Trial, TrialFailed, Variant
from charonia.tools.tune.decision import Ranked
from charonia.tools.tune.profile import NoteAdded, TrialDone, TrialStarted

LOADS = (LoadPoint("m", LoadMode.CONCURRENCY, 8.0),)
VARIANT = Variant((ModelChange("m", instance_count=2),))


def trial(number: int, variant: Variant = VARIANT) -> Trial:
    return Trial(number, variant, LOADS, 0, 0.5, "first look")


def exactly(value: float) -> Estimate:
    return Estimate(value, value, value)


METRICS: dict[str, dict[str, Estimate]] = {
    "m": {Metric.THROUGHPUT: exactly(1234.0), Metric.LATENCY_P99: exactly(5.678)}
}
FOUND = Measured(METRICS, elapsed_s=2.0)


def best() -> Ranked:
    return Ranked(VARIANT, LOADS, METRICS, (1,), True, 0.0, Estimate(0.12, 0.1, 0.14))


def test_a_measurement_is_a_line_with_the_best_and_the_time_left() -> None:
    out = io.StringIO()
    printer = TunePrinter(out, quiet=False)

    for left_s in (59.0, None):
        printer(TrialStarted(trial(1), "m_config_1", 9, left_s))
        printer(TrialDone(trial(1), FOUND, best()))

    measured = "[1] m_config_1, concurrency 8: 1,234 infer/s, p99 5.68 ms; best so far m_config_1 (1,234 infer/s)"
    # Without a budget, the time left comes from what was measured.
    assert out.getvalue().splitlines() == [f"{measured}; at most 59 s left", f"{measured}; at most 18 s left"]


def test_names_move_no_cursor() -> None:
    out = io.StringIO()

    TunePrinter(out, quiet=False)(NoteAdded("\x1b[2J\nm"))

    assert out.getvalue() == "?[2J\nm\n"


def test_a_stream_that_is_closed_does_not_end_the_run() -> None:
    out = io.StringIO()
    out.close()

    TunePrinter(out, quiet=False)(NoteAdded("note"))


def test_language_models_are_shown_by_their_tokens() -> None:
    tokens: dict[str, Estimate] = {
        Metric.OUTPUT_TOKENS: exactly(128.4),
        Metric.TTFT_P99: exactly(266.0),
        Metric.ITL_P99: exactly(24.1),
    }
    metrics: dict[str, dict[str, Estimate]] = {"m": {**METRICS["m"], **tokens}}
    ranked = Ranked(VARIANT, LOADS, metrics, (1,), True, 0.0, Estimate(0.12, 0.1, 0.14))
    out = io.StringIO()
    printer = TunePrinter(out, quiet=False)

    printer(TrialStarted(trial(1), "m_config_1", 10, 9.0))
    printer(TrialDone(trial(1), Measured(metrics, elapsed_s=2.0), ranked))

    assert "128 tokens/s, TTFT p99 266.00 ms; best so far m_config_1 (128 tokens/s)" in out.getvalue()


def test_a_reason_for_failures_is_printed_once() -> None:
    out = io.StringIO()
    printer = TunePrinter(out, quiet=False)

    for number in (1, 2):
        printer(TrialStarted(trial(number), f"m_config_{number}", 10, None))
        printer(TrialDone(trial(number), TrialFailed("no room for it"), None))

    outcomes = [line.split(": ", 1)[1].partition(";")[0] for line in out.getvalue().splitlines()]
    assert outcomes == ["failed: no room for it", "failed: as [1]"]
