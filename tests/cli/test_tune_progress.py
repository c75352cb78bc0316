import io
import re

import pytest

from charonia.cli.terminal import is_terminal
from charonia.cli.tune_run import SHOWN_MAX, LiveTable, TunePrinter, watched
from charonia.tools.results.records import Estimate, LoadMode
from charonia.tools.tune.api import Failed, LoadPoint, Measured, Metric, ModelChange, Outcome, Trial, Variant
from charonia.tools.tune.decision import Conclusion, Decision, Ranked
from charonia.tools.tune.progress import Noted, SearchDone, TrialBegun, TrialDone

LOADS = (LoadPoint("m", LoadMode.CONCURRENCY, 8.0),)
VARIANT = Variant((ModelChange("m", instance_count=2),))


class Terminal(io.StringIO):
    """A terminal that understands going up and clearing what is below."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> str:
        lines = [""]
        for piece in re.split(r"(\r?\x1b\[\d+A\x1b\[J)", self.getvalue()):
            up = re.fullmatch(r"\r?\x1b\[(\d+)A\x1b\[J", piece)
            if up:
                lines = [*lines[: len(lines) - 1 - int(up[1])], ""]
            else:
                first, *others = piece.split("\n")
                lines = [*lines[:-1], lines[-1] + first, *others]
        return "\n".join(lines)


def trial(number: int, variant: Variant = VARIANT) -> Trial:
    return Trial(number, variant, LOADS, 0, 0.5, "first look")


def exactly(value: float) -> Estimate:
    return Estimate(value, value, value)


METRICS: dict[str, dict[str, Estimate]] = {
    "m": {Metric.THROUGHPUT: exactly(1234.0), Metric.LATENCY_P99: exactly(5.678)}
}
FOUND = Measured(METRICS, elapsed_s=2.0)


def best(*, keeps: bool = True) -> Ranked:
    return Ranked(VARIANT, LOADS, METRICS, (1,), keeps, 0.0, Estimate(0.12, 0.1, 0.14))


def told(table: LiveTable, number: int, outcome: Outcome = FOUND, *, left_s: float | None = None) -> None:
    table(TrialBegun(trial(number), f"m_config_{number}", 10, left_s))
    table(TrialDone(trial(number), outcome, best()))


def test_what_is_tried_the_best_and_the_time_left_are_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveTable, "_width", lambda self: 120)
    terminal, times = Terminal(), iter([0.0, 1.0, 31.0])
    table = LiveTable(terminal, lambda: next(times))

    told(table, 1, left_s=59.0)
    table(TrialBegun(trial(2, Variant()), "m_config_default", 9, 29.0))

    assert terminal.screen.rstrip().split("\n") == [
        "      configuration     load           infer/s  p99 ms",
        "   1  m_config_1        concurrency 8    1,234    5.68  first look",
        " now  m_config_default  concurrency 8                   first look",
        "best  m_config_1        concurrency 8    1,234    5.68  +12.0 % over the default",
        "31 s  [######------]  at most 29 s left",
    ]


def test_without_a_budget_the_time_left_comes_from_what_was_measured() -> None:
    terminal = Terminal()
    table = LiveTable(terminal, lambda: 0.0)

    told(table, 1)
    table(TrialBegun(trial(2), "m_config_1", 9, None))

    assert "at most 18 s left, 9 measurements" in terminal.screen


def test_a_failure_and_a_missed_limit_are_told() -> None:
    terminal = Terminal()
    table = LiveTable(terminal, lambda: 0.0)

    table(TrialBegun(trial(1), "m_config_0", 10, None))
    table(TrialDone(trial(1), Failed("out of memory\nand more"), best(keeps=False)))

    assert "failed: out of memory\n" in terminal.screen
    assert "over a limit" in terminal.screen


def test_the_latest_measurements_stay_and_the_others_go() -> None:
    terminal = Terminal()
    table = LiveTable(terminal, lambda: 0.0)

    for number in range(1, SHOWN_MAX + 3):
        told(table, number)

    assert "m_config_2 " not in terminal.screen
    assert f"{SHOWN_MAX + 2}  m_config_" in terminal.screen


def test_notes_stay_above_the_table_and_the_table_goes_at_the_end() -> None:
    terminal = Terminal()
    table = LiveTable(terminal, lambda: 0.0)

    told(table, 1)
    table(Noted("The server ended; it is started again."))
    assert terminal.screen.startswith("The server ended; it is started again.\n      configuration")
    table(SearchDone(Decision(Conclusion.NOTHING_MEASURED, None, None, (), (), ())))

    assert terminal.screen == "The server ended; it is started again.\n"


def test_names_move_no_cursor_and_long_ones_are_cut_at_their_begin() -> None:
    terminal = Terminal()
    table = LiveTable(terminal, lambda: 0.0)

    table(TrialBegun(trial(1), "\x1b[2J\n" + "n" * 50 + "_config_7", 10, None))

    assert "\x1b[2J" not in terminal.getvalue()
    assert "…" in terminal.screen
    assert "_config_7" in terminal.screen
    assert max(map(len, terminal.screen.split("\n"))) < 80


def test_only_a_terminal_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream, quiet, verbose, expected in (
        (Terminal(), False, False, LiveTable),
        (Terminal(), True, False, TunePrinter),
        (Terminal(), False, True, TunePrinter),
        (io.StringIO(), False, False, TunePrinter),
    ):
        with watched(stream, quiet=quiet, verbose=verbose) as progress:
            assert isinstance(progress, expected)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Terminal())


def test_the_table_is_gone_after_a_failure_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()

    def fail() -> None:
        with watched(terminal, quiet=False, verbose=False) as progress:
            progress(TrialBegun(trial(1), "m_config_0", 10, 5.0))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert terminal.screen == ""


def test_a_terminal_that_is_gone_does_not_end_the_run() -> None:
    written: list[str] = []

    class Gone(Terminal):
        def write(self, text: str) -> int:
            written.append(text)
            return super().write(text)

    terminal = Gone()
    table = LiveTable(terminal, lambda: 0.0)
    terminal.close()

    told(table, 1)

    assert any("m_config_1" in text for text in written)
    assert terminal.closed


def test_language_models_are_shown_by_their_tokens() -> None:
    tokens: dict[str, Estimate] = {
        Metric.OUTPUT_TOKENS: exactly(128.4),
        Metric.TTFT_P99: exactly(266.0),
        Metric.ITL_P99: exactly(24.1),
    }
    metrics: dict[str, dict[str, Estimate]] = {"m": {**METRICS["m"], **tokens}}
    ranked = Ranked(VARIANT, LOADS, metrics, (1,), True, 0.0, Estimate(0.12, 0.1, 0.14))
    terminal, out = Terminal(), io.StringIO()
    table, printer = LiveTable(terminal, lambda: 0.0), TunePrinter(out, quiet=False)

    for display in (table, printer):
        display(TrialBegun(trial(1), "m_config_1", 10, 9.0))
        display(TrialDone(trial(1), Measured(metrics, elapsed_s=2.0), ranked))

    head, first, best_line = terminal.screen.split("\n")[:3]
    assert head.split()[-5:] == ["load", "tokens/s", "TTFT", "p99", "ms"]
    assert "128  " in first
    assert "128  " in best_line
    assert "128 tokens/s, TTFT p99 266.00 ms; best so far m_config_1 (128 tokens/s)" in out.getvalue()


def test_a_reason_for_failures_is_printed_once() -> None:
    out = io.StringIO()
    printer = TunePrinter(out, quiet=False)

    for number in (1, 2):
        printer(TrialBegun(trial(number), f"m_config_{number}", 10, None))
        printer(TrialDone(trial(number), Failed("no room for it"), None))

    outcomes = [line.split(": ", 1)[1] for line in out.getvalue().splitlines()]
    assert outcomes == ["failed: no room for it", "failed: as [1]"]
