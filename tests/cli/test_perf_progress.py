import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.runs import synthetic_run

from charonia.cli.perf_run import UNFINISHED, Printer, ProgressLine, bar, cut, watched
from charonia.tools.perf.api import Event, LevelDone, LevelStarted, LevelTick
from charonia.tools.perf.options import PerfOptions, ReportOptions, TargetOptions
from charonia.tools.report.run_files import read_run
from charonia.tools.results.records import LoadLevel, LoadMode

LEVEL = LoadLevel(LoadMode.CONCURRENCY, 4)
BEFORE = replace(synthetic_run((LEVEL,)), levels=())
TICK = LevelTick(
    level=LEVEL,
    elapsed_s=2.0,
    left_s=6.0,
    rate=1812.0,
    p50_ns=470_000,
    p99_ns=1_950_000,
    in_flight=4,
    error_count=0,
    window=2,
    window_count_max=10,
)


class Terminal(io.StringIO):
    """A terminal of 200 columns that keeps what is visible: text behind a carriage return covers what was there."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return [shown(line) for line in self.getvalue().split("\n")]


def shown(written: str) -> str:
    visible = ""
    for piece in written.split("\r"):
        visible = piece + visible[len(piece) :]
    return visible.rstrip()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr("sys.stderr", made)
    monkeypatch.setattr(ProgressLine, "_width", lambda self: 200)
    return made


def test_a_tick_shows_load_rate_latency_windows_and_time_left(terminal: Terminal) -> None:
    line = ProgressLine(terminal)

    line(LevelStarted(LEVEL, 1, 1, BEFORE))
    line(TICK)

    load, latency = "concurrency 4  [###---------]  at most 6 s left  1,812 infer/s", "p50 470 µs  p99 1.95 ms"
    assert terminal.lines == [f"{load}  {latency}  window 2/10  4 in flight"]


def test_the_time_left_fits_80_columns(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressLine, "_width", lambda self: 80)
    line, level = ProgressLine(terminal), replace(LEVEL, value=64)

    line(LevelStarted(level, 7, 11, BEFORE))
    line(replace(TICK, level=level, rate=12_345.0, left_s=59.0))

    assert "infer/s" in terminal.lines[0]
    assert " left" in terminal.lines[0]


def test_a_shorter_line_leaves_nothing_of_the_longer_one(terminal: Terminal) -> None:
    line = ProgressLine(terminal)

    line(replace(TICK, error_count=1234))
    line(replace(TICK, left_s=None, p50_ns=0, window=0))

    assert terminal.lines == ["concurrency 4  1,812 infer/s  4 in flight"]


def test_the_time_left_counts_the_levels_to_come(terminal: Terminal) -> None:
    line = ProgressLine(terminal)

    line(LevelStarted(LEVEL, 2, 4, BEFORE))
    line(TICK)

    # 6 s of this level, and two more of 8 s each.
    assert "concurrency 4 (2/4)" in terminal.lines[0]
    assert "at most 22 s left" in terminal.lines[0]


def test_errors_are_shown_as_soon_as_there_are_any(terminal: Terminal) -> None:
    ProgressLine(terminal)(replace(TICK, error_count=3))

    assert "3 errors" in terminal.lines[0]


def test_results_are_printed_on_an_empty_line(terminal: Terminal) -> None:
    run = synthetic_run((LEVEL,))

    def printer(event: Event) -> None:
        if isinstance(event, LevelDone):
            terminal.write("Request count: 12\n")

    with watched(ReportOptions(), printer) as tell:
        tell(LevelStarted(LEVEL, 1, 1, BEFORE))
        tell(TICK)
        tell(LevelDone(run.levels[0], run))
        tell(TICK)
    terminal.write("the end")

    assert terminal.lines == ["Request count: 12", "the end"]


@pytest.mark.parametrize("report", [ReportOptions(progress=False), ReportOptions(quiet=True)])
def test_no_progress_is_shown_if_it_is_not_wanted(report: ReportOptions, terminal: Terminal) -> None:
    with watched(report, None) as tell:
        tell(TICK)

    assert terminal.getvalue() == ""


def test_nothing_is_shown_where_stderr_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)

    with watched(ReportOptions(), None) as tell:
        tell(TICK)

    assert log.getvalue() == ""


def test_a_terminal_that_has_gone_does_not_stop_the_run() -> None:
    written: list[str] = []

    class Gone(Terminal):
        def write(self, text: str) -> int:
            written.append(text)
            raise BrokenPipeError

    line = ProgressLine(Gone())
    line(TICK)
    line.wipe()

    assert len(written) == 2  # both were tried


def test_after_every_level_the_file_has_all_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run = synthetic_run()

    with watched(ReportOptions(json=path, progress=False), None) as tell:
        for count in (1, 2):
            so_far = replace(run, levels=run.levels[:count])
            tell(LevelDone(run.levels[count - 1], so_far))
            assert read_run(path) == replace(so_far, notes=(UNFINISHED,))


def test_a_file_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    run = synthetic_run((LEVEL,))

    seen: list[object] = []

    with watched(ReportOptions(json=tmp_path / "missing" / "run.json", progress=False), seen.append) as tell:
        for _ in range(2):
            tell(LevelDone(run.levels[0], run))

    assert len(seen) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("done", "left", "text"), [(0, 0, 0), (0, 5, 0), (1, 1, 6), (5, 0, 12)])
def test_a_bar_is_as_full_as_the_time_is_over(done: float, left: float, text: int) -> None:
    assert bar(done, left) == f"[{'#' * text}{'-' * (12 - text)}]"


@pytest.mark.parametrize("width", range(40))
def test_a_line_never_reaches_the_last_column_and_holds_whole_parts(width: int) -> None:
    line = cut(iter(["concurrency 4", "1,812 infer/s", "p50 1 ms"]), width)

    assert len(line) < max(width, 1)
    assert width < 15 or re.fullmatch(r"concurrency 4(  1,812 infer/s(  p50 1 ms)?)?", line)


def test_a_run_says_early_how_long_it_takes_without_a_terminal_too() -> None:
    out = io.StringIO()
    printer = Printer(PerfOptions(TargetOptions(model="m")), False, out)

    for event in (LevelStarted(LEVEL, 1, 3, BEFORE), replace(TICK, left_s=None), TICK, replace(TICK, elapsed_s=3.0)):
        printer(event)

    assert out.getvalue() == "Request concurrency: 4\n  The run takes at most 24 s\n"
