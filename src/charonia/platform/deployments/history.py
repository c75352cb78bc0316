"""The figures of deployments over days, in the database: means of intervals that grow with their age.

A deployment has at most 1,200 rows; a row is one interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from sqlalchemy import delete, insert, select

from charonia.platform.database.connection import Database
from charonia.platform.database.tables import HistoryRow
from charonia.platform.deployments.figures import Figures, FiguresPoint, merged

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

    def forget(self, deployment_id: int) -> None:
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
