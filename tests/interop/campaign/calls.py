"""Random calls on random models, as they go over the wire. Pure.

`scenario(seed)` is always the same for the same seed: a repository, what happens to it, and all that is asked.
"""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToJson
from tests.interop.campaign.models import TYPES, Model, ensemble, model
from tritonclient.grpc import service_pb2 as pb

CALLS = 50
"""Calls of a scenario, between loading its models and reading what was counted."""

EXTREMES: Mapping[str, Sequence[float | str]] = {
    "FP": (0.0, -1.5, 0.1, 65504.0, 3e38),  # Triton reads some numbers of JSON, 1e-45 is one, not quite exactly
    "BYTES": ("", "a", "ü€", 'q"\\\n', "x" * 300),
}


@dataclass(frozen=True)
class Http:
    """One request; `metrics` sends it to that port."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    metrics: bool = False


@dataclass(frozen=True)
class Grpc:
    """One unary call."""

    method: str
    message: Any


@dataclass(frozen=True)
class Stream:
    """One stream of requests; all are sent before an answer is awaited."""

    messages: tuple[Any, ...]


@dataclass(frozen=True)
class Together:
    """Calls that are made at the same time."""

    calls: tuple["Call", ...]


@dataclass(frozen=True)
class Following:
    """Calls of which each continues what those before it began: after a difference the rest is not compared."""

    calls: tuple["Call", ...]


@dataclass(frozen=True)
class Write:
    """Files that appear in the repository."""

    files: Mapping[str, str]


@dataclass(frozen=True)
class Counted:
    """A call that reads what may lag behind: repeated until both say the same, or for some time."""

    call: Http | Grpc


Call = Http | Grpc | Stream | Together | Following | Write | Counted


@dataclass(frozen=True)
class Scenario:
    """A repository and the calls on it."""

    seed: int
    models: tuple[Model, ...]
    calls: tuple[Call, ...]

    @property
    def batching(self) -> frozenset[str]:
        """Names of the models that put several requests into a batch."""
        return frozenset(entry.name for entry in self.models if entry.config.HasField("dynamic_batching"))

    def has_decoupled_steps(self, name: str) -> bool:
        """Return whether this model is an ensemble with a step that may answer more than once."""
        steps = {
            step.model_name for one in self.models if one.name == name for step in one.config.ensemble_scheduling.step
        }
        return any(one.config.model_transaction_policy.decoupled for one in self.models if one.name in steps)

    def used_by(self, call: Call) -> frozenset[str]:
        """Return the names of the models that a call reaches; all of them if it is about the server."""
        text = str(call)
        named = {entry.name for entry in self.models if re.search(rf"{entry.name}\b", text)}
        if not named:
            return frozenset(entry.name for entry in self.models)
        for entry in self.models:
            if entry.name in named:
                named |= {step.model_name for step in entry.config.ensemble_scheduling.step}
        return frozenset(named)


def request_count(call: Call) -> int:
    """Return the number of requests that a call makes, each message of a stream being one."""
    match call:
        case Stream():
            return len(call.messages)
        case Together() | Following():
            return sum(map(request_count, call.calls))
        case Write():
            return 0
        case _:
            return 1


def is_control(call: Call) -> bool:
    """Return whether the call loads or unloads a model."""
    match call:
        case Http():
            return call.path.endswith(("/load", "/unload"))
        case Grpc():
            return call.method.startswith("RepositoryModel")
        case _:
            return False


def scenario(seed: int) -> Scenario:
    """Return the scenario of this seed."""
    rng = Random(seed)
    palette = [
        (rng.choice(TYPES), [rng.choice([-1, -1, 1, 2, 3]) for _ in range(rng.choice([1, 1, 2, 3]))]) for _ in range(3)
    ]
    models = [model(rng, f"s{seed}_{letter}", palette) for letter in "abc"[: rng.choice([2, 3])]]
    loads = Together(tuple(_control(rng, entry, "load") for entry in models))
    # A step that lacks its sequence ends Triton.
    members = [entry for entry in models if not entry.is_faulty and not entry.config.HasField("sequence_batching")]
    ensembles = [
        ensemble(rng, f"s{seed}_e{number}", members) for number in range(rng.choice([0, 1, 2]) if members else 0)
    ]
    models += ensembles
    calls: list[Call] = [loads, *(_control(rng, entry, "load") for entry in ensembles)]
    for entry in models:
        calls += [_read(rng, entry.name, "config"), _read(rng, entry.name, "")]
    source = _Source(rng, models)
    while len(calls) < CALLS:
        calls += source.calls()
    calls.append(Counted(Http("POST", "/v2/repository/index")))
    for entry in models:
        calls.append(Counted(_read(rng, entry.name, "stats")))
        calls.append(Counted(Http("GET", f"/metrics?{entry.name}", metrics=True)))
    calls += [_control(rng, entry, "unload") for entry in reversed(models)]
    return Scenario(seed, tuple(models), tuple(calls))


@dataclass(frozen=True)
class Tensor:
    """A tensor of a request; elements of BYTES are objects of type bytes."""

    name: str
    datatype: str
    array: Any
    shape: tuple[int, ...]

    def raw(self) -> bytes:
        """Return its elements as the protocol's bytes."""
        if self.datatype == "BYTES":
            return b"".join(struct.pack("<I", len(text)) + text for text in self.array.ravel().tolist())
        return bytes(self.array.tobytes())

    def listed(self, nested: bool) -> Any:
        """Return its elements as JSON has them."""
        array = self.array
        if self.datatype == "BYTES":
            array = np.vectorize(bytes.decode, otypes=[object])(array) if array.size else array
        return (array if nested else array.ravel()).tolist()


