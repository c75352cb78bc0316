"""`charonia deploy`: a model of the registry, or a file or folder of this machine, in one step.

Exit status: 0 it serves, 1 it does not or was refused, 2 for invalid arguments.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.models import RegistryOptions, add_versions, files_of
from charonia.cli.platform_access import ACCESS, THIS_MACHINE, PlatformAccess, connect
from charonia.cli.rollout import NO_WAIT, show_plan, wait_until_served
from charonia.cli.values import by_version, integer, integers, names, number, one_of
from charonia.core.errors import Code, ServingError, invalid
from charonia.platform.api_client import PlatformClient, path_of
from charonia.platform.models.layout import repository_models
from charonia.platform.models.sources import default_name
from charonia.wire.traffic import REPLACE, STRATEGIES


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """The model to deploy, and its options. An option that is None or empty leaves an existing deployment unchanged."""

    model: str = ""
    name: str = ""
    model_name: str = ""
    steps: tuple[str, ...] = ()
    environment: str = ""
    cpu_cores: int | None = None
    gpus: tuple[int, ...] = ()
    memory_mib: int | None = None
    instances: int | None = None
    instances_max: int | None = None
    max_batch_size: int | None = None
    max_queue_delay_us: int | None = None
    strategy: str = ""
    traffic: Mapping[str, float] = field(default_factory=dict)
    keys: bool = False
    ready_within_s: float | None = None
    idle_unload_s: int | None = None
    note: str = ""
    is_dry: bool = False
    waits: bool = True
    access: PlatformAccess = THIS_MACHINE


# fmt: off
LINE = CommandLine(
    command="charonia deploy",
    intro="""\
usage: charonia deploy [OPTIONS] MODEL|PATH

