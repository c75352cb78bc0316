"""What is told while a run goes on, beside its results: a line on the terminal, a file after each level."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from charonia.cli.perf_output import STDOUT
from charonia.tools.perf.api import Event, LevelBegun, LevelDone, Progress, Tick
from charonia.tools.perf.options import ReportOptions
from charonia.tools.report.quantities import clock, duration, number
from charonia.tools.report.run_files import write_run

UNFINISHED = "The run had not ended when this was written."
"""Note of a run in a file that was written between two levels."""

_WIDTH_UNKNOWN = 80
_BAR = 12
_SEPARATOR = "  "


@contextmanager
def watched(report: ReportOptions, printer: Progress | None) -> Iterator[Progress]:
    """Yield progress that is shown, printed and saved as the options want.

    Args:
        report: What is wanted.
        printer: Prints results, None for nobody.
    """
    wanted = report.progress and not report.quiet and sys.stderr.isatty()
    line = ProgressLine(sys.stderr) if wanted else None
    saved = None if report.json is None or report.json == STDOUT else SavedLevels(report.json)
    # The line goes before something else is printed.
    watchers = [watcher for watcher in (line, printer, saved) if watcher is not None]

    def tell(event: Event) -> None:
        for watcher in watchers:
            watcher(event)

    try:
        yield tell
    finally:
        if line is not None:
            line.wipe()


class SavedLevels:
    """A file that has the run so far after every level: whatever ends the run, what was measured is there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: Event) -> None:
        """Write the run so far when a level was measured."""
        if isinstance(event, LevelDone):
            # A disk that is full must not end the run; at its end the file is written again, and that may fail.
            with suppress(OSError):
                write_run(self._path, replace(event.run, notes=(*event.run.notes, UNFINISHED)))


class ProgressLine:
    """One line on a terminal that tells how a run goes on.

    It is written over itself a few times a second, and is gone before anybody prints results: it is drawn for ticks
    only, and wiped for every other event. It has neither colours nor escape sequences: a carriage return and blanks do
    on every terminal, and take microseconds, which counts on a thread that may send the load too.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = 0
        self._number = 0
        self._count = 0
        self._elapsed_s = 0.0
        self._levels_s: list[float] = []

    def __call__(self, event: Event) -> None:
        """Show a tick; wipe the line for everything else."""
        if isinstance(event, Tick):
            self._elapsed_s = event.elapsed_s
            self._draw(cut(self._parts(event), self._width()))
            return
        self.wipe()
        if isinstance(event, LevelBegun):
            self._number, self._count, self._elapsed_s = event.number, event.count, 0.0
        elif isinstance(event, LevelDone):
            self._levels_s.append(self._elapsed_s)

    def wipe(self) -> None:
        """Leave nothing of the line, and the cursor where it began."""
        if self._drawn:
            self._draw("")

    def _draw(self, text: str) -> None:
        # The blanks cover what is left of a longer line before.
        end = "" if text else "\r"
        # Where the terminal has gone nobody sees progress, and the run is worth more.
        with suppress(OSError, ValueError):
            self._stream.write(f"\r{text.ljust(self._drawn)}{end}")
            self._stream.flush()
        self._drawn = len(text)

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _WIDTH_UNKNOWN
        except (OSError, ValueError):
            return _WIDTH_UNKNOWN

    def _parts(self, tick: Tick) -> Iterator[str]:
        """Yield what there is to say, the most important first."""
        place = f" ({self._number}/{self._count})" if self._count > 1 else ""
        yield f"{tick.level}{place}"
        if tick.left_s is not None:
            yield bar(tick.elapsed_s, tick.left_s)
        yield f"{number(tick.rate)} infer/s"
        if tick.p50_ns:
            yield f"p50 {duration(tick.p50_ns)}"
            yield f"p99 {duration(tick.p99_ns)}"
        if tick.error_count:
            yield f"{tick.error_count:,} errors"
        left_s = self._left_s(tick)
        if left_s is not None:
            yield f"at most {clock(left_s)} left"
        if tick.window:
            yield f"window {tick.window}" + (f"/{tick.window_count_max}" if tick.window_count_max else "")
        yield f"{tick.in_flight:,} in flight"

    def _left_s(self, tick: Tick) -> float | None:
        """Return the time left of the run, or of the level where nobody knows how many there are."""
        if tick.left_s is None:
            return None
        others = max(0, self._count - self._number)
        whole_s = tick.elapsed_s + tick.left_s
        return tick.left_s + others * max([whole_s, *self._levels_s])


def bar(done: float, left: float) -> str:
    """Return how much is done as a bar of `#` and `-`."""
    whole = done + left
    filled = round(_BAR * done / whole) if whole > 0 else 0
    return f"[{'#' * filled}{'-' * (_BAR - filled)}]"


def cut(parts: Iterator[str], width: int) -> str:
    """Return as many of the parts as fit into a line, which never reaches the last column."""
    line = ""
    for part in parts:
        longer = f"{line}{_SEPARATOR}{part}" if line else part[: max(0, width - 1)]
        if len(longer) > width - 1:
            break
        line = longer
    return line
