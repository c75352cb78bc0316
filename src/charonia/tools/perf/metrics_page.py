"""The server's metrics page: numbers by name and labels, and the metrics of GPUs. Pure.

Source: Prometheus text exposition format; names of Triton's GPU metrics.
"""

import re
from collections.abc import Sequence

from charonia.tools.results.server import Gpu

SERIES_MAX = 10_000
"""Limit of lines read from a page."""

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+-?\d+)?")
_UUID = re.compile(r'[{,]\s*gpu_uuid="((?:[^"\\]|\\.)*)"')

Page = dict[str, float]
"""Values by name and labels, as on the page: `nv_gpu_utilization{gpu_uuid="GPU-1"}`."""


def parse(text: str) -> Page:
    """Return the numbers of a page; other lines are ignored."""
    page: Page = {}
    for line in text.splitlines()[:SERIES_MAX]:
        found = _LINE.fullmatch(line.strip())
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if value - value == 0:  # neither infinite nor NaN, which JSON cannot hold
            page[found[1] + (found[2] or "")] = value
    return page


def gpus(pages: Sequence[Page]) -> tuple[Gpu, ...]:
    """Return the GPUs on consecutive pages of the same server."""
    by_uuid: dict[str, dict[str, list[float]]] = {}
    for page in pages:
        for series, value in page.items():
            uuid = _UUID.search(series)
            if uuid is not None:
                by_uuid.setdefault(uuid[1], {}).setdefault(series.split("{", 1)[0], []).append(value)
    return tuple(_gpu(uuid, series) for uuid, series in sorted(by_uuid.items()))


def _gpu(uuid: str, series: dict[str, list[float]]) -> Gpu:
    def mean(name: str) -> float | None:
        values = series.get(name)
        return sum(values) / len(values) if values else None

    def most(name: str) -> float | None:
        return max(series.get(name, ()), default=None)

    return Gpu(
        uuid=uuid,
        utilization=mean("nv_gpu_utilization"),
        power_watts=mean("nv_gpu_power_usage"),
        memory_used_bytes=most("nv_gpu_memory_used_bytes"),
        memory_total_bytes=most("nv_gpu_memory_total_bytes"),
    )
