"""Base of backends whose library takes and returns arrays: options, file, completion and errors.

A subclass inspects and opens models. Its instances are `ArrayInstance`.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from charonia.config.backends import record_of
from charonia.config.complete import Signature, merge_signature
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.problems import Problem, raise_problems
from charonia.core.errors import Code, ServingError, unsupported
from charonia.server.backends.api import BackendSettings, Completion, LoadedModel, ModelFiles
from charonia.server.backends.model_file import model_file
from charonia.server.backends.parameters import Params

_log = logging.getLogger(__name__)

_MESSAGE_CHARS_MAX = 1000

Plan = TypeVar("Plan")
Model = TypeVar("Model", bound=LoadedModel)


class ArrayBackend(ABC, Generic[Plan, Model]):
    """A backend that computes on the CPU.

    Attributes:
        name: Name of the backend.
        parameters: Parameters of its models.
        gpu_hint: Hint for models with instances on GPUs.
    """

    name: str
    parameters: ClassVar[Params]
    gpu_hint: ClassVar[str] = "use instances of KIND_CPU"

    @abstractmethod
    def read_plan(self, config: ModelConfig, settings: Mapping[str, str]) -> tuple[Plan, list[Problem]]:
        """Return the options of a model, and all problems of its parameters and of the backend's settings."""

    @abstractmethod
    async def inspect(self, files: ModelFiles, config: ModelConfig, plan: Plan) -> tuple[Signature, Sequence[str]]:
        """Return the inputs and outputs of a model, and notes.

        Raises:
            ServingError: The model cannot be read.
        """

    @abstractmethod
    async def open(self, files: ModelFiles, config: ModelConfig, plan: Plan) -> Model:
        """Load a version.

        Raises:
            ServingError: The model cannot be read, or contradicts the configuration.
        """

    def uses_gpus(self) -> bool:
        return False

    def plan(self, config: ModelConfig, settings: BackendSettings) -> Plan:
        """Return the options of a model.

        Raises:
            ServingError: A parameter or a setting is invalid.
        """
        plan, problems = self.read_plan(config, settings.values)
        if problems:
            raise_problems(config.name, problems)
        return plan

    def path(self, files: ModelFiles, config: ModelConfig) -> Path:
        """Return the file of a model: one of the record's forms, unless the configuration names another.

        Raises:
            ServingError: The file does not exist.
        """
        names = [form.filename for form in record_of(self.name).forms]
        return model_file(files, config, next((n for n in names if (files.version_dir / n).is_file()), names[0]))

    def batch_size(self, settings: BackendSettings) -> int:
        """Return the default of `max_batch_size` for models that can batch."""
        return settings.default_max_batch_size

    def remarks(self, config: ModelConfig, plan: Plan) -> Iterator[str]:
        yield from self.parameters.remarks(config)

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        """Fill in inputs, outputs and batching from the model, unless inputs and outputs are given.

        Raises:
            ServingError: The model cannot be read, or contradicts the configuration.
        """
        if config.input and config.output:
            return Completion(config)
        signature, remarks = await self.inspect(files, config, self.plan(config, settings))
        size = self.batch_size(settings)
        merged, notes = merge_signature(config, signature, default_max_batch_size=size, model_name=config.name)
        return Completion(merged, (*notes, *remarks))

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Model:
        """Load a version.

        Raises:
            ServingError: A setting is invalid or not supported, or the model cannot be read.
        """
        plan = self.plan(config, settings)
        if any(group.kind is InstanceKind.KIND_GPU for group in config.instance_group):
            raise unsupported(
                f"model '{config.name}': the {self.name} backend has no instances of KIND_GPU", hint=self.gpu_hint
            )
        for sentence in self.remarks(config, plan):
            _log.warning(sentence)
        return await self.open(files, config, plan)

    async def aclose(self) -> None: ...


def plain_error(what: str, error: Exception, code: Code, *sources: re.Pattern[str]) -> ServingError:
    """Return an error of a library as one line.

    Args:
        what: The action that failed.
        error: The library's error.
        code: Code of the result.
        sources: Patterns to remove from the message, such as locations in the library's source.
    """
    text = str(error)
    for source in sources:
        text = source.sub("", text)
    return ServingError(code, f"{what}: {' '.join(text.split())[:_MESSAGE_CHARS_MAX]}")