Deploy a model of the registry, in its latest version that is ready or in MODEL/VERSION; or add a file, a folder or a
repository to the registry and deploy that. The steps of an ensemble, and the models that the source of a Python model
names in its calls, are deployed with it. If there is a deployment of the name, it gets the model and the options given
here, and keeps the rest; the previous version serves until the new one is ready. --strategy says how the new one gets
requests.
""",
    groups={
        "Options": (
            Option("MODEL", "model", str, "MODEL|PATH", "NAME, NAME/VERSION, or a file or folder", default=""),
            Option("--name", "name", str, "NAME", "Name of the deployment; default: the name of the model"),
            Option("--model-name", "model_name", str, "NAME", "Name of the model in the registry, for a PATH"),
            Option("--with", "steps", names, "LIST", "More models of the pipeline, for calls that are not found"),
            Option("--environment", "environment", str, "NAME", "Its environment; default: the platform's Python"),
            Option("--cpu-cores", "cpu_cores", integer(0), "N", "Cores that its models may use, 0 for all", default=""),
            Option("--gpus", "gpus", integers(0), "LIST", "Numbers of its GPUs"),
            Option("--memory-mib", "memory_mib", integer(0), "N", "Memory that it may use, 0 for no limit", default=""),
            Option("--instances", "instances", integer(1), "N", "Instances of the model", default=""),
            Option("--instances-max", "instances_max", integer(1), "N", "Upper limit of instances by load", default=""),
            Option("--max-batch-size", "max_batch_size", integer(1), "N", "Largest batch", default=""),
            Option("--max-queue-delay-us", "max_queue_delay_us", integer(0), "N",
                   "Longest wait for a fuller batch, in microseconds", default=""),
            Option("--strategy", "strategy", one_of(STRATEGIES), "replace|beside|canary",
                   "The version gets all requests when it is ready, none yet, or more step by step", default="replace"),
            Option("--traffic", "traffic", by_version, "VERSION=N,...",
                   "Split requests by these weights, among these versions: 1=90,2=10", default=""),
            flag("--keys", "keys", True, "Clients need an API key"),
            Option("--ready-within", "ready_within_s", number(0, above=True), "SECONDS",
                   "A revision that is not ready after this has failed", default=""),
            Option("--idle-unload", "idle_unload_s", integer(0), "SECONDS",
                   "Unload models that are not used for this time; their next request loads them again", default=""),
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


def _deploy(options: DeployOptions) -> int:
    client, project = connect(options.access), options.access.project
    is_file = Path(options.model).expanduser().exists()
    models = _models(client, options, is_file=is_file)
    model = models[0][0] if len(models) == 1 else default_name(options.model)
    name = options.name or re.sub(r"[^a-z0-9_-]+", "-", model.lower()).strip("-_")
    place = path_of("projects", project, "deployments", name)
    before = _there(client, place)
    query = {
        "dry_run": "true" if options.is_dry else "",
        "note": options.note,
        "revision": before["revision"] if before else 0,
    }
    old = before["spec"] if before else None
    spec = _with_models(old, name, models, options)
    if is_file and options.is_dry:
        # The platform cannot plan with a version that it does not have.
        from charonia.platform.deployments.spec import changes, read_spec  # which imports pydantic

        made = changes(read_spec(old) if old else None, read_spec(spec))
        for model, version in models:
            print(f"{model}/{version}: would be added from '{options.model}', unless a version has the same files")
        show_plan(name, {"changes": made, "problems": (), "is_new": not old}, is_dry=True)
        return 0
    plan = client.call("PUT", place, spec, query=query)
    show_plan(name, plan, is_dry=options.is_dry)
    if options.is_dry:
        return 1 if plan["problems"] else 0
    if options.waits:
        wait_until_served(client, project, name, plan["revision"])
    return 0


def _models(client: PlatformClient, options: DeployOptions, *, is_file: bool) -> list[tuple[str, int]]:
    """Return models and versions, 0 for the latest; a file or folder is added to the registry before.

    A dry run adds none, and returns the versions that would be added.
    """
    if is_file:
        if options.is_dry:
            several = repository_models(list(files_of(Path(options.model).expanduser())))
            models = list(several) or [options.model_name or default_name(options.model)]
            return [(model, _next_number(client, options.access.project, model)) for model in models]
        wanted = RegistryOptions(
            source=options.model, name=options.model_name, notes=options.note, access=options.access
        )
        return add_versions(client, wanted, reuse=True)
    name, slash, version = options.model.partition("/")
    if not name or (slash and not version.isdecimal()):
        raise invalid(
            f"expected NAME, NAME/VERSION or a file or folder, got '{options.model}'",
            hint="a file or folder of that name does not exist on this machine",
        )
    return [(name, int(version) if slash else 0)]


def _next_number(client: PlatformClient, project: str, model: str) -> int:
    found = _there(client, path_of("projects", project, "models", model))
    return 1 + max((int(each["number"]) for each in found["versions"]), default=0) if found else 1


def _with_models(
    before: Mapping[str, Any] | None, name: str, models: Sequence[tuple[str, int]], options: DeployOptions
) -> dict[str, Any]:
    """Return the specification of a deployment with these models, and those that --with names."""
    plain = replace(
        options, instances=None, instances_max=None, max_batch_size=None, max_queue_delay_us=None, traffic={}
    )
    if len(models) > 1 and plain != options:
        raise invalid(
            f"instances, batches and traffic are for one model, got a repository with {len(models)}",
            hint="deploy it without them, then name the model",
        )
    for model, version in models:
        before = changed_spec(before, name, model, version, options)
    present = {each["name"] for each in (before or {}).get("models", ())}
    for model in options.steps:
        if model not in present:
            before = changed_spec(before, name, model, 0, plain)
    return dict(before or {})


def _there(client: PlatformClient, place: str) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = client.call("GET", place)
    except ServingError as error:
        if error.code is Code.NOT_FOUND:
            return None
        raise
    return found


def changed_spec(
    before: Mapping[str, Any] | None, name: str, model: str, version: int, options: DeployOptions
) -> dict[str, Any]:
    """Return the specification of a deployment with a model, and with the options that were given.

    Args:
        before: The specification that it has, None if it is new.
        model: The model; one that is not among its models is added.
        version: The version, 0 for the latest.
    """
    if options.traffic and options.strategy not in ("", REPLACE):
        raise invalid(f"--traffic splits the requests itself, expected it without --strategy {options.strategy}")
    spec: dict[str, Any] = {"models": [], **(before or {}), "name": name, "strategy": options.strategy or REPLACE}
    entry: dict[str, Any] = next((dict(each) for each in spec["models"] if each["name"] == model), {"name": model})
    wanted = {*([version] if version else []), *map(int, options.traffic)}
    entry["versions"] = sorted(wanted) or "latest"
    split = [number for number, weight in entry.pop("traffic", {}).get("weights", {}).items() if weight]
    if options.traffic:
        entry["traffic"] = {"weights": dict(options.traffic)}
    elif len(split) > 1 and not options.strategy:
        raise invalid(
            f"requests of '{model}' are split among the versions {', '.join(split)}: expected --strategy, got none",
            hint="replace gives the new version all requests, beside none yet, canary more step by step",
        )
    _add(entry, "instances", {"min": options.instances, "max": options.instances_max})
    batching = {"max_batch_size": options.max_batch_size, "max_queue_delay_microseconds": options.max_queue_delay_us}
    _add(entry, "batching", batching)
    others = [each for each in spec["models"] if each["name"] != model]
    device = {"cpu_cores": options.cpu_cores, "gpus": list(options.gpus) or None, "memory_mib": options.memory_mib}
    _add(spec, "device", device)
    members = {name: getattr(options, name) for name in ("environment", "keys", "ready_within_s", "idle_unload_s")}
    return spec | {"models": [*others, entry]} | {name: value for name, value in members.items() if value}


def _add(target: dict[str, Any], key: str, values: Mapping[str, Any]) -> None:
    fields = {name: value for name, value in values.items() if value is not None}
    if fields:
        target[key] = {**target.get(key, {}), **fields}