@dataclass(frozen=True)
class Inference:
    """A request for inference before it is encoded."""

    model: str
    inputs: tuple[Tensor, ...]
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    decoupled: bool = False

    def http(self, rng: Random) -> Http:
        """Encode it for HTTP: each tensor in JSON or in binary."""
        blobs, inputs = [], []
        binary = rng.choice([0, 0.5, 1])
        for tensor in self.inputs:
            entry: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype}
            if rng.random() < binary or (tensor.datatype == "FP16" and (not tensor.array.size or rng.random() < 0.9)):
                blobs.append(tensor.raw())
                entry["parameters"] = {"binary_data_size": len(blobs[-1])}
            else:
                entry["data"] = tensor.listed(rng.random() < 0.5)
            inputs.append(entry)
        document: dict[str, Any] = {"inputs": inputs}
        if self.id:
            document["id"] = self.id
        parameters = dict(self.parameters)
        if rng.random() < 0.3:
            parameters["binary_data_output"] = rng.random() < 0.8
        if parameters:
            document["parameters"] = parameters
        if self.outputs:
            document["outputs"] = []
            for name, about in self.outputs:
                about = {**about, **({"binary_data": rng.random() < 0.7} if rng.random() < 0.4 else {})}
                document["outputs"].append({"name": name, **({"parameters": about} if about else {})})
        head = json.dumps(document, ensure_ascii=rng.random() < 0.5).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))} if blobs else {}
        return Http("POST", self._path("infer"), head + b"".join(blobs), headers)

    def grpc(self, rng: Random, **flags: bool) -> Any:
        """Return its message, with raw or with typed contents."""
        message = pb.ModelInferRequest(model_name=self.model, model_version=self.version, id=self.id)
        raw = rng.random() < 0.6
        for tensor in self.inputs:
            given = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            if raw or tensor.datatype == "FP16":
                message.raw_input_contents.append(tensor.raw())
            else:
                getattr(given.contents, _contents(tensor.datatype)).extend(tensor.array.ravel().tolist())
        for name, about in self.outputs:
            _parameters(message.outputs.add(name=name), about)
        _parameters(message, {**self.parameters, **flags})
        return message

    def generate(self, stream: bool) -> Http:
        """Encode it for the generate routes."""
        document: dict[str, Any] = {tensor.name: tensor.listed(False) for tensor in self.inputs}
        known = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end")
        # Charonia obeys these here, Triton hands them to the model.
        parameters = {key: value for key, value in self.parameters.items() if key not in known}
        document |= {"parameters": parameters} if parameters else {}
        document |= {"id": self.id} if self.id else {}
        return Http("POST", self._path("generate_stream" if stream else "generate"), json.dumps(document).encode())

    def _path(self, action: str) -> str:
        version = f"/versions/{self.version}" if self.version else ""
        return f"/v2/models/{self.model}{version}/{action}"


