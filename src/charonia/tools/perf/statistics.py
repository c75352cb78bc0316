"""What the server reports: differences of its statistics between two readings, and its metrics page. Pure.

The server counts requests of all clients. Comparing its count with our own reveals other traffic.

Source: Triton's statistics extension; Prometheus text exposition format; names of Triton's GPU metrics.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from charonia.tools.results.records import Gpu, ServerModel, ServerSide

Json = Mapping[str, Any]
Reading = Mapping[tuple[str, str], Json]
"""Statistics by model name and version."""

_SLACK_SHARE = 0.02
_SLACK_COUNT = 4


def reading(entries: Sequence[Json]) -> Reading:
    """Return the statistics by model and version."""
    return {(str(entry.get("name", "")), str(entry.get("version", ""))): entry for entry in entries}


def difference(before: Reading, after: Reading, model: str, version: str = "") -> tuple[ServerModel | None, str]:
    """Return a model's statistics between two readings, and a note if they are in doubt.

    Args:
        version: Model version, "" for the active one.
    """
    versions = sorted((key[1] for key in after if key[0] == model), key=_number)
    if version:
        versions = [found for found in versions if found == version]
    found = [_delta(before.get((model, name), {}), after[model, name], model, name) for name in versions]
    moved = [entry for entry in found if entry.success_count or entry.fail_count]
    last = next(reversed(moved or found), None)
    if last is not None and len(moved) > 1:
        return last, f"Several versions of '{model}' were busy; these are the statistics of version {last.version}."
    return last, ""


def server_side(
    model: ServerModel | None, composing: Sequence[ServerModel], notes: Sequence[str], ended: int, in_flight: int
) -> ServerSide:
    """Return the server's statistics, and whether there was other traffic.

    Args:
        ended: Our completed requests, including failed ones.
        in_flight: Upper limit of our requests in flight when the statistics were read.
    """
    if model is None:
        return ServerSide(None, False, tuple(notes))
    notes = list(notes)
    counted = model.success_count + model.fail_count
    slack = max(_SLACK_COUNT, 2 * in_flight, int(ended * _SLACK_SHARE))
    others = counted > ended + slack
    if others:
        notes.append(
            f"The server counted {counted} requests and this client {ended}: so its times include other clients."
        )
    elif counted < ended - slack and counted:
        notes.append(f"The server counted only {counted} of this client's {ended} requests.")
    return ServerSide(replace(model, composing=tuple(composing)), others, tuple(notes))


def composing_models(config: Json) -> list[tuple[str, str]]:
    """Return name and version ("" for any) of the composing models of an ensemble's configuration, each once."""
    steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
    found: dict[tuple[str, str], None] = {}
    for step in steps:
        version = int(step.get("model_version", -1) or -1)
        found[str(step.get("model_name", "")), str(version) if version > 0 else ""] = None
    return list(found)


def _delta(before: Json, after: Json, name: str, version: str) -> ServerModel:
    def moved(*path: str) -> int:
        # The counts of a reloaded model restart at zero.
        return max(0, _at(after, path) - _at(before, path))

    def stats(kind: str, field: str) -> int:
        return moved("inference_stats", kind, field)

    return ServerModel(
        name=name,
        version=version,
        inference_count=moved("inference_count"),
        execution_count=moved("execution_count"),
        success_count=stats("success", "count"),
        fail_count=stats("fail", "count"),
        success_ns=stats("success", "ns"),
        queue_ns=stats("queue", "ns"),
        compute_input_ns=stats("compute_input", "ns"),
        compute_infer_ns=stats("compute_infer", "ns"),
        compute_output_ns=stats("compute_output", "ns"),
        queue_count=stats("queue", "count"),
        cache_hit_count=stats("cache_hit", "count"),
        cache_hit_ns=stats("cache_hit", "ns"),
        cache_miss_count=stats("cache_miss", "count"),
        cache_miss_ns=stats("cache_miss", "ns"),
    )


def _at(entry: Any, path: Sequence[str]) -> int:
    for key in path:
        entry = entry.get(key) if isinstance(entry, Mapping) else None
    return int(entry or 0)


def _number(version: str) -> int:
    return int(version) if version.isdigit() else -1


SERIES_MAX = 10_000
"""Limit of lines read from a page."""

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+-?\d+)?")
_UUID = re.compile(r'[{,]\s*gpu_uuid="((?:[^"\\]|\\.)*)"')

Page = dict[str, float]
"""Values by name and labels, as on the page: `nv_gpu_utilization{gpu_uuid="GPU-1"}`."""


def parse_page(text: str) -> Page:
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
