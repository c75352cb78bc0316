"""A run of `charonia perf`: the measurement, its progress display, and its reports."""

import asyncio
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from charonia.cli.perf_live import LiveRun, live_view
from charonia.cli.perf_progress import Course, ProgressLine
from charonia.cli.values import STDOUT, only_model
from charonia.client.errors import ClientError
from charonia.client.sync_client import Client
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, not_found, unavailable
from charonia.core.metadata import ModelMetadata, ServerMetadata
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
from charonia.tools.report.quantities import clock
from charonia.tools.report.run_files import write_profile, write_run, write_whole
from charonia.tools.report.summary import failures
from charonia.tools.results.json_form import to_json
from charonia.tools.results.records import PerfRun
from charonia.wire.transport import Failure

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
    """Serve what the options say for the measurement, and yield options with the model and its server.

    Raises:
        ServingError: It cannot be served, or has several models and none is named.
    """
    path = options.target.serve
    if not path:
        yield options
        return
    if not os.path.exists(path):
        hint = "a model of a running server is named with -m"
        raise not_found(f"there is no file or folder '{path}'", hint=hint)
    # Imported late, because measuring a running server does not need them.
    from charonia.server.files.repository import with_files
    from charonia.server.lifecycle.repository.scan import scan
    from charonia.server.machine.private_folder import PrivateFolder
    from charonia.tools.tune.options import LaunchOptions
    from charonia.tools.tune.servers import LocalServer

    with PrivateFolder() as own:
        (repository, *_), _ = asyncio.run(with_files([path], own.path, {}))
        model = options.target.model or only_model(scan([repository], fingerprints=False).models)
        with LocalServer(LaunchOptions(repository=Path(repository))) as server:
            server.client.load_model(model)
            url = server.url(options.target.protocol)
            page = server.metrics_url if options.collect_metrics and not options.server.metrics_url else ""
            yield replace(
                options,
                target=replace(options.target, model=model, serve="", url=url),
                server=replace(options.server, metrics_url=page or options.server.metrics_url),
            )


def measure(options: PerfOptions, settings_for: Callable[[Mapping[str, Any]], RunSettings]) -> PerfRun:
    """Measure, print and write the reports, and return the run.

    Args:
        settings_for: Returns the settings of the run for a model's configuration.

    Raises:
        ServingError: Nothing can be measured, or a report cannot be written.
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
        else:
            source = load_inputs(model_spec(subject.metadata, subject.config, options.target.version), options)
        out = _text_output(options)
        printer = None if out is None else Printer(options, is_decoupled(subject.config), out)
        if out is not None:
            print(settings_text(printed_settings(options, subject.config)), file=out, flush=True)
        with live_view(options.report.live_port) as live:
            with stopped_by_signals() as stop, watched(options.report, printer, live) as progress:
                made = run(settings, source, client, subject, progress, stop, replies)
            if printer is not None:
                printer.end(made)
            failed = failures(options.report.fail_if, made)  # which the caller prints, to stderr
            made = replace(made, notes=(*made.notes, *(f"Failed: {sentence}" for sentence in failed)))
            write_reports(made, options, source)
            if live is not None:
                live.end(made)
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
    """Prints results as they arrive.

    Args:
        decoupled: Whether the model is decoupled.
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
            language=options.is_language,
            metrics=options.collect_metrics,
        )
        self._course = Course()
        self._told_duration = False

    def __call__(self, event: Event) -> None:
        self._course(event)
        match event:
            case LevelTick() if not self._told_duration and (left_s := self._course.left_s(event)) is not None:
                self._told_duration = True
                what = "This level" if not self._course.count else "The run"
                self._print(f"  {what} takes at most {clock(event.elapsed_s + left_s)}")
            case LevelBegun():
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


def printed_settings(options: PerfOptions, config: Mapping[str, Any]) -> Settings:
    """Return the settings to print before the run."""
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
        language=options.language.endpoint.value if options.is_language else "",
    )


@contextmanager
def watched(report: ReportOptions, printer: Progress | None, live: LiveRun | None = None) -> Iterator[Progress]:
    """Yield a receiver of progress events that displays, prints and saves them.

    Args:
        report: The options of the output.
        printer: Prints results, None for no text.
        live: The view in the browser, None for none.
    """
    wanted = report.progress and not report.quiet and sys.stderr.isatty()
    line = ProgressLine(sys.stderr) if wanted else None
    saved = None if report.json is None or report.json == STDOUT else SavedLevels(report.json)
    # The progress line comes first, because it must be wiped before other output.
    watchers = [watcher for watcher in (line, printer, saved, live) if watcher is not None]

    def tell(event: Event) -> None:
        for watcher in watchers:
            watcher(event)

    try:
        yield tell
    finally:
        if line is not None:
            line.wipe()


class SavedLevels:
    """Saves the run so far after every level, so that no result is lost if the run is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: Event) -> None:
        """Write the run so far after a level."""
        if isinstance(event, LevelDone):
            # A full disk must not end the run; the file is written again at the end, where an error is reported.
            with suppress(OSError):
                write_run(self._path, replace(event.run, notes=(*event.run.notes, UNFINISHED)))


def write_reports(run: PerfRun, options: PerfOptions, source: InputSource) -> None:
    """Write the requested files.

    Raises:
        ServingError: UNAVAILABLE if a file cannot be written; the others are written anyway.
    """
    problems: list[str] = []
    for write in (_write_json, _write_csv, _write_html, _write_markdown, _write_profile):
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
        # Imported late, because few runs write a page.
        from charonia.tools.report.html import render

        write_whole(path, render([run]))


def _write_markdown(run: PerfRun, options: PerfOptions, source: InputSource) -> None:
    if options.report.markdown is not None:
        write_whole(options.report.markdown, markdown.render(run).encode())


def _write_profile(run: PerfRun, options: PerfOptions, source: InputSource) -> None:
    path = options.report.profile_export
    if path is not None:
        write_profile(path, run, ExportedInputs(source))


class ExportedInputs:
    """The inputs of requests as cached JSON.

    Args:
        source: The requests.
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
    """Return a tensor as JSON: a single element as a scalar, several as a flat list, too many as null."""
    if tensor.array.size > EXPORT_ELEMENTS_MAX:
        return None
    array = from_bfloat(tensor.array) if tensor.datatype is DataType.BF16 else tensor.array
    elements: list[Any] = array.ravel().tolist()
    if tensor.datatype is DataType.BYTES:
        elements = [element.decode(errors="replace") for element in elements]
    return elements[0] if len(elements) == 1 else elements
