"""A run of `charonia perf`: the measurement, its progress display, and its reports."""

import asyncio
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from charonia.cli.values import STDOUT, only_model
from charonia.client.errors import ClientError
from charonia.client.sync_client import Client
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, not_found, unavailable
from charonia.core.metadata import ModelMetadata, ServerMetadata
from charonia.core.tensor import Tensor
from charonia.tools.perf.api import (
    Distribution,
    Event,
    InputSource,
    LevelDone,
    LevelStarted,
    LevelTick,
    MeasurementMode,
    MeasurePlan,
    Progress,
    RunSettings,
    WindowDone,
)
from charonia.tools.perf.data.load import load_inputs
from charonia.tools.perf.data.recording import read_recording
from charonia.tools.perf.data.spec import model_spec
from charonia.tools.perf.language.load import language_run
from charonia.tools.perf.options import (
    CallStyle,
    PerfOptions,
    ReportOptions,
    is_decoupled,
    is_sequence,
    target,
)
from charonia.tools.perf.run import Subject, ask, run, stopped_by_signals
from charonia.tools.report import markdown
from charonia.tools.report.console import View, level_text, level_title, pass_text, summary_text
from charonia.tools.report.csv import csv_files
from charonia.tools.report.html import render
from charonia.tools.report.quantities import clock, duration, number
from charonia.tools.report.run_files import InputsOf, write_profile, write_run, write_whole
from charonia.tools.report.summary import failures
from charonia.tools.results.json_form import to_json
from charonia.tools.results.records import LoadMode, PerfRun
from charonia.wire.answer import Failure
from charonia.wire.python_values import readable

EXPORT_ELEMENTS_MAX = 4096
"""Largest input in an export; larger ones are null."""

UNFINISHED = "The run was still in progress when this file was written."
"""Note in a file that was written between two levels."""

CONTEXT = "failed to get model metadata"
"""Prefix of errors about the model or the server, as in perf_analyzer."""

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
"""Hints by a part of the client's error message."""


@contextmanager
def served(options: PerfOptions) -> Iterator[PerfOptions]:
    """Serve the model of the options for the measurement, and yield options with the model and its server."""
    path = options.target.serve
    if not path:
        yield options
        return
    if not os.path.exists(path):
        hint = "a model of a running server is named with -m"
        raise not_found(f"there is no file or folder '{path}'", hint=hint)
    # Imported late, because measuring a running server does not need them.
    from charonia.tools.tune.options import LaunchOptions
    from charonia.tools.tune.servers import LocalServer

    with (
        repository_of(path, options.target.model) as (repository, model),
        LocalServer(LaunchOptions(repository=repository)) as server,
    ):
        server.client.load_model(model)
        url = server.url(options.target.protocol)
        page = server.metrics_url if options.collect_metrics and not options.server.metrics_url else ""
        yield replace(
            options,
            target=replace(options.target, model=model, serve="", url=url),
            server=replace(options.server, metrics_url=page or options.server.metrics_url),
        )


@contextmanager
def repository_of(path: str, model: str = "") -> Iterator[tuple[Path, str]]:
    """Yield a repository for a path as `charonia serve` takes it, and the model: the given one, or the only one."""
    # Imported late, because measuring a running server does not need them.
    from charonia.server.files.repository import with_files
    from charonia.server.lifecycle.repository.scan import scan
    from charonia.server.machine.private_folder import PrivateFolder

    with PrivateFolder() as own:
        (repository, *_), _ = asyncio.run(with_files([path], own.path, {}))
        yield Path(repository), model or only_model(scan([repository], fingerprints=False).models, f"'{path}'")


def measure(options: PerfOptions, settings_for: Callable[[Mapping[str, Any]], RunSettings]) -> PerfRun:
    """Measure, print and write the reports, and return the run.

    Args:
        settings_for: Returns the settings of the run for a model's configuration.
    """
    wanted = target(options)
    with Client(wanted.url, options=wanted.transport) as client:
        subject = _asked(client, options)
        settings = settings_for(subject.config)
        source: InputSource
        replies = None
        if options.is_language:
            language = language_run(options, subject)
            source, replies = language.source, language.replies
            settings = language.settings(settings)
        elif options.data.replay:
            source = recording = read_recording(options)
            settings = recording.settings(settings, options.data.replay_speed)
            if recording.left_out_count:
                print(
                    f"note: {recording.left_out_count} requests have values left out and are not sent", file=sys.stderr
                )
        else:
            source = load_inputs(model_spec(subject.metadata, subject.config, options.target.version), options)
        out = _text_output(options)
        printer = None if out is None else Printer(options, is_decoupled(subject.config), out)
        if out is not None:
            print(settings_text(options, subject.config), file=out, flush=True)
        with stopped_by_signals() as stop, watched(options.report, printer) as progress:
            made = run(settings, source, client, subject, progress, stop, replies)
        if printer is not None:
            printer.end(made)
        failed = failures(options.report.fail_if, made)  # which the caller prints, to stderr
        made = replace(made, notes=(*made.notes, *(f"Failed: {sentence}" for sentence in failed)))
        write_reports(made, options, source)
    return made


