"""From a YAML file and a command line to `TuneOptions`: the command line beats the file, the file the default."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

from charonia.core.errors import ServingError, invalid
from charonia.tools.tune.options import (
    GoalSettings,
    LaunchMode,
    LaunchOptions,
    MeasureSettings,
    ModelRequest,
    ModelsSettings,
    OutputSettings,
    SearchSettings,
    TuneFor,
    TuneOptions,
)
from charonia.tools.tune.requests import WITHOUT_EFFECT
from charonia.tools.tune.settings import BY_NAME, Option
from charonia.tools.tune.yaml_config import unknown_keys

_DEFAULTS: dict[str, Any] = {
    "models": ModelsSettings(),
    "launch": LaunchOptions(),
    "search": SearchSettings(),
    "measure": MeasureSettings(),
    "goal": GoalSettings(),
    "output": OutputSettings(),
}
_EXAMPLE = TuneOptions(
    models=ModelsSettings(profile=(ModelRequest("NAME"),)), launch=LaunchOptions(repository=Path("PATH"))
)
_SECRET = ("header", "H", "triton_server_environment")


@dataclass(frozen=True, slots=True)
class Merged:
    """What is asked for.

    Attributes:
        options: The options.
        named: Those that were named, as text by name.
        notes: Remarks, one sentence each.
    """

    options: TuneOptions
    named: dict[str, str]
    notes: tuple[str, ...]


def merge(
    document: Mapping[str, object],
    arguments: Mapping[str, str],
    *,
    config_file: Path | None = None,
    tune_for: TuneFor = TuneFor.ONLINE,
) -> Merged:
    """Return what a file and a command line ask for.

    Args:
        document: Values by name, from YAML.
        arguments: Texts by the same names, from the command line.
        config_file: Where the document is from, for messages.
        tune_for: What the models are for.

    Raises:
        ServingError: INVALID_ARG with a line for every problem.
    """
    problems = [f"{config_file}: {line}" for line in unknown_keys(document, BY_NAME)]
    groups: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    given = {name: value for name, value in document.items() if name in BY_NAME and value is not None}
    for name, value in {**given, **arguments}.items():
        option = BY_NAME[name]
        try:
            _set(groups, option, option.read(value))
        except ValueError as error:
            where = option.flag if name in arguments else f"{config_file}: {name}"
            problems.append(f"{where}: {error}")
        if option.note:
            notes.append(f"{option.flag} has no effect: {option.note}")
    groups.setdefault("goal", {})["tune_for"] = tune_for
    options = _build(groups, config_file, problems)
    if problems:
        raise invalid("\n".join(problems))
    for request in (*options.models.profile, *options.models.composing):
        notes += [
            f"{name} of model '{request.name}' has no effect: {WITHOUT_EFFECT[name]}" for name in request.without_effect
        ]
    if options.launch.mode is LaunchMode.DOCKER:
        notes.append("launch mode docker: no container is needed, a server is started as a process")
        options = replace(options, launch=replace(options.launch, mode=LaunchMode.LOCAL))
    named = _without_secrets({**given, **arguments})
    texts = {name: value if isinstance(value, str) else repr(value) for name, value in named.items()}
    return Merged(options, texts, tuple(notes))


def _without_secrets(values: Mapping[str, object]) -> dict[str, object]:
    """Return values without those of headers and environments: tokens and passwords do not belong into reports."""
    return {name: _masked(value) if name.lstrip("-") in _SECRET else _open(value) for name, value in values.items()}


def _open(value: object) -> object:
    if isinstance(value, Mapping):
        return _without_secrets({str(name): inner for name, inner in value.items()})
    return [_open(inner) for inner in value] if isinstance(value, list) else value


def _masked(value: object) -> object:
    if isinstance(value, Mapping):
        return dict.fromkeys(map(str, value), "***")
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    name, colon, _ = str(value).partition(":")
    return f"{name}:***" if colon else "***"


def default_text(option: Option) -> str:
    """Return an option's default as it would be written, "" where there is none."""
    if option.default is not None or not option.field:
        return option.default or ""
    value = attrgetter(option.field)(_EXAMPLE)
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _set(groups: dict[str, dict[str, Any]], option: Option, value: object) -> None:
    if not option.field:
        return
    head, _, name = option.field.partition(".")
    group = groups.setdefault(head, {})
    if name == "composing" and isinstance(value, tuple):
        value = (*group.get(name, ()), *value)
    group[name] = value


def _build(groups: Mapping[str, Mapping[str, Any]], config_file: Path | None, problems: list[str]) -> TuneOptions:
    made = {head: replace(_DEFAULTS[head], **values) for head, values in groups.items()}
    try:
        return TuneOptions(**made, config_file=config_file)
    except ServingError as error:
        # What follows from an option that could not be read is no news.
        unread = [line.removeprefix(f"{config_file}: ").partition(":")[0] for line in problems]
        unread += [BY_NAME[name].flag for name in unread if name in BY_NAME]
        problems += [line for line in error.message.splitlines() if line.partition(":")[0] not in unread]
        return _EXAMPLE
