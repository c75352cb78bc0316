"""`charonia environments`: Python environments that deployments run in, on a platform.

Exit status: 0 done, 1 it could not be built or found, 2 for invalid arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia.cli.command_line import CommandLine, Option, flag
from charonia.cli.platform_access import (
    ACCESS,
    THIS_MACHINE,
    PlatformAccess,
    PlatformSubcommand,
    connect,
    follow,
    moment,
    run_subcommand,
    size_text,
    table,
)
from charonia.cli.values import names
from charonia.core.errors import invalid, not_found
from charonia.platform.api_client import PlatformClient, path_of


@dataclass(frozen=True, slots=True)
class ListEnvironments:
    """Where to list them."""

    access: PlatformAccess = THIS_MACHINE


@dataclass(frozen=True, slots=True)
class NamedEnvironment:
    """An environment."""

    name: str = ""
    access: PlatformAccess = THIS_MACHINE


@dataclass(frozen=True, slots=True)
class AddEnvironment:
    """An environment to build.

    Attributes:
        name: Its name, "" for that of the preset.
        requirements: File with its packages.
        script: File that states them, as PEP 723 says.
        preset: Name of one that is ready to choose.
        python: Version of Python, "" for that of the platform.
        imports: Modules to test it with.
        waits: Whether the command ends when it is built.
        access: The platform.
    """

    name: str = ""
    requirements: Path | None = None
    script: Path | None = None
    preset: str = ""
    python: str = ""
    imports: tuple[str, ...] = ()
    waits: bool = True
    access: PlatformAccess = THIS_MACHINE


LIST = CommandLine(
    command="charonia environments list",
    intro="""\
usage: charonia environments list [OPTIONS]

List the environments of a project, and those to choose from.
""",
    groups={"Options": ACCESS},
    record=ListEnvironments(),
)

SHOW = CommandLine(
    command="charonia environments show",
    intro="usage: charonia environments show [OPTIONS] NAME\n\nShow an environment with all its packages.\n",
    groups={"Options": (Option("NAME", "name", str, "NAME", "The environment", default=""), *ACCESS)},
    record=NamedEnvironment(),
)

ADD = CommandLine(
    command="charonia environments add",
    intro="""\
usage: charonia environments add [OPTIONS] [NAME]

Build an environment from packages, from a script that states them, or from a preset, and test it. Its packages are
code that runs, so that needs the permission for code.
""",
    groups={
        "Options": (
            Option("--name NAME", "name", str, "NAME", "Its name, by default that of the preset"),
            Option("--requirements -r", "requirements", Path, "FILE", "Its packages, as pip takes them", default=""),
            Option("--script", "script", Path, "FILE", "A Python file that states its packages (PEP 723)", default=""),
            Option("--preset", "preset", str, "NAME", "One that is ready to choose, see `charonia environments list`"),
            Option("--python", "python", str, "VERSION", "Version of Python, by default that of the platform"),
            Option("--imports", "imports", names, "MODULES", "Further modules to test it with, with commas between"),
            flag("--no-wait", "waits", False, "Do not wait until it is built"),
            *ACCESS,
        )
    },
    record=AddEnvironment(),
)

REMOVE = CommandLine(
    command="charonia environments remove",
    intro="usage: charonia environments remove [OPTIONS] NAME\n\nRemove an environment that no deployment uses.\n",
    groups={"Options": (Option("NAME", "name", str, "NAME", "The environment", default=""), *ACCESS)},
    record=NamedEnvironment(),
)


def run(arguments: Sequence[str]) -> int:
    purpose = "Keep Python environments that deployments run in, on a platform."
    return run_subcommand("charonia environments", purpose, SUBCOMMANDS, arguments)


def _list(given: ListEnvironments) -> int:
    client = connect(given.access)
    found, place = list[dict[str, Any]](), path_of("projects", given.access.project, "environments")
    while page := client.call("GET", place, query={"limit": 200, "offset": len(found)}):
        found += page
    rows = [
        (each["name"], each["state"], each["python"], size_text(each["size"]), moment(each["created"]))
        for each in found
    ]
    print(table(("Name", "State", "Python", "Size", "Added"), rows))
    presets = client.call("GET", path_of("environments", "choices"))["presets"]
    print(f"\nto choose with --preset: {', '.join(each['name'] for each in presets)}")
    return 0


def _show(given: NamedEnvironment) -> int:
    found = connect(given.access).call("GET", path_of("projects", given.access.project, "environments", given.name))
    facts = [("state", found["state"]), ("reason", found["reason"]), ("Python", found["python"])]
    print("\n".join([found["name"], *(f"{label}: {text}" for label, text in facts if text)]))
    print("\n".join(["", table(("Package", "Version"), found["packages"])]))
    return 0


def _add(given: AddEnvironment) -> int:
    client = connect(given.access)
    wanted = request_for(client, given)
    made = client.call("POST", path_of("projects", given.access.project, "environments"), wanted)
    if given.waits and made["task"]:
        follow(client, made["task"], with_log=True)
    print(made["name"])
    return 0


def request_for(client: PlatformClient, given: AddEnvironment) -> dict[str, Any]:
    """Return what is asked of the platform.

    Raises:
        ServingError: INVALID_ARG for several sources or a file that cannot be read; NOT_FOUND for a preset.
    """
    sources = [each for each in (given.requirements, given.script, given.preset) if each]
    if len(sources) != 1:
        raise invalid(f"expected one of --requirements, --script and --preset, got {len(sources)}")
    wanted: dict[str, Any] = {"name": given.name, "python": given.python, "imports": list(given.imports)}
    if given.preset:
        presets = {each["name"]: each for each in client.call("GET", path_of("environments", "choices"))["presets"]}
        if given.preset not in presets:
            raise not_found(f"there is no preset '{given.preset}'", hint=f"known are {', '.join(presets)}")
        preset = presets[given.preset]
        wanted["requirements"] = preset["requirements"]
        wanted["imports"] += preset["imports"]
    elif given.script:
        wanted["script"] = _text(given.script)
    elif given.requirements:
        wanted["requirements"] = _text(given.requirements)
    wanted["name"] = wanted["name"] or given.preset
    if not wanted["name"]:
        raise invalid("expected a NAME for the environment, got none")
    return wanted


def _text(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"'{path}' cannot be read: {error}") from None


def _remove(given: NamedEnvironment) -> int:
    connect(given.access).call("DELETE", path_of("projects", given.access.project, "environments", given.name))
    return 0


SUBCOMMANDS = {
    "list": PlatformSubcommand("List environments, and those to choose from", LIST, _list),
    "show": PlatformSubcommand("Show an environment with its packages", SHOW, _show),
    "add": PlatformSubcommand("Build an environment", ADD, _add),
    "remove": PlatformSubcommand("Remove an environment", REMOVE, _remove),
}
