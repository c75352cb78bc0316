"""Records the changes that requests make in an engine, in the private folder of the server, for the next engine.

1. A change is on the disk before its request is answered. The folder is deleted with the server: a new server begins as
   its command line says.
2. The next engine makes the changes of models by their sequence numbers: first before it is ready, then, when the
   previous engine cannot change any more, the later ones.
3. Everything else is a state rather than an action. It is restored as a whole, one time, at that point.
4. The log has one writer. An engine that hands over closes its keeper before the next one reads.
"""

import asyncio
import contextlib
import copy
import logging
import marshal
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from weakref import WeakValueDictionary

from charonia.core.errors import ServingError, invalid, unavailable
from charonia.server.facade import Engine, Services
from charonia.server.front_ends.calls import ServedEngine
from charonia.server.front_ends.messages import MOVED, plain, record
from charonia.server.lifecycle.load_errors import NOT_ALL_LOADED
from charonia.wire.log_settings import LogOptions
from charonia.wire.shared_memory import CudaRegion, SystemRegion
from charonia.wire.trace_settings import Change


@dataclass(frozen=True, slots=True)
class RequestedLoad:
    """A model that was loaded by request.

    Attributes:
        config: The configuration of the request as JSON text, None for the model's own.
        files: Stored files of the request, by path relative to the model's folder; None for the repository.
        is_lost: Whether the files of the request were too large to be kept.
    """

    config: str | None = None
    files: Mapping[str, str] | None = None
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class RequestedChange:
    """The latest change of a model by request.

    Attributes:
        number: Sequence number of the change, in the order in which the engines of the server made them. Two loads that
            look alike may have read different files, so only the number says whether an engine has made a change.
        load: How the model was loaded, None for unloaded.
        with_dependents: Whether the models that were loaded only for it were unloaded, too.
    """

    number: int
    load: RequestedLoad | None = None
    with_dependents: bool = False


@dataclass(slots=True)
class ChangeLog:
    """The changes since the server started.

    Attributes:
        number: Sequence number of the latest change of a model.
        models: The latest change of each model, in the order of their numbers.
        log: Settings of the log, None if they were never changed.
        trace: Settings of traces by model, "" for the server's.
        system: The regions of system shared memory.
        cuda: The regions of GPUs' memory.
        traffic: Persistent state of the traffic between versions, by model, as `TrafficService.restore` takes it.
    """

    number: int = 0
    models: dict[str, RequestedChange] = field(default_factory=dict)
    log: LogOptions | None = None
    trace: dict[str, dict[str, int]] = field(default_factory=dict)
    system: tuple[SystemRegion, ...] = ()
    cuda: tuple[CudaRegion, ...] = ()
    traffic: dict[str, str] = field(default_factory=dict)

    def model_loaded(self, name: str, loaded: RequestedLoad, *, is_overridden: bool) -> None:
        """Add the load of a model.

        Args:
            loaded: How.
            is_overridden: Whether it has the configuration of a request: this one's, or that of an earlier one.
        """
        former = self.models[name].load if name in self.models else None
        keeps_config = is_overridden and loaded.config is None and former is not None and former.files is None
        self._model_changed(name, load=former if keeps_config else loaded)

    def model_unloaded(self, name: str, *, with_dependents: bool) -> None:
        self._model_changed(name, with_dependents=with_dependents)

    def since(self, number: int) -> dict[str, RequestedChange]:
        """Return the changes of models after this sequence number, in their order."""
        return {name: change for name, change in self.models.items() if change.number > number}

    def trace_changed(self, model: str, change: Change) -> None:
        """Add a change of the settings of traces."""
        own = {**self.trace.pop(model, {}), **change}
        kept = {name: int(value) for name, value in own.items() if value is not None}
        if kept:
            self.trace[model] = kept

    def traffic_changed(self, model: str, text: str) -> None:
        """Set what to keep of the traffic of a model, "" for nothing."""
        self.traffic.pop(model, None)
        if text:
            self.traffic[model] = text

    def _model_changed(self, name: str, *, load: RequestedLoad | None = None, with_dependents: bool = False) -> None:
        self.number += 1
        self.models.pop(name, None)
        self.models[name] = RequestedChange(self.number, load, with_dependents)


_log = logging.getLogger(__name__)

CHANGES_NAME = "changes"

KEPT_FILES_BYTES_MAX = 2**30
"""Bytes of the files of one load request that are kept; a model with more cannot be loaded again."""

LOOK_S = 0.02
"""Interval of checks for changes in progress."""


def read_changes(folder: Path) -> ChangeLog:
    """Return the changes since the server started. Blocks on the disk."""
    try:
        return record(ChangeLog, marshal.loads((folder / CHANGES_NAME).read_bytes()))
    except FileNotFoundError:
        return ChangeLog()


