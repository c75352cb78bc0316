"""The module that Python models import, usually as `pb_utils`.

Names and meanings are those of Triton's Python backend, so that models run unchanged. What belongs to features that the
server does not have yet raises a `TritonModelException` that says so.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, ClassVar, NoReturn

    from charonia.backends.python.worker import charonia_datatypes as datatypes
    from charonia.backends.python.worker.charonia_datatypes import Array
else:  # a sibling of this file; the package is not there
    import charonia_datatypes as datatypes

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

deserialize_bytes_tensor = datatypes.deserialize_bytes_tensor
numpy_to_triton_type = datatypes.numpy_to_triton_type
serialize_byte_tensor = datatypes.serialize_byte_tensor
triton_string_to_numpy = datatypes.triton_string_to_numpy
triton_to_numpy_type = datatypes.triton_to_numpy_type


class TritonModelException(Exception):
    """Raised for wrong use of this module; a model may raise it too."""


class TritonError:
    """An error to answer a request with."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: object, code: int = INTERNAL) -> None:
        if not isinstance(code, int) or not 0 <= code <= 7:
            raise TritonModelException(f"TritonError: expected one of its codes 0 to 7, got {code!r}")
        self._message = str(message)
        self._code = int(code)

    def code(self) -> int:
        """Return the code."""
        return self._code

    def message(self) -> str:
        """Return the message."""
        return self._message

    def __str__(self) -> str:
        return self._message


class Tensor:
    """A named tensor."""

    def __init__(self, name: str, array: Array) -> None:
        if not isinstance(array, np.ndarray):
            raise TritonModelException(f"Tensor '{name}': expected a numpy array, got {type(array).__name__}")
        if array.dtype.kind in "SU":
            array = array.astype(np.object_)
        elif array.dtype != np.object_ and array.dtype not in datatypes.WIRE:
            raise TritonModelException(f"Tensor '{name}': numpy dtype {array.dtype} is none of the tensor datatypes")
        self._name = str(name)
        self._array = array
        self._datatype = "BYTES" if array.dtype == np.object_ else datatypes.WIRE[array.dtype]

    @classmethod
    def _received(cls, name: str, datatype: str, shape: tuple[int, ...], data: memoryview) -> Tensor:
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._datatype = datatype
        if datatype == "BYTES":
            tensor._array = datatypes.deserialize_bytes_tensor(data).reshape(shape)
        elif datatype == "BF16":
            tensor._array = np.ndarray(shape, np.uint16, data)
        else:
            tensor._array = np.ndarray(shape, datatypes.NUMPY_BY_TYPE["TYPE_" + datatype], data)
        return tensor

    def name(self) -> str:
        """Return the name."""
        return self._name

    def as_numpy(self) -> Array:
        """Return the elements; object arrays of bytes for strings."""
        if self._datatype == "BF16":
            raise TritonModelException(
                f"Tensor '{self._name}' is BF16, which numpy does not have; its bytes can only be passed on"
            )
        return self._array

    def triton_dtype(self) -> int:
        """Return the number of the datatype in model configurations."""
        return datatypes.NUMBERS["STRING" if self._datatype == "BYTES" else self._datatype]

    def shape(self) -> list[int]:
        """Return the shape."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Return whether the elements are in the memory of the CPU."""
        return True

    def to_dlpack(self) -> NoReturn:
        """Return a dlpack capsule."""
        raise _not_here("exchanging tensors by dlpack")

    @staticmethod
    def from_dlpack(name: str, tensor: object) -> NoReturn:
        """Return a tensor made from a dlpack capsule or from an object that offers one."""
        raise _not_here("exchanging tensors by dlpack")