class _Source:
    """Draws calls; it knows which sequence is open, as a model may have room for no second one."""

    def __init__(self, rng: Random, models: Sequence[Model]) -> None:
        self._rng, self._models = rng, models
        self._ids = iter(range(1, 1 << 30))

    def calls(self) -> list[Call]:
        """Return the next calls."""
        rng = self._rng
        entry = rng.choice(self._models)
        choice = rng.random()
        if entry.config.HasField("sequence_batching") and choice < 0.6:
            return self._sequence(entry)
        if choice < 0.55:
            inference = self._inference(entry, calls=True)
            return [self._over_a_protocol(inference)]
        if choice < 0.65:
            return [self._inference(entry).generate(rng.random() < 0.6)]
        if choice < 0.77:
            requests = [self._inference(rng.choice([entry, *self._models])) for _ in range(rng.randint(1, 4))]
            named = [replace(request, id=f"{request.id} {index}") for index, request in enumerate(requests)]
            return [Stream(tuple(self._streamed(request) for request in named))]
        if choice < 0.82 and not entry.config.HasField("sequence_batching"):
            parts = [self._over_a_protocol(self._inference(entry)) for _ in range(rng.randint(2, 6))]
            return [Together(tuple(parts))]
        if choice < 0.9:
            return [_read(rng, rng.choice([entry.name] * 9 + ["unknown"]), rng.choice(["", "ready", "config"]), True)]
        if choice < 0.94:
            return [Counted(_read(rng, entry.name, "stats"))]
        return self._changes(entry)

    def _over_a_protocol(self, inference: Inference) -> Call:
        # Outside of a stream Triton refuses it, where Charonia may have begun a sequence.
        if inference.decoupled and (self._rng.random() < 0.9 or "sequence_id" in inference.parameters):
            return Stream((self._streamed(inference),))
        if self._rng.random() < 0.55:
            return inference.http(self._rng)
        return Grpc("ModelInfer", inference.grpc(self._rng))

    def _streamed(self, inference: Inference) -> Any:
        flags = {"triton_enable_empty_final_response": True} if self._rng.random() < 0.4 else {}
        return inference.grpc(self._rng, **flags)

    def _inference(self, entry: Model, *, calls: bool = False) -> Inference:
        """Return a request for this model, one in four with a fault."""
        inference = self._sound(entry, self._parameters(entry, calls))
        return self._faulty(inference) if self._rng.random() < 0.25 else inference

    def _sound(self, entry: Model, parameters: Mapping[str, Any]) -> Inference:
        rng, config = self._rng, entry.config
        variable, rows = (
            rng.choice([1, 2, 5, 1 if entry.is_ensemble else 0]),
            rng.randint(1, max(1, config.max_batch_size)),
        )
        if config.HasField("sequence_batching"):
            rows = 1
        batch = (rows,) if config.max_batch_size else ()
        inputs = []
        for tensor in config.input:
            if tensor.optional and rng.random() < 0.4:
                continue
            shape = batch + tuple(variable if size == -1 else size for size in tensor.dims)
            inputs.append(_tensor(rng, tensor.name, _datatype(tensor), shape))
        names = [output.name for output in config.output]
        texts = {output.name for output in config.output if _datatype(output) == "BYTES"}  # classes of them end Triton
        outputs: tuple[tuple[str, Mapping[str, Any]], ...] = ()
        if rng.random() < 0.4 and names:
            chosen = rng.sample(names, rng.randint(1, len(names)))
            few = all(tensor.array.size <= 16 for tensor in inputs)  # Triton's order of equal values is theirs then too
            classes = [{}, {}, {}, {}, {}, {"classification": rng.choice([1, 2, 9])} if few else {}]
            outputs = tuple((name, {} if name in texts else rng.choice(classes)) for name in chosen)
        version = rng.choice([*map(str, entry.versions)]) if rng.random() < 0.3 else ""
        named = rng.choice(["", "", "7", "an id", "ü"])
        return Inference(entry.name, tuple(inputs), version, named, parameters, outputs, self._decoupled(entry))

    def _decoupled(self, entry: Model) -> bool:
        used = {entry.name, *(step.model_name for step in entry.config.ensemble_scheduling.step)}
        return any(other.config.model_transaction_policy.decoupled for other in self._models if other.name in used)

    def _parameters(self, entry: Model, calls: bool) -> dict[str, Any]:
        rng = self._rng
        parameters: dict[str, Any] = {}
        if rng.random() < 0.3:
            values = [1, -5, 2**40, True, False, "text", "", 0.5, -1e300]
            parameters |= {key: rng.choice(values) for key in rng.sample(["p", "q", "a b", "ü", "headers"], 2)}
        if rng.random() < 0.1:
            parameters["priority"] = rng.choice([0, 1, 2, 9])
        if rng.random() < 0.1:
            parameters["timeout"] = rng.choice([0, 15_000_000])
        todo = rng.random()
        if todo < 0.06:
            codes = ["UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS"]
            parameters |= {"fail": rng.choice(codes), "fail_at": rng.choice([0, 0, 1])}
        elif todo < 0.08 and calls:  # of requests in one batch it would end all
            parameters["raise"] = True
        elif todo < 0.14:
            # Wrong tensors within an ensemble end Triton.
            what = "omit" if entry.is_ensemble else rng.choice(["omit", "omit", "mistype", "misshape"])
            parameters[what] = rng.choice(["OUT0", "OUT1", "SEEN"])
        elif todo < 0.2 and calls and not entry.is_ensemble:
            others = [other for other in self._models if other.name != entry.name and not other.is_ensemble]
            called = rng.choice(others)
            parameters |= {"call": rng.choice([called.name] * 9 + ["unknown"])}
            parameters |= {"call_decoupled": True} if rng.random() < 0.5 else {}
        if rng.random() < 0.04:
            parameters |= {"sequence_id": rng.choice([7, "a"]), "sequence_end": rng.random() < 0.5}
        if entry.is_ensemble:
            parameters["in_ensemble"] = True
        if todo > 0.7:
            parameters["count"] = rng.choice([0, 1, 2, 3])
        if todo > 0.85:
            parameters["final_apart"] = True
        return parameters

    def _faulty(self, inference: Inference) -> Inference:
        rng, inputs = self._rng, inference.inputs
        if not inputs:
            return inference
        first, *rest = inputs
        shapes = [(*first.shape, 1), first.shape[1:], (1, *first.shape), (99, *first.shape[1:])]
        wrong: Sequence[tuple[Tensor, ...]] = (
            tuple(rest),
            (replace(first, name="X"), *rest),
            (*inputs, replace(first, name="X")),
            (first, *inputs),
            (_tensor(rng, first.name, rng.choice(["FP32", "INT32", "BYTES"]), first.shape), *rest),
            (_tensor(rng, first.name, first.datatype, rng.choice(shapes)), *rest),
            (replace(first, shape=(*first.shape, 2)), *rest),
        )
        keys: Sequence[dict[str, Any]] = ({"triton_x": 1}, {"priority": -1}, {"timeout": "a"}, {"sequence_start": 1})
        changes: Sequence[dict[str, Any]] = (
            *({"inputs": given} for given in wrong),
            {"outputs": (("X", {}),)},
            {"outputs": (("OUT0", {}), ("OUT0", {}))},
            {"version": rng.choice(["55", "0"])},
            {"model": "unknown"},
            {"parameters": {**inference.parameters, **rng.choice(keys)}},
        )
        return replace(inference, **rng.choice(changes))

    def _sequence(self, entry: Model) -> list[Call]:
        """Return the calls of one sequence, from its start to its end, sometimes with a fault."""
        rng = self._rng
        number = next(self._ids)
        key = rng.choice(_keys(entry, number))
        length = rng.randint(1, 4)
        found: list[Call] = []
        for index in range(length):
            flags = {"sequence_id": key, "sequence_start": index == 0, "sequence_end": index == length - 1}
            flags = {key: value for key, value in flags.items() if value is not False or rng.random() < 0.3}
            if index == 0 and rng.random() < 0.15:
                flags |= rng.choice([{"sequence_start": False}, {"sequence_id": 0}, {"sequence_id": ""}])
                length = 1
            inference = self._inference(entry)
            inference = replace(inference, parameters={**inference.parameters, **flags})
            if rng.random() < 0.25:
                found.append(Stream((self._streamed(inference),)))
            else:
                found.append(self._over_a_protocol(inference))
            if length == 1:
                break
        end = self._sound(entry, {"sequence_id": key, "sequence_end": True})
        return [Following((*found, Stream((replace(end, version="").grpc(rng),))))]

    def _changes(self, entry: Model) -> list[Call]:
        """Return calls that change which models there are."""
        rng = self._rng
        match rng.randrange(6):
            case 0:
                return [_control(rng, entry, "unload"), _read(rng, entry.name, "ready")]
            case 1 if not entry.is_ensemble:
                added = replace(entry, versions=(9,)).folder()
                files = {path: text for path, text in added.items() if "/9/" in path}
                return [Write(files), _control(rng, entry, "load"), _read(rng, entry.name, "")]
            case 2:
                other = type(entry.config)()
                other.CopyFrom(entry.config)
                other.metric_tags["over"] = "written"
                text = MessageToJson(other, preserving_proto_field_name=True)
                return [_control(rng, entry, "load", text), _read(rng, entry.name, "config")]
            case 3:
                return [Counted(Http("POST", "/v2/repository/index", rng.choice([b"", b'{"ready":true}'])))]
            case _:
                return [_control(rng, entry, "load"), _read(rng, entry.name, "config")]


