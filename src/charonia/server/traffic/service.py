"""The traffic of all models: changes by request, canary plans over time, the state for the next engine."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace

from charonia.clock import WakeTimer, now_ns
from charonia.core.errors import ServingError, invalid, models_hint, not_found, unsupported
from charonia.core.metadata import name_of
from charonia.server.execution.version_runner import Runner
from charonia.server.metrics.metric_families import Family
from charonia.server.traffic.canary import (
    Canary,
    CanaryCommand,
    CanaryEvent,
    EngineEnded,
    ObservedTraffic,
    OperatorAction,
    ReadyVersions,
    Replaced,
    RestoreSplit,
    SetShare,
)
from charonia.server.traffic.split import Shadowing, SplitRunner
from charonia.server.traffic.state import (
    POLICY_HINT,
    ModelTraffic,
    TrafficEvent,
    configured,
    policy_obstacle,
    shadow_obstacle,
    traffic_families,
    traffic_json,
    traffic_words,
)
from charonia.wire.json_text import Object
from charonia.wire.traffic import (
    CanaryAction,
    CanaryPlan,
    CanaryState,
    TrafficChange,
    TrafficSettings,
    plan_json,
    read_change,
    read_plan,
    read_settings,
    settings_json,
)

_log = logging.getLogger(__name__)

Sticky = Mapping[str, tuple[bytes, ...]]
"""By model, the headers of which the first that a request has keeps its client on a version."""


class TrafficService:
    """The traffic of all models. Everything runs on the event loop's thread.

    Args:
        reroute: Called with the key of a model whose requests go elsewhere from now on.

    Attributes:
        sticky: The models whose clients are kept on a version by a header.
        keep: Called after every change with the key of a model and the persistent state of its traffic, "" for none.
        demand: Loads the model of a change; None where models are not loaded on demand.
    """

    def __init__(self, reroute: Callable[[str], None]) -> None:
        self.sticky: Sticky = {}
        self.keep: Callable[[str, str], None] | None = None
        self.demand: Callable[[str], Awaitable[None] | None] | None = None
        self._reroute = reroute
        self._models: dict[str, ModelTraffic[Runner]] = {}
        self._shadowings: dict[str, Shadowing] = {}
        self._timer: WakeTimer | None = None

    # For the life cycle.

    def follow(self, key: str, runners: Mapping[int, Runner], loading: Collection[int] = ()) -> Runner | None:
        """Set the ready versions of a model; return the runner of requests without a version, if there is one.

        Where a model returns, there is none while a version with a weight is being loaded: the first ready version may
        be a canary that should get 1 %, or a version that should get no requests.

        Args:
            key: Key of the model.
            runners: The runners of the versions that are ready.
            loading: The versions that are being loaded and do not answer yet.
        """
        traffic = self._models.get(key)
        newest = runners[max(runners)] if runners else None
        own = configured(newest.config) if newest is not None else None
        if traffic is None:
            traffic = self._models[key] = ModelTraffic(key)
        before, traffic.runners = traffic.runners, runners
        if newest is not None:
            traffic.configured = own
        if traffic.running is not None:
            self._handle(traffic, ReadyVersions(frozenset((*runners, *loading))))
        if traffic.running is not None:
            plan = traffic.running.plan
            for version in (plan.version, plan.stable):
                if version in before and version in runners and before[version] is not runners[version]:
                    self._handle(traffic, Replaced(version))
        self._record_sticky(traffic)
        waits = not traffic.is_routed and any(traffic.settings.weights.get(version) for version in loading)
        traffic.is_routed = newest is not None and not waits
        if newest is None or waits:
            return None
        if not traffic.is_split:
            return newest
        shadowing = self._shadowings.setdefault(key, Shadowing(traffic))
        return SplitRunner(traffic, shadowing)

    # For clients.

    async def show(self, model: str) -> Object:
        """Return the traffic of a model.

        Raises:
            ServingError: NOT_FOUND, or INVALID_ARG for a name that several models have.
        """
        return traffic_json(self._find(model), now_ns())

    async def change(self, model: str, document: Object) -> Object:
        """Change the traffic of a model, and return it.

        Raises:
            ServingError: As `show`; INVALID_ARG with the reason for a change that cannot be made, UNSUPPORTED; why the
                model cannot be loaded.
        """
        change = read_change(document)
        loaded = self.demand(model) if self.demand is not None else None
        if loaded is not None:
            await loaded
        traffic = self._find(model)
        if change.action is not None and traffic.running is None:
            raise invalid(f"there is no canary plan of '{model}' to {change.action.value}")
        settings = self._changed(traffic, change)
        canary = self._begun(traffic, change.canary, settings) if change.canary is not None else None
        if settings != traffic.settings:
            traffic.requested = settings
            self._log_event(traffic, _change_text(change))
        if canary is not None:
            traffic.canary, traffic.before = canary, traffic.settings.weights
            self._carry_out(traffic, canary.start())
        if change.action is not None:
            self._handle(traffic, OperatorAction(change.action))
        self._apply(traffic)
        return await self.show(model)

    async def reset(self, model: str) -> Object:
        """Forget what requests have changed of a model, with its figures; return its traffic."""
        before = self._find(model)
        self._shadowings.pop(before.model, None)
        traffic = self._models[before.model] = ModelTraffic(before.model, configured=before.configured)
        traffic.runners, traffic.is_routed = before.runners, before.is_routed
        _log.info("traffic of '%s': reset", traffic.model)
        self._apply(traffic)
        return await self.show(model)

    def words(self, model: str) -> list[str]:
        """Return the traffic of a model in sentences; none without traffic."""
        try:
            return traffic_words(self._find(model), now_ns())
        except ServingError:
            return []

    def families(self) -> list[Family]:
        return traffic_families(self._models.values())

    # For the next engine.

    def restore(self, key: str, text: str) -> None:
        """Continue from the kept state of a previous engine; a step of a canary plan begins again."""
        traffic = self._models.setdefault(key, ModelTraffic(key))
        kept = json.loads(text) if text else {"settings": None, "canary": None, "history": []}
        traffic.requested = read_settings(kept["settings"]) if kept["settings"] is not None else None
        traffic.canary = None
        traffic.history.clear()
        traffic.history.extend(TrafficEvent(*each) for each in kept["history"])
        plan = kept["canary"]
        if plan is not None:
            traffic.canary = Canary(read_plan(plan["plan"]), now_ns(), plan["step"], plan.get("ends", 0))
            traffic.canary.state, traffic.canary.reason = CanaryState(plan["state"]), plan["reason"]
            traffic.before = read_settings({"weights": plan.get("before", {})}).weights
            for version in (traffic.canary.plan.version, traffic.canary.plan.stable):
                traffic.figures[version].is_watched = not traffic.canary.state.is_over
        self._reroute(key)
        self._arm()

    def engine_ended(self) -> None:
        """The previous engine has not handed over: it has crashed, or was killed."""
        for traffic in list(self._models.values()):
            if self._handle(traffic, EngineEnded()):
                self._reroute(traffic.model)
        self._arm()

    def close(self) -> None:
        """Stop checking canary plans."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    # Inside.

    def _find(self, model: str) -> ModelTraffic[Runner]:
        found = [each for key, each in self._models.items() if key == model]
        found = found or [each for key, each in self._models.items() if name_of(key) == model]
        if len(found) > 1:
            names = ", ".join(each.model for each in found)
            raise invalid(f"there are {len(found)} models named '{model}'", hint=f"name one of {names}")
        if not found or (not found[0].runners and found[0].requested is None):
            known = sorted(key for key, each in self._models.items() if each.runners)
            raise not_found(f"Request for unknown model: '{model}' is not ready", hint=models_hint(model, known))
        return found[0]

    def _changed(self, traffic: ModelTraffic[Runner], change: TrafficChange) -> TrafficSettings:
        """Return the settings after a change. Raises ServingError."""
        settings = traffic.settings
        if change.weights is not None:
            if traffic.running is not None:
                version = traffic.running.plan.version
                raise invalid(
                    f"weights: the canary plan of version {version} sets them",
                    hint="send the action 'promote' or 'abort' first",
                )
            self._require_ready(traffic, "weights", [v for v, weight in change.weights.items() if weight])
            settings = replace(settings, weights=change.weights)
        if change.sticky is not None:
            settings = replace(settings, sticky=change.sticky)
        if change.shadow is not None:
            self._require_ready(traffic, "shadow", list(change.shadow))
            if change.shadow and traffic.runners:
                reason = shadow_obstacle(next(iter(traffic.runners.values())).config)
                if reason:
                    raise unsupported(f"shadow: {reason}")
            settings = replace(settings, shadow=change.shadow)
        return settings

    def _begun(self, traffic: ModelTraffic[Runner], plan: CanaryPlan, settings: TrafficSettings) -> Canary:
        """Return a new canary plan. Raises ServingError."""
        if traffic.running is not None:
            raise invalid(
                f"canary: one of version {traffic.running.plan.version} is under way",
                hint="send the action 'promote' or 'abort' first",
            )
        self._require_ready(traffic, "canary.version", [plan.version])
        if not plan.stable:
            shares = replace(traffic, requested=settings).shares()
            others = [version for version in traffic.runners if version != plan.version]
            stable = max(others, key=lambda version: (shares.get(version, 0.0), version), default=0)
            if not stable:
                self._refuse(traffic, f"canary: version {plan.version} is the only one that is ready")
            if shares.get(plan.version) == 1:
                raise invalid(
                    f"canary.version: version {plan.version} already gets all requests, expected one that gets fewer",
                    hint=f'to move requests back from it, name the version that gets the rest: "stable": {stable}',
                )
            plan = replace(plan, stable=stable)
        self._require_ready(traffic, "canary.stable", [plan.stable])
        if plan.difference_rate_max is not None and plan.version not in settings.shadow:
            raise invalid(
                f"canary.difference_rate_max: version {plan.version} gets no copies to compare",
                hint=f'give it some: "shadow": {{"{plan.version}": {{"share": 0.1}}}}',
            )
        for version in (plan.version, plan.stable):
            traffic.figures[version].take()
        traffic.shadows[plan.version].take()
        return Canary(plan, now_ns())

    def _require_ready(self, traffic: ModelTraffic[Runner], member: str, versions: list[int]) -> None:
        missing = next((version for version in versions if version not in traffic.runners), None)
        if missing is not None:
            self._refuse(traffic, f"{member}: version {missing} of '{traffic.model}' is not ready")

    def _refuse(self, traffic: ModelTraffic[Runner], text: str) -> None:
        ready = ", ".join(map(str, sorted(traffic.runners))) or "none"
        reason = policy_obstacle(next(iter(traffic.runners.values())).config) if traffic.runners else ""
        if reason:
            raise invalid(f"{text}: {reason}", hint=f"ready: {ready}; {POLICY_HINT}")
        raise invalid(text, hint=f"versions that are ready: {ready}")

    def _handle(self, traffic: ModelTraffic[Runner], event: CanaryEvent) -> bool:
        """Tell the canary plan; return whether that has changed something."""
        canary = traffic.running
        commands = canary.handle(event, now_ns()) if canary is not None else []
        self._carry_out(traffic, commands)
        if commands:
            self._keep(traffic)
        return bool(commands)

    def _carry_out(self, traffic: ModelTraffic[Runner], commands: list[CanaryCommand]) -> None:
        for command in commands:
            if isinstance(command, SetShare):
                traffic.set_share(command.percent)
            elif isinstance(command, RestoreSplit):
                traffic.set_weights(traffic.before)
            else:
                self._log_event(traffic, command.text)

    def _log_event(self, traffic: ModelTraffic[Runner], text: str) -> None:
        traffic.history.append(TrafficEvent(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time())), text))
        _log.info("traffic of '%s': %s", traffic.model, text)

    def _apply(self, traffic: ModelTraffic[Runner]) -> None:
        """Send requests where they go now."""
        self._keep(traffic)
        self._reroute(traffic.model)
        self._arm()

    def _keep(self, traffic: ModelTraffic[Runner]) -> None:
        if self.keep is not None:
            self.keep(traffic.model, snapshot_text(traffic))

    def _record_sticky(self, traffic: ModelTraffic[Runner]) -> None:
        names = {traffic.model, name_of(traffic.model)}
        others = {name: headers for name, headers in self.sticky.items() if name not in names}
        headers = traffic.settings.headers
        self.sticky = {**others, **dict.fromkeys(names, headers)} if headers else others

    def _arm(self) -> None:
        wakes = [at for each in self._models.values() if each.running is not None and (at := each.running.wake_at())]
        if wakes and self._timer is None:
            self._timer = WakeTimer(asyncio.get_running_loop(), self._check_canaries)
        if self._timer is not None:
            self._timer.set(min(wakes, default=None))

    def _check_canaries(self) -> None:
        for traffic in list(self._models.values()):
            canary = traffic.running
            if canary is None or (canary.wake_at() or 0) > now_ns():
                continue
            plan = canary.plan
            compared = traffic.shadows[plan.version].take()
            seen = ObservedTraffic(traffic.figures[plan.version].take(), traffic.figures[plan.stable].take(), *compared)
            try:
                if self._handle(traffic, seen):
                    self._reroute(traffic.model)
            except Exception:  # a bug: clients must not suffer from an unwatched canary
                _log.exception("the canary plan of '%s' failed", traffic.model)
                self._handle(traffic, OperatorAction(CanaryAction.ABORT))
                self._reroute(traffic.model)
        self._arm()


