"""Scenarios: a repository, clients and faults, drawn from a seed. Any operation can be left out."""

import random
from dataclasses import dataclass, field
from typing import Any

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the repository.

    Attributes:
        role: "plain", "cached", "sequence", "decoupled" or "ensemble".
        versions: Versions in its folder.
        queue_max: Requests that may wait, 0 for any number.
    """

    name: str
    role: str
    pbtxt: str
    versions: tuple[int, ...] = (1,)
    queue_max: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """What is done to the server at a time.

    Attributes:
        number: Its number in the history.
        at_s: Time since the server is ready.
        kind: Name of a method of `world.World`.
    """

    number: int
    at_s: float
    kind: str
    model: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        values = " ".join(f"{key}={value}" for key, value in self.values.items())
        return f"{self.at_s:9.4f} s  #{self.number} {self.kind} {self.model} {values}".rstrip()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario.

    Attributes:
        injected: What happens before the callback of the event loop with its number, counted from the first request.
    """

    seed: int
    shape: str
    seconds: float
    models: tuple[Model, ...]
    operations: tuple[Operation, ...]
    options: dict[str, Any]
    injected: Operation | None = None


def _tensors(batched: bool, dims: str = "[4]") -> str:
    return (
        f'input {{ name: "INPUT" data_type: TYPE_INT32 dims: {dims} }}\n'
        f'output {{ name: "OUTPUT" data_type: TYPE_INT32 dims: {dims} }}\n'
    )


_CONTROLS = """
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] } }
"""

THEMES = {
    "": ("plain", "plain", "cached", "sequence", "decoupled"),
    "slow": ("plain", "plain", "cached", "sequence", "decoupled"),
    "restarts": ("plain", "sequence", "sequence", "decoupled"),
    "cached": ("cached",),
    "ordered": ("plain", "plain", "decoupled"),
    "timers": ("plain", "plain", "cached"),
    "sequences": ("sequence",),
    "demand": ("plain", "plain", "sequence"),
    "canaries": ("plain",),
    "changes": ("plain", "plain", "cached"),
}
"""Situations and the roles of their models: anything, queues behind slow models, ends of processes, the cache, order of
answers, timeouts, more sequences than slots, loads on demand, canary plans, and changes of models among ends of
processes."""


def _model(chance: random.Random, number: int, role: str, theme: str) -> Model:
    name = f"{role}{number}"
    batch = chance.choice((0, 1, 4, 8)) if role in ("plain", "cached") else chance.choice((1, 4))
    batch = 1 if theme == "sequences" else chance.choice((1, 4, 8)) if theme in ("ordered", "timers") else batch
    is_slow = theme == "slow" or (theme in ("restarts", "cached", "timers") and chance.random() < 0.5)
    cost_us = round(10 ** (chance.uniform(4.3, 5.3) if is_slow else chance.uniform(1, 4.3)))
    kind = "elsewhere"
    if role in ("plain", "cached", "sequence"):
        kind = chance.choice(("blocking", "elsewhere", "worker"))
    lines = [f'backend: "simulated"\nmax_batch_size: {batch}', _tensors(batch > 0)]
    lines.append(f'parameters {{ key: "cost_us" value {{ string_value: "{cost_us}" }} }}')
    lines.append(f'parameters {{ key: "kind" value {{ string_value: "{kind}" }} }}')
    lines.append(f"instance_group {{ count: {chance.randint(2 if theme == 'ordered' else 1, 3)} kind: KIND_CPU }}")
    queue_max = 0
    is_timed = theme == "timers"
    if role in ("plain", "cached", "decoupled") and batch and (theme in ("ordered", "timers") or chance.random() < 0.7):
        queue_max = chance.choice((0, 0, 4, 30))
        timeout_us = chance.choice((1_000, 5_000, 20_000) if is_timed else (0, 0, 20_000, 200_000))
        delay_us = chance.choice((0, 100, 3_000, 30_000, 1_000_000) if is_timed else (0, 100, 3_000, 30_000))
        policy = f"max_queue_size: {queue_max} default_timeout_microseconds: {timeout_us} allow_timeout_override: true"
        preferred = f"preferred_batch_size: [{batch}]" if batch > 1 and chance.random() < 0.4 else ""
        is_ordered = chance.random() < (0.9 if theme == "ordered" else 0.3) and role != "cached"
        order = "preserve_ordering: true" if is_ordered else ""
        policy += " timeout_action: DELAY" if chance.random() < 0.2 and not is_ordered else ""
        levels = "priority_levels: 2 default_priority_level: 2" if chance.random() < 0.4 and not order else ""
        lines.append(
            f"dynamic_batching {{ max_queue_delay_microseconds: {delay_us} {preferred} {order} {levels} "
            f"default_queue_policy {{ {policy} }} }}"
        )
    if role == "cached":
        lines.append("response_cache { enable: true }")
    if role == "decoupled":
        lines.append("model_transaction_policy { decoupled: true }")
    if role == "sequence":
        strategy = chance.choice(("direct { }", f"oldest {{ max_candidate_sequences: {chance.choice((4, 8))} }}"))
        lines.append(
            f"sequence_batching {{ max_sequence_idle_microseconds: {chance.choice((1_000_000, 5_000_000))} "
            f"{strategy} {_CONTROLS} }}"
        )
    share = {"demand": 0.8, "canaries": 0.8, "ordered": 0.0}.get(theme, 0.4)
    versions = (1, 2) if role == "plain" and chance.random() < share else (1,)
    if len(versions) > 1:
        lines.append("version_policy { all { } }")
    return Model(name, role, "\n".join(lines) + "\n", versions, queue_max)


