"""The module that Python models import, usually as `pb_utils`.

Names and meanings are those of Triton's Python backend, so that models run unchanged. A model gets a copy of it that
knows who runs the model: see `bound_to`.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from charonia.server.backends.python.worker import charonia_datatypes as datatypes
    from charonia.server.backends.python.worker.charonia_calls import ResponseIterator
    from charonia.server.backends.python.worker.charonia_control import ModelControl
    from charonia.server.backends.python.worker.charonia_errors import TritonError, TritonModelException
    from charonia.server.backends.python.worker.charonia_host import Binding
    from charonia.server.backends.python.worker.charonia_logger import Logger
    from charonia.server.backends.python.worker.charonia_metrics import Metric, MetricFamily
    from charonia.server.backends.python.worker.charonia_model_config import ModelConfig
    from charonia.server.backends.python.worker.charonia_requests import (
        RELEASE_ALL,
        RELEASE_RESCHEDULE,
        InferenceRequest,
        InferenceTrace,
        PreferredMemory,
    )
    from charonia.server.backends.python.worker.charonia_responses import (
        FINAL,
        InferenceResponse,
        InferenceResponseSender,
    )
    from charonia.server.backends.python.worker.charonia_tensor import Tensor
else:  # siblings of this file; the package is not there
    import charonia_datatypes as datatypes
    from charonia_calls import ResponseIterator
    from charonia_control import ModelControl
    from charonia_errors import TritonError, TritonModelException
    from charonia_host import Binding
    from charonia_logger import Logger
    from charonia_metrics import Metric, MetricFamily
    from charonia_model_config import ModelConfig
    from charonia_requests import (
        RELEASE_ALL,
        RELEASE_RESCHEDULE,
        InferenceRequest,
        InferenceTrace,
        PreferredMemory,
    )
    from charonia_responses import FINAL, InferenceResponse, InferenceResponseSender
    from charonia_tensor import Tensor

if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2
TRITON_STRING_TO_NUMPY = datatypes.NUMPY_BY_TYPE

deserialize_bytes_tensor = datatypes.deserialize_bytes_tensor
numpy_to_triton_type = datatypes.numpy_to_triton_type
serialize_byte_tensor = datatypes.serialize_byte_tensor
triton_string_to_numpy = datatypes.triton_string_to_numpy
triton_to_numpy_type = datatypes.triton_to_numpy_type


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input of a request, or None."""
    for tensor in request._inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    """Return an output of a response, or None."""
    for tensor in response._outputs:
        if tensor._name == name:
            return tensor
    return None


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return an input's configuration, or None."""
    return next((i for i in model_config.get("input", ()) if i["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return an output's configuration, or None."""
    return next((o for o in model_config.get("output", ()) if o["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return whether the model is decoupled."""
    return bool((model_config.get("model_transaction_policy") or {}).get("decoupled", False))


class _Functions(ModelControl):
    """The functions that depend on the model."""

    def get_model_dir(self) -> str:
        """Return the folder of the model version."""
        return self._binding.model_dir


_unbound = _Functions(Binding(None))
get_model_dir = _unbound.get_model_dir
load_model = _unbound.load_model
unload_model = _unbound.unload_model
is_model_ready = _unbound.is_model_ready


def bound_to(binding: Binding) -> ModuleType:
    """Return a copy of this module for one model.

    Its functions, and those of its classes that talk to the host, know the binding; all others are shared.
    """
    functions = _Functions(binding)
    bound = ModuleType(__name__.rpartition(".")[2], __doc__)
    bound.__dict__.update({name: globals()[name] for name in __all__}, __file__=__file__, __all__=__all__)
    for base in (InferenceRequest, Logger, MetricFamily):
        body = {"_binding": binding, "__slots__": (), "__doc__": base.__doc__, "__module__": bound.__name__}
        setattr(bound, base.__name__, type(base.__name__, (base,), body))
    for name in ("get_model_dir", "load_model", "unload_model", "is_model_ready"):
        setattr(bound, name, getattr(functions, name))
    return bound