def snapshot_text(traffic: ModelTraffic[Runner]) -> str:
    """Return what to keep of the traffic of a model for an engine that follows, "" for nothing."""
    canary = traffic.canary
    if traffic.requested is None and canary is None:
        return ""
    plan = canary and {
        "plan": plan_json(canary.plan),
        "state": canary.state.value,
        "step": canary.step,
        "ends": canary.ends,
        "reason": canary.reason,
        "before": {str(version): weight for version, weight in traffic.before.items()},
    }
    settings = settings_json(traffic.requested) if traffic.requested is not None else None
    return json.dumps({"settings": settings, "canary": plan, "history": [list(each) for each in traffic.history]})


def _change_text(change: TrafficChange) -> str:
    parts = []
    if change.weights is not None:
        weights = ", ".join(f"{version}: {weight:g}" for version, weight in sorted(change.weights.items()))
        parts.append(f"weights {weights or 'reset'}")
    if change.sticky is not None:
        parts.append(f"sticky by {change.sticky}" if change.sticky else "not sticky")
    if change.shadow is not None:
        shadows = ", ".join(f"{version}: {each.share:.1%}" for version, each in sorted(change.shadow.items()))
        parts.append(f"shadow {shadows or 'reset'}")
    return f"changed by request: {'; '.join(parts)}"
