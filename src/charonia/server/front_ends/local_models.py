"""The models that a front end runs itself: copies of models that the engine offers.

1. A copy takes the requests without a trace that reach its model, while its executions are short; the engine takes the
   others. A copy whose executions have become long leaves its requests to the engine for `REST_NS`.
2. When an offer is withdrawn, no more requests reach the copy; requests in flight finish.
3. Counters of copies are transferred one time, by `take_counts`.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from charonia.clock import now_ns
from charonia.config.backends import records
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, unavailable
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Reply, Ticket
from charonia.server.directory import Target
from charonia.server.ensembles.call import EnsembleRunner, Infer
from charonia.server.ensembles.plan import EnsemblePlan
from charonia.server.execution.runner import ModelRunner
from charonia.server.execution.version_runner import Runner
from charonia.server.front_ends.messages import plain
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.front_end_placement import Offer, for_front_end
from charonia.server.lifecycle.loader import LoadedVersion, load_version
from charonia.server.lifecycle.repository.scan import CONFIG_FILE, ModelFolder, version_fingerprint
from charonia.server.metrics.key_usage import Usage
from charonia.server.metrics.model_metrics import Increase, ModelMetrics
from charonia.server.options import ServerOptions

_log = logging.getLogger(__name__)

REST_NS = 10_000_000_000
"""Time for which a copy leaves its requests to the engine after its executions have become long."""

LOADS_MAX = 4
"""Copies that are loaded at the same time."""

DRAIN_LOOK_S = 0.005
"""Pause between two checks whether requests are in flight."""


def software_of(options: ServerOptions) -> str:
    """Return the software that this process and an engine must share for copies to equal the engine's models.

    It consists of the packages, as now installed on the disk, and the options with which models are loaded and run.
    """
    loaded = [record for record in records() if record.in_front_ends]
    modules = [module for each in loaded for module in (each.factory, *(package.module for package in each.packages))]
    names = sorted({re.split(r"[.:]", module)[0] for module in modules})
    origins = [spec.origin for name in names if (spec := find_spec(name)) and spec.origin]
    packages = [(origin, os.stat(origin).st_mtime_ns) for origin in origins if os.path.exists(origin)]
    backends = sorted((name, sorted(settings.items())) for name, settings in options.backends.items())
    return repr((packages, backends, options.busy_poll_us, options.metrics.summary_latencies))


@dataclass(slots=True, eq=False)
class Copy:
    """A model version in this front end.

    Attributes:
        offer: The offer that it was loaded for.
        loaded: The version.
        rests_until_ns: When it takes requests again, 0 while it takes them.
    """

    offer: Offer
    loaded: LoadedVersion
    rests_until_ns: int = 0

    @property
    def runner(self) -> Runner:
        return self.loaded.runner

    def takes_requests(self) -> bool:
        """Whether it takes the next request. The steps of an ensemble decide for themselves."""
        runner = self.loaded.runner
        if not isinstance(runner, ModelRunner) or runner.runs_in_place:
            return True
        now = now_ns()
        if not self.rests_until_ns:
            self.rests_until_ns = now + REST_NS
        if now < self.rests_until_ns:
            return False
        self.rests_until_ns = 0
        runner.begin_in_place()
        return runner.runs_in_place


@dataclass(slots=True, eq=False)
class _Counter:
    """The metrics of a copy, until it is closed and they are taken."""

    number: int
    metrics: ModelMetrics
    is_closed: bool = False


class LocalModels:
    """The copies in this front end. To be made on the event loop.

    Args:
        backends: Load them.
        infer: Runs a request here or in the engine, for steps of ensembles.
        summarizes: Whether they keep summaries of latencies.
    """

    def __init__(self, backends: Backends, infer: Infer, *, summarizes: bool = False) -> None:
        self._backends = backends
        self._infer = infer
        self._summarizes = summarizes
        self._routes: dict[Target, Copy] = {}
        self._copies: dict[int, Copy] = {}
        self._offers: Mapping[Target, Offer] = {}
        self._configs: Mapping[Target, ModelConfig] = {}
        self._wanted: dict[int, Offer] = {}
        self._refused: set[int] = set()  # numbers of offers that could not be loaded
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._retirements: set[asyncio.Task[None]] = set()
        self._counters: list[_Counter] = []
        self._usage = Usage(now_ns)
        self._loading = asyncio.Semaphore(LOADS_MAX)

    def infer(self, request: InferRequest, reply: Reply) -> Ticket | None:
        """Run a request here; None if it is one for the engine."""
        copy = self._routes.get((request.model_name, request.model_version))
        flow = request.flow
        is_limited = flow.requests_per_minute or flow.tokens_per_minute  # by the engine, which sees all front ends
        if copy is None or request.trace is not None or is_limited or not copy.takes_requests():
            return None
        if flow.key and request.caller is None:
            reply = self._usage.begin(flow, reply) or reply
        return copy.loaded.runner.submit(request, reply)

    def infer_at_once(self, request: InferRequest) -> InferResponse | ServingError | None:
        """Run a request as `Runner.run_at_once` does; None if it cannot run here."""
        copy = self._routes.get((request.model_name, request.model_version))
        return copy.loaded.runner.run_at_once(request) if copy is not None and copy.takes_requests() else None

    def follow(self, offers: Mapping[Target, Offer], configs: Mapping[Target, ModelConfig]) -> None:
        """Drop copies whose offers are gone, and begin to load new offers."""
        self._offers, self._configs = offers, configs
        self._wanted = {offer.number: offer for offer in offers.values()}
        self._refused &= self._wanted.keys()
        for number, copy in list(self._copies.items()):
            if self._wanted.get(number) != copy.offer:
                self._drop(number)
        for target, offer in offers.items():
            number = offer.number
            if not (offer.steps or number in self._copies or number in self._loads or number in self._refused):
                self._loads[number] = asyncio.create_task(self._load(offer, configs[target]))
        self._route()

    def reset(self) -> None:
        """Drop all copies and counters: the engine that offered the models is gone."""
        self.follow({}, {})
        self._counters = []

    def report(self, send: Callable[[tuple[object, ...]], None]) -> None:
        """Send the engine the counts since the last report, and the loaded copies."""
        send(("counted", list(self._copies), plain(self.take_counts()), self._usage.take()))

    def take_counts(self) -> list[tuple[int, Increase]]:
        """Return the counts since the last call, by the number of the offer."""
        closed = [counter for counter in self._counters if counter.is_closed]
        counts = [(each.number, each.metrics.take()) for each in self._counters]
        self._counters = [counter for counter in self._counters if counter not in closed]
        return [(number, increase) for number, increase in counts if increase is not None]

    async def drained(self, timeout_s: float) -> bool:
        """Wait until every request is answered, up to a limit, when the rest is; return whether that was in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(copy.runner.in_flight for copy in self._copies.values()):
                    await asyncio.sleep(DRAIN_LOOK_S)
        except TimeoutError:
            for copy in self._copies.values():
                copy.runner.abandon(unavailable("the server stopped before the request was done: exit timeout expired"))
            return False
        return True

    async def aclose(self) -> None:
        """Let everything go; to be called when drained."""
        self.follow({}, {})
        for load in list(self._loads.values()):
            load.cancel()
        await asyncio.gather(*self._loads.values(), *self._retirements, return_exceptions=True)
        await self._backends.aclose()

    async def _load(self, offer: Offer, config: ModelConfig) -> None:
        folder = Path(offer.folder)
        loaded: LoadedVersion | None = None
        try:
            async with self._loading:
                loaded = await load_version(
                    ModelFolder(offer.name, folder.parent, folder),
                    offer.version,
                    for_front_end(config),
                    backends=self._backends,
                    cores=1,
                )
            # Loaded from files that were replaced after the engine has read them, it would be another model.
            files = await asyncio.to_thread(
                version_fingerprint, folder, offer.version, config=CONFIG_FILE, is_immutable=offer.is_immutable
            )
        except Exception as error:
            self._refuse(offer)
            _log.warning("model '%s' version %d runs in the engine only: %s", offer.name, offer.version, error)
        else:
            if files != offer.files:
                self._refuse(offer)
                _log.info(
                    "model '%s' version %d runs in the engine only: its files have changed", offer.name, offer.version
                )
            elif self._wanted.get(offer.number) == offer:
                if isinstance(loaded.runner, ModelRunner):
                    loaded.runner.begin_in_place()
                self._add(Copy(offer, loaded))
                self._route()
                loaded = None
        finally:
            self._loads.pop(offer.number, None)
            if self._wanted.get(offer.number, offer) != offer:  # another engine has given the number to another version
                self.follow(self._offers, self._configs)
        if loaded is not None:
            await loaded.retire()

    def _refuse(self, offer: Offer) -> None:
        """Leave a version to the engine while it is offered."""
        if self._wanted.get(offer.number) == offer:
            self._refused.add(offer.number)

    def _add(self, copy: Copy) -> None:
        metrics = copy.runner.metrics
        if self._summarizes:
            metrics.summarize()
        self._copies[copy.offer.number] = copy
        self._counters.append(_Counter(copy.offer.number, metrics))

    def _route(self) -> None:
        """Create the ensembles of which every step is here, and send requests to all copies."""
        steps = {offer.number: self._configs[target] for target, offer in self._offers.items()}
        found = True
        while found:
            missing = {t: o for t, o in self._offers.items() if o.steps and o.number not in self._copies}
            ready = {t: o for t, o in missing.items() if all(step in self._copies for step in o.steps)}
            found = bool(ready)
            for target, offer in ready.items():
                if offer.number not in self._copies:
                    plan = EnsemblePlan(self._configs[target], [steps[number] for number in offer.steps], offer.labels)
                    runner = EnsembleRunner(str(offer.version), plan, self._infer, self.infer_at_once)
                    self._add(Copy(offer, LoadedVersion(runner, None, offer.labels)))
        copies = ((target, self._copies.get(offer.number)) for target, offer in self._offers.items())
        self._routes = {target: copy for target, copy in copies if copy is not None}

    def _drop(self, number: int) -> None:
        """Send no more requests to a copy, and close it when the requests in flight are answered."""
        copy = self._copies.pop(number)
        counter = next(each for each in self._counters if each.metrics is copy.runner.metrics)
        task = asyncio.create_task(self._retire(copy, counter))
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _retire(self, copy: Copy, counter: _Counter) -> None:
        try:
            await copy.loaded.retire()
        finally:
            counter.is_closed = True
