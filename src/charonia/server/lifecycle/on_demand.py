"""Loads models on demand and evicts the least recently used, within a memory budget (`auto` control mode).

`eviction.py` decides what is evicted. In every mode, models can be unloaded once they have been idle for some time;
outside of `auto` mode, only these are loaded on demand.

The requests that wait for their models to be loaded.

A request waits in the queue of its model, which has a limit, and no longer than its deadline. When the model answers,
the queue runs in the order of arrival; when the load fails, every request of the queue gets the reason.
"""

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from charonia.clock import now_ns
from charonia.config.parameters import PINNED
from charonia.core.errors import Code, ServingError, internal, unavailable
from charonia.core.metadata import name_of
from charonia.core.request import InferRequest
from charonia.core.response import Reply, Ticket
from charonia.server.execution.admission import with_request_id
from charonia.server.lifecycle.entries import keys_of
from charonia.server.lifecycle.eviction import BackOff, Fit, Resident, idle_since, make_room
from charonia.server.lifecycle.lifecycle import Lifecycle
from charonia.server.lifecycle.loader import LoadedVersion
from charonia.server.machine.memory import tree_bytes
from charonia.server.metrics.metric_families import Family, family
from charonia.server.model_options import AutoOptions


class DeferredRequest:
    """A request that waits for its model; also the ticket that the front end holds."""

    __slots__ = ("_queue", "is_over", "key", "reply", "request", "ticket", "timer")

    def __init__(self, queue: "DeferredRequests", key: str, request: InferRequest, reply: Reply) -> None:
        self.key = key
        self.request = request
        self.reply = reply
        self.ticket: Ticket | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_over = False
        self._queue = queue

    def cancel(self) -> None:
        if self.ticket is not None:
            self.ticket.cancel()
        else:
            self._queue.end(self, ServingError(Code.CANCELLED, "the request was cancelled"))


class DeferredRequests:
    """A queue of requests for each model that is being loaded."""

    def __init__(self, infer: Callable[[InferRequest, Reply], Ticket], waiting_max: int, wait_s: float) -> None:
        self._infer = infer
        self._waiting_max = waiting_max
        self._wait_s = wait_s
        self._queues: dict[str, list[DeferredRequest]] = {}

    def refusal(self, key: str) -> ServingError | None:
        """Return the error for another request of a model, None while its queue has room."""
        length = len(self._queues.get(key, ()))
        if length < self._waiting_max:
            return None
        return unavailable(
            f"{length} requests wait already for model '{name_of(key)}' to be loaded",
            hint="retry later, or raise --auto-queue-size",
        )

    def refuse(self, key: str, request: InferRequest, reply: Reply, error: ServingError) -> DeferredRequest:
        """Answer a request with `error`, and return its ticket."""
        deferred = DeferredRequest(self, key, request, reply)
        self.end(deferred, error)
        return deferred

    def add(self, key: str, request: InferRequest, reply: Reply) -> DeferredRequest:
        """Let a request wait for its model, and return its ticket."""
        deferred = DeferredRequest(self, key, request, reply)
        self._queues.setdefault(key, []).append(deferred)
        deferred.timer = asyncio.get_running_loop().call_later(self._patience_s(request), self._expire, deferred)
        return deferred

    def end(self, deferred: DeferredRequest, error: ServingError) -> None:
        """Answer a request that waits with `error`, unless it already has its answer."""
        if deferred.is_over:
            return
        _stop_waiting(deferred)
        queue = self._queues.get(deferred.key, [])
        if deferred in queue:
            queue.remove(deferred)
        request = deferred.request
        deferred.reply(with_request_id(error, request) if request.id else error, True)

    def run(self, key: str) -> None:
        """Run the requests that wait for a model, which answers now."""
        for deferred in self._queues.pop(key, []):
            if not deferred.is_over:
                _stop_waiting(deferred)
                deferred.ticket = self._infer(deferred.request, deferred.reply)

    def fail(self, key: str, error: ServingError) -> None:
        """Answer the requests that wait for a model, which cannot be loaded."""
        for deferred in self._queues.pop(key, []):
            self.end(deferred, error)

    def close(self) -> None:
        """Answer every request: the server stops."""
        for key in list(self._queues):
            self.fail(key, unavailable("the server stops: the model is not loaded any more"))

    def counts(self) -> dict[str, int]:
        return {key: len(queue) for key, queue in self._queues.items()}

    def _patience_s(self, request: InferRequest) -> float:
        limits = [self._wait_s]
        if request.timeout_us:
            limits.append(request.timeout_us / 1e6)
        if request.deadline_ns:
            limits.append((request.deadline_ns - now_ns()) / _NS_PER_S)
        return max(0.0, min(limits))

    def _expire(self, deferred: DeferredRequest) -> None:
        self.end(deferred, too_late(deferred.key))


