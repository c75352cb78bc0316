"""Reads, completes and validates the configuration of a model's folder."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from charonia.config.backends import ENSEMBLE
from charonia.config.complete import derive_backend, normalise
from charonia.config.model import Latest, ModelConfig, VersionPolicy
from charonia.config.problems import Problem, check_problems
from charonia.core.errors import ServingError, internal
from charonia.server.backends.api import Completion, ModelFiles
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.load_errors import reason_of
from charonia.server.lifecycle.repository.model_folder import (
    check_name,
    mistaken_config,
    none_selected,
    read_config,
    select,
    version_files,
    version_hint,
    versions,
)
from charonia.server.lifecycle.repository.scan import CONFIG_FILE, ModelFolder
from charonia.server.lifecycle.validation import unsupported, validate
from charonia.server.metrics.metric_families import HISTOGRAM_UNITS, unknown_families
from charonia.server.scheduling.configuration import idle_settings

_log = logging.getLogger(__name__)

DEFAULT_INSTANCES = 1
"""Instances of a group that gives no count. One CPU instance with all of the thread budget beats two that share it."""


_OF_TENSORS = ("input[", "output[")


class ConfigurationError(ServingError):
    """A configuration is wrong by itself, not only about tensors, which depend on the model's files."""


class VersionsError(ServingError):
    """The configuration cannot be completed from the files of any version; the error is that of the highest.

    Attributes:
        reasons: Why, by version.
    """

    def __init__(self, error: ServingError, reasons: Mapping[int, str]) -> None:
        super().__init__(error.code, error.message, hint=error.hint)
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class ConfigureOptions:
    """How configurations are completed.

    Attributes:
        auto_complete: Whether backends fill in missing fields.
        config_name: Name of the configuration variant (`--model-config-name`), "" for config.pbtxt.
        gpu_count: GPUs of this machine.
    """

    auto_complete: bool = True
    config_name: str = ""
    gpu_count: int = 0


@dataclass(frozen=True, slots=True)
class Configured:
    """A configuration ready to load, and its inferred fields.

    Attributes:
        completion: The configuration, completed from the highest version whose files permit it.
        versions: The versions to load, as the policy selects them, without `unusable`.
        unusable: Why the configuration cannot be completed from the higher ones, by version.
    """

    completion: Completion
    versions: tuple[int, ...]
    unusable: Mapping[int, str] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.completion.config


async def configure(
    folder: ModelFolder, backends: Backends, options: ConfigureOptions, override: ModelConfig | None = None
) -> Configured:
    """Read, complete and validate the configuration of a model.

    Args:
        folder: The model's folder.
        backends: Complete it from the model's files.
        options: How it is completed.
        override: Configuration to use instead of the folder's own.

    Raises:
        ConfigurationError: The configuration cannot be read, or is wrong by itself.
        VersionsError: It cannot be completed from any version that it selects.
        ServingError: It selects no version.
    """
    config = override
    try:
        if config is None:
            config, _ = await asyncio.to_thread(read_config, folder, config_name=options.config_name)
        is_silent = config is None
        config = config or ModelConfig()
        check_name(folder, config)
    except ServingError as error:
        raise ConfigurationError(error.code, error.message, hint=error.hint) from error
    if not config.name:
        config = replace(config, name=folder.name)
    try:
        selected = await _versions(folder, config)
    except ServingError as error:
        raise _with_problems(error, config, options) from error
    mistaken = await asyncio.to_thread(mistaken_config, folder, selected[-1]) if is_silent else ""
    if mistaken:
        _log.warning("model '%s': %s is not its configuration, %s would be", folder.name, mistaken, CONFIG_FILE)
    errors: dict[int, Exception] = {}
    for version in reversed(selected):
        try:
            completion = await _complete_from(folder, version, config, backends, options)
        except ConfigurationError:
            raise
        except Exception as error:
            if not isinstance(error, ServingError):
                _log.warning("reading '%s' version %d", folder.name, version, exc_info=error)
            errors[version] = error
        else:
            usable = tuple(each for each in selected if each not in errors)
            return Configured(completion, usable, {each: reason_of(error) for each, error in errors.items()})
    first = errors[selected[-1]]
    shown = first if isinstance(first, ServingError) else internal(reason_of(first))
    raise VersionsError(shown, {version: reason_of(each) for version, each in errors.items()}) from first


