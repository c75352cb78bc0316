"""`charonia deploy`: a model of the registry, or a file or folder of this machine, in one step.

Exit status: 0 it serves, 1 it does not or was refused, 2 for invalid arguments.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.models import RegistryOptions, add_version
from charonia.cli.platform_access import ACCESS, THIS_MACHINE, PlatformAccess, connect
from charonia.cli.rollout import NO_WAIT, show_plan, wait_until_served
from charonia.cli.values import by_version, integer, integers, number
from charonia.core.errors import Code, ServingError, invalid
from charonia.platform.api_client import PlatformClient, path_of


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """The model to deploy, and its options. An option that is None or empty leaves an existing deployment unchanged."""

    model: str = ""
    name: str = ""
    model_name: str = ""
    environment: str = ""
    cpu_cores: int | None = None
    gpus: tuple[int, ...] = ()
    memory_mib: int | None = None
    instances: int | None = None
    instances_max: int | None = None
    max_batch_size: int | None = None
    max_queue_delay_us: int | None = None
    traffic: Mapping[str, float] = field(default_factory=dict)
    keys: bool = False
    ready_within_s: float | None = None
    note: str = ""
    is_dry: bool = False
    waits: bool = True
    access: PlatformAccess = THIS_MACHINE


# fmt: off
LINE = CommandLine(
    command="charonia deploy",
    intro="""\
usage: charonia deploy [OPTIONS] MODEL|PATH