def too_late(key: str) -> ServingError:
    """Return the error for a caller that has waited too long for a model."""
    message = f"Request timeout expired: model '{name_of(key)}' was not loaded in time"
    return unavailable(message, hint="loading continues: a later request may find it")


def _stop_waiting(deferred: DeferredRequest) -> None:
    deferred.is_over = True
    if deferred.timer is not None:
        deferred.timer.cancel()


@dataclass(slots=True)
class ResidencyCounts:
    """Loads on demand, and unloads.

    Attributes:
        loads: Loads by model.
        failures: Loads that failed, by model.
        evictions: Unloads to make room, by model.
        idle: Unloads of idle models, by model.
    """

    loads: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    idle: Counter[str] = field(default_factory=Counter)


def on_demand_families(
    counts: ResidencyCounts, *, budget: int, sizes: Mapping[str, int], waiting: Mapping[str, int]
) -> list[Family]:
    """Return the metrics of models that are loaded on demand; `budget` is 0 where there is none."""
    by_model = (
        ("charonia_model_loads_total", "counter", "Loads on demand", counts.loads),
        ("charonia_model_load_failures_total", "counter", "Loads on demand that failed", counts.failures),
        ("charonia_model_evictions_total", "counter", "Unloads to make room for other models", counts.evictions),
        ("charonia_model_idle_unloads_total", "counter", "Unloads of idle models", counts.idle),
        ("charonia_model_resident_bytes", "gauge", "Memory that a loaded model takes", sizes),
        ("charonia_model_load_waiting", "gauge", "Requests that wait for a model to be loaded", waiting),
    )
    limit = family("charonia_model_memory_budget_bytes", "gauge", "Memory that loaded models may take", (budget, {}))
    return [
        *([limit] if budget else []),
        *(
            family(name, kind, text, *((value, {"model": model}) for model, value in sorted(values.items())))
            for name, kind, text, values in by_model
        ),
    ]


_log = logging.getLogger(__name__)

ROOM_LOOK_S = 0.05
"""Pause between two checks whether the models in the way have become idle."""

IDLE_LOOKS = 10
"""Checks for idle models during the time after which they are unloaded."""

_MIB = 2**20
_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class DemandOptions:
    """How models are loaded on demand.

    Attributes:
        auto: The options of the command line.
        budget: Bytes that loaded models may take together.
        loads_all: Whether every model is loaded on demand; otherwise those that were unloaded while idle.
    """

    auto: AutoOptions = field(default_factory=AutoOptions)
    budget: int = sys.maxsize
    loads_all: bool = True