async def _complete_from(
    folder: ModelFolder, version: int, config: ModelConfig, backends: Backends, options: ConfigureOptions
) -> Completion:
    """Return the configuration as the files of a version complete it."""
    files = await asyncio.to_thread(version_files, folder, version)
    config, derived = derive_backend(config, folder.name, files, backends.names)
    notes = tuple(derived)
    # Problems in the file itself are reported before a backend tries to interpret it.
    check_problems(folder.name, unsupported(config))
    if config.platform == ENSEMBLE:
        return Completion(_complete(config, folder, options), notes)
    backend = await backends.get(config.backend, folder.name)
    if options.auto_complete:
        completion = await backend.complete(model_files(folder, version), config, backends.settings(config.backend))
        config = completion.config
        notes += completion.notes
    return Completion(_complete(config, folder, options, uses_gpus=backend.uses_gpus()), notes)


async def _versions(folder: ModelFolder, config: ModelConfig) -> tuple[int, ...]:
    policy = config.version_policy or VersionPolicy(latest=Latest(1))
    available = await asyncio.to_thread(versions, folder)
    if not available:
        if config.platform == ENSEMBLE or config.ensemble_scheduling is not None:
            hint = f"an ensemble needs a folder with a number for a name, too: make an empty one, {folder.name}/1"
        else:
            hint = await asyncio.to_thread(version_hint, folder)
        raise none_selected(folder.name, available, hint=hint)
    return select(policy, available, model_name=folder.name)


def _with_problems(missing: ServingError, config: ModelConfig, options: ConfigureOptions) -> ServingError:
    """Return the error of a model without a version, together with the problems of its configuration itself."""
    with contextlib.suppress(ServingError):
        config, _ = derive_backend(config, config.name, ())
    config = normalise(config, name=config.name, gpu_count=0, default_instance_count=DEFAULT_INSTANCES)
    problems = validate(config, gpu_count=options.gpu_count)
    named = problems
    if config.backend or config.platform:
        problems += unsupported(config)
    else:  # the files of a version would tell
        named = [problem for problem in problems if problem.path != "backend"]
    lines = "".join(f"\n  {problem}" for problem in named)
    text = f"{missing.message}; problems in the model configuration:{lines}" if named else missing.message
    return _refusal(ServingError(missing.code, text, hint=missing.hint), config, problems)


def _refusal(error: ServingError, config: ModelConfig, problems: Sequence[Problem]) -> ServingError:
    """Return the error as a `ConfigurationError` where the problems say that it is one."""
    # An ensemble has no backend that would look at its tensors later.
    own = [p for p in problems if config.platform == ENSEMBLE or not p.path.startswith(_OF_TENSORS)]
    return ConfigurationError(error.code, error.message, hint=error.hint) if own else error


def _complete(
    config: ModelConfig, folder: ModelFolder, options: ConfigureOptions, *, uses_gpus: bool = False
) -> ModelConfig:
    """Return the configuration with its defaults."""
    config = normalise(
        config,
        name=folder.name,
        gpu_count=options.gpu_count if uses_gpus else 0,
        default_instance_count=DEFAULT_INSTANCES,
    )
    problems: Sequence[Problem] = [*validate(config, gpu_count=options.gpu_count), *unsupported(config)]
    try:
        check_problems(folder.name, problems)
    except ServingError as error:
        raise _refusal(error, config, problems) from error
    for family in unknown_families(config):
        known = ", ".join(HISTOGRAM_UNITS)
        _log.warning("model '%s': metric_control of '%s' is ignored; known are %s", folder.name, family, known)
    for sentence in idle_settings(config):
        _log.warning("model '%s': %s", folder.name, sentence)
    return config


def model_files(folder: ModelFolder, version: int) -> ModelFiles:
    return ModelFiles(folder.path, version, folder.path / str(version))