class InferenceRequest:
    """A request, as `execute` gets it."""

    _inputs: list[Tensor]
    _id: str
    _correlation_id: int | str
    _flags: int
    _timeout: int
    _priority: int
    _parameters: str
    _requested: tuple[str, ...]

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise _not_here("calling other models from a model (business logic scripting)")

    @classmethod
    def _received(cls, inputs: list[Tensor], fields: tuple[Any, ...]) -> InferenceRequest:
        request = cls.__new__(cls)
        request._inputs = inputs
        request._id, request._correlation_id, request._flags, request._timeout, *more = fields
        request._priority, request._parameters, request._requested = more
        return request

    def inputs(self) -> list[Tensor]:
        """Return the input tensors."""
        return self._inputs

    def request_id(self) -> str:
        """Return the caller's request id, "" for none."""
        return self._id

    def correlation_id(self) -> int | str:
        """Return the sequence id, 0 for none."""
        return self._correlation_id

    def flags(self) -> int:
        """Return the sequence flags."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the sequence flags."""
        self._flags = flags

    def timeout(self) -> int:
        """Return the queue timeout that was asked for, in us."""
        return self._timeout

    def priority(self) -> int:
        """Return the priority that was asked for."""
        return self._priority

    def parameters(self) -> str:
        """Return the request parameters as JSON text."""
        return self._parameters

    def requested_output_names(self) -> list[str]:
        """Return the names of the outputs that were asked for."""
        return list(self._requested)

    def is_cancelled(self) -> bool:
        """Return whether the caller has gone."""
        return False

    def trace(self) -> None:
        """Return the trace; requests are not traced."""
        return None

    def get_response_sender(self) -> NoReturn:
        """Return where to send responses to."""
        raise _not_here("sending responses through a response sender (decoupled models)")

    def set_release_flags(self, flags: int) -> None:
        """Set what happens to the request after `execute`."""
        if flags != TRITONSERVER_REQUEST_RELEASE_ALL:
            raise _not_here("rescheduling a request (iterative sequences)")


