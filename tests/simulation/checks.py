"""What a history must fulfil."""

import gc
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.simulation import left
from tests.simulation.machine import SECOND_NS, START_NS
from tests.simulation.models import RAISES, REFUSED

if TYPE_CHECKING:
    from tests.simulation.world import Request, Traffic, World


def check_history(world: "World") -> None:
    """Check every request, then what they were counted as."""
    raised: dict[str, list[Request]] = {}
    _check_order(world)
    _check_traffic(world)
    for request in world.requests:
        if request.operation.values.get("fault") == RAISES:
            raised.setdefault(request.model.name, []).append(request)
    for request in world.requests:
        executed = world.record.executed[request.number]
        expected = 2 if request.model.role == "ensemble" else 1
        expected += sum(name in world.shadowed for name in _parts(request.model))
        if executed > expected and request.model.role != "cached":
            world.problems.append(f"request {request.number} was executed {executed} times: {request.operation}")
        _check_times(world, request)
        if request.outcome.status == "ok":
            _check_answer(world, request, executed)
        elif request.outcome.status in ("error", "broken", "refused"):
            reason = _unexplained(world, request, raised)
            if reason:
                world.problems.append(f"request {request.number} {reason}: {request.outcome}: {request.operation}")


def _check_traffic(world: "World") -> None:
    """Check that the versions get their shares, and how canary plans end."""
    if world.scenario.options["control"] not in ("explicit", "poll") or world.outages or world.harmed:
        return
    for change in world.traffics:
        of_model = [each for each in world.traffics if each.model == change.model and each is not change]
        if change.kind != "weights" or change.status != "ok" or any(each.end_s > change.begin_s for each in of_model):
            continue  # only the first change of all is alone
        end_s = min((each.begin_s for each in of_model), default=world.leaving_s)
        near = [
            each
            for each in world.requests
            if each.model.name == change.model and not each.operation.values.get("version")
            if each.end_s > change.begin_s and each.begin_s < end_s
        ]
        inside = [
            each for each in near if each.begin_s > change.end_s and each.end_s < end_s and each.outcome.status == "ok"
        ]
        expected, found = change.share * len(inside), sum(each.version == 1 for each in inside)
        if abs(found - expected) > SHARE_ERROR + len(near) - len(inside):
            world.problems.append(
                f"{found} of {len(inside)} requests went to version 1 of {change.model}, {expected:.0f} were expected"
            )
    for name, traffic in world.plans.items():
        accepted = [each for each in world.traffics if each.model == name and each.status == "ok"]
        kinds = [each.kind for each in accepted]
        if traffic["canary"] is None or any(_overlap(one, other) for one in accepted for other in accepted):
            continue
        plans = [number for number, kind in enumerate(kinds) if "canary" in kind]
        state, actions = traffic["canary"]["state"], kinds[plans[-1] + 1 :] if plans else []
        expected_states = {"abort": {"aborted"}, "promote": {"finished"}, "pause": {"paused"}}.get(
            actions[0] if actions else "", {"running"} if plans and kinds[plans[-1]] == "long canary" else {"finished"}
        )
        # An action may come after the end; errors and versions that are loaded again roll a plan back.
        is_changed = any(each.model == name for each in world.changes)
        has_errors = any(each.model.name == name and each.outcome.status != "ok" for each in world.requests)
        expected_states |= {"rolled_back"} if is_changed or has_errors else set()
        expected_states |= {"finished"} if actions else set()
        if not plans or state not in expected_states:
            world.problems.append(f"the canary plan of {name} is {state} after {kinds}: {traffic['canary']}")
        share = sum(each["share"] for each in traffic["versions"] if each["version"] == "2")
        wanted = {"finished": 1.0, "rolled_back": 0.0}.get(state)
        if wanted is not None and share != wanted and kinds[-1] != "weights":
            world.problems.append(f"version 2 of {name} gets {share} of the requests after a plan that is {state}")


