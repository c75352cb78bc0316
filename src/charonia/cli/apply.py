"""`charonia apply`: create or update deployments from files.

Exit status: 0 all serve, or with --dry-run fit; 1 refused, failed or do not fit; 2 for invalid arguments.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.platform_access import ACCESS, THIS_MACHINE, PlatformAccess, connect
from charonia.cli.rollout import NO_WAIT, show_plan, wait_until_served
from charonia.core.errors import invalid
from charonia.platform.api_client import path_of


@dataclass(frozen=True, slots=True)
class ApplyOptions:
    """What to apply."""

    files: tuple[str, ...] = ()
    is_dry: bool = False
    note: str = ""
    waits: bool = True
    access: PlatformAccess = THIS_MACHINE


LINE = CommandLine(
    command="charonia apply",
    intro="""\
usage: charonia apply -f FILE [OPTIONS]

Create or update deployments from a file. Deployments that already match the file are left alone.
A file is YAML or JSON, with `---` between several deployments.
""",
    groups={
        "Options": (
            Option("--file -f", "files", str, "FILE", "The file, - for stdin; repeatable", tuple),
            flag("--dry-run", "is_dry", True, "Only show what would change"),
            Option("--note", "note", str, "TEXT", "Note on the change"),
            NO_WAIT,
            *ACCESS,
        )
    },
    record=ApplyOptions(),
)


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _apply)


def _apply(options: ApplyOptions) -> int:
    if not options.files:
        raise invalid("expected -f FILE, got none")
    specs = [spec for file in options.files for spec in read_specs(file)]
    client, project, fits = connect(options.access), options.access.project, True
    applied = dict[str, int]()
    for spec in specs:
        query = {"dry_run": "true" if options.is_dry else "", "note": options.note}
        plan = client.call("PUT", path_of("projects", project, "deployments", spec["name"]), spec, query=query)
        show_plan(spec["name"], plan, is_dry=options.is_dry)
        applied[spec["name"]] = plan["revision"]
        fits = fits and not plan["problems"]
    if options.is_dry:
        return 0 if fits else 1
    for name, revision in applied.items() if options.waits else ():
        wait_until_served(client, project, name, revision)
    return 0


def read_specs(file: str) -> list[dict[str, Any]]:
    """Return the deployments of a file."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        found = [each for each in yaml.safe_load_all(text) if each is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"'{file}' cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist is a ValueError
        raise invalid(f"'{file}': expected YAML or JSON: {error}") from None
    if not found:
        raise invalid(f"'{file}': expected at least one deployment, got none")
    for each in found:
        if not isinstance(each, Mapping) or not isinstance(each.get("name"), str) or not each["name"]:
            raise invalid(f"'{file}': expected deployments with a name each", hint="name: reader")
    return [dict(each) for each in found]
