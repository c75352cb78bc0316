"""`charonia environments`: Python environments that deployments run in, on a platform.

Exit status: 0 done, 1 it could not be built or found, 2 for invalid arguments.
"""

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from charonia.cli.command_line import Option, flag
from charonia.cli.platform_access import (
    THIS_MACHINE,
    Columns,
    PlatformAccess,
    Resource,
    Verb,
    at,
    facts,
    follow,
    listed,
    table,
)
from charonia.cli.values import file_text, names
from charonia.core.errors import invalid, not_found
from charonia.platform.api_client import PlatformClient, path_of
from charonia.tools.report.quantities import size


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """The options of all verbs."""

    name: str = ""
    requirements: str | None = None
    script: str | None = None
    preset: str = ""
    python: str = ""
    imports: tuple[str, ...] = ()
    waits: bool = True
    access: PlatformAccess = THIS_MACHINE


def _list(client: PlatformClient, options: EnvironmentOptions) -> int:
    columns: Columns = {
        "Name": "name",
        "State": "state",
        "Python": "python",
        "Size": lambda environment: size(environment["size"]),
        "Added": at("created"),
    }
    print(table(columns, listed(client, path_of("projects", options.access.project, "environments"))))
    presets = client.call("GET", path_of("environments", "choices"))["presets"]
    print(f"\nto choose with --preset: {', '.join(each['name'] for each in presets)}")
    return 0


def _show(client: PlatformClient, options: EnvironmentOptions) -> int:
    found = client.call("GET", path_of("projects", options.access.project, "environments", options.name))
    named = {"state": found["state"], "reason": found["reason"], "Python": found["python"]}
    packages = table({"Package": itemgetter(0), "Version": itemgetter(1)}, found["packages"])
    print("\n".join([found["name"], *facts(named), "", packages]))
    return 0


def _add(client: PlatformClient, options: EnvironmentOptions) -> int:
    made = client.call(
        "POST", path_of("projects", options.access.project, "environments"), request_for(client, options)
    )
    if options.waits and made["task"]:
        follow(client, made["task"], with_log=True)
    print(made["name"])
    return 0


def request_for(client: PlatformClient, options: EnvironmentOptions) -> dict[str, Any]:
    """Return the body of the request to the platform."""
    sources = [each for each in (options.requirements, options.script, options.preset or None) if each is not None]
    if len(sources) != 1:
        raise invalid(f"expected one of --requirements, --script and --preset, got {len(sources)}")
    wanted: dict[str, Any] = {"name": options.name, "python": options.python, "imports": list(options.imports)}
    if options.preset:
        presets = {each["name"]: each for each in client.call("GET", path_of("environments", "choices"))["presets"]}
        if options.preset not in presets:
            raise not_found(f"there is no preset '{options.preset}'", hint=f"known are {', '.join(presets)}")
        preset = presets[options.preset]
        wanted["requirements"] = preset["requirements"]
        wanted["imports"] += preset["imports"]
    elif options.script is not None:
        wanted["script"] = options.script
    elif options.requirements is not None:
        wanted["requirements"] = options.requirements
    wanted["name"] = wanted["name"] or options.preset
    if not wanted["name"]:
        raise invalid("expected a NAME for the environment, got none")
    return wanted


def _remove(client: PlatformClient, options: EnvironmentOptions) -> int:
    client.call("DELETE", path_of("projects", options.access.project, "environments", options.name))
    return 0


_NAME = Option("NAME", "name", str, "NAME", "The environment", default="")

# fmt: off
RESOURCE = Resource(
    "charonia environments", "Manage the Python environments of deployments, on a platform.", EnvironmentOptions(),
    {
        "list": Verb("List environments and presets", _list,
                     "List the environments of a project, and the presets."),
        "show": Verb("Show an environment with its packages", _show, "Show an environment with all its packages.",
                     "NAME", (_NAME,)),
        "add": Verb("Build an environment", _add,
                    """\
Build an environment from packages, from a script that states them, or from a preset, and test it. Its packages are
code that runs, so that needs the permission for code.""", "[NAME]",
                    (Option("--name NAME", "name", str, "NAME", "Its name; default: the name of the preset"),
                     Option("--requirements -r", "requirements", file_text, "FILE", "Its packages, in pip's format",
                            default=""),
                     Option("--script", "script", file_text, "FILE", "A Python file that lists its packages (PEP 723)",
                            default=""),
                     Option("--preset", "preset", str, "NAME",
                            "A predefined environment, see `charonia environments list`"),
                     Option("--python", "python", str, "VERSION", "Version of Python; default: the platform's"),
                     Option("--imports", "imports", names, "MODULES",
                            "Additional modules to import as a test, separated by commas"),
                     flag("--no-wait", "waits", False, "Do not wait until it is built"))),
        "remove": Verb("Remove an environment", _remove, "Remove an environment that no deployment uses.", "NAME",
                       (_NAME,)),
    },
)
# fmt: on

run = RESOURCE.run
