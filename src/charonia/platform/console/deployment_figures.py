"""The figures of deployments as pages show them: a line of a list, tiles, charts. Pure."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from charonia.platform.console.text import figure, natural_sort_key, percent, plural
from charonia.platform.deployments.figures import Figures, FiguresPoint
from charonia.platform.deployments.reads import DeploymentView

CHARTS = (
    ("rate", "Requests", "per second"),
    ("latency", "Latency", "ms"),
    ("errors", "Errors", "per second"),
    ("queue", "Time in the queue", "ms"),
    ("batch", "Batch size", "elements"),
    ("instances", "Instances", ""),
    ("memory", "Memory", "MB"),
    ("cpu", "CPU", "cores"),
)
"""Key, title and unit, in the order of the page."""

GPU_CHARTS = (("gpu", "GPU", "% busy"), ("gpu_memory", "GPU memory", "MB"))

SERIES_MAX = 4
"""Most versions in a chart: the busiest ones."""

NONE = "\N{EN DASH}"

LOCAL = "local"
"""The target that lists do not mention."""

_MB = 1e6


def ms_text(value: float | None) -> str:
    """Return milliseconds with their unit: "12 ms", "1.2 s"."""
    if value is None:
        return NONE
    return f"{figure(value / 1e3)} s" if value >= 999.5 else f"{figure(value)} ms"


def error_share(figures: Figures) -> float:
    return figures.errors_per_s / figures.requests_per_s if figures.requests_per_s else 0.0


def line(view: DeploymentView) -> dict[str, Any]:
    """Return the row of a deployment in the list."""
    point = None if view.state == "stopped" else view.figures
    share = error_share(point.all) if point is not None else 0.0
    has_traffic = point is not None and point.all.requests_per_s > 0
    failure = f"Revision {view.revision} has failed: {view.latest_reason}" if view.latest_state == "failed" else ""
    return {
        "name": view.name,
        "state": view.state,
        "says": failure or view.reason or view.doing,
        "models": models_text(view) + ("" if view.target == LOCAL else f" at {view.target}"),
        "rate": figure(point.all.requests_per_s) if point is not None else NONE,
        "p99": ms_text(point.all.p99_ms) if point is not None else NONE,
        "errors": percent(share) if has_traffic else NONE,
        "has_errors": share > 0,
        "device": device_text(view),
        "revision": view.serving or view.revision,
    }


SORTS: dict[str, Callable[[DeploymentView], Any]] = {
    "name": lambda view: natural_sort_key(view.name),
    "state": lambda view: view.state,
    "rate": lambda view: view.figures.all.requests_per_s if view.figures else -1.0,
    "p99": lambda view: (view.figures.all.p99_ms if view.figures else None) or -1.0,
    "errors": lambda view: error_share(view.figures.all) if view.figures else -1.0,
    "revision": lambda view: view.serving or view.revision,
}
"""What the list can be sorted by."""


def waits(view: DeploymentView) -> bool:
    """Whether a deployment is stuck and its servers give the reason, for example that no node has room for a pod."""
    return bool(view.doing) and view.reason == view.doing and any(server.reason for server in view.replicas)


def models_text(view: DeploymentView) -> str:
    """Return the models of a deployment with their versions: "reader 1, 2; writer 3"."""
    parts = []
    for model in view.spec.get("models", ()):
        versions = model.get("versions", "latest")
        parts.append(f"{model['name']} {', '.join(map(str, versions)) if isinstance(versions, list) else versions}")
    return "; ".join(parts)


def device_text(view: DeploymentView) -> str:
    """Return the hardware of a deployment: "GPU 0", "2 cores", "CPU"."""
    device = view.spec.get("device", {})
    if gpus := device.get("gpus"):
        return f"GPU {', '.join(map(str, gpus))}"
    cores = device.get("cpu_cores", 0)
    return plural(cores, "core") if cores else "CPU"


def charts_of(point: FiguresPoint | None) -> Sequence[tuple[str, str, str]]:
    """Return key, title and unit of the charts: the same before the first figures, so that none moves."""
    return CHARTS + (GPU_CHARTS if has_gpu(point) else ())


def charts(points: Sequence[FiguresPoint]) -> dict[str, Any]:
    """Return the series of all charts, with their times."""

    def by_version(value: Callable[[Figures], float | None]) -> list[dict[str, Any]]:
        names = busiest(points)
        titles = dict(zip(names, short_names(names), strict=True))
        return [
            {
                "label": titles[name],
                "values": [value(point.versions[name]) if name in point.versions else None for point in points],
            }
            for name in names
        ]

    def of_all(*series: tuple[str, Callable[[FiguresPoint], float | None]]) -> list[dict[str, Any]]:
        return [{"label": label, "values": [value(point) for point in points]} for label, value in series]

    found = {
        "rate": by_version(lambda one: one.requests_per_s),
        "latency": of_all(("p50", lambda point: point.all.p50_ms), ("p99", lambda point: point.all.p99_ms)),
        "errors": by_version(lambda one: one.errors_per_s),
        "queue": by_version(lambda one: one.queue_ms),
        "batch": by_version(lambda one: one.batch_size),
        "instances": by_version(lambda one: one.instances or None),
        "memory": of_all(("all processes", lambda point: point.memory_bytes / _MB)),
        "cpu": of_all(("busy", lambda point: round(point.cpu_cores, 2))),
    }
    if has_gpu(points[-1] if points else None):
        found["gpu"] = of_all(("busiest", lambda point: _times(point.gpu_utilization, 100)))
        found["gpu_memory"] = of_all(("in use", lambda point: _times(point.gpu_memory_bytes, 1 / _MB)))
    return {"times": [point.time for point in points], "charts": found}


def has_gpu(point: FiguresPoint | None) -> bool:
    return point is not None and point.gpu_utilization is not None


def busiest(points: Sequence[FiguresPoint]) -> list[str]:
    """Return the present and former versions by name; of many, the busiest."""
    sums: dict[str, float] = defaultdict(float)
    for point in points:
        for name, figures in point.versions.items():
            sums[name] += figures.requests_per_s
    names = sorted(sums, key=lambda name: (-sums[name], name))[:SERIES_MAX]
    return sorted(names, key=lambda name: (name.rpartition("/")[0], int(name.rpartition("/")[2] or 0)))


def short_names(names: Sequence[str]) -> list[str]:
    """Return "MODEL/VERSION" in the shortest clear form: "version 2" for a single model."""
    is_one = len({name.rpartition("/")[0] for name in names}) == 1
    return [f"version {name.rpartition('/')[2]}" if is_one else name.replace("/", " ") for name in names]


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
