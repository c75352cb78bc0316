"""Figures of a deployment from two polls of its servers' metrics pages: rates, percentiles, batch sizes. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LINE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_SUMS = {
    "nv_inference_request_success": "successes",
    "nv_inference_request_failure": "failures",
    "nv_inference_count": "inferences",
    "nv_inference_exec_count": "executions",
    "nv_inference_queue_duration_us": "queue_us",
    "nv_inference_compute_infer_duration_us": "compute_us",
    "charonia_load_seconds_total": "load_s",
    "nv_inference_pending_request_count": "pending",
    "charonia_instances": "instances",
    "charonia_model_memory_bytes": "memory_bytes",
}
"""Names in `Counts` by metric; the values of all its lines are added."""

_BUCKETS = "charonia_request_duration_seconds_bucket"
_PROCESSES = ("charonia_process_resident_memory_bytes", "charonia_process_cpu_seconds_total", "nv_gpu_")
_RESTARTS = "charonia_process_restarts_total"
_KEYS = {"charonia_key_requests_total": "result", "charonia_key_tokens_total": "kind"}
"""Metrics of API keys, with the label whose value says what is counted."""

_WANTED = (_RESTARTS, *_SUMS, _BUCKETS, *_PROCESSES, "charonia_worker_memory_bytes", *_KEYS)

Version = tuple[str, str]
"""Model and version."""


Counts = Counter[Any]
"""Counters of a model version since it was loaded, and its gauges; buckets of its histogram by their upper bounds."""


@dataclass(slots=True)
class Sample:
    """A metrics page.

    Attributes:
        gpu_utilization: Utilization of the busiest GPU, 0 to 1; None without GPUs.
        gpu_memory_bytes: Memory in use on all GPUs, None without GPUs.
        engines_over_memory: How often its engine was restarted because it exceeded its memory limit.
        keys: Counters of API keys by name and what they count.
    """

    versions: dict[Version, Counts] = field(default_factory=dict)
    keys: dict[tuple[str, str], float] = field(default_factory=dict)
    memory_bytes: float = 0.0
    cpu_s: float = 0.0
    gpu_utilization: float | None = None
    gpu_memory_bytes: float | None = None
    engines_over_memory: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Activity between two polls.

    Attributes:
        requests_per_s: Requests, including failed ones.
        p50_ms: Median of the time from arrival to response, None without requests.
        p99_ms: Its 99th percentile.
        queue_ms: Mean time in the queue, None without requests.
        waited: Time in the queue over time of execution; execution counts as a tenth of the time at least.
        batch_size: Mean size of a batch, None without batches.
        busy: Instances that were needed, on average, with full batches.
        instances: Instances now, 0 for an ensemble.
        memory_bytes: Memory of the weights.
    """

    requests_per_s: float = 0.0
    errors_per_s: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    queue_ms: float | None = None
    waited: float = 0.0
    batch_size: float | None = None
    pending: float = 0.0
    busy: float = 0.0
    instances: float = 0.0
    memory_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class KeyFigures:
    """Activity of an API key between two polls.

    Attributes:
        requests: Requests a minute, including failed ones.
        errors: Failed requests a minute.
        refused: Requests beyond its limits, a minute.
        tokens: Tokens of language models a minute.
    """

    requests: float = 0.0
    errors: float = 0.0
    refused: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class FiguresPoint:
    """The figures of a deployment at a time.

    Attributes:
        time: Seconds since the epoch.
        versions: By "MODEL/VERSION".
        gpu_utilization: Utilization of the busiest GPU, 0 to 1; None without GPUs.
        gpu_memory_bytes: Memory in use on all GPUs, None without GPUs.
        engines_over_memory: How often an engine was restarted because it exceeded its memory limit.
        keys: By name of an API key.
    """

    time: float
    all: Figures
    versions: Mapping[str, Figures]
    memory_bytes: float
    cpu_cores: float
    gpu_utilization: float | None
    gpu_memory_bytes: float | None
    engines_over_memory: float = 0.0
    keys: Mapping[str, KeyFigures] = field(default_factory=dict)


Samples = Mapping[str, Sample]
"""Samples of the servers of a deployment, by the address of the page."""


def read_page(text: str) -> Sample:
    """Return the sample of a metrics page."""
    sample = Sample()
    for line in text.splitlines():
        if not line.startswith(_WANTED) or (found := _LINE.match(line)) is None:
            continue
        name, value = found[1], float(found[3])
        labels = dict(_LABEL.findall(found[2] or ""))
        if "model" in labels and "version" in labels:
            counts = sample.versions.setdefault((labels["model"], labels["version"]), Counts())
            if name in _SUMS or name == _BUCKETS:
                counts[_SUMS.get(name) or float(labels["le"])] += value  # type: ignore[assignment] # it adds floats, too
        if name in ("charonia_process_resident_memory_bytes", "charonia_worker_memory_bytes"):
            sample.memory_bytes += value
        elif name in _KEYS:
            sample.keys[labels["key"], labels[_KEYS[name]]] = value
        elif name == _RESTARTS and labels.get("reason") == "memory limit":
            sample.engines_over_memory += value
        elif name == "charonia_process_cpu_seconds_total":
            sample.cpu_s += value
        elif name == "nv_gpu_utilization":
            sample.gpu_utilization = max(value, sample.gpu_utilization or 0.0)
        elif name == "nv_gpu_memory_used_bytes":
            sample.gpu_memory_bytes = value + (sample.gpu_memory_bytes or 0.0)
    return sample


