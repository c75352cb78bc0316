"""The loaded versions that front ends in other processes load, too, and their counts."""

import itertools
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from charonia.server.directory import Target
from charonia.server.ensembles.configuration import scheduling_of
from charonia.server.ensembles.plan import key_of
from charonia.server.execution.runner import ModelRunner
from charonia.server.execution.version_runner import Runner
from charonia.server.lifecycle.entries import VersionEntry
from charonia.server.lifecycle.front_end_placement import Offer, reason_to_stay
from charonia.server.lifecycle.model_table import ModelTable
from charonia.server.metrics.model_metrics import Increase, ModelMetrics
from charonia.server.traffic.split import SplitRunner

SPLIT = "its requests without a version are split among its versions"
"""Why such requests stay in the engine; requests that name a version need not."""


class Judgement(NamedTuple):
    """An offer, and why it is not made: "" if it is."""

    reason: str
    offer: Offer


class Offers:
    """The versions that the engine offers to front ends, by the rule of `front_end_placement.py`.

    Args:
        table: Every model.
    """

    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self._next = itertools.count(1)
        self._numbers: WeakKeyDictionary[ModelMetrics, int] = WeakKeyDictionary()
        self._metrics: WeakValueDictionary[int, ModelMetrics] = WeakValueDictionary()

    def now(self) -> dict[Target, Offer]:
        return {target: offer for target, (reason, offer) in self._judged().items() if not reason}

    def reason(self, runner: Runner) -> str:
        judged = self._judged()
        return next((judged[target].reason for target, each in self._table.routes.items() if each is runner), "")

    def count(self, number: int, more: Increase) -> None:
        """Add the counts of a front end for an offer, unless its version is gone."""
        metrics = self._metrics.get(number)
        if metrics is not None:
            metrics.merge(more)

    def number_of(self, runner: Runner) -> int:
        number = self._numbers.get(runner.metrics)
        if number is None:
            number = self._numbers[runner.metrics] = next(self._next)
            self._metrics[number] = runner.metrics
        return number

    def _judged(self) -> dict[Target, Judgement]:
        """Return a judgement of every version that answers, by where requests go."""
        routes = self._table.routes
        entries = {
            id(entry.loaded.runner): (version, entry)
            for model in self._table.models.values()
            for version, entry in model.versions.items()
            if entry.loaded is not None
        }
        judged: dict[int, Judgement] = {}

        def judge(runner: Runner) -> Judgement:
            if isinstance(runner, SplitRunner):
                return Judgement(SPLIT, Offer(0, 0, runner.config.name))
            known = judged.get(id(runner))
            if known is None:
                scheduling = runner.config.ensemble_scheduling
                steps = scheduling_of(runner.config).step if scheduling is not None else ()
                targets = [(key_of(step), str(max(0, step.model_version) or "")) for step in steps]
                found = [judge(routes[target]) if target in routes else _missing(target) for target in targets]
                known = judged[id(runner)] = self._judge(*entries[id(runner)], found)
            return known

        return {target: judge(runner) for target, runner in routes.items()}

    def _judge(self, version: int, entry: VersionEntry, steps: list[Judgement]) -> Judgement:
        loaded = entry.loaded
        assert loaded is not None
        runner, provided = loaded.runner, entry.provided
        reason = reason_to_stay(
            runner.config,
            sum(usage.byte_size for usage in runner.metrics.statistics.memory),
            is_limited=loaded.claim is not None,
            has_short_requests=isinstance(runner, ModelRunner) and runner.has_short_requests,
            steps=[(judgement.offer.name, judgement.reason) for judgement in steps],
        )
        offer = Offer(
            self.number_of(runner),
            version,
            name=runner.config.name,
            folder=str(provided.folder.path) if provided is not None and loaded.model is not None else "",
            files=entry.content.files if entry.content is not None else "",
            is_immutable=provided is not None and provided.lease is not None,
            labels=loaded.labels,
            steps=tuple(judgement.offer.number for judgement in steps),
        )
        return Judgement(reason, offer)


def _missing(target: Target) -> Judgement:
    return Judgement("it is not loaded", Offer(0, 0, target[0]))