def _ensemble(number: int, first: Model, second: Model) -> Model:
    steps = "".join(
        f'step {{ model_name: "{model.name}" model_version: -1 input_map {{ key: "INPUT" value: "{source}" }} '
        f'output_map {{ key: "OUTPUT" value: "{target}" }} }}\n'
        for model, source, target in ((first, "INPUT", "MIDDLE"), (second, "MIDDLE", "OUTPUT"))
    )
    text = f'platform: "ensemble"\nmax_batch_size: 0\n{_tensors(False)}ensemble_scheduling {{ {steps} }}\n'
    return Model(f"ensemble{number}", "ensemble", text)


FREQUENT = {
    "canaries": ("traffic", "canary"), "ordered": ("burst",), "restarts": ("load",),
    "sequences": ("harm_worker",), "timers": ("burst",),
}  # fmt: skip
"""Control and faults that themes have most of."""

CONTROLS = {
    "": ("explicit", "explicit", "auto", "idle", "poll"), "demand": ("auto", "idle"), "changes": ("explicit",),
}  # fmt: skip

SHARES = {
    "fault": 0.03, "leaves_ms": 0.08, "deadline_ms": 0.1, "timeout_us": 0.05, "rows": 0.05, "reads_slowly": 0.02,
    "version": 0.3, "stops_after": 0.05, "pipelined": 0.2, "shared": 0.5, "region": 0.1,
    "pauses": 0.1,
}  # fmt: skip
"""Share of the requests with each property; a scenario leaves some out, and has more of others."""


