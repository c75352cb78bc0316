"""Polls the metrics pages of all deployments, and keeps their figures for an hour; `FigureHistory` has older ones."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus

from charonia.http_call import NO_ANSWER, http_call
from charonia.platform.database.connection import now
from charonia.platform.database.lease import RepeatedStep
from charonia.platform.deployments.figures import FiguresPoint, Sample, point, read_page
from charonia.platform.deployments.history import FigureHistory

WATCHED_S = 5.0
"""Interval between polls of a watched deployment."""

OTHERS_S = 20.0
"""Interval between polls of the others."""

WATCHED_FOR_S = 120.0
"""How long a deployment is watched after a request for its figures."""

KEPT_S = 3600.0
POINTS_MAX = 720

ANSWER_S_MAX = 2.0
PAGE_BYTES_MAX = 16 * 2**20

_AT_ONCE = 4


@dataclass(slots=True)
class _Series:
    """State of a deployment."""

    pages: Sequence[str] = ()
    points: deque[FiguresPoint] = field(default_factory=lambda: deque(maxlen=POINTS_MAX))
    last: tuple[float, Mapping[str, Sample]] | None = None
    next_s: float = 0.0
    asked_s: float = -WATCHED_FOR_S


class Collector:
    """Collects the figures of deployments in a thread. Any thread may ask for them.

    Args:
        pages: Returns the addresses of the metrics pages of its servers by the id of the deployment.
        history: Where older figures are.
        fetch: Returns a page; raises OSError or ValueError.
        may_write: Whether this platform writes the history.
    """

    def __init__(
        self,
        pages: Callable[[], Mapping[int, Sequence[str]]],
        history: FigureHistory,
        fetch: Callable[[str], str] | None = None,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pages = pages
        self.history = history
        self._fetch = fetch or fetch_page
        self._may_write = may_write
        self._series: dict[int, _Series] = {}
        self._lock = threading.Lock()
        self._loop = RepeatedStep("figures", lambda: self.step(time.monotonic()), 1.0)
        self.start = self._loop.start
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="figures")

    def close(self) -> None:
        """Stop."""
        self._loop.close()
        self._pool.shutdown(cancel_futures=True)

    def latest(self, deployment_id: int) -> FiguresPoint | None:
        with self._lock:
            series = self._series.get(deployment_id)
            return series.points[-1] if series and series.points else None

    def since(self, deployment_id: int, time_s: float) -> Sequence[FiguresPoint]:
        """Return the figures after a time, and watch the deployment closely for a while."""
        with self._lock:
            series = self._series.setdefault(deployment_id, _Series())
            if time.monotonic() - series.asked_s > WATCHED_FOR_S:
                series.next_s = 0.0
            series.asked_s = time.monotonic()
            return [found for found in series.points if found.time > time_s]

    def step(self, monotonic_s: float) -> None:
        """Poll the pages that are due."""
        pages = self._pages()
        with self._lock:
            for gone in self._series.keys() - pages.keys():
                del self._series[gone]
                self.history.forget(gone)
            due = []
            for key, found in pages.items():
                series = self._series.setdefault(key, _Series())
                series.pages = found
                if found and series.next_s <= monotonic_s:
                    is_watched = monotonic_s - series.asked_s < WATCHED_FOR_S
                    series.next_s = monotonic_s + (WATCHED_S if is_watched else OTHERS_S)
                    due.append((key, series))
        for _ in self._pool.map(lambda each: self._look(*each), due):
            pass
        self.history.keep(now(), may_write=self._may_write())

    def _look(self, key: int, series: _Series) -> None:
        samples: dict[str, Sample] = {}
        for page in series.pages:
            with contextlib.suppress(*NO_ANSWER):  # the other pages count
                samples[page] = read_page(self._fetch(page))
        at_s = time.monotonic()
        before, series.last = series.last, (at_s, samples) if samples else None
        # Servers that take the place of others have no interval yet: a gap, not zero.
        if before is not None and before[1].keys() & samples.keys() and at_s > before[0]:
            found = point(before[1], samples, at_s - before[0], now())
            with self._lock:
                series.points.append(found)
                while series.points[0].time < found.time - KEPT_S:
                    series.points.popleft()
            self.history.add(key, found)


def fetch_page(address: str) -> str:
    """Return a metrics page.

    Raises:
        OSError, ValueError, HTTPException: It does not answer, or not with metrics.
    """
    answer = http_call("GET", address, timeout_s=ANSWER_S_MAX, bytes_max=PAGE_BYTES_MAX)
    if answer.status != HTTPStatus.OK:
        raise ValueError(f"{address} answers {answer.status}")
    return answer.body.decode()