class InferenceResponse:
    """The answer to one request."""

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, bool | int | str] | None = None,
    ) -> None:
        self._outputs = list(output_tensors)
        for tensor in self._outputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(
                    f"InferenceResponse: expected Tensor objects as outputs, got {type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(
                f"InferenceResponse: expected a TritonError as error, got {type(error).__name__}"
            )
        self._error = error
        self._parameters: dict[str, bool | int | str] = {}
        for key, value in (parameters or {}).items():
            plain = next((kind for kind in (bool, int, str) if isinstance(value, kind)), None)
            if not isinstance(key, str) or plain is None:
                raise TritonModelException(
                    f"InferenceResponse: parameter {key!r} must be a string, an integer or a boolean"
                )
            self._parameters[str(key)] = plain(value)

    def output_tensors(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._outputs

    def has_error(self) -> bool:
        """Return whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the response parameters as JSON text."""
        return json.dumps(self._parameters)


class Logger:
    """Writes to the server's log."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    _write: ClassVar[Callable[[int, str, str, int], None] | None] = None
    """Set by the worker: level, message, file, line."""

    @classmethod
    def log(cls, message: object, level: int = INFO) -> None:
        """Write a message of a level."""
        cls._log(message, level)

    @classmethod
    def log_info(cls, message: object) -> None:
        """Write an informational message."""
        cls._log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: object) -> None:
        """Write a warning."""
        cls._log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: object) -> None:
        """Write an error."""
        cls._log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: object) -> None:
        """Write a message that appears with verbose logging only."""
        cls._log(message, cls.VERBOSE)

    @classmethod
    def _log(cls, message: object, level: int) -> None:
        if level not in (cls.INFO, cls.WARNING, cls.ERROR, cls.VERBOSE):
            raise TritonModelException(f"Logger: expected one of its levels, got {level!r}")
        caller = sys._getframe(2)
        if cls._write is not None:
            cls._write(int(level), str(message), caller.f_code.co_filename, caller.f_lineno)


class MetricFamily:
    """A family of custom metrics."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise _not_here("custom metrics")


class PreferredMemory:
    """Where the outputs of a called model should be."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class ModelConfig:
    """The configuration that `auto_complete_config` completes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary."""
        return self._config

    def set_max_batch_size(self, size: int) -> None:
        """Set the largest batch size, unless the configuration has a larger one."""
        given = self._config.get("max_batch_size", 0)
        if given > size:
            raise TritonModelException(
                "configuration specified max_batch_size {}, but in auto-complete-config function for model '{}' "
                "specified max_batch_size {}".format(given, self._config.get("name", ""), size)
            )
        self._config["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        """Turn on dynamic batching, unless the configuration has another scheduler."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if self._config.get(other):
                raise TritonModelException(
                    "Configuration specified scheduling_choice as '{}', but auto-complete-config function for model "
                    "'{}' tries to set scheduling_choice as 'dynamic_batching'".format(
                        other, self._config.get("name", "")
                    )
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        """Set whether the model is decoupled."""
        if list(policy) != ["decoupled"] or not isinstance(policy["decoupled"], bool):
            raise TritonModelException(f"model transaction policy: expected {{'decoupled': bool}}, got {policy!r}")
        given = self._config.get("model_transaction_policy")
        if given and given.get("decoupled") != policy["decoupled"]:
            raise TritonModelException(
                "trying to change decoupled property in auto-complete-config for model '{}', which is already set to "
                "'{}'".format(self._config.get("name", ""), given.get("decoupled"))
            )
        self._config["model_transaction_policy"] = dict(policy)

    def add_input(self, properties: dict[str, Any]) -> None:
        """Add an input, or check that the configuration's agrees."""
        self._add("input", properties, ("name", "data_type", "dims", "optional"))

    def add_output(self, properties: dict[str, Any]) -> None:
        """Add an output, or check that the configuration's agrees."""
        self._add("output", properties, ("name", "data_type", "dims"))

    def _add(self, kind: str, properties: dict[str, Any], known: tuple[str, ...]) -> None:
        model = self._config.get("name", "")
        for key in properties:
            if key not in known:
                raise TritonModelException(
                    "{} '{}' in auto-complete-config function for model '{}' contains property other than {}.".format(
                        kind, properties.get("name", ""), model, ", ".join(f"'{k}'" for k in known)
                    )
                )
        for key in ("name", "data_type", "dims"):
            if key not in properties:
                raise TritonModelException(
                    "{} '{}' in auto-complete-config function for model '{}' is missing '{}' property.".format(
                        kind, properties.get("name", ""), model, key
                    )
                )
        for given in self._config.setdefault(kind, []):
            if given["name"] != properties["name"]:
                continue
            for key in ("data_type", "dims"):
                if given.get(key) and list(np.atleast_1d(given[key])) != list(np.atleast_1d(properties[key])):
                    raise TritonModelException(
                        "unable to load model '{}', configuration expects {} {} for {} '{}', model provides {}".format(
                            model, key, given[key], kind, given["name"], properties[key]
                        )
                    )
            given.update(properties)
            return
        self._config[kind].append(dict(properties))


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input of a request, or None."""
    return next((t for t in request.inputs() if t.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    """Return an output of a response, or None."""
    return next((t for t in response.output_tensors() if t.name() == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return an input's configuration, or None."""
    return next((i for i in model_config.get("input", ()) if i["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return an output's configuration, or None."""
    return next((o for o in model_config.get("output", ()) if o["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return whether the model is decoupled."""
    return bool((model_config.get("model_transaction_policy") or {}).get("decoupled", False))


def get_model_dir() -> str:
    """Return the folder of the model version."""
    return _MODEL_DIR


_MODEL_DIR = ""


def load_model(*args: object, **kwargs: object) -> NoReturn:
    """Load a model."""
    raise _not_here("loading models from a model")


def unload_model(*args: object, **kwargs: object) -> NoReturn:
    """Unload a model."""
    raise _not_here("unloading models from a model")


def is_model_ready(*args: object, **kwargs: object) -> NoReturn:
    """Return whether a model is ready."""
    raise _not_here("asking for the readiness of other models")


def _not_here(feature: str) -> TritonModelException:
    return TritonModelException(f"{feature} is not available in this version of the server")