def _keys(entry: Model, number: int) -> Sequence[int | str]:
    """Return ids of sequences that fit what the model takes them as."""
    for given in entry.config.sequence_batching.control_input:
        if given.name == "CORRID":
            kind = _datatype(given.control[0])
            return [f"text {number}"] if kind == "BYTES" else [number] if "32" in kind else [number, 2**40 + number]
    return [number, number, 2**40 + number, f"text {number}"]


def _read(rng: Random, name: str, what: str, versions: bool = False) -> Http | Grpc:
    version = rng.choice(["", "", "1", "2", "3", "55"]) if versions else ""
    if rng.random() < 0.5:
        path = f"/v2/models/{name}" + (f"/versions/{version}" if version else "") + (f"/{what}" if what else "")
        return Http("GET", path)
    kind = {"": "Metadata", "ready": "Ready", "config": "Config", "stats": "Statistics"}[what]
    return Grpc(f"Model{kind}", getattr(pb, f"Model{kind}Request")(name=name, version=version))


def _control(rng: Random, entry: Model, action: str, config: str = "") -> Http | Grpc:
    if rng.random() < 0.7:
        document: dict[str, Any] = {"parameters": {"config": config}} if config else {}
        return Http("POST", f"/v2/repository/models/{entry.name}/{action}", json.dumps(document).encode())
    message = getattr(pb, f"RepositoryModel{action.title()}Request")(model_name=entry.name)
    if config:
        message.parameters["config"].string_param = config
    return Grpc(f"RepositoryModel{action.title()}", message)


