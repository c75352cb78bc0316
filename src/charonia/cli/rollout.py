"""`charonia rollout`: what becomes of the changes of deployments.

Exit status: 0 done, or the newest revision serves; 1 it does not, or the call was refused; 2 for invalid arguments.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.cli.command_line import CommandLine, Option, flag
from charonia.cli.platform_access import (
    ACCESS,
    LOOK_S,
    THIS_MACHINE,
    PlatformAccess,
    PlatformSubcommand,
    connect,
    moment,
    run_subcommand,
    table,
)
from charonia.cli.values import integer
from charonia.core.errors import ServingError, internal, invalid
from charonia.platform.api_client import PlatformClient, path_of


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """What to show."""

    name: str = ""
    waits: bool = True
    access: PlatformAccess = THIS_MACHINE


@dataclass(frozen=True, slots=True)
class NamedDeployment:
    """A deployment."""

    name: str = ""
    access: PlatformAccess = THIS_MACHINE


@dataclass(frozen=True, slots=True)
class RolloutUndo:
    """Where to go back to."""

    name: str = ""
    to: int = 0
    waits: bool = True
    access: PlatformAccess = THIS_MACHINE


NAME = Option("NAME", "name", str, "NAME", "The deployment", default="")
NO_WAIT = flag("--no-wait", "waits", False, "Do not wait until it serves")


def _line(name: str, purpose: str) -> CommandLine[NamedDeployment]:
    command = f"charonia rollout {name}"
    intro = f"usage: {command} [OPTIONS] NAME\n\n{purpose}\n"
    return CommandLine(command, intro, {"Options": (NAME, *ACCESS)}, NamedDeployment())


STATUS = CommandLine(
    command="charonia rollout status",
    intro="""\
usage: charonia rollout status [OPTIONS] [NAME]