def draw(seed: int, seconds: float = 0.0, rate: float = 0.0, shape: str = "", theme: str | None = None) -> Scenario:
    """Return the scenario of a seed, which draws the length, the rate, the shape and the theme that are not given.

    Most are short, have few models and much of a few kinds of operations: two events meet more often in them.
    """
    chance = random.Random(f"scenario {seed}")
    drawn = chance.choice(("", *THEMES))
    theme = drawn if theme is None else theme
    has_ends = theme in ("restarts", "changes")  # of processes
    seconds = seconds or chance.choice((4.0, 8.0) if has_ends else (1.0, 2.0, 2.0, 4.0, 8.0))
    is_rare = theme in ("slow", "restarts", "sequences")
    rates = (1.0, 3.0, 100.0) if theme == "demand" else (30.0, 100.0, 300.0)  # or no model is ever idle
    rate = rate or chance.choice((10.0, 30.0) if is_rare else rates)
    shares = {name: min(share * chance.choice((0, 1, 1, 8)), 0.8) for name, share in SHARES.items()}
    shares["rows"] = max(shares["rows"], 0.3) if theme == "timers" else shares["rows"]  # whole batches do not wait
    count = chance.choice((1, 1, 2, 3, 8))
    roles = chance.choices(THEMES[theme], k=count)
    models = [_model(chance, number, role, theme) for number, role in enumerate(roles)]
    unbatched = [m for m in models if m.role == "plain" and "max_batch_size: 0" in m.pbtxt and len(m.versions) == 1]
    if len(unbatched) > 1:
        models.append(_ensemble(len(models), *unbatched[:2]))
    shape = shape or ("apart" if has_ends else chance.choice(("one", "one", "one", "apart")))
    operations: list[Operation] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(rate)) < seconds:
        operations.append(_request(chance, shares, len(operations), at_s, chance.choice(models)))
    controlled = [model for model in models if model.role != "ensemble"]
    controls = {"load": 0.15, "unload": 0.03, "statistics": 0.1, "traffic": 0.05, "canary": 0.03, "index": 0.1}
    for kind, per_s in controls.items():
        often: tuple[int, ...] = (5, 10) if kind in FREQUENT.get(theme, ()) else (0, 1, 10)
        often = (10, 30) if theme == "changes" and kind == "unload" else often
        for _ in range(_poisson(chance, per_s * seconds * chance.choice(often))):
            model = chance.choice(controlled)
            values: dict[str, Any] = {"is_bad": True} if kind == "load" and chance.random() < 0.2 else {}
            if kind == "canary":
                action = chance.choice(("", "", "abort", "promote", "pause"))
                values = {"shadow": chance.random() < 0.5, "action": action}
            if kind == "unload":
                values = {"back_s": round(chance.uniform(0.01, 8 if has_ends else 2), 3)}
            operations.append(Operation(len(operations), chance.uniform(0, seconds), kind, model.name, values))
    faults = [("cut", 0.5), ("wall_clock", 0.02), ("burst", 0.15), ("disk", 0.05)]
    if shares["region"]:
        faults += [("regions", 0.1)]
    if any('"worker"' in model.pbtxt for model in models):
        faults += [("harm_worker", 0.1)]
    frequent: tuple[str, ...] = ()
    if shape == "apart":
        ends = ("kill_engine", "kill_front_end", "upgrade")
        if has_ends:
            frequent = chance.choice((ends, ends[:1], ends[2:], ends[:2], ends[1:]))
        faults += [(kind, 0.03) for kind in frequent or ends]
    for kind, per_s in faults:
        most: tuple[int, ...] = (3, 8) if kind in frequent else (0, 1, 10)
        most = (10,) if kind in FREQUENT.get(theme, ()) else most
        for _ in range(_poisson(chance, per_s * seconds * chance.choice(most))):
            values = {"down_s": round(10 ** chance.uniform(-2, 0.3), 3), "pick": chance.randrange(1000)}
            model = chance.choice(models)
            if kind == "burst":
                start_s = chance.uniform(0, seconds)
                protocols = ("grpc",) if model.role == "sequence" else ("grpc", "stream", "json")
                protocol = chance.choice(protocols)
                shared = {"protocol": protocol, "shared": len(operations)} if chance.random() < shares["shared"] else {}
                pause_s = chance.choice((0.0, 0.0, 0.001, 0.02))
                for index in range(chance.randint(5, 15) if theme == "slow" else chance.randint(20, 60)):
                    operation = _request(chance, shares, len(operations), start_s + index * pause_s, model)
                    operation.values.update(shared if model.role != "decoupled" else {})
                    if operation.values["protocol"] != "grpc":
                        for each in ("leaves_ms", "deadline_ms", "pipelined") if shared else ("deadline_ms",):
                            operation.values.pop(each, None)
                    operations.append(operation)
                continue
            if kind == "kill_engine" and chance.random() < 0.2:
                values["again"] = chance.randint(2, 6)
            if kind == "upgrade" and chance.random() < 0.6:  # a process is killed after one of its steps
                values |= {"step": chance.randint(1, 5), "role": chance.choice(("engine", "engine", "front_end"))}
            at_s = chance.uniform(0, seconds)
            anchors = [each.at_s for each in operations if each.kind not in ("request", "cut")]
            if anchors and chance.random() < 0.5:  # soon after something else
                at_s = chance.choice(anchors) + chance.expovariate(5)
            operations.append(Operation(len(operations), at_s, kind, "", values))
    operations.sort(key=lambda each: (each.at_s, each.number))
    options: dict[str, Any] = {
        "exit_timeout_secs": chance.choice((1, 5)),
        "cache_bytes": chance.choice((0, 4096, 1 << 20)),
        "front_ends": chance.choice((2, 3) if theme == "changes" else (1, 1, 2, 3)),
        "exits_busy": chance.random() < 0.5,
        "control": chance.choice(CONTROLS.get(theme, CONTROLS[""])),
        "theme": theme,
        "starts_s": chance.choice((0.5, 0.5, 15.0)) if theme == "restarts" else 0.5,
        "late": chance.choice((0.02, 0.3)) if has_ends else 0.02,  # share of messages that processes read late
        "memory_mb": chance.choice((2, 3, 100)),
        "regions": shares["region"] > 0,
        "inline_bytes": chance.choice((32, 65536, 65536)),  # larger tensors travel in shared memory
    }
    return Scenario(seed, shape, seconds, tuple(models), tuple(operations), options)


