"""`charonia rollout`: status, history and rollback of deployments.

Exit status: 0 done, or the latest revision serves; 1 it does not, or the call was refused; 2 for invalid arguments.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from charonia.cli.command_line import Option, flag
from charonia.cli.platform_access import (
    LOOK_S,
    PAGE,
    THIS_MACHINE,
    Columns,
    PlatformAccess,
    Resource,
    Verb,
    at,
    listed,
    table,
)
from charonia.cli.values import integer, one_of
from charonia.core.errors import ServingError, internal, invalid
from charonia.platform.api_client import PlatformClient, path_of


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """The options of all verbs."""

    name: str = ""
    to: int = 0
    lines: int = 200
    search: str = ""
    level: str = ""
    waits: bool = True
    access: PlatformAccess = THIS_MACHINE


NO_WAIT = flag("--no-wait", "waits", False, "Do not wait until it serves")


def show_plan(name: str, plan: Mapping[str, Any], *, is_dry: bool) -> None:
    """Print the changes that a plan makes, or would make."""
    if not plan["changes"] and not plan["is_new"]:
        print(f"{name}: no change, revision {plan['revision']}")
    else:
        done = "created" if plan["is_new"] else "changed"
        print(f"{name}: would be {done}" if is_dry else f"{name}: {done}, revision {plan['revision']}")
    for change in plan["changes"]:
        print(f"  {change}")
    if plan.get("steps"):
        print(f"  models that are called come along: {', '.join(plan['steps'])}")
    for text in plan.get("missing", ()):
        print(f"  missing: {text}")
    for problem in plan["problems"]:
        print(f"  does not fit: {problem}")


def wait_until_served(client: PlatformClient, project: str, name: str, revision: int) -> None:
    """Wait until a revision serves, and print where."""
    said = ""
    while True:
        found: dict[str, Any] = client.call("GET", path_of("projects", project, "deployments", name))
        if found["revision"] > revision:
            newer = f"{name}: revision {found['revision']} has superseded revision {revision}"
            raise invalid(newer, hint="charonia rollout history")
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


def _place(options: RolloutOptions, *parts: str) -> str:
    return path_of("projects", options.access.project, "deployments", *parts)


def _status(client: PlatformClient, options: RolloutOptions) -> int:
    if not options.name:
        print(table(_DEPLOYMENT, listed(client, _place(options), "deployments")))
        return 0
    found = client.call("GET", _place(options, options.name))
    if options.waits:
        wait_until_served(client, options.access.project, options.name, found["revision"])
        return 0
    print(table(_DEPLOYMENT, [found]))
    for text in filter(None, (found["reason"], found["latest_reason"])):
        print(text)
    return 0 if failure(found) is None else 1


def _undo(client: PlatformClient, options: RolloutOptions) -> int:
    plan = client.call("POST", _place(options, options.name, "rollback"), {"to": options.to})
    show_plan(options.name, plan, is_dry=False)
    if options.waits:
        wait_until_served(client, options.access.project, options.name, plan["revision"])
    return 0


def _history(client: PlatformClient, options: RolloutOptions) -> int:
    revisions = client.call("GET", _place(options, options.name, "revisions"), query={"limit": PAGE})["revisions"]
    print(table(_REVISION, revisions))
    return 0


def _log(client: PlatformClient, options: RolloutOptions) -> int:
    query = {"lines": options.lines, "search": options.search, "level": options.level}
    print(client.call("GET", _place(options, options.name, "log"), query=query)["text"], end="")
    return 0


def _stop(client: PlatformClient, options: RolloutOptions) -> int:
    found = client.call("POST", _place(options, options.name, "stop"))
    print(f"{options.name}: {found['state']}; `charonia rollout start {options.name}` starts it again")
    return 0


def _start(client: PlatformClient, options: RolloutOptions) -> int:
    found = client.call("POST", _place(options, options.name, "start"))
    print(f"{options.name}: {found['state']}")
    if options.waits:
        wait_until_served(client, options.access.project, options.name, found["revision"])
    return 0


def _remove(client: PlatformClient, options: RolloutOptions) -> int:
    client.call("DELETE", _place(options, options.name))
    print(f"{options.name}: its servers are being stopped, its revisions are deleted")
    return 0


_DEPLOYMENT: Columns = {
    "Name": "name",
    "State": "state",
    "Revision": "revision",
    "Serving": lambda found: found["serving"] or "-",
    "Address": lambda found: found["http"] or "-",
}
_REVISION: Columns = {
    "Revision": "number",
    "State": "state",
    "Made": at("created"),
    "By": "author",
    "Change": lambda found: "; ".join(found["changes"]) or found["note"],
}
_NAME = Option("NAME", "name", str, "NAME", "The deployment", default="")

# fmt: off
RESOURCE = Resource(
    "charonia rollout", "Watch, roll back and stop rollouts, and read logs, on a platform.", RolloutOptions(),
    {
        "status": Verb("Wait until a deployment serves its latest revision; list all", _status,
                       "Wait until the latest revision of a deployment serves or has failed. "
                       "Without NAME, list all deployments.", "[NAME]",
                       (Option("--name NAME", "name", str, "NAME", "The deployment"), NO_WAIT)),
        "undo": Verb("Roll back to an earlier revision", _undo,
                     "Create a new revision with the content of an earlier one.",
                     "NAME", (_NAME, Option("--to", "to", integer(1), "REVISION",
                                            "The earlier revision; by default the previously served one", default=""),
                              NO_WAIT)),
        "history": Verb("List revisions, with what each has changed", _history,
                        "List the revisions of a deployment, with what each has changed.", "NAME", (_NAME,)),
        "log": Verb("Print the end of the log of a deployment", _log,
                    "Print the last lines of the log of a deployment's servers.", "NAME",
                    (_NAME, Option("--lines", "lines", integer(1), "N", "How many"),
                     Option("--search", "search", str, "TEXT", "Only entries with this text, such as a request's id"),
                     Option("--level", "level", one_of(("error", "warning", "info")), "error|warning|info",
                            "Only entries of this level, or a more severe one", default=""))),
        "stop": Verb("Stop the servers of a deployment", _stop,
                     "Stop the servers of a deployment; its revisions and its address stay.", "NAME", (_NAME,)),
        "start": Verb("Start a deployment that was stopped or has failed", _start,
                      "Start a deployment that was stopped or has failed.", "NAME", (_NAME, NO_WAIT)),
        "remove": Verb("Stop and remove a deployment", _remove, "Stop and remove a deployment.", "NAME", (_NAME,)),
    },
)
# fmt: on

run = RESOURCE.run
