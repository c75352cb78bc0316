"""A run of `charonia perf`: the measurement, its progress display, and its reports.

The live view (`--live`) is the page of the report with the current measurement above. It is made when a browser asks
for it, on a thread of its server, and at most once for each level; apart from that, an open page costs one event a
second. Other processes send the load.
"""

import asyncio
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, TextIO

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
from charonia.tools.report.html import render, render_live
from charonia.tools.report.quantities import clock
from charonia.tools.report.run_files import write_profile, write_run, write_whole
from charonia.tools.report.summary import failures
from charonia.tools.results.json_form import to_json
from charonia.tools.results.records import PerfRun
from charonia.wire.transport import Failure

HOST = "127.0.0.1"
PACE_S = 1.0
"""Time between two events of a page."""

POINTS_MAX = 1200
"""Points of time that a page shows: five minutes."""

STREAMS_MAX = 16
"""Pages that follow a run at a time; more are refused."""

REQUEST_S_MAX = 5.0
"""Time in which a browser sends its request, or takes a part of the answer."""

START_S_MAX = 30.0
"""Time that an early browser waits for the run to begin."""

FAREWELL_S = 3.0
"""Time at the end of a run in which open pages load the final report."""

_NAMES_HERE = ("127.0.0.1", "localhost")


class LiveRun:
    """The state of a run in progress, and its page. Threads may share it.

    Args:
        now_s: The clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._begin_s: float | None = None
        self._changed = Condition()
        self._rendering = Lock()
        self._course = Course()
        self._level = ""
        self._tick: LevelTick | None = None
        self._run: PerfRun | None = None
        self._points: deque[tuple[int, float, int, int, str]] = deque(maxlen=POINTS_MAX)
        self._point_count = 0
        self._page_count = 0
        self._pages: dict[str, bytes] = {}
        self._has_ended = False
        self._following = self._farewells = 0
        self._loaded_s = -math.inf

    def __call__(self, event: Event) -> None:
        with self._changed:
            self._course(event)
            match event:
                case LevelBegun():
                    self._begin_s = self._now_s() if self._begin_s is None else self._begin_s
                    self._level, self._tick = str(event.level), None
                    self._show(event.run)
                case LevelDone():
                    self._show(event.run)
                case LevelTick():
                    self._tick = event
                    passed_ms = round(1000 * (self._now_s() - (self._begin_s or 0.0)))
                    self._points.append((passed_ms, event.rate, event.p50_ns, event.p99_ns, str(event.level)))
                    self._point_count += 1

    def end(self, run: PerfRun) -> None:
        """Show the final report, and wait until the pages that follow have loaded it, at most `FAREWELL_S`."""
        with self._changed:
            self._has_ended = True
            self._show(run)
            is_loading = self._now_s() - self._loaded_s < PACE_S
            pages = max(self._following, int(is_loading))
            self._changed.wait_for(lambda: self._farewells >= pages, FAREWELL_S)

    def page(self) -> bytes:
        """Return the current page."""
        with self._rendering:
            with self._changed:
                self._changed.wait_for(lambda: self._run is not None, START_S_MAX)
                run, page, has_ended = self._run, self._page, self._has_ended
            if run is None:
                return b"The run has not begun: load this page again."
            if page not in self._pages:
                made = render([run]) if has_ended else render_live(run, page, POINTS_MAX)
                self._pages = {page: made}
            return self._pages[page]

    def taken(self) -> None:
        """Count a page that has been loaded."""
        with self._changed:
            self._loaded_s = self._now_s()
            if self._has_ended:
                self._farewells += 1
                self._changed.notify_all()

    @contextmanager
    def following(self) -> Iterator[bool]:
        """Count a page that follows the run; yield False for one too many."""
        with self._changed:
            is_taken = self._following < STREAMS_MAX
            self._following += is_taken
        try:
            yield is_taken
        finally:
            with self._changed:
                self._following -= is_taken

    def events(self) -> Iterator[bytes]:
        """Yield an event a second, and one as soon as the page is another, until the run has ended."""
        sent = 0
        has_ended = False
        while not has_ended:
            with self._changed:
                page, has_ended = self._page, self._has_ended
                new = min(self._point_count - sent, len(self._points))
                points = list(self._points)[len(self._points) - new :]
                sent = self._point_count
                now = self._now()
            yield f"data: {json.dumps(now | {'points': points}, separators=(',', ':'))}\n\n".encode()
            with self._changed:
                self._changed.wait_for(self._is_past(page), 0 if has_ended else PACE_S)

    def _is_past(self, page: str) -> Callable[[], bool]:
        return lambda: self._page != page

    @property
    def _page(self) -> str:
        # Runs of other processes at the same port have other pages.
        return f"{os.getpid()}-{self._page_count}"

    def _show(self, run: PerfRun) -> None:
        self._run = run
        self._page_count += 1
        self._changed.notify_all()

    def _now(self) -> dict[str, Any]:
        course, tick = self._course, self._tick
        left_s = None if tick is None else course.left_s(tick)
        return {
            "page": self._page,
            "level": self._level,
            "number": course.number,
            "count": course.count,
            "share": 0.0 if tick is None else course.share(tick),
            "left": "" if left_s is None else clock(left_s),
            "window": 0 if tick is None else tick.window,
            "windows": 0 if tick is None else tick.window_count_max,
            "inFlight": 0 if tick is None else tick.in_flight,
            "errors": 0 if tick is None else tick.error_count,
        }


class _PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, run: LiveRun) -> None:
        self.run = run
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore browsers that have gone."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S_MAX
    server: _PageServer

    def do_GET(self) -> None:
        # A page of another site must not read this one through a name that it made to lead here.
        if self.headers.get("Host", "").partition(":")[0] not in _NAMES_HERE:
            self.send_error(421, "expected the host 127.0.0.1 or localhost")
        elif self.path == "/":
            page = self.server.run.page()
            self._begin("text/html; charset=utf-8", len(page))
            self.wfile.write(page)
            self.server.run.taken()
        elif self.path == "/events":
            with self.server.run.following() as is_taken:
                if not is_taken:
                    self.send_error(503, f"more than {STREAMS_MAX} pages follow the run")
                    return
                self._begin("text/event-stream")
                for event in self.server.run.events():
                    self.wfile.write(event)
        else:
            self.send_error(404)

    def _begin(self, kind: str, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: stderr is the run's."""


@contextmanager
def live_view(port: int | None) -> Iterator[LiveRun | None]:
    """Serve the page of a run, and print its address to stderr; yield what follows the run.

    Args:
        port: The port, 0 for a free one, None for no view.

    Raises:
        ServingError: UNAVAILABLE if the port is taken.
    """
    if port is None:
        yield None
        return
    run = LiveRun()
    try:
        server = _PageServer(port, run)
    except OSError as error:
        raise unavailable(
            f"--live: cannot listen on {HOST}:{port}: {error.strerror}", hint="--live without a port takes a free one"
        ) from None
    with server:
        thread = Thread(target=server.serve_forever, name="live view", daemon=True)
        thread.start()
        print(f"live view: http://{HOST}:{server.server_port}/", file=sys.stderr, flush=True)
        try:
            yield run
        finally:
            server.shutdown()


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
    """Serve the model of the options for the measurement, and yield options with the model and its server.

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