Deploy a model of the registry, in its latest version that is ready or in MODEL/VERSION; or add a file or folder to the
registry and deploy that. If there is a deployment of the name, it gets the model and the options given here, and
keeps the rest; the version before serves until the new one is ready. Where requests are split by weights, they stay so:
the version is loaded beside the others, and --traffic gives it requests.
""",
    groups={
        "Options": (
            Option("MODEL", "model", str, "MODEL|PATH", "NAME, NAME/VERSION, or a file or folder", default=""),
            Option("--name", "name", str, "NAME", "Name of the deployment; default: the name of the model"),
            Option("--model-name", "model_name", str, "NAME", "Name of the model in the registry, for a PATH"),
            Option("--environment", "environment", str, "NAME", "Its environment; default: the platform's Python"),
            Option("--cpu-cores", "cpu_cores", integer(0), "N", "Cores that its models may use, 0 for all", default=""),
            Option("--gpus", "gpus", integers(0), "LIST", "Numbers of its GPUs"),
            Option("--memory-mib", "memory_mib", integer(0), "N", "Memory that it may use, 0 for no limit", default=""),
            Option("--instances", "instances", integer(1), "N", "Instances of the model", default=""),
            Option("--instances-max", "instances_max", integer(1), "N", "Upper limit of instances by load", default=""),
            Option("--max-batch-size", "max_batch_size", integer(1), "N", "Largest batch", default=""),
            Option("--max-queue-delay-us", "max_queue_delay_us", integer(0), "N",
                   "Longest wait for a fuller batch, in microseconds", default=""),
            Option("--traffic", "traffic", by_version, "VERSION=N,...",
                   "Split requests by these weights, among these versions: 1=90,2=10", default=""),
            flag("--keys", "keys", True, "Clients need an API key"),
            Option("--ready-within", "ready_within_s", number(0, above=True), "SECONDS",
                   "A revision that is not ready after this has failed", default=""),
            Option("--note", "note", str, "TEXT", "Note on the change"),
            flag("--dry-run", "is_dry", True, "Only show what would change; nothing is added to the registry"),
            NO_WAIT,
            *ACCESS,
        )
    },
    record=DeployOptions(),
)
# fmt: on


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _deploy)


def _deploy(given: DeployOptions) -> int:
    client, project = connect(given.access), given.access.project
    model, version = _model(client, given)
    name = given.name or re.sub(r"[^a-z0-9_-]+", "-", model.lower()).strip("-_")
    place = path_of("projects", project, "deployments", name)
    before = _there(client, place)
    query = {
        "dry_run": "true" if given.is_dry else "",
        "note": given.note,
        "revision": before["revision"] if before else 0,
    }
    old = before["spec"] if before else None
    if not version and _weights(old, model) and not given.traffic:
        version = _newest(client, project, model)
    spec = changed_spec(old, name, model, version, given)
    plan = client.call("PUT", place, spec, query=query)
    show_plan(name, plan, is_dry=given.is_dry)
    if given.is_dry:
        return 1 if plan["problems"] else 0
    if given.waits:
        wait_until_served(client, project, name, plan["revision"])
    return 0


def _model(client: PlatformClient, given: DeployOptions) -> tuple[str, int]:
    """Return model and version, 0 for the latest; a file or folder is added to the registry before."""
    path = Path(given.model).expanduser()
    if path.exists():
        if given.is_dry:
            raise invalid(f"--dry-run: '{given.model}' is not in the registry yet", hint="charonia models add")
        wanted = RegistryOptions(source=given.model, name=given.model_name, notes=given.note, access=given.access)
        return add_version(client, wanted, reuse=True)
    name, slash, version = given.model.partition("/")
    if not name or (slash and not version.isdecimal()):
        raise invalid(
            f"expected NAME, NAME/VERSION or a file or folder, got '{given.model}'",
            hint="a file or folder of that name does not exist on this machine",
        )
    return name, int(version) if slash else 0


def _newest(client: PlatformClient, project: str, model: str) -> int:
    """Return the newest version of a model that is ready, 0 for none."""
    versions = client.call("GET", path_of("projects", project, "models", model))["versions"]
    return max((int(each["number"]) for each in versions if each["state"] == "ready"), default=0)


def _weights(spec: Mapping[str, Any] | None, model: str) -> Mapping[str, float]:
    """Return the weights by which the requests of a model are split, {} for none."""
    for each in (spec or {}).get("models", ()):
        if each["name"] == model:
            found: Mapping[str, float] = each.get("traffic", {}).get("weights") or {}
            return found
    return {}


def _there(client: PlatformClient, place: str) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = client.call("GET", place)
    except ServingError as error:
        if error.code is Code.NOT_FOUND:
            return None
        raise
    return found


def changed_spec(
    before: Mapping[str, Any] | None, name: str, model: str, version: int, given: DeployOptions
) -> dict[str, Any]:
    """Return the specification of a deployment with a model, and with the options that were given.

    Args:
        before: The specification that it has, None if it is new.
        model: The model; one that is not among its models is added.
        version: The version, 0 for the latest. It replaces the previous versions; where requests are split by
            weights it is added beside them, with weight 0.
    """
    spec: dict[str, Any] = {"models": [], **(before or {}), "name": name}
    entry: dict[str, Any] = next((dict(each) for each in spec["models"] if each["name"] == model), {"name": model})
    weights = given.traffic or _weights(before, model)
    wanted = {version} if version else set[int]()
    if given.traffic:
        wanted |= {int(each) for each in given.traffic}
    elif weights and entry["versions"] != "latest":
        wanted |= set(entry["versions"])
    entry["versions"] = sorted(wanted) or "latest"
    traffic = {
        "weights": dict(weights),
        "sticky": entry.get("traffic", {}).get("sticky"),
        "shadow": {
            each: shadow for each, shadow in entry.get("traffic", {}).get("shadow", {}).items() if int(each) in wanted
        },
    }
    entry["traffic"] = {key: value for key, value in traffic.items() if value}
    if not entry["traffic"]:
        del entry["traffic"]
    _add(entry, "instances", {"min": given.instances, "max": given.instances_max})
    batching = {"max_batch_size": given.max_batch_size, "max_queue_delay_microseconds": given.max_queue_delay_us}
    _add(entry, "batching", batching)
    others = [each for each in spec["models"] if each["name"] != model]
    device = {"cpu_cores": given.cpu_cores, "gpus": list(given.gpus) or None, "memory_mib": given.memory_mib}
    _add(spec, "device", device)
    further = {"environment": given.environment, "keys": given.keys, "ready_within_s": given.ready_within_s}
    return spec | {"models": [*others, entry]} | {key: value for key, value in further.items() if value}


def _add(target: dict[str, Any], key: str, values: Mapping[str, Any]) -> None:
    given = {name: value for name, value in values.items() if value is not None}
    if given:
        target[key] = {**target.get(key, {}), **given}