def point(before: Samples, after: Samples, seconds: float, time: float) -> FiguresPoint:
    """Return the figures of all servers between two polls.

    Args:
        before: The first poll; counters of a server start at 0 again after a restart.
        after: The second one.
        seconds: Time between them, above 0.
        time: When the second one was, in seconds since the epoch.
    """
    changes: dict[Version, Counts] = {}
    for page, sample in after.items():
        former = before.get(page, Sample())
        for version, found in sample.versions.items():
            # Requests before the first poll of a server are not part of this interval.
            start = former.versions.get(version) if page in before else found
            changes.setdefault(version, Counts()).update(_change(start or Counts(), found))
    used = [one.gpu_utilization for one in after.values() if one.gpu_utilization is not None]
    gpu_memory = [one.gpu_memory_bytes for one in after.values() if one.gpu_memory_bytes is not None]
    return FiguresPoint(
        time=time,
        all=_figures(_sum(changes.values()), seconds),
        versions={f"{model}/{number}": _figures(change, seconds) for (model, number), change in changes.items()},
        memory_bytes=sum(sample.memory_bytes for sample in after.values()),
        cpu_cores=sum(max(0.0, one.cpu_s - before[page].cpu_s) for page, one in after.items() if page in before)
        / seconds,
        gpu_utilization=max(used, default=None),
        gpu_memory_bytes=max(gpu_memory, default=None),  # each server reports the whole machine's
        engines_over_memory=sum(one.engines_over_memory for one in after.values()),
        keys=_key_figures(before, after, seconds),
    )


def _key_figures(before: Samples, after: Samples, seconds: float) -> dict[str, KeyFigures]:
    counts: dict[str, dict[str, float]] = {}
    for page, sample in after.items():
        former = before[page].keys if page in before else sample.keys
        for (key, what), value in sample.keys.items():
            more = value - former.get((key, what), 0.0)
            found = counts.setdefault(key, {})
            found[what] = found.get(what, 0.0) + (more if more >= 0 else value)
    return {
        key: KeyFigures(
            *(
                sum(found.get(what, 0.0) for what in parts) * 60 / seconds
                for parts in (("ok", "error"), ("error",), ("refused",), ("prompt", "completion"))
            )
        )
        for key, found in counts.items()
    }


def merged(points: Sequence[FiguresPoint]) -> FiguresPoint:
    """Return the figures of an interval: means, and the largest p99, at the time of its last point."""
    last = points[-1]
    names = dict.fromkeys(name for point in points for name in point.versions)
    none = Figures()
    return FiguresPoint(
        time=last.time,
        all=_mean([point.all for point in points]),
        versions={name: _mean([point.versions.get(name, none) for point in points]) for name in names},
        **{
            name: _average([getattr(point, name) for point in points])
            for name in ("memory_bytes", "cpu_cores", "gpu_utilization", "gpu_memory_bytes")
        },
    )


_OF_REQUESTS = ("p50_ms", "queue_ms", "batch_size")
_GAUGES = ("instances", "memory_bytes")
"""Present in all points in which a version is loaded."""


def _mean(found: Sequence[Figures]) -> Figures:
    values: dict[str, Any] = {
        name: sum(getattr(each, name) for each in found) / len(found)
        for name in ("requests_per_s", "errors_per_s", "waited", "pending", "busy")
    }
    loaded = [each for each in found if each.instances] or found
    values |= {name: sum(getattr(each, name) for each in loaded) / len(loaded) for name in _GAUGES}
    for name in _OF_REQUESTS:
        known = [(getattr(each, name), each.requests_per_s) for each in found if getattr(each, name) is not None]
        weight = sum(rate for _, rate in known)
        values[name] = sum(value * rate for value, rate in known) / weight if weight else None
    return Figures(**values, p99_ms=max((each.p99_ms for each in found if each.p99_ms is not None), default=None))


def _average(values: Sequence[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def quantile_s(buckets: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of a cumulative histogram by its upper bounds, None if it is empty."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low


_COUNTED = ("successes", "failures", "inferences", "executions", "queue_us", "compute_us", "load_s")
_STATES = ("pending", "instances", "memory_bytes")


def _change(before: Counts, after: Counts) -> dict[Any, float]:
    """Return the activity of a version; after a reset, its counters are the activity. Gauges stay."""
    start = before if all(after[name] >= before[name] for name in _COUNTED) else Counts()
    return {name: value - (0 if name in _STATES else start[name]) for name, value in after.items()}


def _sum(changes: Iterable[Counts]) -> Counts:
    whole: Counts = Counts()
    for change in changes:
        whole.update(change)
    return whole


def _figures(change: Counts, seconds: float) -> Figures:
    buckets = {bound: count for bound, count in change.items() if isinstance(bound, float)}
    requests = change["successes"] + change["failures"]
    p50_s, p99_s = (quantile_s(buckets, share) for share in (0.5, 0.99))
    return Figures(
        requests_per_s=requests / seconds,
        errors_per_s=change["failures"] / seconds,
        p50_ms=None if p50_s is None else p50_s * 1e3,
        p99_ms=None if p99_s is None else p99_s * 1e3,
        queue_ms=change["queue_us"] / change["successes"] / 1e3 if change["successes"] else None,
        batch_size=change["inferences"] / change["executions"] if change["executions"] else None,
        waited=change["queue_us"] / max(change["compute_us"], seconds * 1e5),
        pending=change["pending"],
        busy=change["load_s"] / seconds,
        instances=change["instances"],
        memory_bytes=change["memory_bytes"],
    )
