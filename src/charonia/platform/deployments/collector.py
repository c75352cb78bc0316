"""Polls the metrics pages of all deployments, and keeps their figures: for an hour in memory, for days in the database.

There, rows are means of intervals that grow with their age, at most 1,200 a deployment.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from http import HTTPStatus
from typing import Any

from sqlalchemy import delete, insert, select

from charonia.http_call import NO_ANSWER, http_call
from charonia.platform.database.connection import Database, now
from charonia.platform.database.lease import RepeatedStep
from charonia.platform.database.tables import HistoryRow
from charonia.platform.deployments.figures import Figures, FiguresPoint, Sample, merged, point, read_page

LEVELS = ((60, 2 * 3600.0), (300, 25 * 3600.0), (3600, 31 * 86_400.0))
"""Length of the intervals, and how long they are kept, in seconds."""

VERSIONS_MAX = 8
"""Most versions of a point: the busiest ones."""

SWEEP_S = 600.0
"""How often old rows are removed."""

DIGITS = 4
"""Significant digits of what is kept."""


class FigureHistory:
    """Keeps and returns the figures of deployments."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[int, list[list[FiguresPoint]]] = {}
        self._swept_s = 0.0

    def add(self, deployment_id: int, point: FiguresPoint) -> None:
        """Add the latest figures of a deployment, from any thread but one at a time for each."""
        self._waiting.setdefault(deployment_id, [[] for _ in LEVELS])[0].append(point)

    def keep(self, now_s: float, *, may_write: bool) -> None:
        """Write the intervals that are over. Raises ServingError."""
        rows = []
        for number, levels in list(self._waiting.items()):
            for at, (step_s, _) in enumerate(LEVELS):
                points = levels[at]
                if not points or points[0].time // step_s == now_s // step_s:
                    break
                levels[at] = []
                found = merged(points)
                rows.append({"deployment_id": number, "step": step_s, "created": found.time, **_written(found)})
                if at + 1 < len(LEVELS):
                    levels[at + 1].append(found)
        if may_write and rows:
            with self._database.transaction() as session:
                session.execute(insert(HistoryRow), rows)
        if may_write and now_s - self._swept_s > SWEEP_S:
            self._swept_s = now_s
            with self._database.transaction() as session:
                for step_s, kept_s in LEVELS:
                    old = (HistoryRow.step == step_s) & (HistoryRow.created < now_s - kept_s)
                    session.execute(delete(HistoryRow).where(old))

    def discard(self, deployment_id: int) -> None:
        self._waiting.pop(deployment_id, None)

    def was_busy(self, deployment_id: int) -> bool:
        """Whether there were requests in the time that is kept."""
        with self._database.reading() as session:
            busy = (HistoryRow.deployment_id == deployment_id) & HistoryRow.is_busy
            return session.scalar(select(HistoryRow.id).where(busy).limit(1)) is not None

    def since(
        self, deployment_id: int, time_s: float, recent: Sequence[FiguresPoint], now_s: float
    ) -> Sequence[FiguresPoint]:
        """Return the figures after a time, in intervals of the length that fits.

        Args:
            recent: The figures in memory, which follow or take the place of shorter intervals.
        """
        first = next((at for at, (_, kept_s) in enumerate(LEVELS) if now_s - time_s < kept_s), len(LEVELS) - 1)
        found: list[FiguresPoint] = []
        with self._database.reading() as session:
            for step_s, _ in LEVELS[first::-1]:
                after_s = found[-1].time if found else time_s
                of_level = (HistoryRow.deployment_id == deployment_id) & (HistoryRow.step == step_s)
                query = select(HistoryRow.created, HistoryRow.data).where(of_level, HistoryRow.created > after_s)
                if not first and recent:
                    query = query.where(HistoryRow.created < recent[0].time)
                found += [_read(*row) for row in session.execute(query.order_by(HistoryRow.created))]
        after_s = found[-1].time if found else time_s
        return [*found, *(point for point in recent if point.time > after_s)]


def _written(point: FiguresPoint) -> dict[str, Any]:
    busiest = sorted(point.versions, key=lambda name: -point.versions[name].requests_per_s)[:VERSIONS_MAX]
    data = {
        "all": _short(astuple(point.all)),
        "versions": {name: _short(astuple(point.versions[name])) for name in busiest},
        "machine": _short((point.memory_bytes, point.cpu_cores, point.gpu_utilization, point.gpu_memory_bytes)),
    }
    return {"data": data, "is_busy": point.all.requests_per_s > 0}


def _short(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.{DIGITS}g}") for value in values]


def _read(time_s: float, data: Mapping[str, Any]) -> FiguresPoint:
    versions = {name: Figures(*values) for name, values in data["versions"].items()}
    return FiguresPoint(time_s, Figures(*data["all"]), versions, *data["machine"])


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
                self.history.discard(gone)
            due = []
            for key, found in pages.items():
                series = self._series.setdefault(key, _Series())
                series.pages = found
                if found and series.next_s <= monotonic_s:
                    is_watched = monotonic_s - series.asked_s < WATCHED_FOR_S
                    series.next_s = monotonic_s + (WATCHED_S if is_watched else OTHERS_S)
                    due.append((key, series))
        for _ in self._pool.map(lambda each: self._collect(*each), due):
            pass
        self.history.keep(now(), may_write=self._may_write())

    def _collect(self, key: int, series: _Series) -> None:
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
