"""Random models: configurations, folders, and ensembles over them. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelSequenceBatching

WHOLE = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
TYPES = (*WHOLE, "BOOL", "FP16", "FP32", "FP64", "STRING", "STRING")

MODEL = '''\
import json

import numpy as np
import triton_python_backend_utils as pb_utils

COMPLETES = {completes}


def plain(array):
    return [x.decode("latin-1") if isinstance(x, bytes) else repr(x) for x in array.ravel().tolist()[:8]]


class TritonPythonModel:
    """OUTi is INi, SEEN says what the model was given. Parameters of the request tell it to fail, and so on."""

    @staticmethod
    def auto_complete_config(config):
        for add, tensor in COMPLETES:
            getattr(config, add)(tensor)
        return config

    def initialize(self, args):
        self.args = args
        self.config = json.loads(args["model_config"])
        self.decoupled = self.config.get("model_transaction_policy", {{}}).get("decoupled", False)

    def execute(self, requests):
        if any("raise" in json.loads(request.parameters()) for request in requests):
            raise ValueError("told to raise")
        if not self.decoupled:
            return [self.response(request, 0) for request in requests]
        for request in requests:
            todo = json.loads(request.parameters())
            sender, count = request.get_response_sender(), int(todo.get("count", 1))
            for index in range(count):
                last = index == count - 1 and "final_apart" not in todo
                flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
                sender.send(self.response(request, index), flags=flags)
            if not count or "final_apart" in todo:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def response(self, request, index):
        todo = json.loads(request.parameters())
        if "fail" in todo and index == todo.get("fail_at", 0):
            code = getattr(pb_utils.TritonError, todo["fail"])
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("told to fail", code))
        given = {{tensor.name(): tensor.as_numpy() for tensor in request.inputs()}}
        batches = self.config["max_batch_size"] > 0
        rows = len(next(iter(given.values()))) if batches and given else 1
        outputs = []
        for output in self.config["output"]:
            name = output["name"]
            if todo.get("omit") == name:
                continue
            if name == "SEEN":
                seen = json.dumps(self.seen(request, todo, given, index), sort_keys=True).encode()
                array = np.array([[seen]] * rows if batches else [seen], object)
            else:
                array = given.get("IN" + name[3:])
                if array is None:
                    dims = [max(1, d) for d in (output.get("reshape") or {{"shape": output["dims"]}}).get("shape", [])]
                    dtype = pb_utils.triton_string_to_numpy(output["data_type"])
                    array = np.zeros(([rows] if batches else []) + dims, dtype)
            if todo.get("mistype") == name:
                array = array.astype(np.float64)
            if todo.get("misshape") == name:
                array = np.stack([array, array])
            outputs.append(pb_utils.Tensor(name, array))
        return pb_utils.InferenceResponse(outputs)

    def seen(self, request, todo, given, index):
        parameters = {{key: value for key, value in todo.items() if key != "id"}}
        seen = {{"parameters": parameters, "id": request.request_id(), "index": index}}
        seen["model"] = [self.args["model_name"], self.args["model_version"], self.args["model_instance_kind"]]
        seen["sequence"] = [request.correlation_id(), request.flags()]
        seen["timeout"] = request.timeout()
        if "in_ensemble" not in todo:
            seen["requested"] = sorted(request.requested_output_names())
        seen["inputs"] = {{name: [str(a.dtype), list(a.shape), plain(a)] for name, a in sorted(given.items())}}
        if "call" in todo:
            inputs = [pb_utils.Tensor(name, array) for name, array in given.items()]
            inner = pb_utils.InferenceRequest(todo["call"], ["OUT0"], inputs, request_id="inner")
            decoupled = bool(todo.get("call_decoupled"))
            answers = inner.exec(decoupled=decoupled)
            seen["called"] = [self.called(a) for a in (answers if decoupled else [answers])]
        return seen

    def called(self, answer):
        if answer.has_error():
            return answer.error().code()
        return [[t.name(), list(t.as_numpy().shape), plain(t.as_numpy())] for t in answer.output_tensors()]
'''


@dataclass(frozen=True)
class Model:
    """A model folder.

    Attributes:
        config: Its configuration, complete.
        versions: Its version folders.
        written: What config.pbtxt says; the rest the model itself completes. None where there is no such file.
        files: Further files by path, relative to the folder.
        spoiled: Whether the configuration has a fault on purpose, so that probably no server loads it.
    """

    config: Any
    versions: tuple[int, ...] = (1,)
    written: Any = None
    files: Mapping[str, str] = field(default_factory=dict)
    spoiled: bool = False

    @property
    def name(self) -> str:
        """Name of the folder."""
        return str(self.config.name)

    @property
    def is_ensemble(self) -> bool:
        """Whether it has steps."""
        return bool(self.config.HasField("ensemble_scheduling"))

    def folder(self) -> dict[str, str]:
        """Return all files by path, relative to the repository; a path that ends with a slash is an empty folder."""
        files = dict(self.files)
        if self.written is not None:
            files["config.pbtxt"] = text_format.MessageToString(self.written)
        for version in self.versions:
            if self.is_ensemble:
                files[f"{version}/"] = ""
            else:
                files[f"{version}/{self.config.default_model_filename or 'model.py'}"] = self._code()
        return {f"{self.name}/{path}": text for path, text in files.items()}

    def _code(self) -> str:
        completes = []
        for kind in ("input", "output"):
            if self.written is None or not getattr(self.written, kind):
                for tensor in getattr(self.config, kind):
                    entry = {"name": tensor.name, "data_type": _type_name(tensor), "dims": list(tensor.dims)}
                    completes.append((f"add_{kind}", entry))
        if self.written is None and self.config.max_batch_size:
            completes.append(("set_max_batch_size", self.config.max_batch_size))
        return MODEL.format(completes=repr(completes))


def model(rng: Random, name: str, palette: Sequence[tuple[str, list[int]]]) -> Model:
    """Return a Python model; its tensors have types and dims of the palette."""
    config = ModelConfig(name=name, backend="python", max_batch_size=rng.choice([0, 0, 1, 4, 8]))
    for index in range(rng.choice([1, 1, 2, 3])):
        kind, dims = rng.choice(palette)
        given = config.input.add(name=f"IN{index}", data_type=f"TYPE_{kind}", dims=dims)
        given.optional = index > 0 and rng.random() < 0.3
        output = config.output.add(name=f"OUT{index}", data_type=f"TYPE_{kind}", dims=dims)
        if rng.random() < 0.15:
            shape = [*dims, 1] if -1 in dims else [math.prod(dims)]
            given.reshape.shape.extend(shape)
            output.reshape.shape.extend(shape)
    config.output.add(name="SEEN", data_type="TYPE_STRING", dims=[1])
    completes = rng.random() < 0.15 and not any(tensor.HasField("reshape") for tensor in config.input)
    if not completes:
        config.model_transaction_policy.decoupled = rng.random() < 0.25
        _schedule(rng, config)
        _decorate(rng, config)
    files = {}
    if rng.random() < 0.2:
        config.output[0].label_filename = "labels.txt"
        files["labels.txt"] = "cat\ndog\n\nowl"
    written = ModelConfig()
    written.CopyFrom(config)
    if completes:
        for kind in ("input", "output"):
            written.ClearField(kind)
        files.pop("labels.txt", None)
        for tensor in (*config.input, *config.output):
            tensor.ClearField("optional" if tensor.name.startswith("IN") else "label_filename")
    if rng.random() < 0.2:
        written.ClearField("name")
    spoiled = not completes and rng.random() < 0.12 and _spoil(rng, written)
    versions = tuple(sorted(rng.sample([1, 2, 3, 7], rng.choice([1, 1, 2, 3]))))
    return Model(config, versions, written, files, bool(spoiled))


def ensemble(rng: Random, name: str, members: Sequence[Model]) -> Model:
    """Return an ensemble of one to three of the members, its tensors connected where they fit."""
    config = ModelConfig(name=name, platform="ensemble")
    steps = [rng.choice(members) for _ in range(rng.choice([1, 2, 2, 3]))]
    config.max_batch_size = min(step.config.max_batch_size for step in steps)
    tensors: dict[str, tuple[int, list[int]]] = {}
    used: set[str] = set()
    for number, member in enumerate(steps):
        step = config.ensemble_scheduling.step.add(model_name=member.name, model_version=-1)
        available = dict(tensors)
        for given in member.config.input:
            if given.optional and rng.random() < 0.5:
                continue
            fitting = [key for key, value in available.items() if value == (given.data_type, list(given.dims))]
            if fitting and rng.random() < 0.85:
                source = rng.choice(fitting)
            else:
                source = f"IN{len(config.input)}"
                config.input.add(name=source, data_type=given.data_type, dims=given.dims)
                config.input[-1].optional = given.optional and rng.random() < 0.5
                tensors[source] = (given.data_type, list(given.dims))
            step.input_map[given.name] = source
            used.add(source)
        for output in member.config.output:
            if output.name == "OUT0" or rng.random() < 0.6:
                key = f"{output.name}_{number}"
                step.output_map[output.name] = key
                tensors[key] = (output.data_type, list(output.dims))
    for key, (kind, dims) in tensors.items():
        if not key.startswith("IN") and (key not in used or rng.random() < 0.3):
            config.output.add(name=key, data_type=kind, dims=dims)
    if rng.random() < 0.3 or any(step.config.model_transaction_policy.decoupled for step in steps):
        config.model_transaction_policy.decoupled = rng.random() < 0.8
    written = ModelConfig()
    written.CopyFrom(config)
    spoiled = rng.random() < 0.15 and _spoil_ensemble(rng, written)
    return Model(config, (1,), written, {}, bool(spoiled))


def _schedule(rng: Random, config: Any) -> None:
    choice = rng.random()
    if choice < 0.35 and (config.max_batch_size or rng.random() < 0.1):
        batching = config.dynamic_batching
        batching.SetInParent()
        if rng.random() < 0.4 and config.max_batch_size:
            sizes = range(1, config.max_batch_size + 1)
            batching.preferred_batch_size.extend(sorted(rng.sample(sizes, min(len(sizes), rng.choice([1, 2])))))
        if rng.random() < 0.5:
            batching.max_queue_delay_microseconds = rng.choice([100, 5000])
        if rng.random() < 0.3:
            batching.priority_levels = rng.choice([1, 2, 3])
            batching.default_priority_level = rng.randint(1, batching.priority_levels)
        if rng.random() < 0.2:
            batching.default_queue_policy.default_timeout_microseconds = 20_000_000
            batching.default_queue_policy.allow_timeout_override = rng.random() < 0.5
        batching.preserve_ordering = batching.priority_levels <= 1 and rng.random() < 0.2
    elif choice < 0.6:
        _sequences(rng, config)


def _sequences(rng: Random, config: Any) -> None:
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = 60_000_000
    if rng.random() < 0.5:
        batching.oldest.max_candidate_sequences = rng.choice([1, 4])
    elif rng.random() < 0.8:
        batching.direct.SetInParent()
    kinds = ModelSequenceBatching.Control
    for name in ("START", "READY", "END"):
        if rng.random() < 0.6:
            control = batching.control_input.add(name=name).control.add(kind=getattr(kinds, f"CONTROL_SEQUENCE_{name}"))
            getattr(control, rng.choice(["int32_false_true", "fp32_false_true", "bool_false_true"])).extend([0, 1])
    if rng.random() < 0.5:
        # Triton cannot give texts to models without batching.
        kind = rng.choice(["UINT64", "INT64", "UINT32", "INT32", "STRING" if config.max_batch_size else "INT32"])
        control = batching.control_input.add(name="CORRID").control.add(data_type=f"TYPE_{kind}")
        control.kind = kinds.CONTROL_SEQUENCE_CORRID


def _decorate(rng: Random, config: Any) -> None:
    """Add what shows in the configuration, and changes little else."""
    match rng.randrange(10):
        case 0:
            config.version_policy.all.SetInParent()
        case 1:
            config.version_policy.latest.num_versions = rng.choice([1, 2])
        case 2:
            config.version_policy.specific.versions.extend(rng.sample([1, 2, 3, 7], 2))
        case 3:
            config.instance_group.add(count=2, kind=rng.choice(["KIND_CPU", "KIND_AUTO"]))
        case 4:
            config.instance_group.add(name="one", kind="KIND_CPU")
            config.instance_group.add(kind="KIND_CPU", count=1)
        case 5:
            config.metric_tags["team"] = "a b"
            config.response_cache.enable = rng.random() < 0.5
        case 6:
            config.default_model_filename = "other.py"
        case 7 if not config.HasField("sequence_batching"):
            sample = config.model_warmup.add(name="warm", batch_size=max(1, config.max_batch_size))
            for tensor in config.input:
                sample.inputs[tensor.name].data_type = tensor.data_type
                sample.inputs[tensor.name].dims.extend(max(1, size) for size in tensor.dims)
                sample.inputs[tensor.name].zero_data = True
        case 8:
            config.optimization.priority = rng.choice([0, 1, 2])
            config.optimization.eager_batching = rng.random() < 0.5
    if rng.random() < 0.3:
        config.parameters["note"].string_value = rng.choice(["", "plain", 'with "quotes" and ü'])


def _spoil(rng: Random, config: Any) -> bool:
    """Put one fault into a configuration."""
    match rng.randrange(16):
        case 0:
            config.input[0].dims[0] = rng.choice([0, -2])
        case 1:
            config.input[0].ClearField("data_type")
        case 2:
            config.output[0].ClearField("name")
        case 3:
            config.ClearField("backend")
        case 4:
            config.backend = "nothing"
        case 5:
            config.platform = rng.choice(["ensemble", "onnxruntime_onnx"])
        case 6:
            config.max_batch_size = -1
        case 7:
            config.dynamic_batching.preferred_batch_size.append(rng.choice([-1, 0, 99]))
        case 8:
            config.version_policy.specific.versions.append(55)
        case 9:
            config.instance_group.add(kind="KIND_GPU")
        case 10:
            config.instance_group.add(kind="KIND_CPU", gpus=[0])
        case 11:
            config.input[0].reshape.shape.append(5)
        case 12:
            config.name = "another"
        case 13:
            config.input[0].format = "FORMAT_NHWC"
        case 14:
            config.default_model_filename = "missing.py"
        case 15:
            config.input.add().CopyFrom(config.input[0])
    return True


def _spoil_ensemble(rng: Random, config: Any) -> bool:
    """Put one fault into the configuration of an ensemble."""
    step = config.ensemble_scheduling.step[0]
    match rng.randrange(10):
        case 0:
            step.model_name = rng.choice(["", "unknown", config.name])
        case 1:
            step.model_version = rng.choice([55, -2])
        case 2:
            step.input_map["nothing"] = config.input[0].name
        case 3:
            step.output_map["nothing"] = "OUT"
        case 4:
            config.input[0].data_type = "TYPE_BF16"
        case 5:
            config.input.add(name="unused", data_type="TYPE_FP32", dims=[1])
        case 6:
            config.output.add(name="unwritten", data_type="TYPE_FP32", dims=[1])
        case 7:
            config.max_batch_size += 16
        case 8:
            config.input[0].dims.append(5)
        case 9:
            config.instance_group.add(kind="KIND_CPU")
    return True


def _type_name(tensor: Any) -> str:
    return str(tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[tensor.data_type].name)
