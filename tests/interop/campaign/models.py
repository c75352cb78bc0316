"""Random models: configurations, folders, and ensembles over them. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

WHOLE = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
TYPES = (*WHOLE, "BOOL", "FP16", "FP32", "FP64", "STRING", "STRING")

DETAILS = (
    *("", "", "", ""),
    "version_policy { all { } }",
    "version_policy { latest { num_versions: 2 } }",
    "version_policy { specific { versions: [ 1, 2 ] } }",
    "version_policy { specific { versions: [ 3, 7 ] } }",
    "instance_group { count: 2 kind: KIND_CPU }",
    'instance_group { name: "one" kind: KIND_CPU } instance_group { kind: KIND_AUTO }',
    'metric_tags { key: "team" value: "a b" } response_cache { enable: true }',
    'default_model_filename: "other.py"',
    "optimization { priority: PRIORITY_MAX eager_batching: true }",
    'parameters { key: "note" value { string_value: "with \\"quotes\\" and \303\274" } }',
)
"""What shows in a configuration, and changes little else."""
FAULTS = (
    'input { name: "IN9" data_type: TYPE_FP32 dims: [ 0 ] }',
    'input { name: "IN9" dims: [ 1 ] }',
    'input { name: "IN9" data_type: TYPE_FP32 dims: [ 2 ] reshape { shape: [ 5 ] } }',
    'input { name: "IN9" data_type: TYPE_FP32 dims: [ 1 ] format: FORMAT_NHWC }',
    "output { data_type: TYPE_FP32 dims: [ 1 ] }",
    'backend: ""',
    'backend: "nothing"',
    'platform: "ensemble"',
    'platform: "onnxruntime_onnx"',
    "max_batch_size: -1",
    "dynamic_batching { preferred_batch_size: [ 99 ] }",
    "dynamic_batching { preferred_batch_size: [ 0 ] }",
    "version_policy { specific { versions: [ 55 ] } }",
    "instance_group { kind: KIND_GPU }",
    "instance_group { kind: KIND_CPU gpus: [ 0 ] }",
    'name: "another"',
    'default_model_filename: "missing.py"',
)
FAULTS_OF_ENSEMBLES = (
    'ensemble_scheduling { step { model_name: "unknown" input_map { key: "a" value: "IN0" } } }',
    'ensemble_scheduling { step { input_map { key: "a" value: "IN0" } } }',
    'input { name: "unused" data_type: TYPE_FP32 dims: [ 1 ] }',
    'output { name: "unwritten" data_type: TYPE_FP32 dims: [ 1 ] }',
    "max_batch_size: 20",
    "instance_group { kind: KIND_CPU }",
)

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
                array = np.zeros(array.shape, np.float64)
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
            names = dict(model_name=todo["call"], requested_output_names=["OUT0"], request_id="inner")
            inner = pb_utils.InferenceRequest(inputs=inputs, **names)
            decoupled = bool(todo.get("call_decoupled"))
            answers = inner.exec(decoupled=decoupled)
            seen["called"] = [self.called(a) for a in (answers if decoupled else [answers])]
        return seen

    def called(self, answer):
        if answer.has_error():
            return "an error"
        return [[t.name(), list(t.as_numpy().shape), plain(t.as_numpy())] for t in answer.output_tensors()]
'''


@dataclass(frozen=True)
class Model:
    """A model folder.

    Attributes:
        config: Its configuration, complete.
        written: What config.pbtxt says; the rest the model itself completes.
        versions: Its version folders.
        files: Further files by path, relative to the folder.
        is_faulty: Whether the written configuration has a fault, so that probably no server loads it.
    """

    config: Any
    written: Any
    versions: tuple[int, ...] = (1,)
    files: Mapping[str, str] = field(default_factory=dict)
    is_faulty: bool = False

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
        files = {**self.files, "config.pbtxt": text_format.MessageToString(self.written)}
        for version in self.versions:
            if self.is_ensemble:
                files[f"{version}/"] = ""
            else:
                files[f"{version}/{self.config.default_model_filename or 'model.py'}"] = self._code()
                files[f"{version}/__pycache__"] = ""  # Triton takes the folder that Python makes for a change
        return {f"{self.name}/{path}": text for path, text in files.items()}

    def _code(self) -> str:
        completes = [
            (f"add_{kind}", {"name": tensor.name, "data_type": _type_name(tensor), "dims": list(tensor.dims)})
            for kind in ("input", "output")
            for tensor in getattr(self.config, kind)
            if not getattr(self.written, kind)
        ]
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
    written, files = ModelConfig(), {}
    completes = rng.random() < 0.15 and not any(t.optional or t.HasField("reshape") for t in config.input)
    if not completes:
        config.model_transaction_policy.decoupled = rng.random() < 0.25
        _merge(config, _scheduling(rng, config.max_batch_size), rng.choice(DETAILS))
        if rng.random() < 0.2:
            config.output[0].label_filename = "labels.txt"
            files["labels.txt"] = "cat\ndog\n\nowl"
    written.CopyFrom(config)
    if completes:
        written.ClearField("input")
        written.ClearField("output")
    if rng.random() < 0.2:
        written.ClearField("name")
    is_faulty = not completes and rng.random() < 0.12
    if is_faulty:
        _merge(written, rng.choice(FAULTS))
    versions = tuple(sorted(rng.sample([1, 2, 3, 7], rng.choice([1, 1, 2, 3]))))
    return Model(config, written, versions, files, is_faulty)


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
    written = ModelConfig()
    written.CopyFrom(config)
    is_faulty = rng.random() < 0.15
    if is_faulty:
        _merge(written, rng.choice(FAULTS_OF_ENSEMBLES))
    return Model(config, written, is_faulty=is_faulty)


def _scheduling(rng: Random, size: int) -> str:
    """Return the scheduler of a model as text of its configuration; empty for none."""
    choice = rng.random()
    if choice < 0.35 and size:
        levels = rng.choice([0, 0, 1, 3])
        parts = [
            f"preferred_batch_size: {sorted({rng.randint(1, size), size})}",
            f"max_queue_delay_microseconds: {rng.choice([100, 5000])}",
            f"priority_levels: {levels} default_priority_level: {rng.randint(1, levels)}" if levels else "",
            "default_queue_policy { default_timeout_microseconds: 20000000 allow_timeout_override: true }",
            "preserve_ordering: true" if levels < 2 else "",
        ]
        return f"dynamic_batching {{ {' '.join(rng.sample(parts, rng.randint(0, 4)))} }}"
    if choice > 0.6:
        return ""
    parts = [rng.choice(["direct { }", "oldest { max_candidate_sequences: 4 }", "oldest { }", ""])]
    for name in ("START", "READY", "END"):
        values = rng.choice(["int32_false_true", "fp32_false_true", "bool_false_true"])
        if rng.random() < 0.6:
            control = f"kind: CONTROL_SEQUENCE_{name} {values}: [ 0, 1 ]"
            parts.append(f'control_input {{ name: "{name}" control {{ {control} }} }}')
    if rng.random() < 0.5:
        kind = rng.choice(["UINT64", "INT64", "UINT32", "INT32", "STRING"])
        control = f"kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{kind}"
        parts.append(f'control_input {{ name: "CORRID" control {{ {control} }} }}')
    return f"sequence_batching {{ max_sequence_idle_microseconds: 60000000 {' '.join(parts)} }}"


def _merge(config: Any, *texts: str) -> None:
    for text in texts:
        text_format.Merge(text, config)


def _type_name(tensor: Any) -> str:
    return str(tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[tensor.data_type].name)
