"""Sequence models for tests: Python models that run on any server with a Python backend, and ONNX models."""

from tests.support.onnx_writer import GraphWriter

from charonia.core.dtypes import DataType

RUNNING_SUM = '''\
import numpy as np
import triton_python_backend_utils as pb_utils


def value(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]


class TritonPythonModel:
    """OUTPUT is the sum of INPUT over the sequence. By row, so for the direct strategy."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for row, request in enumerate(requests):
            if value(request, "READY"):
                if value(request, "START"):
                    self.sums[row] = 0
                self.sums[row] += int(value(request, "INPUT"))
            output = np.array([[self.sums.get(row, 0)]]).astype(np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)]))
        return responses
'''
"""`model.py` of a model that keeps a sum in each row of the batch."""

SUM_BY_ID = '''\
import numpy as np
import triton_python_backend_utils as pb_utils


def value(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]


class TritonPythonModel:
    """OUTPUT is the sum of INPUT over the sequence; with the last request the sequence's id is added."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            key = value(request, "CORRID")
            total = 0
            if value(request, "READY"):
                if value(request, "START"):
                    self.sums[key] = 0
                total = self.sums[key] = self.sums[key] + int(value(request, "INPUT"))
                if value(request, "END"):
                    total += len(key) if isinstance(key, bytes) else int(key)
                    del self.sums[key]
            output = np.array([[total]]).astype(np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)]))
        return responses
'''
"""`model.py` of a model that keeps a sum for each correlation id; of a text it adds the number of bytes."""

COUNTDOWN = '''\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers INPUT n with n responses, n - 1 to 0, one for each time that it is given the request. Decoupled."""

    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            key = request.correlation_id()
            if pb_utils.get_input_tensor_by_name(request, "START").as_numpy().reshape(-1)[0]:
                self.left[key] = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().reshape(-1)[0])
            self.left[key] -= 1
            sender = request.get_response_sender()
            output = pb_utils.Tensor("OUTPUT", np.array([[self.left[key]]], np.int32))
            sender.send(pb_utils.InferenceResponse([output]))
            if self.left[key] > 0:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                del self.left[key]
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
'''
"""`model.py` of an iterative sequence."""

_CONTROLS = """
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] } }
"""


def sequence_pbtxt(
    batching: str = "direct { }",
    *,
    backend: str = "python",
    max_batch_size: int = 4,
    id_type: str = "TYPE_UINT64",
    controls: str = _CONTROLS,
    more: str = "",
) -> str:
    """Return config.pbtxt of a model with INPUT and OUTPUT, INT32 of one element.

    Args:
        batching: What stands in `sequence_batching` beside the controls.
        id_type: Datatype of the control input CORRID, "" for no such input.
        controls: The other control inputs; by default START as INT32, END as FP32 and READY as BOOL.
    """
    corrid = f"control {{ kind: CONTROL_SEQUENCE_CORRID data_type: {id_type} }}"
    return (
        f'backend: "{backend}"\nmax_batch_size: {max_batch_size}\n'
        'input { name: "INPUT" data_type: TYPE_INT32 dims: [1] }\n'
        'output { name: "OUTPUT" data_type: TYPE_INT32 dims: [1] }\n'
        f"sequence_batching {{ {batching}{controls}"
        + (f'  control_input {{ name: "CORRID" {corrid} }}\n' if id_type else "")
        + f"}}\n{more}"
    )


def implicit_sum(*, batches: bool = True) -> bytes:
    """OUTPUT = INPUT_STATE + INPUT, and OUTPUT_STATE is the same: the server keeps the sum. INT32 of one element."""
    shape: list[int | str] = ["batch", 1] if batches else [1]
    graph = GraphWriter()
    graph.input("INPUT", DataType.INT32, shape)
    graph.input("INPUT_STATE", DataType.INT32, shape)
    graph.node("Add", ["INPUT", "INPUT_STATE"], "OUTPUT")
    graph.node("Identity", ["OUTPUT"], "OUTPUT_STATE")
    graph.output("OUTPUT", DataType.INT32, shape)
    graph.output("OUTPUT_STATE", DataType.INT32, shape)
    return graph.model()