def _tensor(rng: Random, name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
    size = int(np.prod(shape))
    if datatype == "BYTES":
        texts = [rng.choice(EXTREMES["BYTES"]) for _ in range(size)]
        array = np.array([str(text).encode() for text in texts] + [None], object)[:-1]
    elif datatype == "BOOL":
        array = np.array([rng.random() < 0.5 for _ in range(size)], bool)
    elif datatype.startswith("FP"):
        with np.errstate(over="ignore"):
            array = np.array([rng.choice(EXTREMES["FP"]) for _ in range(size)], f"<f{int(datatype[2:]) // 8}")
    else:
        dtype = np.dtype(datatype.lower())
        limits = np.iinfo(dtype)
        array = np.array([rng.choice([0, 1, 100, limits.min, limits.max]) for _ in range(size)], dtype)
    return Tensor(name, datatype, array.reshape(shape), shape)


def _datatype(tensor: Any) -> str:
    kinds = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    name = str(kinds[tensor.data_type].name).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _contents(datatype: str) -> str:
    small = {"INT8": "int", "INT16": "int", "INT32": "int", "UINT8": "uint", "UINT16": "uint", "UINT32": "uint"}
    return f"{small.get(datatype, datatype.lower())}_contents"


def _parameters(message: Any, parameters: Mapping[str, Any]) -> None:
    for key, value in parameters.items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        setattr(message.parameters[key], f"{kind}_param", value)