def _overlap(one: "Traffic", other: "Traffic") -> bool:
    return one is not other and one.begin_s <= other.end_s and other.begin_s <= one.end_s


def _check_order(world: "World") -> None:
    """Check that a model that preserves the order answers the calls of a connection in their order."""
    last: dict[tuple[int, int], Request] = {}
    for request in world.ended:
        if (
            request.outcome.status == "ok"
            and "preserve_ordering" in request.model.pbtxt
            and "shared" in request.operation.values
            and "leaves_ms" not in request.operation.values  # sent a little later
        ):
            key = request.operation.values["shared"], request.version
            before = last.get(key)
            if before is not None and before.number > request.number and not _overlaps(world.changes, request):
                world.problems.append(
                    f"request {before.number} was answered before {request.number}: {request.operation}"
                )
            last[key] = request


def _check_times(world: "World", request: "Request") -> None:
    """Check that what nobody waits for does not start, and that deadlines hold."""
    values = request.operation.values
    start_s = (world.record.started_ns.get(request.number, 0) - START_NS) / SECOND_NS
    took_s, status = request.end_s - request.begin_s, request.outcome.status
    is_seen = request.model.role not in ("cached", "ensemble") and not values.get("reads_slowly")
    cost = re.search(r'"cost_us" value { string_value: "(\d+)', request.model.pbtxt)
    batch_s = 40 * int(cost[1]) / 1e6 if cost else 0.0  # it may be in a batch that waits behind another one
    is_lost = any(each.begin_s <= start_s and each.end_s >= request.begin_s for each in world.harmed)
    is_waiting = '"worker"' in request.model.pbtxt and is_lost  # its batch, for a new process
    is_late = request.end_s + LATE_S + batch_s < start_s < world.stopped_s  # then all exits
    if is_seen and status != "ok" and is_late and not is_waiting:
        world.problems.append(f"request {request.number} started at {start_s:.3f} s, after its end: {request.outcome}")
    limit_s = values.get("deadline_ms", 1e9) / 1000 + LATE_S
    if took_s > limit_s and not values.get("reads_slowly"):
        world.problems.append(f"request {request.number} outlived its deadline: {request.operation}")
    # Sequences wait for slots, which sequences that their clients have left keep until they are idle for long.
    is_fast = (
        world.scenario.options["theme"] not in ("slow", "restarts", "cached", "timers")
        and request.model.role != "sequence"
    )
    if is_fast and took_s > WAIT_S_MAX and world.scenario.options["control"] == "explicit":
        world.problems.append(f"request {request.number} took {took_s:.1f} s: {request.operation}")
    for away in world.away if world.scenario.options["control"] == "explicit" else ():
        is_inside = away.begin_s < request.begin_s and request.end_s < away.end_s and away.model == request.model.name
        if not (is_inside and status == away.kind == "ok"):
            continue
        others = [each for each in world.changes if each.model == away.model and each.begin_s != away.begin_s]
        if sum(each.begin_s < away.end_s and each.end_s > away.begin_s for each in others) == 1:
            world.problems.append(
                f"request {request.number} was answered by a model that was unloaded: {request.operation}"
            )


def _check_answer(world: "World", request: "Request", executed: int) -> None:
    values, model = request.operation.values, request.model
    where = f"request {request.number} of {model.name} at {request.begin_s:.6f} s"
    if values.get("fault") and model.role != "cached" and not (model.role == "decoupled" and not request.responses):
        world.problems.append(f"{where} should have failed: {request.operation}")
        return
    if model.role not in ("cached", "ensemble") and executed != 1 and model.name not in world.shadowed:
        world.problems.append(f"{where} was answered, and executed {executed} times")
    if model.role == "decoupled":
        if request.responses != values["responses"]:
            world.problems.append(f"{where} had {request.responses} responses, expected {values['responses']}")
        if not request.responses:
            return
    elif request.responses != 1:
        world.problems.append(f"{where} had {request.responses} responses")
    first = request.output[0]
    if request.sums is not None:
        is_whole = all(each.outcome.status == "ok" for each in world.parts_of[request.operation.number])
        if is_whole and first != request.sums:
            world.problems.append(
                f"{where}: the sequence's sum is {first}, expected {request.sums}: {request.operation}"
            )
        return
    if model.role == "ensemble":
        return
    if values.get("version") not in (None, request.version):
        world.problems.append(f"{where} asked for version {values['version']}, got {request.version}")
    generation, version = divmod(first - 3 * request.value, 1000)
    if version != request.version:
        world.problems.append(f"{where}: {request.output} is not what version {request.version} computes")
    elif not request.floor <= generation <= request.ceiling:
        world.problems.append(
            f"{where} was answered by generation {generation}, {request.floor} had been loaded: {request.operation}"
        )


