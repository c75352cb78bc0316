"""Prepares a model's files for a load: fetches them from a store or takes them from a request, and runs its agents.

Model folders made from the files of a load request.

The paths come from clients: they are checked before the first
byte is written, and files are only created, never opened where one already exists.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal, invalid
from charonia.server.lifecycle.repository.agents import AgentRun, prepare_agents
from charonia.server.lifecycle.repository.mirror import Lease
from charonia.server.lifecycle.repository.model_folder import read_config
from charonia.server.lifecycle.repository.scan import CONFIG_FILE, Fingerprint, ModelFolder, version_fingerprint
from charonia.server.lifecycle.repository.sources import Sources
from charonia.server.machine.private_folder import PrivateFolder

OVERRIDE_FILES_MAX = 4096
OVERRIDE_PATH_CHARS_MAX = 1024
OVERRIDE_NAME_BYTES_MAX = 255
"""Longest name of a file or folder, which is that of usual file systems."""

OVERRIDE_BYTES_MAX = 8 * 1024**3


def write_override(files: Mapping[str, bytes]) -> PrivateFolder:
    """Write the files into a new private folder and return it. Blocks on the disk."""
    contents = _checked(files)
    try:
        folder = PrivateFolder()
    except OSError as error:
        raise _failed(error) from error
    try:
        for relative, content in contents.items():
            path = folder.path / relative
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(content)
    except OSError as error:
        folder.remove()
        raise _failed(error) from error
    return folder


def _checked(files: Mapping[str, bytes]) -> dict[PurePosixPath, bytes]:
    if len(files) > OVERRIDE_FILES_MAX:
        raise invalid(f"model override: expected at most {OVERRIDE_FILES_MAX} files, got {len(files)}")
    total = sum(len(content) for content in files.values())
    if total > OVERRIDE_BYTES_MAX:
        raise invalid(f"model override: expected at most {OVERRIDE_BYTES_MAX} bytes in all, got {total}")
    contents: dict[PurePosixPath, bytes] = {}
    for path, content in files.items():
        relative = _inside(path)
        if relative in contents:
            raise invalid(f"model override file '{path}' is given twice")
        contents[relative] = content
    for relative in contents:
        for parent in relative.parents:
            if parent in contents:
                raise invalid(f"model override file '{relative}': '{parent}' is a file, too, and cannot hold it")
    return contents


def _inside(path: str) -> PurePosixPath:
    if len(path) > OVERRIDE_PATH_CHARS_MAX:
        raise invalid(f"Invalid file path: expected at most {OVERRIDE_PATH_CHARS_MAX} characters, got {len(path)}")
    relative = PurePosixPath(path.lstrip("/"))  # clients write /1/model.onnx, too
    if ".." in relative.parts:
        raise invalid(f"Invalid file path '{path}': it must stay within model directory")
    if not relative.parts or path.endswith("/"):
        raise invalid(f"Invalid file path '{path}': expected the path of a file")
    if "\\" in path or not path.isprintable():
        raise invalid(f"Invalid file path {path!a}: expected printable characters and '/'")
    longest = max(relative.parts, key=lambda part: len(part.encode()))
    if len(longest.encode()) > OVERRIDE_NAME_BYTES_MAX:
        raise invalid(
            f"Invalid file path: expected names of at most {OVERRIDE_NAME_BYTES_MAX} bytes, got {len(longest.encode())}"
        )
    return relative


def _failed(error: OSError) -> ServingError:
    reason = (error.strerror or str(error)).lower()
    return internal(f"model override cannot be written below {os.path.abspath(tempfile.gettempdir())}: {reason}")


@dataclass(slots=True, eq=False)
class ProvidedFiles:
    """A model's files while they are loaded.

    Attributes:
        folder: Where they are.
        lease: Keeps them in the cache, None for the repository's own folder.
        override: Folder of files that came with a request, None where they come from a repository.
        agents: The model's agents, None where it has none.
        earlier: Files of older versions that still answer; they are given back together with these.
    """

    folder: ModelFolder
    lease: Lease | None = None
    override: PrivateFolder | None = None
    agents: AgentRun | None = None
    earlier: list["ProvidedFiles"] = field(default_factory=list)
    _is_ending: bool = False

    def split(self, used: Callable[["ProvidedFiles"], bool]) -> tuple[list["ProvidedFiles"], list["ProvidedFiles"]]:
        """Separate these files from the earlier ones; return those that are used, and the others."""
        every = [self, *self.earlier]
        self.earlier = []
        return [each for each in every if used(each)], [each for each in every if not used(each)]

    def fingerprint(self, version: int) -> Fingerprint:
        """Return the fingerprint of the files of one version. Blocks on the disk."""
        is_immutable = self.lease is not None
        return version_fingerprint(self.folder.path, version, config=CONFIG_FILE, is_immutable=is_immutable)

    async def loaded(self) -> None:
        if self.agents is not None:
            await asyncio.to_thread(self.agents.complete)

    async def failed(self) -> None:
        """Tell the agents that the load failed, and give back everything."""
        if self.agents is not None:
            await asyncio.to_thread(self.agents.fail)
        await self._release()

    async def ending(self) -> None:
        """Tell the agents that the model is about to be unloaded."""
        for each in self.earlier:
            await each.ending()
        if self.agents is not None and not self._is_ending:
            self._is_ending = True
            await asyncio.to_thread(self.agents.unload)

    async def ended(self) -> None:
        """Tell the agents that the model is unloaded or replaced, and give back everything."""
        await self.ending()
        for each in self.earlier:
            await each.ended()
        if self.agents is not None:
            await asyncio.to_thread(self.agents.unloaded)
        await self._release()

    async def _release(self) -> None:
        if self.lease is not None:
            self.lease.release()
        if self.override is not None:
            await asyncio.to_thread(self.override.remove)


class Provisioner:
    """Prepares the files of models.

    Args:
        sources: The repositories.
        config_name: Name of the configuration variant, "" for config.pbtxt.
        agents: Folder of repository agents, None for the built-in ones only.
    """

    def __init__(self, sources: Sources, *, config_name: str = "", agents: Path | None = None) -> None:
        self._sources = sources
        self._config_name = config_name
        self._agents = agents

    async def provide(
        self, folder: ModelFolder, config: ModelConfig | None, files: Mapping[str, bytes] | None
    ) -> ProvidedFiles:
        """Prepare a model's files.

        Raises:
            ServingError: They cannot be fetched or written, or an agent refuses. Nothing is left behind.
        """
        if files:
            override = await asyncio.to_thread(write_override, files)
            provided = ProvidedFiles(
                replace(folder, actual_path=override.path, repository=override.path), override=override
            )
        else:
            provided = ProvidedFiles(*await asyncio.to_thread(self._sources.fetch, folder))
        try:
            await asyncio.to_thread(self._show, provided, config)
        except BaseException:
            await provided.failed()
            raise
        return provided

    def _show(self, provided: ProvidedFiles, config: ModelConfig | None) -> None:
        if config is None:
            config, _ = read_config(provided.folder, config_name=self._config_name)
        run = prepare_agents(provided.folder, config, self._agents) if config is not None else None
        if run is not None:
            provided.folder = replace(provided.folder, actual_path=run.load())
            provided.agents = run