def _asked(client: Client, options: PerfOptions) -> Subject:
    try:
        return ask(client, target(options))
    except ServingError as error:
        is_there = not isinstance(error, ClientError) or error.failure is Failure.STATUS
        if options.is_language and options.language.endpoint.is_openai and is_there:
            # A server of OpenAI's API only, or a model that only its requests can name.
            model = ModelMetadata(options.target.model, (), "", (), ())
            return Subject(ServerMetadata("", "", ()), model, {})
        raise ServingError(error.code, f"{CONTEXT}: {error.message}", hint=_hint(error)) from None


def _hint(error: ServingError) -> str:
    """Return a hint for a server that does not respond, or not with the expected protocol."""
    for text, hint in _HINTS.items():
        if text in error.message:
            return hint
    return "-u names the server" if isinstance(error, ClientError) and error.failure is Failure.REFUSED else error.hint


def _text_output(options: PerfOptions) -> TextIO | None:
    """Return the stream for text: None if quiet, stderr if JSON goes to stdout."""
    if options.report.quiet:
        return None
    return sys.stderr if options.report.json == STDOUT else sys.stdout


class Printer:
    """Prints results as they arrive."""

    def __init__(self, options: PerfOptions, decoupled: bool, out: TextIO) -> None:
        self._out = out
        self._verbose = options.report.verbosity > 0
        self._percentile = options.measure.percentile
        self._view = View(
            protocol=options.target.protocol.value,
            percentile=options.measure.percentile,
            verbose=self._verbose,
            decoupled=decoupled,
            language=options.is_language,
            metrics=options.collect_metrics,
        )
        self._course = RunProgress()
        self._told_duration = False

    def __call__(self, event: Event) -> None:
        self._course(event)
        match event:
            case LevelTick() if not self._told_duration and (left_s := self._course.left_s(event)) is not None:
                self._told_duration = True
                what = "This level" if not self._course.count else "The run"
                self._print(f"  {what} takes at most {clock(event.elapsed_s + left_s)}")
            case LevelStarted():
                title = level_title(event.level)
                if title:
                    self._print(title)
            case WindowDone() if self._verbose:
                self._print(pass_text(event.number, event.window, event.deviation_ns, self._percentile))
            case LevelDone():
                self._print(level_text(event.result, self._view))

    def end(self, run: PerfRun) -> None:
        self._print(summary_text(run))

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def settings_text(options: PerfOptions, config: Mapping[str, Any]) -> str:
    """Return the text printed before a run, for a model with this configuration."""
    measure, load, style = options.measure, options.load, options.report.call_style
    is_language, is_rate = options.is_language, load.mode is LoadMode.REQUEST_RATE
    lines = ["*** Measurement Settings ***", f"  Batch size: {options.target.batch_size}", "  Service Kind: TRITON"]
    if is_language:
        lines[1:] = [f"  Language model, endpoint: {options.language.endpoint.value}"]
    if measure.warmup_request_count:
        lines.append(f"  Sending {measure.warmup_request_count} warmup request(s)")
    if measure.request_count:
        lines.append(f"  Sending {measure.request_count} benchmark requests")
    else:
        lines += _window_lines(measure)
    if load.start != load.end:
        lines.append(f"  Latency limit: {measure.latency_limit_ns // 1_000_000} msec")
        if not math.isinf(load.end):
            what, unit = ("Request Rate", "requests per seconds") if is_rate else ("Concurrency", "concurrent requests")
            lines.append(f"  {what} limit: {load.end:g} {unit}")
    if is_rate:
        name = "uniform" if load.distribution is Distribution.CONSTANT else load.distribution.value
        lines.append(f"  Using {name} distribution on request generation")
    if load.binary_search:
        lines.append("  Using Binary Search algorithm")
    if not is_language:
        is_async = options.target.streaming or is_sequence(config) if style is None else style is CallStyle.ASYNC
        lines.append(f"  Using {'asynchronous' if is_async else 'synchronous'} calls for inference")
        if is_decoupled(config):
            lines.append("  Detected decoupled model, using the last response for measuring latency")
    return "\n".join(lines) + "\n"