LATE_S = 1.0
"""Time in which news travels and the event loop may be held up."""

CROSSING_S = 0.02
"""Time of a request that meets the end of its connection on the way."""

SHARE_ERROR = 4
"""Requests by which the share of a version may differ: points are spread evenly."""

BUSY_S = 10.0
"""Time after its last answer in which a model may be busy: a sequence is idle, and another model is loaded."""

FINISH_S = 10.0
"""Time that an engine has for its requests after an upgrade."""

WAIT_S_MAX = 25.0
"""Time that a request may take where models are fast: held for an engine for 10 s, and finished by it for 10 s."""

_WORKER_ENDED = "is not healthy|failed to start|has not come back|the process that remembered it|must specify the START"
_SECONDS_AFTER = 0.5


def _overlaps(changes: list, request: "Request", name: str = "") -> bool:  # type: ignore[type-arg]
    return any(
        each.begin_s <= request.end_s
        and each.end_s + _SECONDS_AFTER >= request.begin_s
        and (not name or each.model == name)
        for each in changes
    )


def _unexplained(world: "World", request: "Request", raised: dict[str, list["Request"]]) -> str:
    """Return what is wrong with a request that has failed, "" if its scenario explains it."""
    values, model, text = request.operation.values, request.model, ""
    if request.outcome.body:
        text = bytes(request.outcome.body).decode("utf-8", "replace")
    is_leaving = request.end_s >= world.leaving_s
    is_outage = _overlaps([each for each in world.outages if each.model != "upgrade"], request)
    is_engine_away = _overlaps([each for each in world.outages if each.model == "engine"], request)
    if request.sums is not None and "must specify the START" in text and is_engine_away and _knows_loss(world, request):
        return "got the error of an unknown sequence from the engine after the lost one"
    if request.outcome.status in ("broken", "refused"):
        if request.was_cut or is_leaving or (is_outage and any("front" in each.model for each in world.outages)):
            return ""
        is_http = values["protocol"] in ("json", "binary")
        if is_http and _overlaps(world.outages, request) and request.end_s - request.begin_s < CROSSING_S:
            return ""  # it crossed the end of a connection that was idle
        return "ended with its connection"
    if is_leaving or is_engine_away or _overlaps(world.failures, request):
        return ""
    if values.get("fault") and ("a fault of the model" in text or REFUSED in text):
        return ""
    names = _parts(model)
    has_worker = any('"worker"' in world.models[name].pbtxt for name in names)
    if has_worker and re.search(_WORKER_ENDED, text) and _overlaps(world.harmed, request):
        return ""
    if "a fault of the model" in text:
        near = [each for name in names for each in raised.get(name, ())]
        return "" if any(each.begin_s <= request.end_s for each in near) else "failed for no reason"
    if "Exceeds maximum queue size" in text or "exceeds maximum queue size" in text:
        return "" if model.queue_max else "was refused by a queue without a limit"
    if "is overloaded" in text:
        return ""
    if request.sums is not None and "sequence" in text:
        begun_s = world.parts_of[request.operation.number][0].begin_s
        if any(each.begin_s <= request.end_s and each.end_s + _SECONDS_AFTER >= begun_s for each in world.outages):
            return ""
    if _overlaps(world.outages, request):  # an upgrade
        began_s = min(each.begin_s for each in world.outages if each.end_s + _SECONDS_AFTER >= request.begin_s)
        if re.search("the engine ended before|exit timeout expired|is shutting down", text):
            return "" if request.end_s - began_s >= FINISH_S else "was not finished"
    if "was not loaded in time" in text:  # a worker that hangs takes 10 s to start, and 10 s to be killed
        hangs = has_worker and any(each.begin_s <= request.end_s for each in world.harmed)
        if hangs or _has_busy_models(world, request):
            return ""
    if re.search(r"[Tt]imeout expired|deadline|Deadline", text):
        has_limit = values.get("timeout_us") or values.get("deadline_ms") or "default_timeout" in model.pbtxt
        return "" if has_limit else "timed out without a limit"
    if "batch" in text and values.get("rows", 1) > 1:
        return ""
    is_on_demand = world.scenario.options["control"] in ("auto", "idle")  # files of a bad load may be read
    unloads = [each for each in world.changes if is_on_demand or each.kind != "load"]
    if any(_overlaps(unloads, request, name) for name in names):
        return ""
    loads = [each for each in world.changes if each.kind == "load" and each.model in names]
    if "is damaged" in text and any(
        is_on_demand or any(each.begin_s <= load.end_s and load.begin_s <= each.end_s for each in world.outages)
        for load in loads
        if load.begin_s <= request.end_s
    ):
        return ""  # a load on demand, or the next engine, has read the files of a bad load
    if values.get("region") and _overlaps(world.changes, request, "clients") and "shared memory region" in text:
        return ""
    if is_on_demand:
        is_tried_again = (world.changes or world.failures) and "is tried again in" in text
        is_full = re.search("no room for model|does not fit|could not be loaded within", text)
        if _overlaps(world.changes, request, "disk") or is_tried_again or is_full:
            return ""
    if request.sums is not None and ("sequence" in text.lower()):
        is_idle = _is_idle(values)
        others = world.parts_of[request.operation.number]
        is_broken = values.get("pipelined") and any(each.outcome.status in ("left", "error") for each in others[:-1])
        loads = [each for each in world.changes if each.model == model.name and each.end_s >= others[0].begin_s]
        is_broken = is_broken or sum(each.begin_s <= request.end_s for each in loads) > 1  # one after the other
        is_unloaded = any(each in unloads and each.begin_s <= request.end_s for each in loads)
        return "" if is_idle or is_broken or is_unloaded else "lost its sequence"
    return "failed"


