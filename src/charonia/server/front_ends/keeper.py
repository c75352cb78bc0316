"""Keeps what requests have changed in an engine, in the private folder of the server, for the engine that follows it.

A change is on the disk before its request is answered. The folder goes with the server: a new server begins as its
command line says.
"""

import asyncio
import contextlib
import copy
import logging
import marshal
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from charonia.core.errors import ServingError
from charonia.server.facade import Engine, KeptTraffic, Services
from charonia.server.front_ends.changes import ChangeLog, RequestedLoad
from charonia.server.front_ends.records import plain, record
from charonia.wire.log_settings import LogOptions
from charonia.wire.trace_settings import Change

_log = logging.getLogger(__name__)

CHANGES_NAME = "changes"

KEPT_FILES_BYTES_MAX = 2**30
"""Bytes of the files of one load request that are kept; a model with more is not loaded again."""


def read_changes(folder: Path) -> ChangeLog:
    """Return what was changed since the server started. Blocks on the disk."""
    try:
        return record(ChangeLog, marshal.loads((folder / CHANGES_NAME).read_bytes()))
    except FileNotFoundError:
        return ChangeLog()


class Keeper:
    """The changes of an engine.

    Args:
        folder: Private folder of the server.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changes = ChangeLog()  # as far as they hold in this engine

    async def replay(
        self, engine: Engine, services: Services, traffic: KeptTraffic | None = None, *, has_ended: bool = False
    ) -> list[str]:
        """Make the changes of the engine before this one, as far as they do not hold already.

        Args:
            engine: The engine.
            services: Its services.
            traffic: Its traffic between versions.
            has_ended: Whether the engine before has ended, rather than to hand over.

        Returns:
            Why models that were loaded by request cannot be loaded.
        """
        before, now = self._changes, read_changes(self._folder)
        self._changes = now
        failures = []
        for name, loaded in now.models.items():
            if name not in before.models or before.models[name] != loaded:
                try:
                    await self._replay_model(engine, name, loaded)
                except ServingError as error:
                    failures.append(str(error))
        if services.log is not None and now.log is not None:
            own = services.log.options
            await services.log.change(replace(now.log, file=own.file, access=own.access, access_file=own.access_file))
        if services.tracing is not None:
            for model in sorted(now.trace):  # that of the server, "", first
                if before.trace.get(model) != now.trace[model]:
                    with self._reported(f"settings of traces of '{model}'"):
                        await services.tracing.change(model, now.trace[model])
        if services.regions is not None:
            services.regions.remember([*now.system, *now.cuda])
        if traffic is not None:
            for model in before.traffic.keys() | now.traffic.keys():
                if before.traffic.get(model) != now.traffic.get(model):
                    traffic.restore(model, now.traffic.get(model, ""))
            if has_ended:
                traffic.keep = self.traffic_changed
                traffic.engine_ended()
        return failures

    async def model_loaded(
        self, name: str, config: str | None, files: Mapping[str, bytes] | None, is_overridden: bool
    ) -> None:
        """Keep that a model was loaded by request."""
        loaded = RequestedLoad(config)
        if files:
            loaded = await asyncio.to_thread(self._keep_files, name, config, files)
        self._note(lambda changes: changes.model_loaded(name, loaded, is_overridden=is_overridden))

    def model_unloaded(self, name: str) -> None:
        """Keep that a model was unloaded by request."""
        self._note(lambda changes: changes.model_unloaded(name))

    def log_changed(self, options: LogOptions) -> None:
        """Keep settings of the log."""
        self._changes.log = options
        self._write()

    def trace_changed(self, model: str, change: Change) -> None:
        """Keep settings of traces."""
        self._note(lambda changes: changes.trace_changed(model, change))

    def traffic_changed(self, model: str, text: str) -> None:
        """Keep the traffic of a model."""
        self._note(lambda changes: changes.traffic_changed(model, text))

    def regions_changed(self, services: Services) -> None:
        """Keep the regions of shared memory."""
        if services.regions is not None:
            self._changes.system, self._changes.cuda = tuple(services.regions.system()), tuple(services.regions.cuda())
            self._write()

    async def _replay_model(self, engine: Engine, name: str, loaded: RequestedLoad | None) -> None:
        if loaded is None:
            await engine.unload_model(name)
        elif loaded.is_lost:
            _log.error("'%s' is not loaded again: the files of its request were too large to be kept", name)
        else:
            files = None
            if loaded.files is not None:
                kept = loaded.files
                files = await asyncio.to_thread(lambda: {path: Path(at).read_bytes() for path, at in kept.items()})
            await engine.load_model(name, loaded.config, files)

    def _note(self, change: Callable[[ChangeLog], None]) -> None:
        before = copy.copy(self._changes.models)
        change(self._changes)
        self._write()
        after = self._changes.models.values()
        for former in before.values():
            if former is not None and former.files and all(former is not each for each in after):
                shutil.rmtree(Path(next(iter(former.files.values()))).parent, ignore_errors=True)

    def _write(self) -> None:
        new = self._folder / f"{CHANGES_NAME}.new"
        with self._reported("a change made by request"):
            new.write_bytes(marshal.dumps(plain(self._changes), 2))  # type: ignore[arg-type] # plain values
            new.replace(self._folder / CHANGES_NAME)

    def _keep_files(self, name: str, config: str | None, files: Mapping[str, bytes]) -> RequestedLoad:
        lost = RequestedLoad(config, None, is_lost=True)
        if sum(map(len, files.values())) > KEPT_FILES_BYTES_MAX:
            _log.warning("the files of '%s' are too large to be kept: an engine that follows does not load it", name)
            return lost
        places: dict[str, str] = {}
        with self._reported(f"the files of '{name}'"):
            folder = Path(mkdtemp(prefix="files-", dir=self._folder))
            for number, (path, content) in enumerate(files.items()):
                at = folder / str(number)
                at.write_bytes(content)
                places[path] = str(at)
            return RequestedLoad(config, places)
        return lost

    @contextlib.contextmanager
    def _reported(self, what: str):  # type: ignore[no-untyped-def]
        """Report a failure. On a full disk the server goes on; an engine that follows knows less."""
        try:
            yield
        except (OSError, ServingError) as error:
            _log.error("%s cannot be kept or made again: %s", what, error)
