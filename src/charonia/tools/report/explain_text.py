"""Formats the explanation of a model, JSON from the server, as text. Pure."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

COLUMNS_MAX = 110
_BAR = 24
_LABEL = 13
_SIZES_MAX = 12

_REASONS = {
    "full": "the batch was full",
    "preferred": "a preferred size was reached",
    "delay": "the queue delay expired",
    "queue_empty": "no other request waited",
    "shape": "the next request had another shape",
    "strategy": "the model's batching strategy decided",
}


def explain_text(document: Mapping[str, Any], columns: int = COLUMNS_MAX) -> str:
    """Return an explanation as text.

    Args:
        document: Response of `/v2/models/{model}/explain`.
        columns: Maximal width.
    """
    version = document["model_version"]
    head = f"{document['model_name']}, version {version}"
    if document["seconds"]:
        head += f", in the last {document['seconds']:.0f} s"
    if 0 < document["active_seconds"] < document["seconds"]:
        head += f", {document['active_seconds']:.0f} s of them with requests"
    lines = [head, "", *_findings(document["findings"], columns)]
    if document["requests"]["success"] or document["requests"]["failed"]:
        lines += ["", *_requests(document)]
        lines += _batches(document["batches"], is_dynamic=document["configuration"]["dynamic_batching"])
    lines += [] if document["steps"] else ["", *_place(document)]
    lines += _runs_in(document.get("runs_in"))
    if document["steps"]:
        lines += ["", *_steps(document["steps"])]
    labels = ["Traffic", *[""] * len(document.get("traffic", []))]
    lines += [_line(label, text) for label, text in zip(labels, document.get("traffic", []), strict=False)]
    lines += _processes(document.get("processes", []))
    return "\n".join(lines)


def _findings(findings: list[Mapping[str, Any]], columns: int) -> Iterator[str]:
    for place, finding in enumerate(findings, 1):
        lead = f"{place}. " if len(findings) > 1 else ""
        indent = " " * len(lead)
        yield textwrap.fill(finding["says"], columns, initial_indent=lead, subsequent_indent=indent)
        if finding["change"]:
            first, later = f"{indent}-> ", f"{indent}   "
            yield textwrap.fill(finding["change"], columns, initial_indent=first, subsequent_indent=later)


def _requests(document: Mapping[str, Any]) -> Iterator[str]:
    requests, times = document["requests"], document["time_us"]
    parts = [f"{_count(requests['success'])} answered ({requests['per_second']:,.0f} a second)"]
    parts += [f"{_count(count)} {_FAILED.get(reason, reason)}" for reason, count in requests["failed"].items()]
    parts += [f"{_count(requests['from_cache'])} from the cache"] if requests["from_cache"] else []
    yield _line("Requests", ", ".join(parts))
    yield _line("Queue", f"{_count(requests['waiting'])} waiting now, {_count(requests['waiting_max'])} at most")
    if requests["success"]:
        at = max(0.0, times["request"] - times["queue"])
        most = f" (99% up to {_time(times['queue_p99'])})" if times["queue_p99"] is not None else ""
        yield _line(
            "Time",
            f"{_time(times['request'])} a request: {_time(times['queue'])} in the queue{most}, {_time(at)} after it",
        )


_FAILED = {
    "rejected": "refused",
    "canceled": "cancelled",
    "backend": "failed in the model",
    "other": "failed otherwise",
}


def _batches(batches: Mapping[str, Any], *, is_dynamic: bool) -> Iterator[str]:
    count = batches["count"]
    if not count:
        return
    yield _line("Batches", f"{_count(count)}, of {batches['mean_size']:.1f} elements on average")
    shown = sorted(batches["sizes"].items(), key=lambda item: -item[1])[:_SIZES_MAX]
    yield from _bars({f"of {size}": each for size, each in sorted(shown, key=lambda item: int(item[0]))}, count)
    if not is_dynamic:
        return
    closed = {_REASONS.get(reason, reason): each for reason, each in batches["closed"].items()}
    yield _line("Sent because", "")
    yield from _bars(dict(sorted(closed.items(), key=lambda item: -item[1])), sum(closed.values()))


def _bars(counts: Mapping[str, int], total: int) -> Iterator[str]:
    width = max(map(len, counts), default=0)
    for name, count in counts.items():
        share = count / total
        yield f"  {name:<{width}}  {'#' * max(1, round(share * _BAR)):<{_BAR}}  {share:.0%}"


def _place(document: Mapping[str, Any]) -> Iterator[str]:
    instances, cores, configuration = document["instances"], document["cores"], document["configuration"]
    where = "on the GPU" if instances["kind"] == "KIND_GPU" else "on the CPU"
    count = instances["threads"]
    threads = f", {count} thread{'s' if count > 1 else ''} each" if count else ""
    yield _line("Instances", f"{instances['count']} {where}{threads}, busy {instances['busy']:.0%} of the time")
    if instances.get("scaling"):
        yield _line("Scaling", instances["scaling"])
    if instances["batches_at_once"] > 1:
        yield _line("", f"{instances['batches_at_once']:.1f} batches per instance at a time, all but one queued")
    limiter = document["rate_limiter"]
    if limiter["waiting"]:
        held = f"; held by {', '.join(limiter['holders'])}" if limiter["holders"] else ""
        yield _line(
            "Resources", f"{', '.join(limiter['resources'])}, waited for {limiter['waiting']:.0%} of the time{held}"
        )
    taken = f", {cores['taken']:.1f} taken by other programs or the hypervisor" if cores["taken"] else ""
    yield _line("Cores", f"{cores['count']}, {cores['idle']:.1f} of them idle{taken}")
    batching = "no dynamic batching"
    if configuration["dynamic_batching"]:
        batching = f"dynamic batching, max_queue_delay_microseconds {configuration['max_queue_delay_microseconds']}"
        if configuration["preferred_batch_size"]:
            batching += f", preferred_batch_size {configuration['preferred_batch_size']}"
    yield _line("Settings", f"max_batch_size {configuration['max_batch_size']}, {batching}")


def _runs_in(where: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield where the model runs in a server with front-end processes."""
    if where is None:
        return
    count, reason = where["front_ends"], where["only_in_engine_because"]
    text = f"the engine only: {reason}" if reason else "the engine: no front end has loaded it"
    yield _line("Runs in", f"{count} front end{'s' if count > 1 else ''}" if count else text)


def _steps(steps: list[Mapping[str, Any]]) -> Iterator[str]:
    yield "Steps"
    width = max(len(step["model_name"]) for step in steps)
    for step in steps:
        times, instances = step["time_us"], step["instances"]
        yield (
            f"  {step['model_name']:<{width}}  busy {instances['busy']:>4.0%} of {instances['count']} instances, "
            f"{_time(times['request'])} a request, {_time(times['queue'])} of it in the queue"
        )


def _processes(processes: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the processes that were started again or are about to be."""
    label = "Processes"
    for each in processes:
        if each["last_exit"]:
            times = f"{each['restarts']} time{'' if each['restarts'] == 1 else 's'}"
            state = f"up {each['uptime_seconds']:,.0f} s" if each["uptime_seconds"] else "not running"
            yield _line(label, f"{each['name']} {state}, started again {times}; its last end: {each['last_exit']}")
            label = ""


def _count(number: int) -> str:
    return f"{number:,}"


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}".rstrip()


def _time(us: float) -> str:
    for unit, name in ((1e6, "s"), (1e3, "ms")):
        if us >= unit:
            return f"{us / unit:.3g} {name}"
    return f"{us:.0f} us"