def _knows_loss(world: "World", request: "Request") -> bool:
    """Whether the only front end saw the sequence of a request begin at an engine that has ended since."""
    is_simple = world.scenario.options["front_ends"] == 1 and {each.model for each in world.outages} == {"engine"}
    parts = world.parts_of[request.operation.number]
    is_first = [each.outcome.status for each in parts if each.end_s < request.end_s][-1:] == ["ok"]
    is_changed = any(each.model == request.model.name for each in world.changes)
    return is_simple and is_first and not is_changed and not _is_idle(request.operation.values)


def _has_busy_models(world: "World", request: "Request") -> bool:
    """Whether other models were in the way until the end of a request, which has waited for room in memory."""
    others = [each for each in world.requests if each.model is not request.model and each.outcome.status == "ok"]
    return any(each.begin_s < request.end_s and each.end_s > request.end_s - BUSY_S for each in others)


def _is_idle(values: dict[str, Any]) -> bool:
    """Whether a sequence pauses for so long that it may be over: its requests are late, too."""
    is_late = values.get("reads_slowly") or "shared" in values  # with one that reads slowly
    return bool(values["gap_ms"] + (500 if is_late else 0) > 900)


def _parts(model: object) -> list[str]:
    """Return the names of the models that a request of this one runs."""
    return [model.name, *re.findall(r'model_name: "(\w+)"', model.pbtxt)]  # type: ignore[attr-defined]


