"""The Python model that runs a SavedModel, in a worker process; and what describes one to the server.

A SavedModel runs in a session, as in TensorFlow Serving. That is the quickest call that TensorFlow has, prunes outputs
that nobody asks for, and takes models of TensorFlow 1 and 2 alike.
"""

import functools
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from google.protobuf import text_format
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import saved_model_pb2

DEFAULT_SIGNATURE = "serving_default"

CALLABLES_MAX = 32
"""Combinations of outputs for which a call is kept ready."""

_v1 = tf.compat.v1
_FILES = ("saved_model.pb", "saved_model.pbtxt")
_INTERNAL = ("__saved_model_init_op", "__saved_model_train_op")

# Operators that keep a tensor after the call, and with it memory of the server that the next request will be in.
_KEEPING = ("Assign", "Barrier", "MapStage", "OrderedMapStage", "Queue", "Stack", "Stage", "TensorArray")

tf.get_logger().setLevel("ERROR")


class RefusedError(Exception):
    """What is wrong with a model, and a hint."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class TritonPythonModel:
    """A SavedModel."""

    @staticmethod
    def auto_complete_config(question: Any) -> Any:
        """Answer the server's question what a model takes and gives; no configuration is completed here.

        The question has the `path` of a SavedModel or Keras file, `keras_to`, the folder in which a SavedModel of a
        Keras file is made, and `tag` and `signature`, "" for those that a model usually has.
        """
        asked = question.as_dict()
        try:
            folder = asked["path"]
            if asked["keras_to"]:
                folder = asked["keras_to"]
                _export_keras(asked["path"], folder)
            graph = _graph_of(folder, asked["tag"])
            key = _signature_key(graph, asked["signature"])
            signature = graph.signature_def[key]
            answer = {
                "folder": folder,
                "tags": list(graph.meta_info_def.tags),
                "signature": key,
                "inputs": [_described("input", name, signature.inputs[name]) for name in sorted(signature.inputs)],
                "outputs": [_described("output", name, signature.outputs[name]) for name in sorted(signature.outputs)],
            }
        except RefusedError as refused:
            answer = {"refused": str(refused), "hint": refused.hint}
        return pb_utils.ModelConfig(answer)

    def initialize(self, arguments: dict[str, str]) -> None:
        self._is_batched = json.loads(arguments["model_config"]).get("max_batch_size", 0) > 0
        plan = json.loads(arguments["tensorflow"])
        options = _v1.ConfigProto(
            intra_op_parallelism_threads=plan["intra"],
            inter_op_parallelism_threads=plan["inter"],
            allow_soft_placement=plan["soft_placement"],
            device_count={"GPU": 0},
        )
        graph = tf.Graph()
        with graph.as_default():
            self._session = _v1.Session(graph=graph, config=options)
            try:
                loaded = _v1.saved_model.load(self._session, plan["tags"], plan["folder"])
            except (tf.errors.OpError, OSError, ValueError) as error:
                raise _load_error(error) from None
            for name in plan["init_ops"]:
                try:
                    self._session.run(graph.get_operation_by_name(name))
                except (tf.errors.OpError, KeyError) as error:
                    raise RefusedError(f"operation '{name}' of TF_INIT_OPS_FILE failed: {_text_of(error)}") from None
        signature = loaded.signature_def[plan["signature"]]
        self._inputs = sorted(signature.inputs)
        self._feeds = [signature.inputs[name].name for name in self._inputs]
        self._fetches = {name: signature.outputs[name].name for name in plan["outputs"]}
        definition = graph.as_graph_def()
        self._keeps_inputs = any(op.startswith(_KEEPING) for op in _operators(definition, self._fetches.values()))
        make = self._session.make_callable
        self._call = functools.lru_cache(CALLABLES_MAX)(
            lambda names: make([self._fetches[name] for name in names], feed_list=self._feeds)
        )

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        if len(requests) > 1 and self._is_batched:
            try:
                return self._execute(requests)
            except Exception:  # whose fault it is shows when each is alone
                pass
        return [self._execute_alone(request) for request in requests]

    def finalize(self) -> None:
        self._session.close()

    def _execute_alone(self, request: Any) -> Any:
        try:
            return self._execute([request])[0]
        except tf.errors.OpError as error:
            is_input = isinstance(error, tf.errors.InvalidArgumentError)
            code = pb_utils.TritonError.INVALID_ARG if is_input else pb_utils.TritonError.INTERNAL
            return _failed(f"TensorFlow failed: {_text_of(error)}", code)
        except ValueError as error:  # of shapes, which TensorFlow's Python checks
            return _failed(f"TensorFlow failed: {error}", pb_utils.TritonError.INVALID_ARG)

    def _execute(self, requests: Sequence[Any]) -> list[Any]:
        inputs = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        names = self._wanted(requests)
        if len(requests) > 1:
            feed = [np.concatenate([arrays[name] for arrays in inputs]) for name in self._inputs]
        elif self._keeps_inputs:
            feed = [inputs[0][name].copy() for name in self._inputs]
        else:
            feed = [inputs[0][name] for name in self._inputs]
        outputs = list(map(_array, self._call(names)(*feed)))
        if len(requests) == 1:
            parts = [outputs]
        else:
            parts = list(_split(names, outputs, [arrays[self._inputs[0]].shape[0] for arrays in inputs]))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in zip(names, part, strict=True)])
            for part in parts
        ]

    def _wanted(self, requests: Sequence[Any]) -> tuple[str, ...]:
        names = tuple(self._fetches)
        asked: set[str] = set()
        for request in requests:
            of_request = request.requested_output_names()
            if not of_request:
                return names
            asked.update(of_request)
        return tuple(name for name in names if name in asked) or names


def _text_of(error: Exception) -> str:
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return (text or type(error).__name__).removeprefix("Graph execution error:").strip()


def _load_error(error: Exception) -> RefusedError:
    text = _text_of(error)
    unknown = re.match(r"Op type not registered '(\w+)'", text)
    if unknown:
        return RefusedError(
            f"the model needs the operator '{unknown[1]}', which TensorFlow {tf.__version__} does not have (hint: "
            "serve it as a Python model that calls tf.load_op_library, or with the version that exported it)"
        )
    return RefusedError(f"the SavedModel cannot be loaded; are all files of its folder variables there? {text}")


def _array(output: Any) -> Any:
    """Return an output as an array, which a scalar is not."""
    if isinstance(output, np.ndarray):
        return output
    return np.array(output, object) if isinstance(output, bytes) else np.asarray(output)


def _split(names: Sequence[str], outputs: Sequence[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
    total = sum(sizes)
    for name, array in zip(names, outputs, strict=True):
        if array.ndim == 0 or array.shape[0] != total:
            raise ValueError(
                f"output '{name}': expected {total} rows for a batch of {total}, got an array of shape "
                f"{list(array.shape)} (hint: a model whose rows depend on one another cannot batch: set "
                "max_batch_size to 0)"
            )
    start = 0
    for size in sizes:
        yield [array[start : start + size] for array in outputs]
        start += size


def _failed(message: str, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def _operators(graph: Any, outputs: Iterable[str]) -> Iterator[str]:
    """Yield the operators that these outputs need, those in functions among them."""
    functions = {function.signature.name: function for function in graph.library.function}
    pending = list(_v1.graph_util.extract_sub_graph(graph, [name.partition(":")[0] for name in outputs]).node)
    while pending:
        node = pending.pop()
        yield node.op
        called = [node.op]
        for value in node.attr.values():
            called += [value.func.name, *(function.name for function in value.list.func)]
        for name in called:
            function = functions.pop(name, None)
            if function is not None:
                pending += function.node_def


def _graph_of(folder: str, tag: str) -> Any:
    """Return the meta graph with a tag; of several the one with the fewest other tags."""
    path = next((os.path.join(folder, name) for name in _FILES if os.path.isfile(os.path.join(folder, name))), "")
    if not path:
        raise RefusedError(f"the folder '{os.path.basename(folder)}' holds no {_FILES[0]}, so it is no SavedModel")
    model = saved_model_pb2.SavedModel()
    try:
        with open(path, "rb") as file:
            content = file.read()
        if path.endswith("txt"):
            text_format.Parse(content, model)
        else:
            model.ParseFromString(content)
    except (OSError, DecodeError, text_format.ParseError) as error:
        why = f"{os.path.basename(path)} cannot be read: {error}"
        raise RefusedError(why, "it is truncated, or no SavedModel: export it again") from None
    if not model.meta_graphs:
        raise RefusedError(f"{os.path.basename(path)} holds no graph", "it is truncated, or no SavedModel")
    fitting = [graph for graph in model.meta_graphs if (tag or "serve") in graph.meta_info_def.tags]
    if not fitting:
        known = ", ".join("+".join(sorted(graph.meta_info_def.tags)) or "none" for graph in model.meta_graphs)
        raise RefusedError(
            f"no graph has the tag '{tag or 'serve'}'; the tags of its graphs are {known}",
            "the parameter TF_GRAPH_TAG says which",
        )
    return min(fitting, key=lambda graph: len(graph.meta_info_def.tags))


def _signature_key(graph: Any, key: str) -> str:
    known = [name for name in graph.signature_def if name not in _INTERNAL]
    if key:
        chosen = key
    elif len(known) == 1:
        chosen = known[0]
    else:
        chosen = DEFAULT_SIGNATURE
    if chosen not in known:
        what = f"its signatures are {', '.join(sorted(known))}" if known else "it has none"
        hint = "the parameter TF_SIGNATURE_DEF says which"
        if not known:
            hint = "export it with one: tf.saved_model.save(model, folder, signatures=model.__call__)"
        raise RefusedError(f"the model has no signature '{chosen}'; {what}", hint)
    return chosen


def _described(kind: str, name: str, tensor: Any) -> dict[str, Any]:
    """Return name, datatype of TensorFlow, and dims, None where the model tells no rank."""
    encoding = tensor.WhichOneof("encoding")
    if encoding != "name":
        what = "sparse" if encoding == "coo_sparse" else "ragged, or another composite tensor"
        raise RefusedError(
            f"{kind} '{name}' is {what}, which requests cannot hold",
            "export a signature of dense tensors, for example values and row lengths, and convert them in the model",
        )
    shape = tensor.tensor_shape
    dims = None if shape.unknown_rank else [dim.size for dim in shape.dim]
    return {"name": name, "dtype": tf.dtypes.as_dtype(tensor.dtype).name, "dims": dims}


def _export_keras(path: str, folder: str) -> None:
    import keras

    if not zipfile.is_zipfile(path):
        raise RefusedError(
            f"{os.path.basename(path)} is truncated, or no file of Keras 3",
            "a file of an earlier version: keras.saving.load_model(path, compile=False).save('model.keras')",
        )
    try:
        keras.saving.load_model(path, compile=False).export(folder, verbose=False)
    except Exception as error:  # Keras raises anything
        raise RefusedError(
            f"Keras cannot load {os.path.basename(path)}: {type(error).__name__}: {error}",
            "a model with classes of its own can be exported where they are defined: model.export('model.savedmodel')",
        ) from None