Wait until the newest revision of a deployment serves or has failed. Without NAME, list all deployments.
""",
    groups={"Options": (Option("--name NAME", "name", str, "NAME", "The deployment"), NO_WAIT, *ACCESS)},
    record=RolloutStatus(),
)

UNDO = CommandLine(
    command="charonia rollout undo",
    intro="usage: charonia rollout undo [OPTIONS] NAME\n\nMake a new revision that is as an earlier one was.\n",
    groups={
        "Options": (
            NAME,
            Option(
                "--to", "to", integer(1), "REVISION", "Which one; by default the one that served before", default=""
            ),
            NO_WAIT,
            *ACCESS,
        )
    },
    record=RolloutUndo(),
)

HISTORY = _line("history", "List the revisions of a deployment, with what each has changed.")
STOP = _line("stop", "End the servers of a deployment; its revisions and its address stay.")
START = _line("start", "Start a deployment that was stopped or has failed.")
REMOVE = _line("remove", "End a deployment and remove it.")


def run(arguments: Sequence[str]) -> int:
    purpose = "Follow, undo and end the changes of deployments, on a platform."
    return run_subcommand("charonia rollout", purpose, SUBCOMMANDS, arguments)


def show_plan(name: str, plan: Mapping[str, Any], *, is_dry: bool) -> None:
    """Print what a change does, or would do."""
    if not plan["changes"] and not plan["is_new"]:
        print(f"{name}: no change, revision {plan['revision']}")
    else:
        done = "created" if plan["is_new"] else "changed"
        print(f"{name}: would be {done}" if is_dry else f"{name}: {done}, revision {plan['revision']}")
    for change in plan["changes"]:
        print(f"  {change}")
    for problem in plan["problems"]:
        print(f"  does not fit: {problem}")


def wait_until_served(client: PlatformClient, project: str, name: str, revision: int) -> None:
    """Wait until a revision serves, and print where.

    Raises:
        ServingError: INTERNAL if it has failed, INVALID_ARG if there is a newer one or the deployment was stopped.
    """
    said = ""
    while True:
        found: dict[str, Any] = client.call("GET", path_of("projects", project, "deployments", name))
        if found["revision"] > revision:
            raise invalid(f"{name}: revision {found['revision']} was made meanwhile", hint="charonia rollout history")
        if (error := failure(found)) is not None:
            raise error
        if found["serving"] == revision and found["state"] in ("ready", "degraded"):
            grpc = f", gRPC {found['grpc']}" if found["grpc"] else ""
            print(f"{name}: revision {revision} serves at {found['http']}{grpc}")
            return
        if found["doing"] and found["doing"] != said:
            said = found["doing"]
            print(f"{name}: {said}", file=sys.stderr)
        time.sleep(LOOK_S)


def failure(found: Mapping[str, Any]) -> ServingError | None:
    """Return why the newest revision of a deployment does not and will not serve, None if it may."""
    name, revision = found["name"], found["revision"]
    if found["latest_state"] == "failed":
        serving = f"revision {found['serving']} serves" if found["serving"] else "none serves"
        reason = found["latest_reason"] or found["reason"]
        hint = f"charonia rollout {'undo' if found['serving'] else 'start'} {name}"
        return internal(f"{name}: revision {revision} has failed, {serving}: {reason}", hint=hint)
    if found["state"] == "failed":
        return internal(f"{name}: {found['reason'] or 'it has failed'}")
    if found["state"] in ("stopping", "stopped"):
        return invalid(f"{name}: it is {found['state']}", hint=f"charonia rollout start {name}")
    return None


def _status(given: RolloutStatus) -> int:
    client, project = connect(given.access), given.access.project
    if not given.name:
        rows = [_row(each) for each in _all(client, project)]
        print(table(("Name", "State", "Revision", "Serving", "Address"), rows))
        return 0
    found = client.call("GET", path_of("projects", project, "deployments", given.name))
    if given.waits:
        wait_until_served(client, project, given.name, found["revision"])
        return 0
    print(table(("Name", "State", "Revision", "Serving", "Address"), [_row(found)]))
    for text in filter(None, (found["reason"], found["latest_reason"])):
        print(text)
    return 0 if failure(found) is None else 1


def _all(client: PlatformClient, project: str) -> list[dict[str, Any]]:
    found, total = list[dict[str, Any]](), 1
    while len(found) < total:
        query = {"limit": 200, "offset": len(found)}
        page = client.call("GET", path_of("projects", project, "deployments"), query=query)
        total = page["total"] if page["deployments"] else 0
        found += page["deployments"]
    return found


def _row(found: Mapping[str, Any]) -> Sequence[object]:
    return found["name"], found["state"], found["revision"], found["serving"] or "-", found["http"] or "-"


def _undo(given: RolloutUndo) -> int:
    client, project = connect(given.access), given.access.project
    place = path_of("projects", project, "deployments", given.name)
    plan = client.call("POST", f"{place}/rollback", {"to": given.to})
    show_plan(given.name, plan, is_dry=False)
    if given.waits:
        wait_until_served(client, project, given.name, plan["revision"])
    return 0


def _history(given: NamedDeployment) -> int:
    place = path_of("projects", given.access.project, "deployments", given.name, "revisions")
    revisions = connect(given.access).call("GET", place, query={"limit": 200})["revisions"]
    rows = [
        (
            each["number"],
            each["state"],
            moment(each["created"]),
            each["author"],
            "; ".join(each["changes"]) or each["note"],
        )
        for each in revisions
    ]
    print(table(("Revision", "State", "Made", "By", "Change"), rows))
    return 0


def _post(action: str, given: NamedDeployment) -> int:
    place = path_of("projects", given.access.project, "deployments", given.name)
    connect(given.access).call(*(("DELETE", place) if action == "remove" else ("POST", f"{place}/{action}")))
    return 0


SUBCOMMANDS = {
    "status": PlatformSubcommand("Wait until a deployment serves its newest revision; list all", STATUS, _status),
    "undo": PlatformSubcommand("Go back to an earlier revision", UNDO, _undo),
    "history": PlatformSubcommand("List revisions, with what each has changed", HISTORY, _history),
    "stop": PlatformSubcommand("End the servers of a deployment", STOP, lambda given: _post("stop", given)),
    "start": PlatformSubcommand(
        "Start a deployment that was stopped or has failed", START, lambda given: _post("start", given)
    ),
    "remove": PlatformSubcommand("End a deployment and remove it", REMOVE, lambda given: _post("remove", given)),
}
