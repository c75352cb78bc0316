"""The live view of `charonia perf --live`: a page on this machine that follows the run in the browser.

It is the page of the report with the current measurement above. It is made when a browser asks for it, on a thread of
its server, and at most once for each level; apart from that, an open page costs one event a second. Other processes
send the load.
"""

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Lock, Thread
from typing import Any

from charonia.cli.perf_progress import Course
from charonia.core.errors import unavailable
from charonia.tools.perf.api import Event, LevelBegun, LevelDone, LevelTick
from charonia.tools.report.html import render, render_live
from charonia.tools.report.quantities import clock
from charonia.tools.results.records import PerfRun

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
