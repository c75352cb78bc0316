"""The progress of a run of `charonia perf`: how far it is, and a line on the terminal."""

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

from charonia.tools.perf.api import Event, LevelBegun, LevelDone, LevelTick
from charonia.tools.report.quantities import clock, duration, number

_WIDTH_UNKNOWN = 80
_BAR = 12
_SEPARATOR = "  "


class Course:
    """How far a run is, by its events.

    Attributes:
        number: Number of the current level, from 1.
        count: Levels of the run, 0 if it depends on the results.
    """

    def __init__(self) -> None:
        self.number = 0
        self.count = 0
        self._elapsed_s = 0.0
        self._levels_s: list[float] = []

    def __call__(self, event: Event) -> None:
        match event:
            case LevelBegun():
                self.number, self.count, self._elapsed_s = event.number, event.count, 0.0
            case LevelTick():
                self._elapsed_s = event.elapsed_s
            case LevelDone():
                self._levels_s.append(self._elapsed_s)

    def left_s(self, tick: LevelTick) -> float | None:
        """Return the time left of the run at most, or of the level if the number of levels is unknown."""
        if tick.left_s is None:
            return None
        others = max(0, self.count - self.number)
        whole_s = tick.elapsed_s + tick.left_s
        return tick.left_s + others * max([whole_s, *self._levels_s])

    def share(self, tick: LevelTick) -> float:
        """Return the share of the run that is done, at least, from 0 to 1; 0 if the time left is unknown."""
        left_s = self.left_s(tick)
        if left_s is None:
            return 0.0
        done_s = sum(self._levels_s) + tick.elapsed_s
        return done_s / (done_s + left_s) if done_s + left_s else 0.0


class ProgressLine:
    """A progress line on a terminal.

    It is redrawn for ticks, a few times a second, and wiped for every other event, before results are printed. It uses
    a carriage return and spaces only, no colours or escape sequences: they work on every terminal and take only
    microseconds, which matters during a measurement.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = 0
        self._course = Course()

    def __call__(self, event: Event) -> None:
        """Draw a tick; wipe the line for every other event."""
        self._course(event)
        if isinstance(event, LevelTick):
            self._draw(cut(self._parts(event), self._width()))
        else:
            self.wipe()

    def wipe(self) -> None:
        """Erase the line and return the cursor to its start."""
        if self._drawn:
            self._draw("")

    def _draw(self, text: str) -> None:
        # The spaces cover the rest of a longer previous line.
        end = "" if text else "\r"
        # A closed terminal must not end the run.
        with suppress(OSError, ValueError):
            self._stream.write(f"\r{text.ljust(self._drawn)}{end}")
            self._stream.flush()
        self._drawn = len(text)

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _WIDTH_UNKNOWN
        except (OSError, ValueError):
            return _WIDTH_UNKNOWN

    def _parts(self, tick: LevelTick) -> Iterator[str]:
        """Yield the parts of the line, the most important first."""
        course = self._course
        place = f" ({course.number}/{course.count})" if course.count > 1 else ""
        yield f"{tick.level}{place}"
        if tick.left_s is not None:
            yield bar(tick.elapsed_s, tick.left_s)
        yield f"{number(tick.rate)} infer/s"
        if tick.p50_ns:
            yield f"p50 {duration(tick.p50_ns)}"
            yield f"p99 {duration(tick.p99_ns)}"
        if tick.error_count:
            yield f"{tick.error_count:,} errors"
        left_s = course.left_s(tick)
        if left_s is not None:
            yield f"at most {clock(left_s)} left"
        if tick.window:
            yield f"window {tick.window}" + (f"/{tick.window_count_max}" if tick.window_count_max else "")
        yield f"{tick.in_flight:,} in flight"


def bar(done: float, left: float) -> str:
    """Return the progress as a bar of `#` and `-`."""
    whole = done + left
    filled = round(_BAR * done / whole) if whole > 0 else 0
    return f"[{'#' * filled}{'-' * (_BAR - filled)}]"


def cut(parts: Iterator[str], width: int) -> str:
    """Return as many parts as fit into a line, without the last column."""
    line = ""
    for part in parts:
        longer = f"{line}{_SEPARATOR}{part}" if line else part[: max(0, width - 1)]
        if len(longer) > width - 1:
            break
        line = longer
    return line
