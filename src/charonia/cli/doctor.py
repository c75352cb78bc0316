"""`charonia doctor`: the capabilities of this machine, and the requirements of the models of a repository.

Exit status: 0 no problem was found, 1 a problem was found, 2 misuse.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.server.machine.private_folder import PrivateFolder

if TYPE_CHECKING:
    from charonia.server.doctor.machine import Section


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The repositories to examine, whether the machine is left out, and whether to print JSON."""

    repositories: tuple[str, ...] = ()
    models_only: bool = False
    json: bool = False


# fmt: off
LINE = CommandLine(
    command="charonia doctor",
    intro="""\
usage: charonia doctor [OPTIONS] [PATH...]

Check what this machine can run, and the needs of models: of a repository, or of files as `charonia serve` takes them.
""",
    groups={
        "Options": (
            Option("--model-repository PATH", "repositories", str, "PATH",
                   "Also examine the models there, without loading them; repeatable", tuple),
            flag("--models-only", "models_only", True, "Show the models only, not the machine"),
            flag("--json", "json", True, "Print JSON"),
        )
    },
    record=DoctorOptions(),
)
# fmt: on


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _check)


def _isolation() -> "Section":
    """Return how far `charonia platform` could isolate models here: only its users need that."""
    from charonia.platform.isolation.isolation import layers
    from charonia.platform.isolation.rules import missing
    from charonia.server.doctor.machine import Check, Section

    found = layers()
    said = missing(found.landlock, found.namespace, is_root=os.getuid() == 0, has_users=found.has_users)
    return Section("Isolation of the platform's models", (Check("isolation", " ".join(said) or "complete"),))


async def _examine(paths: Sequence[str]) -> "list[Section]":
    from charonia.server.doctor.repository import examine
    from charonia.server.files.repository import with_files

    with PrivateFolder() as folder:
        repositories, _ = await with_files(paths, folder.path, {})
        return await examine(repositories)


def _check(options: DoctorOptions) -> int:
    # Imported late, because they import the engine, which `--help` does not need.
    from charonia.server.doctor.machine import check_machine, problem_count, to_json, to_text

    sections = [] if options.models_only else [*check_machine(), *([_isolation()] if sys.platform == "linux" else [])]
    if options.repositories:
        sections += asyncio.run(_examine(options.repositories))
    print(json.dumps(to_json(sections), indent=2) if options.json else to_text(sections))
    count = problem_count(sections)
    if count and not options.json:
        print(f"\n{count} problem{'s' if count > 1 else ''}, marked with !")
    return 1 if count else 0
