"""`charonia config MODEL_DIR`: the configuration that the server would use for a model, and its inferred parts.

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
from charonia.cli.serve_values import backend_settings, with_cache
from charonia.cli.values import assignment
from charonia.core.errors import ServingError


@dataclass(frozen=True, slots=True)
class ConfigOptions:
    """The model, and how to complete and print its configuration."""

    model_dir: str = ""
    json: bool = False
    config_name: str = ""
    auto_complete: bool = True
    backend_directory: Path | None = None
    backends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


# fmt: off
LINE = CommandLine(
    command="charonia config",
    intro="""\
usage: charonia config [OPTIONS] MODEL_DIR

Print the complete configuration of a model to stdout and the inferred parts to stderr.
""",
    groups={
        "Options": (
            Option("MODEL_DIR", "model_dir", str, "MODEL_DIR", "Folder of the model, which contains its versions"),
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


def _print(given: ConfigOptions) -> int:
    try:
        configuration, notes, placing = asyncio.run(_configure(given))
    except ServingError as error:
        print(problem_text(given.model_dir, error), file=sys.stderr)
        return 1
    print(notes_text(notes), file=sys.stderr)
    print(placing, file=sys.stderr)
    print(configuration.rstrip("\n"))
    return 0


def notes_text(notes: Sequence[str]) -> str:
    """Return the inferred parts, a line each."""
    if not notes:
        return "Nothing was inferred."
    return "\n".join(["Inferred:", *(f"  {note}" for note in notes)])


def problem_text(model_dir: str, error: ServingError) -> str:
    """Return why there is no configuration: every problem, and the hint."""
    lines = [f"charonia config: {model_dir}:", *(f"  {line}" for line in error.message.splitlines())]
    return "\n".join([*lines, f"  hint: {error.hint}"] if error.hint else lines)


async def _configure(given: ConfigOptions) -> tuple[str, Sequence[str], str]:
    # Imported late, because they import backends and schema, which `--help` does not need.
    from charonia.config.json_form import to_json
    from charonia.config.pbtxt import render
    from charonia.server.backends.registry import installed_backends
    from charonia.server.lifecycle.backends import Backends
    from charonia.server.lifecycle.configure import ConfigureOptions, configure
    from charonia.server.lifecycle.in_front import placing_text
    from charonia.server.lifecycle.repository.scan import folder_at
    from charonia.server.machine.gpus import visible_gpus

    folder = await asyncio.to_thread(folder_at, given.model_dir)
    backends = Backends(installed_backends(given.backend_directory), with_cache(given.backends, os.environ))
    options = ConfigureOptions(
        auto_complete=given.auto_complete,
        config_name=given.config_name,
        gpu_count=visible_gpus(),
    )
    try:
        configured = await configure(folder, backends, options)
    finally:
        await backends.aclose()
    text = json.dumps(to_json(configured.config), indent=2) if given.json else render(configured.config)
    return text, configured.completion.notes, placing_text(configured.config)
