import numpy as np
import pytest

from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.response import ExecutionRecord, InferResponse
from charonia.core.tensor import Tensor


def tensor() -> Tensor:
    return Tensor("x", DataType.FP32, np.zeros((2, 3), np.float32))


def test_a_tensor_shows_name_type_and_shape_not_its_elements() -> None:
    assert tensor().shape == (2, 3)
    assert repr(tensor()) == "Tensor('x', FP32, [2, 3])"


@pytest.mark.parametrize(("version", "shown"), [("", "'m', id="), ("3", "'m' v3, id=")])
def test_a_request_shows_what_it_asks_for(version: str, shown: str) -> None:
    request = InferRequest("m", {"x": tensor()}, model_version=version, id="7")

    assert shown in repr(request)
    assert repr(request).endswith("id='7', inputs=[Tensor('x', FP32, [2, 3])])")


def test_requests_do_not_share_parameters() -> None:
    first, second = InferRequest("m", {}), InferRequest("m", {})

    first.parameters["a"] = 1

    assert second.parameters == {}


def test_a_requested_output_shows_how_many_classes() -> None:
    assert repr(RequestedOutput("y", 3)) == "RequestedOutput('y', classification=3)"


def test_a_response_shows_who_answered_and_knows_how_it_was_run() -> None:
    record = ExecutionRecord("m_0_0", batch_size=4, queue_ns=5, compute_ns=6)
    response = InferResponse("m", "1", "7", [tensor()], execution=record)

    assert repr(response) == "InferResponse('m' v1, id='7', outputs=[Tensor('x', FP32, [2, 3])])"
    assert response.execution is record
    assert (record.instance, record.batch_size, record.queue_ns, record.compute_ns) == ("m_0_0", 4, 5, 6)
    assert response.parameters == {}