class EngineChanges:
    """The changes of an engine.

    Args:
        folder: Private folder of the server.
        is_strict: Whether all models that were loaded by request must be loaded again.
    """

    def __init__(self, folder: Path, *, is_strict: bool = False) -> None:
        self._folder = folder
        self._is_strict = is_strict
        self._changes = ChangeLog()
        self._made = 0  # sequence number of the latest change of a model that holds in this engine
        self._is_closed = False
        self._under_way = 0
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # For the next engine.

    async def replay_models(self, engine: Engine) -> None:
        """Make the changes of models that do not hold in this engine yet.

        Raises:
            ServingError: INVALID_ARG with the reasons of models that cannot be loaded, if they must be.
        """
        now = read_changes(self._folder)
        failures = []
        for name, change in now.since(self._made).items():
            try:
                await self._replay(engine, name, change)
            except ServingError as error:
                failures.append(str(error))
        self._made = now.number
        if failures and self._is_strict:
            raise invalid(f"{NOT_ALL_LOADED}:\n" + "\n".join(failures))

    async def take_over(self, engine: ServedEngine, services: Services, *, has_ended: bool) -> None:
        """Make the remaining changes, restore the rest, and keep what changes from now on.

        Args:
            has_ended: Whether the previous engine has exited without handing over.

        Raises:
            ServingError: As `replay_models`.
        """
        await self.replay_models(engine)
        now = self._changes = read_changes(self._folder)
        if services.log is not None and now.log is not None:
            own = services.log.options
            await services.log.change(replace(now.log, file=own.file, access=own.access, access_file=own.access_file))
        if services.tracing is not None:
            for model in sorted(now.trace):  # that of the server, "", first
                with self._reported(f"settings of traces of '{model}'"):
                    await services.tracing.change(model, now.trace[model])
        if services.regions is not None:
            services.regions.remember([*now.system, *now.cuda])
        if engine.traffic is not None:
            for model, text in now.traffic.items():
                engine.traffic.restore(model, text)
        engine.keep_changes(self)
        if has_ended and engine.traffic is not None:
            engine.traffic.engine_ended()

    # For the engine that hands over.

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Make a change that `close` waits for.

        Raises:
            ServingError: UNAVAILABLE, `MOVED`, after `close`.
        """
        if self._is_closed:
            raise unavailable(MOVED)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def close(self) -> None:
        """Wait for the changes in progress, then stop making and keeping changes."""
        while self._under_way:
            await asyncio.sleep(LOOK_S)
        self._is_closed = True

    def reopen(self) -> None:
        """Resume changes: there is no next engine."""
        self._is_closed = False
        self._write()

    # What changes.

    @contextlib.asynccontextmanager
    async def model_change(self, name: str) -> AsyncIterator[None]:
        """Change a model by request: one change of it at a time, so that it is kept in the order in which it is made.

        Raises:
            ServingError: As `under_way`.
        """
        lock = self._locks.setdefault(name, asyncio.Lock())
        with self.under_way():
            async with lock:
                yield

    async def model_loaded(
        self, name: str, config: str | None, files: Mapping[str, bytes] | None, is_overridden: bool
    ) -> None:
        """Keep that a model was loaded by request."""
        loaded = RequestedLoad(config)
        if files:
            loaded = await asyncio.to_thread(self._keep_files, name, config, files)
        with self._files_of_models():
            self._changes.model_loaded(name, loaded, is_overridden=is_overridden)

    def model_unloaded(self, name: str, with_dependents: bool) -> None:
        with self._files_of_models():
            self._changes.model_unloaded(name, with_dependents=with_dependents)

    def log_changed(self, options: LogOptions) -> None:
        """Keep settings of the log."""
        self._changes.log = options
        self._write()

    def trace_changed(self, model: str, change: Change) -> None:
        """Keep settings of traces."""
        self._changes.trace_changed(model, change)
        self._write()

    def traffic_changed(self, model: str, text: str) -> None:
        """Keep the traffic of a model."""
        self._changes.traffic_changed(model, text)
        self._write()

    def regions_changed(self, services: Services) -> None:
        if services.regions is not None:
            self._changes.system, self._changes.cuda = tuple(services.regions.system()), tuple(services.regions.cuda())
            self._write()

    # Inside.

    async def _replay(self, engine: Engine, name: str, change: RequestedChange) -> None:
        loaded, files = change.load, None
        if loaded is None:
            await engine.unload_model(name, change.with_dependents)
            return
        if loaded.is_lost:
            lost = invalid(
                f"failed to load '{name}': the files of its request could not be kept",
                hint=f"load it again with less than {KEPT_FILES_BYTES_MAX} bytes of files, or from the repository",
            )
            _log.error("%s", lost)
            raise lost
        if loaded.files is not None:
            kept = loaded.files
            try:
                files = await asyncio.to_thread(lambda: {path: Path(at).read_bytes() for path, at in kept.items()})
            except OSError as error:
                if name in read_changes(self._folder).since(change.number):
                    return  # the previous engine has since loaded it otherwise
                raise invalid(f"failed to load '{name}': the files of its request cannot be read: {error}") from error
        await engine.load_model(name, loaded.config, files)

    @contextlib.contextmanager
    def _files_of_models(self) -> Iterator[None]:
        """Keep a change of a model, and remove unused files of requests."""
        before = copy.copy(self._changes.models)
        yield
        self._write()
        after = self._changes.models.values()
        for load in (each.load for each in before.values()):
            if load is not None and load.files and all(load is not each.load for each in after):
                shutil.rmtree(Path(next(iter(load.files.values()))).parent, ignore_errors=True)

    def _write(self) -> None:
        if self._is_closed:  # the next engine has read it
            return
        new = self._folder / f"{CHANGES_NAME}.new"
        with self._reported("a change made by request"):
            new.write_bytes(marshal.dumps(plain(self._changes), 2))  # type: ignore[arg-type] # plain values
            new.replace(self._folder / CHANGES_NAME)

    def _keep_files(self, name: str, config: str | None, files: Mapping[str, bytes]) -> RequestedLoad:
        lost = RequestedLoad(config, None, is_lost=True)
        if sum(map(len, files.values())) > KEPT_FILES_BYTES_MAX:
            _log.warning("the files of '%s' are too large to be kept: the next engine will not load it", name)
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
        """Report a failure. On a full disk the server continues; the next engine misses the change."""
        try:
            yield
        except (OSError, ServingError) as error:
            _log.error("%s cannot be kept or made again: %s", what, error)
