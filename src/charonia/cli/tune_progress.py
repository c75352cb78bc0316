"""The progress of `charonia tune`: a line for each trial, or a table on a terminal.

The table shows the latest measurements, the current trial and the best one. It does without `rich`, which takes a
quarter of a second to import and about ninety times as long for each update of the table.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from charonia.cli.perf_progress import bar
from charonia.tools.report.quantities import clock, number, signed_percent
from charonia.tools.results.records import Estimate
from charonia.tools.tune.api import Failed, Metric, Trial
from charonia.tools.tune.decision import Ranked, loads_text
from charonia.tools.tune.progress import Event, Noted, Progress, SearchDone, TrialBegun, TrialDone

SHOWN_MAX = 8
"""Measurements that stay in view."""

_COLUMNS = 6
_NUMBERS = (0, 3, 4)
_NAME_LENGTH_MAX = 36
_WIDTH_UNKNOWN = 80


@contextmanager
def watched(stream: TextIO, *, quiet: bool, verbose: bool) -> Iterator[Progress]:
    """Yield the progress display: a table on a terminal, else a line for each measurement.

    Args:
        stream: Where to.
        quiet: Whether nothing is shown.
        verbose: Whether lines are wanted in any case.
    """
    if quiet or verbose or not is_terminal(stream):
        yield TunePrinter(stream, quiet=quiet)
        return
    table = LiveTable(stream)
    try:
        yield table
    finally:
        table.wipe()


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal with cursor control."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


class TunePrinter:
    """Prints a line for each event.

    Args:
        out: Where to.
        quiet: Whether nothing is said.
    """

    def __init__(self, out: TextIO, *, quiet: bool) -> None:
        self._out = out
        self._quiet = quiet
        self._names: dict[str, str] = {}
        self._left = ""
        self._reasons: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if self._quiet:
            return
        match event:
            case TrialBegun():
                self._names[event.trial.variant.key] = event.name
                self._left = "" if event.left_s is None else f", {event.left_s:.0f} s left"
            case TrialDone():
                name = self._names.get(event.trial.variant.key, str(event.trial.variant))
                self._say(
                    f"[{event.trial.number}] {name}, {loads_text(event.trial.loads)}: {self._found(event)}{self._left}"
                )
            case Noted():
                self._say(event.text)
            case SearchDone():
                pass

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _found(self, event: TrialDone) -> str:
        outcome = event.outcome
        if isinstance(outcome, Failed):
            first = self._reasons.setdefault(outcome.reason, event.trial.number)
            return f"failed: {outcome.reason.splitlines()[0] if first == event.trial.number else f'as [{first}]'}"
        parts = []
        for metrics in outcome.metrics.values():
            (rate, per_s), (latency, name) = _figures(metrics)
            parts.append(f"{metrics[rate].value:,.0f} {per_s}, {name} {metrics[latency].value:.2f} ms")
        text = "; ".join(parts) + (" (from the journal)" if event.resumed else "")
        return text + (f"; best so far {self._best(event.best)}" if event.best is not None else "")

    def _best(self, best: Ranked) -> str:
        rate, unit = _rate(best.metrics)
        return f"{self._names.get(best.variant.key, str(best.variant))} ({rate:,.0f} {unit})"


class LiveTable:
    """The table. Notes are printed above it and stay; the table is cleared at the end.

    Args:
        stream: The terminal.
        now: A clock in seconds.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._begin = now()
        self._drawn = 0
        self._names: dict[str, str] = {}
        self._head: tuple[str, ...] = ("", "configuration", "load", "infer/s", "p99 ms", "")
        self._latest: deque[tuple[str, ...]] = deque(maxlen=SHOWN_MAX)
        self._trying: tuple[str, ...] = ()
        self._best: tuple[str, ...] = ()
        self._left = ""
        self._measured_s: list[float] = []

    def __call__(self, event: Event) -> None:
        match event:
            case TrialBegun():
                self._begun(event)
            case TrialDone():
                self._done(event)
            case Noted():
                self.wipe()
                self._write(f"{_plain(event.text)}\n")
            case _:
                self.wipe()
                return
        self._draw()

    def wipe(self) -> None:
        """Clear the table, and return the cursor to where it started."""
        if self._drawn:
            self._write(f"\r\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _begun(self, event: TrialBegun) -> None:
        trial = event.trial
        self._names[trial.variant.key] = event.name
        self._trying = ("now", self._name(trial), loads_text(trial.loads), "", "", trial.purpose)
        elapsed = self._now() - self._begin
        left = event.left_s
        if left is None and self._measured_s:
            left = event.trials_left * sum(self._measured_s) / len(self._measured_s)
        about = "" if left is None else f"  {bar(elapsed, left)}  at most {clock(left)} left"
        count = "" if event.left_s is not None else f", {event.trials_left:,} measurements"
        self._left = f"{clock(elapsed)}{about}{count}"

    def _done(self, event: TrialDone) -> None:
        trial, outcome = event.trial, event.outcome
        if not event.resumed:
            self._measured_s.append(outcome.elapsed_s)
        self._trying = ()
        if isinstance(outcome, Failed):
            found = ("", "", f"failed: {outcome.reason.splitlines()[0] if outcome.reason else ''}")
        else:
            for metrics in outcome.metrics.values():
                (_, per_s), (_, name) = _figures(metrics)
                self._head = (*self._head[:3], per_s, f"{name} ms", "")
            found = (*_values(outcome.metrics), trial.purpose + (" (journal)" if event.resumed else ""))
        self._latest.append((str(trial.number), self._name(trial), loads_text(trial.loads), *found))
        if event.best is not None:
            self._best = self._best_line(event.best)

    def _best_line(self, best: Ranked) -> tuple[str, ...]:
        why = "over a limit" if not best.keeps_constraints else ""
        if not why and best.gain is not None and not best.variant.is_default:
            why = f"{signed_percent(best.gain.value)} over the default"
            if best.between_loads:
                why += f" at {loads_text(best.base_loads)}"
        name = self._names.get(best.variant.key, str(best.variant))
        return ("best", name, loads_text(best.loads), *_values(best.metrics), why)

    def _name(self, trial: Trial) -> str:
        return self._names.get(trial.variant.key, str(trial.variant))

    def _draw(self) -> None:
        rows = [
            self._head,
            *self._latest,
            *([self._trying] if self._trying else []),
            *([self._best] if self._best else []),
        ]
        lines = [*aligned(rows), self._left]
        width = self._width() - 1  # a line that reaches the last column may wrap
        text = "".join(f"{line[:width]}\n" for line in lines)
        above = f"\r\x1b[{self._drawn}A\x1b[J" if self._drawn else ""
        self._write(above + text)
        self._drawn = len(lines)

    def _write(self, text: str) -> None:
        # A closed terminal must not end the run.
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _WIDTH_UNKNOWN
        except (OSError, ValueError):
            return _WIDTH_UNKNOWN


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns, numbers to the right, long names cut."""
    shown = [[_plain(cell) for cell in row] for row in rows]
    for row in shown:
        row[1] = row[1] if len(row[1]) <= _NAME_LENGTH_MAX else f"…{row[1][1 - _NAME_LENGTH_MAX :]}"
    widths = [max(len(row[column]) for row in shown) for column in range(_COLUMNS - 1)]
    return [
        "  ".join(
            [
                *(
                    cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
                    for column, (cell, width) in enumerate(zip(row, widths, strict=False))
                ),
                row[-1],
            ]
        ).rstrip()
        for row in shown
    ]


def _plain(text: str) -> str:
    """Return a text without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


_Metrics = Mapping[str, Estimate]


def _figures(metrics: _Metrics) -> tuple[tuple[Metric, str], tuple[Metric, str]]:
    """Return the rate and the latency of a model that are shown, each with its name."""
    if Metric.OUTPUT_TOKENS in metrics:
        return (Metric.OUTPUT_TOKENS, "tokens/s"), (Metric.TTFT_P99, "TTFT p99")
    return (Metric.THROUGHPUT, "infer/s"), (Metric.LATENCY_P99, "p99")


def _values(found: Mapping[str, _Metrics]) -> tuple[str, str]:
    rates, latencies = [], []
    for metrics in found.values():
        (rate, _), (latency, _) = _figures(metrics)
        rates += [metrics[rate].value] if rate in metrics else []
        latencies += [metrics[latency].value] if latency in metrics else []
    return number(sum(rates)) if rates else "", number(max(latencies)) if latencies else ""


def _rate(found: Mapping[str, _Metrics]) -> tuple[float, str]:
    """Return the rate of all models together, and its unit: that of the first."""
    (_, unit), _ = _figures(next(iter(found.values())))
    return sum(metrics[_figures(metrics)[0][0]].value for metrics in found.values()), unit
