"""`charonia traffic`: how requests without a version are split among the versions of a model, and canary plans.

Exit status: 0 done, 1 the server does not respond or refuses, 2 misuse.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.server_access import THIS_MACHINE, ServerAccess, access_options
from charonia.cli.values import by_version, integer, number, numbers, one_of
from charonia.client.sync_client import Client
from charonia.core.errors import invalid
from charonia.tools.report.quantities import in_columns

HISTORY_SHOWN = 20
"""Latest happenings that are printed; --json has all."""

ANY = "any"
"""Value of --p99-ratio-max for no condition."""

_SOURCES = {"request": "set by request", "configuration": "set in config.pbtxt", "default": "not split"}

ACTIONS = ("status", "set", "canary", "pause", "resume", "promote", "abort", "reset")


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Values of the command line. None leaves a part unchanged, or at the server's default."""

    action: str = "status"
    model: str = ""
    server: ServerAccess = THIS_MACHINE
    json: bool = False
    weights: dict[str, float] | None = None
    sticky: str | None = None
    shadow: dict[str, float] | None = None
    version: str = ""
    stable: str = ""
    steps: tuple[float, ...] | None = None
    step_seconds: float | None = None
    samples_min: int | None = None
    significance: float | None = None
    p99_ratio_max: float | str | None = None
    difference_rate_max: float | None = None


def _ratio(text: str) -> float | str:
    return text if text == ANY else number(0)(text)


LINE = CommandLine(
    command="charonia traffic",
    intro=f"""\
usage: charonia traffic ACTION [OPTIONS] MODEL

Show or change how requests of a model that name no version are split among its versions.
ACTION is one of {", ".join(ACTIONS)}.
""",
    groups={
        "Options": (
            Option("ACTION", "action", one_of(ACTIONS), "ACTION", "What to do"),
            Option("MODEL", "model", str, "MODEL", "Name of the model"),
            *access_options("; grpc:// for gRPC"),
            flag("--json", "json", True, "Print JSON"),
        ),
        "set": (
            Option("--weights", "weights", by_version, "VERSION=N,...", "Weights; empty for none"),
            Option("--sticky", "sticky", str, "RULE", "header:NAME, key, correlation_id; empty for none"),
            Option("--shadow", "shadow", by_version, "VERSION=SHARE,...", "Copies; empty for none"),
        ),
        "canary": (
            Option("--canary-version", "version", str, "VERSION", "The version that takes over"),
            Option("--stable", "stable", str, "VERSION", "The other version", default="the one with most requests"),
            Option("--steps", "steps", numbers, "N,...", "Percentages", default="1,10,50,100"),
            Option("--step-seconds", "step_seconds", number(0), "SECONDS", "Time of a step", default="300"),
            Option(
                "--samples-min", "samples_min", integer(0), "N", "Requests of each version in a step", default="200"
            ),
            Option("--significance", "significance", number(0), "P", "Chance of a false alarm", default="0.01"),
            Option(
                "--p99-ratio-max", "p99_ratio_max", _ratio, "RATIO", "Largest ratio of the p99 latencies", default="1.5"
            ),
            Option("--difference-rate-max", "difference_rate_max", number(0), "RATE", "Shadow answers that may differ"),
        ),
    },
    record=TrafficOptions(),
)


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _run)


def _run(given: TrafficOptions) -> int:
    with given.server.client() as client:
        document = _ask(client, given)
    print(json.dumps(document, indent=2) if given.json else traffic_text(document))
    return 0


def _ask(client: Client, options: TrafficOptions) -> dict[str, Any]:
    if options.action == "status":
        return client.traffic.get(options.model)
    if options.action == "reset":
        return client.traffic.reset(options.model)
    return client.traffic.update(options.model, change_of(options))


def change_of(options: TrafficOptions) -> dict[str, object]:
    """Return the change that the options describe, as the server takes it."""
    parts = {"weights": options.weights, "sticky": options.sticky, "shadow": options.shadow}
    change: dict[str, object] = {name: value for name, value in parts.items() if value is not None}
    if options.action == "set":
        if not change:
            raise invalid("set: expected --weights, --sticky or --shadow, got none")
        return change
    if options.action != "canary":
        return {"action": options.action}
    if not options.version:
        raise invalid("canary: expected --canary-version, got none")
    given = {option.field: getattr(options, option.field) for option in LINE.groups["canary"]}
    plan: dict[str, object] = {name: value for name, value in given.items() if value not in (None, "")}
    if options.p99_ratio_max == ANY:
        plan["p99_ratio_max"] = None
    return {**change, "canary": plan}


def traffic_text(document: Mapping[str, Any]) -> str:
    """Return the traffic of a model as text."""
    lines = [f"{document['model']}: {_SOURCES[document['source']]}"]
    if document["sticky"]:
        lines[0] += f", sticky by {document['sticky']}"
    rows: list[tuple[str, ...]] = [
        ("version", "ready", "share", "requests", "errors", "in flight", "p50 ms", "p99 ms", "shadow")
    ]
    rows += [_row(each) for each in document["versions"]]
    lines += ["", *in_columns(rows, range(len(rows[0])))]
    canary = document["canary"]
    if canary is not None:
        plan, state = canary["plan"], canary["state"].replace("_", " ")
        lines += ["", f"canary of version {plan['version']} against version {plan['stable']}: {state}"]
        lines += [f"  {canary['reason']}"]
        lines += [f"  waits for {canary['waits_for']}"] if canary["waits_for"] else []
        lines += [f"  {text}" for text in canary["checks"].values()]
    if document["history"]:
        lines += [
            "",
            "history",
            *(f"  {each['time']}  {each['text']}" for each in document["history"][-HISTORY_SHOWN:]),
        ]
    return "\n".join(lines)


def _row(version: Mapping[str, Any]) -> tuple[str, ...]:
    latency, shadow = version["latency_us"], version["shadow"]
    times = [f"{latency[name] / 1e3:.3g}" if name in latency else "-" for name in ("p50", "p99")]
    copies = "-"
    if shadow is not None:
        copies = f"{shadow['difference_rate']:.2%} of {shadow['compared']} differ, {shadow['dropped']} dropped"
        if "p99" in shadow["latency_us"]:
            copies += f", p99 {shadow['latency_us']['p99'] / 1e3:.3g} ms"
    counts = (version["requests"], version["errors"], version["in_flight"])
    return (
        version["version"], "yes" if version["is_ready"] else "no", f"{version['share']:.1%}",
        *map(str, counts), *times, copies,
    )  # fmt: skip