def check_quiet(world: "World") -> None:
    """Check that nothing is left over when all clients have gone, and that the counts are right."""
    lifecycle = world.engine._lifecycle
    if lifecycle.table.in_flight():
        world.problem(f"without clients, {lifecycle.table.in_flight()} versions have requests in flight")
    for loaded in lifecycle.table.loaded():
        if loaded.runner.pending or loaded.runner.in_flight:
            world.problem(
                f"without clients, {loaded.runner} has {loaded.runner.pending} waiting, {loaded.runner.in_flight} open"
            )
        if getattr(loaded.runner, "live", 0):
            world.problem(f"without clients, {loaded.runner} has sequences")
        flights = getattr(loaded.runner, "_flights", None)
        if flights is not None and flights._flights:
            world.problem(f"without clients, {loaded.runner} computes responses for its cache")
    instances = sum(loaded.instances for loaded in lifecycle.table.loaded())
    if instances != sum(world.record.open.values()):
        world.problem(f"the models have {instances} instances, open are {+world.record.open}")
    for end in world.endpoints():
        if end.http.open_count or end.grpc.open_count:
            world.problem(f"without clients, {end.http.open_count} and {end.grpc.open_count} connections are open")
    for front_end in world.front_ends:
        engine = front_end._engine.current
        if engine._replies or engine.held._held:
            world.problem(f"without clients, a front end waits for {len(engine._replies)} answers")
    for peer in getattr(world.engine.front_ends, "_peers", ()):
        if peer._open:
            world.problem(f"without clients, the engine has {len(peer._open)} requests of a front end")
    if any(not end.is_gone for end in world.network.ends):
        world.problem("without clients, a connection is open")
    world.network.ends.clear()
    while gc.collect():
        pass  # what finalizers let go is garbage, too
    ended = left.of_ended(world.loop, world.living())
    found = left.kept(ended)
    more = left.by_role(world.left(ended)) - left.by_role(world.calm)
    for each in ("timer TrafficService._check_canaries of engine", *left.POOLED):  # of a canary plan
        more.pop(each, None)
    files = [each.provided for each in lifecycle.table.models.values() if each.provided is not None]
    brought = [each for provided in files for each in (provided, *provided.earlier) if each.override is not None]
    more -= Counter({left.STAGED: 2 * len(brought), left.KEPT: len(world.brought)})
    if found or more:
        names = [*found, *(f"{count} {name}" for name, count in more.items())]
        world.problem(f"without clients, there is more than at the start: {', '.join(names[:8])}")
    _check_counts(world)


def _check_counts(world: "World") -> None:
    """Compare statistics and metrics with the history, for models that were never loaded again."""
    changed = {each.model for each in world.changes}
    for entry in world.counts:
        name, version = entry["name"], int(entry["version"])
        model = world.models[name]
        success = entry["inference_stats"]["success"]["count"]
        found = re.search(
            rf'nv_inference_request_success{{model="{name}",version="{version}"[^}}]*}} (\d+)', world.metrics
        )
        if found is None or int(found[1]) != success:
            world.problem(f"metrics and statistics of {name} disagree: {found and found[1]}, {success}")
        is_steady = world.scenario.options["control"] in ("explicit", "poll") and not world.shadowed
        if changed & {*_parts(model)} or world.outages or model.role == "decoupled" or not is_steady:
            continue
        of_model = [each for each in world.requests if each.model.name == name]
        parts = [each for each in world.requests if name != each.model.name and name in _parts(each.model)]
        if parts:
            continue
        right = sum(each.outcome.status == "ok" and each.version == version for each in of_model)
        unknown = sum(
            each.outcome.status not in ("ok", "error") or bool(each.operation.values.get("deadline_ms"))
            for each in of_model
        )
        if not right <= success <= right + unknown:
            world.problem(f"{name} {version} counts {success} successes, clients saw {right}, and {unknown} open ends")
