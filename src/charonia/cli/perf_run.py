"""A run of `charonia perf`: the measurement, what is shown while it goes on, and the files that it leaves."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from charonia.client.errors import ClientError
from charonia.client.sync_client import Client
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, unavailable
from charonia.core.tensor import Tensor
from charonia.tools.perf.api import (
    Event,
    InputSource,
    LevelBegun,
    LevelDone,
    LevelTick,
    Progress,
    RunSettings,
    WindowDone,
)
from charonia.tools.perf.data.convert import from_bfloat
from charonia.tools.perf.data.load import load_inputs
from charonia.tools.perf.data.spec import model_spec
from charonia.tools.perf.options import CallStyle, PerfOptions, ReportOptions, is_decoupled, is_sequence, target
from charonia.tools.perf.run import Subject, ask, run, stopped_by_signals
from charonia.tools.report.console import (
    Settings,
    View,
    level_text,
    level_title,
    pass_text,
    settings_text,
    summary_text,
)
from charonia.tools.report.csv import csv_files
from charonia.tools.report.quantities import clock, duration, number
from charonia.tools.report.run_files import write_profile, write_run, write_whole
from charonia.tools.results.json_form import to_json
from charonia.tools.results.records import PerfRun
from charonia.wire.transport import Failure

EXPORT_ELEMENTS_MAX = 4096
"""Largest input that is written to an export; a larger one is null."""

STDOUT = Path("-")

UNFINISHED = "The run had not ended when this was written."
"""Note of a run in a file that was written between two levels."""

_WIDTH_UNKNOWN = 80
_BAR = 12
_SEPARATOR = "  "

CONTEXT = "failed to get model metadata"
"""What perf_analyzer says before the reason why there is no such model or server."""

_OTHER_PROTOCOL = (
    "does another protocol have that port? HTTP has 8000, -i grpc 8001; "
    "TLS is -u https://HOST:PORT, or --ssl-grpc-use-ssl with -i grpc"
)
_HINTS = {
    "this port speaks gRPC": _OTHER_PROTOCOL,
    "expected HTTP/2 of": _OTHER_PROTOCOL,
    "closed the connection before": _OTHER_PROTOCOL,
    "certificate is not trusted": "options of `charonia perf --help`, under TLS, name certificates to trust",
    "needs an API key": "-H 'authorization: Bearer KEY'",
}
"""What to do, by what the client says."""


def measure(options: PerfOptions, settings_for: Callable[[Mapping[str, Any]], RunSettings]) -> PerfRun:
    """Run what the options ask for, print and write what they want, and return what was measured.

    Args:
        options: What is asked for.
        settings_for: Returns the run that they ask for, for a model with a configuration.

    Raises:
        ServingError: Nothing can be measured, or a report cannot be written.
    """
    wanted = target(options)
    with Client(wanted.url, options=wanted.transport) as client:
        subject = _asked(client, options)
        settings = settings_for(subject.config)
        source = load_inputs(model_spec(subject.metadata, subject.config, options.target.version), options)
        out = _text_output(options)
        printer = None if out is None else Printer(options, is_decoupled(subject.config), out)
        if out is not None:
            print(settings_text(printed_settings(options, subject.config)), file=out, flush=True)
        with stopped_by_signals() as stop, watched(options.report, printer) as progress:
            made = run(settings, source, client, subject, progress, stop)
    if printer is not None:
        printer.end(made)
    write_reports(made, options, source)
    return made


def _asked(client: Client, options: PerfOptions) -> Subject:
    try:
        return ask(client, target(options))
    except ServingError as error:
        raise ServingError(error.code, f"{CONTEXT}: {error.message}", hint=_hint(error)) from None


def _hint(error: ServingError) -> str:
    """Return what to do where the server does not answer, or not in the way that it is asked."""
    for text, hint in _HINTS.items():
        if text in error.message:
            return hint
    return "-u names the server" if isinstance(error, ClientError) and error.failure is Failure.REFUSED else error.hint


def _text_output(options: PerfOptions) -> TextIO | None:
    """Return where text goes: nowhere when it is not wanted, to stderr when stdout is taken by JSON."""
    if options.report.quiet:
        return None
    return sys.stderr if options.report.json == STDOUT else sys.stdout


class Printer:
    """Prints results as they come.

    Args:
        options: The options.
        decoupled: Whether the model is.
        out: Where to print.
    """

    def __init__(self, options: PerfOptions, decoupled: bool, out: TextIO) -> None:
        self._out = out
        self._verbose = options.report.verbosity > 0
        self._percentile = options.measure.percentile
        self._view = View(
            protocol=options.target.protocol.value,
            percentile=options.measure.percentile,
            verbose=self._verbose,
            decoupled=decoupled,
            metrics=options.collect_metrics,
        )

    def __call__(self, event: Event) -> None:
        """Print what an event is worth."""
        match event:
            case LevelBegun():
                title = level_title(event.level)
                if title:
                    self._print(title)
            case WindowDone() if self._verbose:
                self._print(pass_text(event.number, event.window, event.deviation_ns, self._percentile))
            case LevelDone():
                self._print(level_text(event.result, self._view))

    def end(self, run: PerfRun) -> None:
        """Print what is said at the end."""
        self._print(summary_text(run))

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def printed_settings(options: PerfOptions, config: Mapping[str, Any]) -> Settings:
    """Return what is said before the run."""
    measure, load = options.measure, options.load
    style = options.report.call_style
    if style is None:
        style = CallStyle.ASYNC if options.target.streaming or is_sequence(config) else CallStyle.SYNC
    return Settings(
        batch_size=options.target.batch_size,
        load=load.mode,
        end=0.0 if math.isinf(load.end) else load.end,
        is_range=load.start != load.end,
        mode=measure.mode.value,
        interval_ms=measure.interval_ms,
        window_request_count=measure.window_request_count,
        request_count=measure.request_count,
        warmup_request_count=measure.warmup_request_count,
        percentile=measure.percentile,
        latency_limit_ms=measure.latency_limit_ns // 1_000_000,
        distribution=load.distribution.value,
        binary_search=load.binary_search,
        is_async=style is CallStyle.ASYNC,
        decoupled=is_decoupled(config),
    )


@contextmanager
def watched(report: ReportOptions, printer: Progress | None) -> Iterator[Progress]:
    """Yield progress that is shown, printed and saved as the options want.

    Args:
        report: What is wanted.
        printer: Prints results, None where none are printed.
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

    It is written over itself a few times a second, and is gone before results are printed: it is drawn for ticks
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
        if isinstance(event, LevelTick):
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
        # A terminal that has gone shows no progress, and must not end the run.
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

    def _left_s(self, tick: LevelTick) -> float | None:
        """Return the time left of the run, or of the level where the number of levels is unknown."""
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


