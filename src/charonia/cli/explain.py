"""`charonia explain`: how the scheduler served a model in the last minute, its bottleneck, and what to change.

Exit status: 0 done, 1 the server does not respond or does not know the model, 2 misuse.
"""

import json
import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.client import HTTPResponse
from typing import Any
from urllib.parse import quote

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.server_access import THIS_MACHINE, ServerAccess, access_options
from charonia.cli.values import only_model
from charonia.core.errors import invalid

ANSWER_SECONDS_MAX = 10.0

LOAD = ("--quiet", "--concurrency-range=16", "--measurement-mode=time_windows", "-p1000", "-r5")
"""The load on a file or folder, in options of `charonia perf`."""


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """The model, its server, and the format of the output."""

    model: str = ""
    server: ServerAccess = THIS_MACHINE
    version: str = ""
    json: bool = False


LINE = CommandLine(
    command="charonia explain",
    intro="""\
usage: charonia explain [OPTIONS] [MODEL|PATH]

Show how the scheduler served a model in the last minute, its bottleneck, and what to change.
A file, or a folder with a slash, as in models/, is served for a few seconds with 16 clients.
""",
    groups={
        "Options": (
            Option(
                "--model -m MODEL",
                "model",
                str,
                "MODEL",
                "Name of a loaded model, or a file or folder",
                default="the only one",
            ),
            *access_options(),
            Option("--model-version", "version", str, "VERSION", "That version", default="the latest"),
            flag("--json", "json", True, "Print JSON"),
        )
    },
    record=ExplainOptions(),
)


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _explain)


def _explain(options: ExplainOptions) -> int:
    document = _under_load(options) if _is_path(options.model) else fetch(options)
    columns = min(shutil.get_terminal_size().columns, COLUMNS_MAX)
    print(json.dumps(document, indent=2) if options.json else explain_text(document, columns))
    return 0


def _is_path(model: str) -> bool:
    """Return whether a model is named by a path: a folder can have the name of a model that a server has."""
    is_folder = os.sep in model or model in (os.curdir, os.pardir)
    return os.path.isfile(model) or (is_folder and os.path.isdir(model))


def _under_load(given: ExplainOptions) -> dict[str, Any]:
    """Serve a file or folder under load, and return the server's explanation."""
    # Imported late, because explaining a running server does not need them.
    from charonia.cli.perf import parse
    from charonia.cli.perf_run import measure, served

    parsed = parse([given.model, *LOAD])
    with served(parsed.options) as options:
        measure(options, replace(parsed, options=options).settings)
        return fetch(replace(given, model=options.target.model, server=replace(given.server, url=options.target.url)))


def fetch(options: ExplainOptions) -> dict[str, Any]:
    """Return the server's explanation of a model."""
    version = f"/versions/{quote(options.version, safe='')}" if options.version else ""

    def call(method: str, path: str, body: bytes = b"") -> Any:
        with options.server.call(method, f"/v2/{path}", body, timeout_s=ANSWER_SECONDS_MAX) as answer:
            if answer.status != HTTPStatus.OK:
                raise invalid(_reason(answer))
            return json.load(answer)

    model = options.model
    if not model:
        model = only_model({entry["name"] for entry in call("POST", "repository/index", b'{"ready": true}')})
    document: dict[str, Any] = call("GET", f"models/{quote(model, safe='')}{version}/explain")
    return document


def _reason(answer: HTTPResponse) -> str:
    """Return the server's error message; other servers lack this route."""
    if answer.status == HTTPStatus.HTTP_VERSION_NOT_SUPPORTED:
        return "this port speaks gRPC (hint: -u names that of HTTP, 8000 by default)"
    try:
        return str(json.load(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {answer.status} {answer.reason}: is it charonia?"


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
    """
    version = document["model_version"]
    head = f"{document['model_name']}, version {version}"
    if document["seconds"]:
        head += f", in the last {document['seconds']:.0f} s"
    if 0 < document["active_seconds"] < document["seconds"]:
        head += f", {document['active_seconds']:.0f} s of them with requests"
    lines = [textwrap.fill(head, columns), "", *_findings(document["findings"], columns)]
    if document["requests"]["success"] or document["requests"]["failed"]:
        lines += ["", *_requests(document)]
        lines += _batches(document["batches"], is_dynamic=document["configuration"]["dynamic_batching"])
    lines += [] if document["steps"] else ["", *_place(document)]
    lines += _runs_in(document.get("runs_in"))
    if document["steps"]:
        lines += ["", *_step_lines(document["steps"])]
    labels = ["Traffic", *[""] * len(document.get("traffic", []))]
    lines += [_line(label, text) for label, text in zip(labels, document.get("traffic", []), strict=False)]
    lines += _processes(document.get("processes", []))
    folded = textwrap.TextWrapper(columns, subsequent_indent=" " * _LABEL)
    return "\n".join(line if "\n" in line or len(line) <= columns else folded.fill(line) for line in lines)


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
            f"{_time(times['request'])} a request: {_time(times['queue'])} in the queue{most}, then {_time(at)}",
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


def _step_lines(steps: list[Mapping[str, Any]]) -> Iterator[str]:
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
