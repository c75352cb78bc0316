"""The traffic of a model as a JSON object, in words and as metrics. Pure."""

from collections.abc import Iterable
from typing import TypeVar

from charonia.server.metrics.metric_families import Family, family
from charonia.server.traffic.canary import Canary
from charonia.server.traffic.state import ModelTraffic, state_text
from charonia.wire.json_text import Object
from charonia.wire.traffic import BY_CORRELATION, BY_HEADER, BY_KEY
from charonia.wire.traffic_form import plan_json, settings_json

R = TypeVar("R")

REQUESTS = "charonia_traffic_requests_total"
ERRORS = "charonia_traffic_errors_total"
SHARE = "charonia_traffic_share"
SHADOW = "charonia_traffic_shadow_total"
CANARY = "charonia_traffic_canary_percent"


def traffic_metric_names() -> tuple[str, ...]:
    return (REQUESTS, ERRORS, SHARE, SHADOW, CANARY)


def traffic_json(traffic: ModelTraffic[R], now_ns: int) -> Object:
    """Return the settings, the figures of each version, the canary and the history."""
    source = "request" if traffic.requested is not None else "configuration" if traffic.configured is not None else ""
    return {
        "model": traffic.model,
        "source": source or "default",
        **settings_json(traffic.settings),
        "versions": [_version_json(traffic, version) for version in _shown(traffic)],
        "canary": _canary_json(traffic.canary, now_ns) if traffic.canary is not None else None,
        "history": [{"time": each.time, "text": each.text} for each in traffic.history],
    }


def traffic_words(traffic: ModelTraffic[R], now_ns: int) -> list[str]:
    """Return the traffic in sentences; none without traffic."""
    if not traffic.is_split:
        return []
    parts = [f"{share:.1%} to version {version}" for version, share in sorted(traffic.shares().items())]
    lines = [f"Requests without a version go {', '.join(parts) or 'nowhere: no version is ready'}"]
    sticky = traffic.settings.sticky
    if sticky:
        what = {BY_KEY: "API key", BY_CORRELATION: "correlation id"}.get(sticky)
        lines[0] += f"; by {what or 'header ' + sticky.removeprefix(BY_HEADER)}"
    for version, weight in traffic.weights():
        if weight and version not in traffic.runners:
            lines.append(f"Version {version} has a weight and is not ready: the others get its share")
    for version, shadow in sorted(traffic.settings.shadow.items()):
        figures = traffic.shadow_figures(version)
        differ = f"{figures.unlike} of {figures.compared} answers differ"
        lines.append(f"Version {version} gets copies of {shadow.share:.1%}: {differ}")
    canary = traffic.canary
    if canary is not None:
        lines.append(f"Canary of version {canary.plan.version}, {state_text(canary.state)}: {canary.reason}")
        waits = canary.waits_for(now_ns)
        if waits:
            lines[-1] += f"; it waits for {waits}"
    return lines


def traffic_families(models: Iterable[ModelTraffic[R]]) -> list[Family]:
    """Return the metrics of models with traffic; none where there are none."""
    shown = [each for each in models if each.is_split]
    if not shown:
        return []
    rows = [(each, version, _labels(each, version)) for each in shown for version in _shown(each)]
    copies = [(each.shadow_figures(v), _labels(each, v)) for each in shown for v in sorted(each.shadows)]
    results = [
        (count, {**labels, "result": result})
        for figures, labels in copies
        for result, count in (
            ("same", figures.same),
            ("different", figures.different),
            ("failed", figures.failed),
            ("dropped", figures.dropped),
        )
    ]
    canaries = [(each.running.percent, _labels(each, each.running.plan.version)) for each in shown if each.running]
    return [
        family(
            REQUESTS, "counter", "Requests without a version that traffic sent to a version",
            *((each.figures(version).requests, labels) for each, version, labels in rows),
        ),
        family(
            ERRORS, "counter", "Requests that were answered with an error",
            *((each.figures(version).errors, labels) for each, version, labels in rows),
        ),
        family(
            SHARE, "gauge", "Share of the requests without a version that a version gets",
            *((round(each.shares().get(version, 0.0), 6), labels) for each, version, labels in rows),
        ),
        family(SHADOW, "counter", "Copies of requests for a shadow version, by what came of them", *results),
        family(CANARY, "gauge", "Percentage that a canary plan gives to its version now", *canaries),
    ]  # fmt: skip


def _labels(traffic: ModelTraffic[R], version: int) -> dict[str, str]:
    return {"model": traffic.model, "version": str(version)}


def _shown(traffic: ModelTraffic[R]) -> list[int]:
    """Return the versions to show: ready ones, and all with a weight or requests."""
    settings = traffic.settings
    return sorted({*traffic.runners, *settings.weights, *settings.shadow, *traffic.versions, *traffic.shadows})


def _version_json(traffic: ModelTraffic[R], version: int) -> Object:
    figures, settings = traffic.figures(version), traffic.settings
    return {
        "version": str(version),
        "is_ready": version in traffic.runners,
        "weight": settings.weights.get(version, 0.0),
        "share": round(traffic.shares().get(version, 0.0), 6),
        "requests": figures.requests,
        "errors": figures.errors,
        "in_flight": figures.in_flight,
        "latency_us": figures.latency_us(),
        "shadow": _shadow_json(traffic, version) if version in settings.shadow else None,
    }


def _shadow_json(traffic: ModelTraffic[R], version: int) -> Object:
    figures = traffic.shadow_figures(version)
    return {
        "sent": figures.sent,
        "compared": figures.compared,
        "different": figures.different,
        "failed": figures.failed,
        "dropped": figures.dropped,
        "difference_rate": round(figures.unlike / figures.compared, 6) if figures.compared else 0.0,
        "latency_us": figures.latency_us(),
    }


def _canary_json(canary: Canary, now_ns: int) -> Object:
    return {
        "plan": plan_json(canary.plan),
        "state": canary.state.value,
        "step": canary.step,
        "percent": canary.percent,
        "reason": canary.reason,
        "waits_for": canary.waits_for(now_ns),
        "checks": canary.checks(),
    }