def write_reports(run: PerfRun, options: PerfOptions, source: InputSource) -> None:
    """Write every file that was asked for.

    Raises:
        ServingError: UNAVAILABLE when one cannot be written; the others are written all the same.
    """
    problems: list[str] = []
    for write in (_write_json, _write_csv, _write_html, _write_profile):
        try:
            write(run, options, source)
        except OSError as error:
            problems.append(f"{error.filename}: cannot be written: {error.strerror}")
        except ServingError as error:
            problems.append(str(error))
    if problems:
        raise unavailable("\n".join(problems))


def _write_json(run: PerfRun, options: PerfOptions, source: InputSource) -> None:
    path = options.report.json
    if path == STDOUT:
        print(to_json(run), flush=True)
    elif path is not None:
        write_run(path, run)


def _write_csv(run: PerfRun, options: PerfOptions, source: InputSource) -> None:
    report = options.report
    if report.csv is None:
        return
    files = csv_files(run, report.csv, verbose=report.verbose_csv, metrics=options.collect_metrics)
    for path, text in files.items():
        write_whole(path, text.encode())


def _write_html(run: PerfRun, options: PerfOptions, source: InputSource) -> None:
    path = options.report.html
    if path is not None:
        # Imported late: few runs write a page.
        from charonia.tools.report.html import render

        write_whole(path, render([run]))


def _write_profile(run: PerfRun, options: PerfOptions, source: InputSource) -> None:
    path = options.report.profile_export
    if path is not None:
        write_profile(path, run, ExportedInputs(source))


class ExportedInputs:
    """The inputs of requests as JSON, each made once.

    Args:
        source: Where the requests are from.
    """

    def __init__(self, source: InputSource) -> None:
        self._source = source
        self._texts: dict[tuple[int, int], str] = {}

    def __call__(self, stream: int, step: int) -> str:
        """Return the inputs of a request as JSON text."""
        text = self._texts.get((stream, step))
        if text is None:
            inputs = self._source.request(stream, step).inputs
            text = json.dumps({name: plain(tensor) for name, tensor in inputs.items()}, separators=(",", ":"))
            self._texts[stream, step] = text
        return text


def plain(tensor: Tensor) -> object:
    """Return a tensor as JSON: one element as itself, more as a flat list, many as null."""
    if tensor.array.size > EXPORT_ELEMENTS_MAX:
        return None
    array = from_bfloat(tensor.array) if tensor.datatype is DataType.BF16 else tensor.array
    elements: list[Any] = array.ravel().tolist()
    if tensor.datatype is DataType.BYTES:
        elements = [element.decode(errors="replace") for element in elements]
    return elements[0] if len(elements) == 1 else elements