def _poisson(chance: random.Random, mean: float) -> int:
    count, product = 0, chance.random()
    limit = 2.718281828459045**-mean
    while product > limit and count < 1000:
        product *= chance.random()
        count += 1
    return count


def _request(
    chance: random.Random, shares: dict[str, float], number: int, at_s: float, model: Model
) -> Operation:  # fmt: skip
    def has(name: str) -> bool:
        return chance.random() < shares[name]

    values: dict[str, Any] = {"protocol": chance.choice(("json", "binary", "grpc", "grpc", "stream"))}
    if model.role == "sequence":
        exponent = chance.uniform(2.5, 2.9) if has("pauses") else chance.uniform(0, 2.5)
        values |= {"length": chance.randint(1, 6), "gap_ms": round(10**exponent, 2)}
        if has("stops_after"):
            values["stops_after"] = chance.randint(1, values["length"])
        if has("pipelined"):
            values |= {"pipelined": True, "protocol": "grpc"}
    if model.role == "decoupled":
        values |= {"protocol": "stream", "responses": chance.choice((0, 1, 2, 5))}
    if has("fault"):
        values["fault"] = chance.choice((-1, -2))
    if has("leaves_ms"):
        values["leaves_ms"] = round(10 ** chance.uniform(-1, 2.5), 3)
    if values["protocol"] == "grpc" and has("deadline_ms"):
        values["deadline_ms"] = round(10 ** chance.uniform(0, 3), 1)
    if model.role == "plain" and "dynamic_batching" in model.pbtxt and has("timeout_us"):
        values["timeout_us"] = chance.choice((1_000, 50_000))
    if "priority_levels" in model.pbtxt:
        values["priority"] = chance.choice((0, 1, 2))
    if model.role in ("plain", "cached") and has("rows"):
        values["rows"] = chance.choice((2, 4, 8, 9))
    if model.role == "cached":
        values["repeat"] = chance.randrange(3 if "default_timeout" in model.pbtxt or number % 2 else 50)
    if model.role != "decoupled" and values["protocol"] != "stream" and has("region"):
        values["region"] = True
    if has("reads_slowly"):
        values["reads_slowly"] = True
    if len(model.versions) > 1 and has("version"):
        values["version"] = chance.choice(model.versions)
    return Operation(number, at_s, "request", model.name, values)
