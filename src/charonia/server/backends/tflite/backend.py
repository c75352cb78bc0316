"""Completes configurations from TensorFlow Lite models, and loads them."""

import asyncio
import logging
from pathlib import Path

from charonia.config.complete import check_signature, merge_signature
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.problems import raise_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.errors import unsupported
from charonia.core.statistics import MemoryUsage
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.model_file import model_file
from charonia.server.backends.parameters import unknown_parameters
from charonia.server.backends.tflite.instance import TfliteInstance
from charonia.server.backends.tflite.options import PARAMETERS, TflitePlan, read_plan
from charonia.server.backends.tflite.program import TfliteProgram, interpreter_of, quantised, read_program
from charonia.server.machine.memory import release_freed_memory

DEFAULT_FILE = "model.tflite"

_log = logging.getLogger(__name__)


class TfliteModel:
    """A loaded version.

    Args:
        program: The model.
        config: The complete configuration.
        threads: Threads of an instance, 0 for its share of the thread budget.
    """

    def __init__(self, program: TfliteProgram, config: ModelConfig, threads: int) -> None:
        self._program = program
        self._config = config
        self._threads = threads
        self._count = 0

    async def create_instance(self, placement: Placement) -> TfliteInstance:
        """Make one more instance, with an interpreter of its own.

        Raises:
            ServingError: LiteRT refuses.
        """
        threads = self._threads or placement.threads
        native = await asyncio.to_thread(interpreter_of, self._program, threads, self._config.max_batch_size)
        self._count += 1
        return TfliteInstance(native, self._program, self._config)

    def memory(self) -> list[MemoryUsage]:
        """Return the size of the file, and as much for each instance, whose kernels have the weights in their order."""
        return [MemoryUsage("CPU", 0, (1 + self._count) * len(self._program.content))]

    async def aclose(self) -> None:
        await asyncio.to_thread(release_freed_memory)


class TfliteBackend:
    """The `tflite` backend, which is also `armnn_tflite`."""

    name = "tflite"

    def uses_gpus(self) -> bool:
        return False

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        if config.input and config.output:
            return Completion(config)
        plan = _plan(config, settings)
        program = await asyncio.to_thread(read_program, _path(files, config), config, plan.signature)
        merged, notes = merge_signature(
            config, program.signature, default_max_batch_size=settings.default_max_batch_size, model_name=config.name
        )
        return Completion(merged, (*notes, *quantised(program)))

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> TfliteModel:
        """Load a version.

        Raises:
            ServingError: A setting is wrong, or the file cannot be read or contradicts the configuration.
        """
        plan = _plan(config, settings)
        if any(group.kind is InstanceKind.KIND_GPU for group in config.instance_group):
            raise unsupported(
                f"model '{config.name}': the tflite backend runs on the CPU only", hint="use instances of KIND_CPU"
            )
        for sentence in unknown_parameters(config, self.name, PARAMETERS):
            _log.warning(sentence)
        config = seen_by_model(config)
        program = await asyncio.to_thread(read_program, _path(files, config), config, plan.signature)
        problems = check_signature(config, program.signature)
        if problems:
            raise_problems(config.name, problems)
        return TfliteModel(program, config, plan.threads)

    async def aclose(self) -> None: ...


def _plan(config: ModelConfig, settings: BackendSettings) -> TflitePlan:
    plan, problems = read_plan(config, settings.values)
    if problems:
        raise_problems(config.name, problems)
    return plan


def _path(files: ModelFiles, config: ModelConfig) -> Path:
    return model_file(files, config, DEFAULT_FILE)