def _window_lines(measure: MeasurePlan) -> Iterator[str]:
    yield f'  Using "{measure.mode.value}" mode for stabilization'
    if measure.mode is MeasurementMode.ADAPTIVE:
        yield "  Measuring until the confidence intervals of throughput and latency are tight"
        return
    latency = "average latency" if measure.percentile is None else f"p{measure.percentile:g} latency"
    yield f"  Stabilizing using {latency} and throughput"
    if measure.mode is MeasurementMode.COUNT_WINDOWS:
        yield f"  Minimum number of samples in each window: {measure.window_request_count}"
    else:
        yield f"  Measurement window: {measure.interval_ms} msec"


@contextmanager
def watched(report: ReportOptions, printer: Progress | None) -> Iterator[Progress]:
    """Yield a receiver of progress events that displays, prints and saves them.

    Args:
        printer: Prints results, None for no text.
    """
    wanted = report.progress and not report.quiet and sys.stderr.isatty()
    line = ProgressLine(sys.stderr) if wanted else None
    # The progress line comes first, because it must be wiped before other output.
    watchers = [watcher for watcher in (line, printer) if watcher is not None]

    def tell(event: Event) -> None:
        for watcher in watchers:
            watcher(event)
        saved(report, event)

    try:
        yield tell
    finally:
        if line is not None:
            line.wipe()


def saved(report: ReportOptions, event: Event) -> None:
    """Write JSON and page of the run so far after a level, so that no result is lost if the run is killed."""
    if not isinstance(event, LevelDone):
        return
    so_far = replace(event.run, notes=(*event.run.notes, UNFINISHED))
    # A full disk must not end the run; the files are written again at the end, where an error is reported.
    with suppress(OSError):
        if report.json is not None and report.json != STDOUT:
            write_run(report.json, so_far)
        if report.html is not None:
            write_whole(report.html, render([so_far]))


def write_reports(run: PerfRun, options: PerfOptions, source: InputSource) -> None:
    """Write the requested files.

    Raises:
        ServingError: UNAVAILABLE if a file cannot be written; the others are written anyway.
    """
    report = options.report
    files: tuple[tuple[Path | None, Callable[[Path], None]], ...] = (
        (report.json, lambda path: print(to_json(run), flush=True) if path == STDOUT else write_run(path, run)),
        (report.csv, lambda path: _write_csv(path, run, options)),
        (report.html, lambda path: write_whole(path, render([run]))),
        (report.markdown, lambda path: write_whole(path, markdown.render(run).encode())),
        (report.profile_export, lambda path: write_profile(path, run, exported_inputs(source))),
    )
    problems: list[str] = []
    for path, write in files:
        try:
            if path is not None:
                write(path)
        except OSError as error:
            problems.append(f"{error.filename}: cannot be written: {error.strerror}")
        except ServingError as error:
            problems.append(str(error))
    if problems:
        raise unavailable("\n".join(problems))


def _write_csv(file: Path, run: PerfRun, options: PerfOptions) -> None:
    files = csv_files(run, file, verbose=options.report.verbose_csv, metrics=options.collect_metrics)
    for path, text in files.items():
        write_whole(path, text.encode())


def exported_inputs(source: InputSource) -> InputsOf:
    """Return a function that returns the inputs of a request as JSON text."""

    @cache
    def text(stream: int, step: int) -> str:
        inputs = source.request(stream, step).inputs
        return json.dumps({name: plain(tensor) for name, tensor in inputs.items()}, separators=(",", ":"))

    return text


def plain(tensor: Tensor) -> object:
    """Return a tensor as JSON: a single element as a scalar, several as a flat list, too many as null."""
    if tensor.array.size > EXPORT_ELEMENTS_MAX:
        return None
    elements: list[Any] = readable(tensor).ravel().tolist()
    if tensor.datatype is DataType.BYTES:
        elements = [element.decode(errors="replace") for element in elements]
    return elements[0] if len(elements) == 1 else elements


_WIDTH_UNKNOWN = 80
_BAR = 12
_SEPARATOR = "  "


class RunProgress:
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
            case LevelStarted():
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


class ProgressLine:
    """A progress line on a terminal.

    It is redrawn for ticks, a few times a second, and wiped for every other event, before results are printed. It uses
    a carriage return and spaces only, no colours or escape sequences: they work on every terminal and take only
    microseconds, which matters during a measurement.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = 0
        self._course = RunProgress()

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
        left_s = course.left_s(tick)
        if left_s is not None:
            yield f"at most {clock(left_s)} left"
        yield f"{number(tick.rate)} infer/s"
        if tick.p50_ns:
            yield f"p50 {duration(tick.p50_ns)}"
            yield f"p99 {duration(tick.p99_ns)}"
        if tick.error_count:
            yield f"{tick.error_count:,} errors"
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
