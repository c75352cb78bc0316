"""`charonia config MODEL_DIR`: the configuration that the server would use for a model, and how it came about.

The configuration goes to stdout, ready to be saved as config.pbtxt; what was inferred, or is wrong, goes to stderr.
Exit status: 0 done, 1 the model cannot be configured, 2 misuse.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from charonia.cli.arguments import Parser
from charonia.cli.cache import with_cache
from charonia.cli.option_table import backend_settings
from charonia.cli.values import assignment
from charonia.core.errors import ServingError


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    given = parser().parse_args(arguments)
    try:
        configuration, notes = asyncio.run(_configure(given))
    except ServingError as error:
        print(problem_text(given.model_dir, error), file=sys.stderr)
        return 1
    print(notes_text(notes), file=sys.stderr)
    print(configuration.rstrip("\n"))
    return 0


def parser() -> Parser:
    """Return the parser of the arguments."""
    made = Parser(
        prog="charonia config",
        description="Print the complete configuration of a model to stdout and what was inferred to stderr.",
    )
    made.add_argument("model_dir", metavar="MODEL_DIR", help="folder of the model, the one that holds its versions")
    made.add_argument("--json", action="store_true", help="print JSON instead of config.pbtxt")
    made.add_argument("--model-config-name", default="", metavar="NAME", help="start from configs/NAME.pbtxt")
    made.add_argument(
        "--disable-auto-complete-config", action="store_true", help="do not fill in missing parts from the model"
    )
    made.add_argument(
        "--backend-directory",
        default="",
        metavar="PATH",
        help="folder of backends written in Python, NAME/model.py each",
    )
    made.add_argument(
        "--backend-config",
        action="append",
        default=[],
        type=_assignment,
        metavar="[BACKEND,]KEY=VALUE",
        help="setting of one backend, or of all; repeatable",
    )
    return made


def notes_text(notes: Sequence[str]) -> str:
    """Return what was inferred, a line each."""
    if not notes:
        return "Nothing had to be inferred."
    return "\n".join(["Inferred:", *(f"  {note}" for note in notes)])


def problem_text(model_dir: str, error: ServingError) -> str:
    """Return why there is no configuration: every problem, and the hint."""
    lines = [f"charonia config: {model_dir}:", *(f"  {line}" for line in error.message.splitlines())]
    return "\n".join([*lines, f"  hint: {error.hint}"] if error.hint else lines)


async def _configure(given: argparse.Namespace) -> tuple[str, Sequence[str]]:
    # Imported late: they read the backends and the schema, which `--help` does not need.
    from charonia.config.json_form import to_json
    from charonia.config.pbtxt import render
    from charonia.server.backends.registry import installed_backends
    from charonia.server.lifecycle.backends import Backends
    from charonia.server.lifecycle.configure import ConfigureOptions, configure
    from charonia.server.lifecycle.repository.scan import folder_at
    from charonia.server.machine.gpus import visible_gpus

    folder = await asyncio.to_thread(folder_at, given.model_dir)
    directory = Path(given.backend_directory) if given.backend_directory else None
    backends = Backends(installed_backends(directory), with_cache(backend_settings(given.backend_config), os.environ))
    options = ConfigureOptions(
        auto_complete=not given.disable_auto_complete_config,
        config_name=given.model_config_name,
        gpu_count=visible_gpus(),
    )
    try:
        configured = await configure(folder, backends, options)
    finally:
        await backends.aclose()
    text = json.dumps(to_json(configured.config), indent=2) if given.json else render(configured.config)
    return text, configured.completion.notes


def _assignment(text: str) -> tuple[str, str, str]:
    try:
        return assignment(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
