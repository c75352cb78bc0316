"""`charonia config PATH`: the configuration that the server would use for a model, and its inferred parts.

The configuration goes to stdout, ready to be saved as config.pbtxt; inferred parts and errors go to stderr.
Exit status: 0 done, 1 the model cannot be configured, 2 misuse.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.serve_options import backend_settings, with_cache
from charonia.cli.values import assignment
from charonia.core.errors import ServingError, not_found
from charonia.server.machine.private_folder import PrivateFolder


@dataclass(frozen=True, slots=True)
class ConfigOptions:
    """The model, and how to complete and print its configuration."""

    path: str = ""
    json: bool = False
    config_name: str = ""
    auto_complete: bool = True
    backend_directory: Path | None = None
    backends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


# fmt: off
LINE = CommandLine(
    command="charonia config",
    intro="""\
usage: charonia config [OPTIONS] PATH

Print the complete configuration of a model to stdout and the inferred parts to stderr.
""",
    groups={
        "Options": (
            Option("PATH", "path", str, "PATH", "Folder of a model, or a file or folder as `charonia serve` takes it"),
            flag("--json", "json", True, "Print JSON instead of config.pbtxt"),
            Option("--model-config-name", "config_name", str, "NAME", "Start from configs/NAME.pbtxt"),
            flag("--disable-auto-complete-config", "auto_complete", False,
                 "Do not complete the configuration from the model"),
            Option("--backend-directory", "backend_directory", Path, "PATH",
                   "Folder of backends written in Python, NAME/model.py each"),
            Option("--backend-config", "backends", assignment, "[BACKEND,]KEY=VALUE",
                   "Setting of one or all backends; repeatable", backend_settings),
        )
    },
    record=ConfigOptions(),
)
# fmt: on


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _print)


def _print(options: ConfigOptions) -> int:
    try:
        return asyncio.run(_print_all(options))
    except ServingError as error:
        print(problem_text(options.path, error), file=sys.stderr)
        return 1


def notes_text(notes: Sequence[str]) -> str:
    """Return the inferred parts, a line each."""
    if not notes:
        return "Nothing was inferred."
    return "\n".join(["Inferred:", *(f"  {note}" for note in notes)])


def problem_text(path: str, error: ServingError) -> str:
    """Return why there is no configuration: every problem, and the hint."""
    first, *others = error.message.splitlines()
    lines = [f"charonia config: {'' if path in first else f'{path}: '}{first}", *(f"  {line}" for line in others)]
    return "\n".join([*lines, f"  hint: {error.hint}"] if error.hint else lines)


def _is_model(folder: Path) -> bool:
    """Return whether a path is one model's folder, perhaps an incomplete or a missing one. Blocks on the disk."""
    if not folder.is_dir():
        return not folder.exists() and not folder.suffix
    return any(each.name == "config.pbtxt" or each.name.isdecimal() for each in folder.iterdir())


async def _print_all(given: ConfigOptions) -> int:
    """Print the configuration, the inferred parts and the place of every model at the path, or its problems."""
    # Imported late, because they import backends and schema, which `--help` does not need.
    from charonia.config.json_form import to_json
    from charonia.config.pbtxt import render
    from charonia.server.backends.registry import installed_backends
    from charonia.server.files.repository import with_files
    from charonia.server.lifecycle.backends import Backends
    from charonia.server.lifecycle.configure import ConfigureOptions, configure
    from charonia.server.lifecycle.front_end_placement import placing_text
    from charonia.server.lifecycle.loader import without_trial
    from charonia.server.lifecycle.repository.scan import folder_at, scan
    from charonia.server.machine.gpus import visible_gpus

    settings = with_cache(given.backends, os.environ)
    options = ConfigureOptions(
        auto_complete=given.auto_complete,
        config_name=given.config_name,
        gpu_count=visible_gpus(),
    )
    backends = Backends(installed_backends(given.backend_directory), settings)
    status = 0
    try:
        with PrivateFolder() as own:
            folders = [Path(given.path)]
            if not await asyncio.to_thread(_is_model, folders[0]):
                repositories, _ = await with_files([given.path], own.path, settings)
                models = (await asyncio.to_thread(scan, repositories, fingerprints=False)).models
                folders = [each.path for each in models.values()]
                if not folders:
                    raise not_found("there is no model", hint="expected a folder of a model, a repository or a file")
            for path in folders:
                try:
                    configured = await configure(await asyncio.to_thread(folder_at, path), backends, options)
                except ServingError as error:
                    print(problem_text(str(path), error), file=sys.stderr)
                    status = 1
                    continue
                config = without_trial(configured.config)
                text = json.dumps(to_json(config), indent=2) if given.json else render(config)
                print(notes_text(configured.completion.notes), placing_text(config), sep="\n", file=sys.stderr)
                print(text.rstrip("\n"), flush=True)
    finally:
        await backends.aclose()
    return status