class OnDemandLoader:
    """Loads models when a request or an ensemble needs them.

    Args:
        lifecycle: Loads and unloads the models.
        options: The limits.
        infer: Runs a request of a model that is loaded.

    Attributes:
        counts: Loads, failures and evictions.
    """

    def __init__(
        self, lifecycle: Lifecycle, options: DemandOptions, infer: Callable[[InferRequest, Reply], Ticket]
    ) -> None:
        self.counts = ResidencyCounts()
        self._lifecycle = lifecycle
        self._options = options
        self._deferred = DeferredRequests(infer, options.auto.waiting_max, options.auto.wait_secs)
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._sizes: dict[str, int] = {}  # as measured at the last load
        self._reserved: dict[str, int] = {}  # of models that are being loaded
        self._unloaded: set[str] = set()  # while they were idle
        self._held: Counter[str] = Counter()
        self._deciding = asyncio.Lock()
        self._back_off = BackOff()

    def is_loadable(self, name: str) -> bool:
        """Whether a request for a model would wait for it to be loaded now."""
        key = self._key(name)
        return key is not None and self._refusal(key) is None

    def is_pinned(self, key: str) -> bool:
        """Whether a model is never evicted, by the options."""
        return name_of(key) in self._options.auto.pinned or key in self._options.auto.pinned

    def counts_for_readiness(self, key: str) -> bool:
        """Whether the server is not ready while a model that should answer does not."""
        return self.is_pinned(key) or not (self._options.loads_all or key in self._unloaded)

    def exclude(self, name: str) -> None:
        """Outside of `auto` mode, do not load a model any more: a request has unloaded it."""
        self._unloaded.difference_update(keys_of(name, self._lifecycle.found))

    async def unload_idle(self) -> None:
        """Unload idle models as long as the server runs."""
        idle_s = self._options.auto.idle_secs
        while idle_s:
            await asyncio.sleep(min(idle_s / IDLE_LOOKS, IDLE_LOOKS))
            await self.unload_unused(time.time() - idle_s)

    async def unload_unused(self, since_s: float) -> None:
        """Unload the models that have not been used since, wall-clock time, unless a load is under way."""
        # Decided anew for each: while one is unloaded, others may be used.
        while not self._loads and (keys := self._idle(since_s)):
            _log.info("unloading '%s', which is idle", keys[0])
            self.counts.idle[keys[0]] += 1
            self._unloaded.add(keys[0])
            await self._lifecycle.evict(keys[0])

    def _idle(self, since_s: float) -> list[str]:
        """Return the idle models that can be loaded again."""
        idle = idle_since(self.residents(), int(since_s * _NS_PER_S))
        return [key for key in idle if key in self._lifecycle.found.models]

    def submit(self, request: InferRequest, reply: Reply) -> Ticket | None:
        """Let a request wait for its model; None for a model that is unknown, or loaded without that version."""
        key = self._key(request.model_name)
        if key is None or (key not in self._loads and (request.model_name, "") in self._lifecycle.table.routes):
            return None
        refusal = self._refusal(key) or self._deferred.refusal(key)
        if refusal is not None:
            return self._deferred.refuse(key, request, reply, refusal)
        deferred = self._deferred.add(key, request, reply)
        self._begin(key, {frame.model for frame in request.caller.chain()} if request.caller is not None else set())
        return deferred

    def demand(self, name: str, version: str = "") -> Awaitable[None] | None:
        """Return an awaitable that ends when a model answers, None where there is nothing to wait for."""
        key = self._key(name)
        if key is None or (name, "") in self._lifecycle.table.routes or (name, version) in self._lifecycle.table.routes:
            return None
        return self._demanded(key)

    def families(self) -> list[Family]:
        return on_demand_families(
            self.counts,
            budget=self._options.budget if self._options.loads_all else 0,
            sizes={key: resident.size for key, resident in self.residents().items()},
            waiting=self._deferred.counts(),
        )

    def residents(self) -> dict[str, Resident]:
        """Return the loaded models."""
        found: dict[str, Resident] = {}
        for key, model in self._lifecycle.table.models.items():
            loaded = [v.loaded for v in model.versions.values() if v.loaded is not None]
            if not loaded:
                continue
            used_ms = max(max(each.runner.metrics.statistics.last_inference_ms, each.loaded_ms) for each in loaded)
            composition = model.composition
            found[key] = Resident(
                size=0 if composition is not None else max(self._sizes.get(key, 0), _known_bytes(loaded)),
                used_ns=used_ms * _NS_PER_MS,
                is_busy=any(each.is_busy for each in loaded),
                is_pinned=self.is_pinned(key)
                or any(_is_true(each.runner.config.parameters.get(PINNED, "")) for each in loaded),
                made_of=composition.models if composition is not None else (),
            )
        return found

    def free_bytes(self) -> int:
        """Return the bytes of the budget that neither loaded models take nor those that are being loaded."""
        taken = sum(resident.size for resident in self.residents().values())
        return self._options.budget - taken - sum(self._reserved.values())

    def close(self) -> None:
        """Answer everything that waits: the server stops."""
        self._deferred.close()
        for task in self._loads.values():
            task.cancel()

    def _key(self, name: str) -> str | None:
        keys = keys_of(name, self._lifecycle.found)
        return keys[0] if len(keys) == 1 and (self._options.loads_all or keys[0] in self._unloaded) else None

    def _state(self, key: str) -> object:
        """Return the fingerprint of a model's files at the last scan: a failure counts until it changes."""
        folder = self._lifecycle.found.models.get(key)
        return folder.fingerprint if folder is not None else None

    def _refusal(self, key: str) -> ServingError | None:
        """Return the error for a model that has just failed to load."""
        found = self._back_off.reason(key, self._state(key), now_ns())
        if found is None:
            return None
        reason, left_ns = found
        again = f"it is tried again in {max(1, round(left_ns / _NS_PER_S))} s, or as soon as its files change"
        return ServingError(Code.UNAVAILABLE, f"model '{name_of(key)}' is not loaded: {reason}", hint=again)

    async def _demanded(self, key: str) -> None:
        refusal = self._refusal(key)
        if refusal is not None:
            raise refusal
        task = self._begin(key, set())
        await asyncio.wait([task], timeout=self._options.auto.wait_secs)
        if not task.done():
            raise too_late(key)
        await task

    async def load_all(self, keys: Sequence[str]) -> None:
        """Load the models of an ensemble. The ensemble itself reports failures."""
        held = set(keys)
        missing = [key for key in keys if (key, "") not in self._lifecycle.table.routes and self._key(key) is not None]
        tasks = [self._begin(key, held) for key in missing if self._refusal(key) is None]
        if tasks:
            await asyncio.wait(tasks)

    def _begin(self, key: str, held: set[str]) -> "asyncio.Task[None]":
        """Start the load of a model, unless it is under way."""
        task = self._loads.get(key)
        if task is None:
            task = self._loads[key] = asyncio.get_running_loop().create_task(self._load(key, held))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _load(self, key: str, held: set[str]) -> None:
        """Load a model and answer the requests that wait for it."""
        holds = {key, *held}
        self._held.update(holds)
        try:
            await self._make_room(key, held)
            await self._load_counted(key)
            self._deferred.run(key)
        except ServingError as error:
            entry = self._lifecycle.table.entry(key)
            entry.failure = entry.failure or error.message
            self._deferred.fail(key, error)
            raise
        except Exception as error:
            _log.exception("loading '%s' on demand", key)
            self._deferred.fail(key, internal(f"loading model '{name_of(key)}' failed: {type(error).__name__}"))
            raise
        finally:
            self._reserved.pop(key, None)
            self._held.subtract(holds)
            self._held += Counter()
            self._loads.pop(key, None)

    async def _load_counted(self, key: str) -> None:
        """Load a model, and count the load or the failure."""
        try:
            await self._measured(key)
        except ServingError as error:
            self.counts.failures[key] += 1
            failure = ServingError(Code.UNAVAILABLE, error.message, hint=error.hint)
            self._back_off.keep(self._lifecycle.found.models.keys())
            self._back_off.failed(key, str(failure), self._state(key), now_ns())
            raise failure from error
        self.counts.loads[key] += 1
        self._unloaded.discard(key)
        self._back_off.loaded(key)

    async def _measured(self, key: str) -> None:
        is_alone = len(self._loads) == 1
        before = await asyncio.to_thread(tree_bytes)
        await self._lifecycle.load_on_demand(key)
        is_alone = is_alone and len(self._loads) == 1
        grown = max(0, await asyncio.to_thread(tree_bytes) - before) if is_alone else 0
        versions = self._lifecycle.table.models[key].versions.values()
        self._sizes[key] = max(grown, _known_bytes([v.loaded for v in versions if v.loaded is not None]))
        self._reserved.pop(key, None)
        # It may be larger than its files: evict idle models for the difference.
        room = make_room(
            self.residents(), self._options.budget, sum(self._reserved.values()), held=self._pinned_models()
        )
        await self._evict(room.evict)

    async def _make_room(self, key: str, held: set[str]) -> None:
        """Evict idle models until one fits, and reserve its memory."""
        needed = self._sizes.get(key)
        if needed is None:
            needed = await asyncio.to_thread(self._lifecycle.sources.size, self._lifecycle.found.models[key])
        budget = self._options.budget
        deadline = now_ns() + int(self._options.auto.wait_secs * _NS_PER_S)
        while True:
            async with self._deciding:
                residents = self.residents()
                is_loaded = residents.pop(key, None) is not None  # meanwhile, by a request
                if is_loaded:
                    self._deferred.run(key)
                waits = {k for k in residents if k in held or name_of(k) in held}
                least = make_room(residents, budget, needed, held=waits)
                if least.verdict is Fit.NEVER:
                    raise _no_room(key, needed, budget, least.stays)
                reserved = sum(size for other, size in self._reserved.items() if other != key)
                room = make_room(residents, budget, needed + reserved, held=waits | self._pinned_models())
                if room.verdict is Fit.FITS:
                    self._reserved[key] = needed
                    await self._evict(room.evict)
                    return
            is_over = now_ns() > deadline
            if is_loaded and (
                is_over or make_room(residents, budget, needed + reserved, held=waits).verdict is Fit.FITS
            ):
                return  # or loads whose models are in each other's way would wait for each other
            if is_over:
                raise unavailable(
                    f"there was no room for model '{name_of(key)}': the models that are loaded have requests in flight",
                    hint="raise --model-memory-budget",
                )
            await asyncio.sleep(ROOM_LOOK_S)

    def _pinned_models(self) -> set[str]:
        """Return the models that are being loaded, and those that they need."""
        models = (self._lifecycle.table.models.get(key) for key in self._loads)
        steps = {step for each in models if each is not None and each.composition for step in each.composition.models}
        return steps | {key for key, count in self._held.items() if count > 0}

    async def _evict(self, keys: Sequence[str]) -> None:
        for key in keys:
            _log.info("evicting '%s', the least recently used", key)
            self.counts.evictions[key] += 1
            await self._lifecycle.evict(key)


def _known_bytes(versions: Sequence[LoadedVersion]) -> int:
    """Return the memory that surely belongs to these versions: as reported at load, and by workers as it is now."""
    total = 0
    for version in versions:
        said = sum(usage.byte_size for usage in version.runner.metrics.statistics.memory if usage.type == "CPU")
        total += max(said, sum(worker.memory_bytes for worker in version.workers()))
    return total


def _no_room(key: str, needed: int, budget: int, stays: int) -> ServingError:
    size, limit, taken = (-(-each // _MIB) for each in (needed, budget, stays))
    return unavailable(
        f"there is no room for model '{name_of(key)}', which takes about {size} MiB: models may take {limit} MiB, of "
        f"which {taken} are taken by models that stay",
        hint="raise --model-memory-budget",
    )


def _is_true(text: str) -> bool:
    return text.strip().lower() in ("true", "1", "yes", "on")
