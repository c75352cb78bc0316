"""Each way in which a request can differ from the model's configuration has its own sentence."""

import numpy as np
import pytest

from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.tensor import Tensor
from charonia.server.execution.admission import Admission

FIXED = ModelInput("a", DataType.FP32, dims=(16,))
VARIABLE = ModelInput("b", DataType.INT32, dims=(-1, 2))


def admission(*inputs: ModelInput, max_batch_size: int = 0) -> Admission:
    return Admission(
        ModelConfig(
            name="m", max_batch_size=max_batch_size, input=inputs, output=(ModelOutput("o", DataType.FP32, (1,)),)
        )
    )


def request(outputs: tuple[str, ...] = (), **shapes: tuple[int, ...]) -> InferRequest:
    datatypes = {"a": DataType.FP32, "b": DataType.INT32}
    inputs = {
        name: Tensor(
            name, datatypes.get(name, DataType.FP32), np.zeros(shape, datatypes.get(name, DataType.FP32).numpy)
        )
        for name, shape in shapes.items()
    }
    return InferRequest("m", inputs, id="7", outputs=tuple(RequestedOutput(o) for o in outputs))


def refusal(of: Admission, sent: InferRequest) -> str:
    with pytest.raises(ServingError) as caught:
        of.check(sent)
    assert caught.value.code is Code.INVALID_ARG
    return str(caught.value)


def test_a_request_without_batching_counts_as_one_and_fixed_shapes_need_no_key() -> None:
    assert admission(FIXED).check(request(a=(16,))) == (1, None)


def test_the_batch_size_is_the_leading_dimension() -> None:
    assert admission(FIXED, max_batch_size=8).check(request(a=(5, 16))) == (5, None)


def test_variable_shapes_make_the_key_by_which_requests_share_a_batch() -> None:
    of = admission(VARIABLE, max_batch_size=8)
    assert of.check(request(b=(1, 3, 2)))[1] == of.check(request(b=(4, 3, 2)))[1]
    assert of.check(request(b=(1, 3, 2)))[1] != of.check(request(b=(1, 4, 2)))[1]


def test_optional_inputs_may_be_absent_and_are_part_of_the_key() -> None:
    of = admission(FIXED, ModelInput("x", DataType.FP32, dims=(1,), optional=True), max_batch_size=4)
    assert of.check(request(a=(1, 16)))[1] != of.check(request(a=(1, 16), x=(1, 1)))[1]
    assert "number of inputs between 1 and 2" in refusal(of, request(x=(1, 1)))
    assert "unexpected inference input 'z'" in refusal(of, request(a=(1, 16), z=(1, 1)))


@pytest.mark.parametrize(
    ("batch", "sent", "text"),
    [
        (0, request(), "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required"),
        (0, request(a=(16,), x=(1,)), "expected 1 inputs but got 2 inputs for model 'm'. Got input(s) ['a','x']"),
        (0, request(a=(8,)), "unexpected shape for input 'a' for model 'm'. Expected [16], got [8]"),
        (4, request(a=(1, 8)), "Expected [-1,16], got [1,8] (hint: dimension 1 is 16, not 8)"),
        (4, request(a=(16,)), "got [16] (hint: the first dimension is the batch: [1,16] is one row)"),
        (4, request(a=(1, 1, 16)), "got [1,1,16] (hint: it has 2 dimensions, the first for the batch)"),
        (4, request(a=()), "input 'a' has no shape but model requires batch dimension for 'm'"),
        (4, request(a=(5, 16)), "inference request batch-size must be <= 4 for 'm'"),
        (4, request(a=(0, 16)), "inference request batch-size must be >= 1 for 'm'"),
    ],
)
def test_a_mismatch_is_named(batch: int, sent: InferRequest, text: str) -> None:
    message = refusal(admission(FIXED, max_batch_size=batch), sent)
    assert message.startswith("[request id: 7] ")
    assert text in message


@pytest.mark.parametrize(
    ("sent", "start"),
    [
        (request(x=(16,)), "unexpected inference input 'x' for model 'm'"),
        (request(outputs=("z",), a=(16,)), "unexpected inference output 'z' for model 'm'"),
        (request(outputs=("z",), x=(16,)), "unexpected inference output 'z' for model 'm'"),
    ],
)
def test_a_name_that_the_model_lacks_is_the_start_of_the_message(sent: InferRequest, start: str) -> None:
    assert refusal(admission(FIXED), sent).startswith(start)


def test_an_output_that_is_not_there_comes_with_those_that_are() -> None:
    with pytest.raises(ServingError) as refused:
        admission(FIXED).check(request(outputs=("z",), a=(16,)))

    assert refused.value.hint == "its outputs are ['o']"


def test_a_request_without_id_says_so() -> None:
    sent = request()
    sent.id = ""
    assert refusal(admission(FIXED), sent).startswith("[request id: <id_unknown>] ")


def test_a_wrong_datatype_names_both() -> None:
    sent = InferRequest("m", {"a": Tensor("a", DataType.INT32, np.zeros(16, "<i4"))})
    message = refusal(admission(FIXED), sent)
    assert "inference input 'a' data-type is 'INT32', but model 'm' expects 'FP32'" in message


def test_inputs_must_agree_on_the_batch_size() -> None:
    of = admission(FIXED, VARIABLE, max_batch_size=8)
    assert "batch size does not match other inputs" in refusal(of, request(a=(2, 16), b=(3, 1, 2)))


def test_a_variable_input_keeps_its_fixed_dimensions_and_rank() -> None:
    of = admission(VARIABLE)
    assert "Expected [-1,2], got [3,3]" in refusal(of, request(b=(3, 3)))
    assert "Expected [-1,2], got [3]" in refusal(of, request(b=(3,)))


def test_a_configuration_without_datatype_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="no data type"):
        admission(ModelInput("a"))


def test_shapes_of_an_input_that_may_be_ragged_are_no_part_of_the_key() -> None:
    of = admission(ModelInput("b", DataType.INT32, dims=(-1, 2), allow_ragged_batch=True), max_batch_size=8)
    assert of.check(request(b=(1, 3, 2))) == of.check(request(b=(1, 4, 2))) == (1, None)
    assert "unexpected shape for input 'b'" in refusal(of, request(b=(1, 3, 3)))


@pytest.mark.parametrize(
    ("dims", "batch", "shape", "words"),
    [
        ((3, -1, -1), 4, (1, 224, 200, 3), "channels first: transpose the array to [1,3,224,200]"),
        ((-1, -1, 3), 4, (1, 3, 224, 200), "channels last: transpose the array to [1,224,200,3]"),
        ((3, 32, 32), 0, (32, 32, 3), "channels first: transpose the array to [3,32,32]"),
        ((3, 32, 32), 4, (1, 3, 31, 30), "dimension 2 is 32, not 31, dimension 3 is 32, not 30"),
    ],
)
def test_a_picture_in_the_other_order_is_recognised(
    dims: tuple[int, ...], batch: int, shape: tuple[int, ...], words: str
) -> None:
    of = admission(ModelInput("a", DataType.FP32, dims=dims), max_batch_size=batch)

    assert words in refusal(of, request(a=shape))
