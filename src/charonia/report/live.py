"""One line that tells how a run goes on, on a terminal, while it goes on.

The line is written over itself a few times a second, and is gone before anybody prints results: it is drawn for ticks
only, and wiped for every other event and at the end. So whoever prints on other events is told of them after this.
It has neither colours nor escape sequences: a carriage return and blanks do on every terminal, and it takes
microseconds, because it is drawn on the thread that may send the load.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from charonia.perf.api import Event, LevelBegun, LevelDone, Progress, Tick, silent
from charonia.report.quantities import clock, duration, number

_WIDTH_UNKNOWN = 80
_BAR = 12
_SEPARATOR = "  "


@contextmanager
def live_progress(stream: TextIO) -> Iterator[Progress]:
    """Yield progress that is shown on a stream if that is a terminal, and wipe it at the end."""
    if not stream.isatty():
        yield silent
        return
    line = ProgressLine(stream)
    try:
        yield line
    finally:
        line.wipe()


class ProgressLine:
    """The line."""

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
        try:
            self._stream.write(f"\r{text.ljust(self._drawn)}{end}")
            self._stream.flush()
        except (OSError, ValueError):
            pass  # the terminal has gone: nobody is there to see progress, and the run is worth more
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
        else:
            yield "warming up"
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
