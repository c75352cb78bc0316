"""A backend of language models: completes configurations, and loads an engine into a worker process."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import orjson

from charonia.config.backends import record_of
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.problems import check_problems
from charonia.core.errors import invalid, unsupported
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.language.signature import complete_language, language_problems
from charonia.server.backends.python.environment import environment_of
from charonia.server.backends.registry import install_hint
from charonia.server.backends.workers.model import PythonModel
from charonia.server.backends.workers.process import SERVER_ENVIRONMENT, Environment
from charonia.server.backends.workers.services import ServerServices
from charonia.server.channel.cuda_driver import is_usable
from charonia.server.machine.private_folder import PrivateFolder

_MODEL = Path(__file__).parent / "worker" / "model.py"


class LanguageBackend(ABC):
    """What a backend of language models derives from.

    Each instance is an engine in a worker process, which is started again when it ends. An environment of its own is
    named or described as for Python models.

    Attributes:
        engine: File with the class `Engine`, for the worker: `worker/model.py` says what that class has.
        kind: Kind of the instances where the configuration names none.
        routes: OpenAI's routes that the engine answers itself.
        more_inputs: Inputs that this engine takes besides those of all.
        more_outputs: Outputs that it has besides those of all.
    """

    name: ClassVar[str]
    engine: ClassVar[Path]
    kind: ClassVar[InstanceKind] = InstanceKind.KIND_AUTO
    routes: ClassVar[Sequence[str]] = ("chat/completions", "completions")
    more_inputs: ClassVar[Sequence[ModelInput]] = ()
    more_outputs: ClassVar[Sequence[ModelOutput]] = ()

    def uses_gpus(self) -> bool:
        """Return True: whether to use the GPU is up to the engine."""
        return True

    @abstractmethod
    async def options(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Mapping[str, object]:
        """Return what the engine needs to know of a version; it is handed to the worker as JSON."""

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        return Completion(*complete_language(config, self.kind, self.routes, self.more_inputs, self.more_outputs))

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> PythonModel:
        check_problems(config.name, language_problems(config, self.more_inputs, self.more_outputs))
        environment = await self._environment(files, config, settings)
        options = orjson.dumps(dict(await self.options(files, config, settings))).decode()
        await asyncio.to_thread(is_usable)  # starting the driver takes a while; the result is cached
        server = ServerServices.of(config.name, files.version, settings)
        sockets = PrivateFolder()

        def arguments(placement: Placement) -> dict[str, str]:
            own = {"threads": str(placement.threads), "folder": str(sockets.path)}
            return {"engine": str(self.engine), "options": options, **own}

        closing = partial(asyncio.to_thread, sockets.remove)
        return PythonModel(files, config, _MODEL, environment, server, arguments, closing=closing)

    async def aclose(self) -> None:  # noqa: B027 # some have something to do
        """Do nothing: models share nothing."""

    async def _environment(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Environment:
        environment = await environment_of(files, config, settings)
        for package in record_of(self.name).packages:
            if environment == SERVER_ENVIRONMENT and not package.optional and find_spec(package.module) is None:
                raise unsupported(
                    f"model '{config.name}' needs the package '{package.module}', which is not installed",
                    hint=install_hint(package),
                )
        return environment


def version_text(files: ModelFiles, config: ModelConfig, name: str, hint: str) -> str:
    """Return the content of a file that a version must have; `hint` describes the file. Blocks on disk I/O.

    Raises:
        ServingError: INVALID_ARG: it is missing, or cannot be read.
    """
    try:
        return (files.version_dir / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise invalid(f"model '{config.name}' version {files.version} has no file {name}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"model '{config.name}': {name} cannot be read: {error}") from None
