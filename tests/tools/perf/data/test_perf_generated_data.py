import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.metadata import ModelMetadata, TensorMetadata
from charonia.core.tensor import from_bfloat16
from charonia.tools.perf.data.load import Generator
from charonia.tools.perf.data.spec import (
    ModelSpec,
    TensorSpec,
    check_batch_size,
    integer_limits,
    is_integer,
    model_spec,
    with_shapes,
)
from charonia.tools.perf.options import DataOptions

SIZE = 1000


def one_input(datatype: DataType, shape: tuple[int, ...] = (SIZE,), *, optional: bool = False) -> ModelSpec:
    return ModelSpec("m", "", 8, (TensorSpec("X", datatype, shape, optional),))


@pytest.mark.parametrize("datatype", DataType)
def test_random_items_are_valid_for_their_datatype(datatype: DataType) -> None:
    array = Generator(one_input(datatype)).random()["X"]

    assert array.shape == (SIZE,)
    assert array.dtype == datatype.numpy
    if datatype is DataType.BYTES:
        assert {len(text) for text in array.tolist()} == {128}
        assert all(text.isalnum() for text in array.tolist())
    elif datatype is DataType.BOOL:
        assert set(array.view(np.uint8).tolist()) == {0, 1}
    elif is_integer(datatype):
        assert (int(array.min()), int(array.max())) == (0, 255 if datatype is DataType.UINT8 else 127)
    else:
        values = (from_bfloat16(array) if datatype is DataType.BF16 else array).astype(np.float64)
        assert 0 <= values.min() < values.max() <= 1


def test_the_same_seed_makes_the_same_items_and_another_one_others() -> None:
    spec = one_input(DataType.FP32)

    assert Generator(spec, seed=3).random()["X"].tolist() == Generator(spec, seed=3).random()["X"].tolist()
    assert Generator(spec, seed=3).random()["X"].tolist() != Generator(spec, seed=4).random()["X"].tolist()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([d for d in DataType if is_integer(d)]), st.data())
def test_integers_stay_in_any_range_of_their_datatype(datatype: DataType, data: st.DataObject) -> None:
    least, most = integer_limits(datatype)
    exact = 2**53
    low = data.draw(st.integers(max(least, -exact), min(most, exact)))
    high = data.draw(st.integers(low, min(most, exact)))

    array = Generator(one_input(datatype), DataOptions(ranges=(("X", low, high),))).random()["X"]

    assert low <= int(array.min()) <= int(array.max()) <= high


def test_floats_stay_in_their_range() -> None:
    array = Generator(one_input(DataType.FP64), DataOptions(ranges=(("X", -5.0, -4.0),))).random()["X"]

    assert -5 <= array.min() < array.max() <= -4


@pytest.mark.parametrize(
    ("datatype", "bounds", "problem"),
    [
        (DataType.UINT8, (0, 256), "--input-range: input 'X': expected values that fit UINT8, got 0:256"),
        (DataType.INT8, (-129, 0), "--input-range: input 'X': expected values that fit INT8, got -129:0"),
        (DataType.INT32, (0.5, 2), "--input-range: input 'X': expected integers for INT32, got 0.5:2"),
        (DataType.FP16, (0, 1e6), "--input-range: input 'X': expected values that fit FP16, got 0:1e+06"),
        (DataType.BYTES, (0, 1), "--input-range: input 'X': expected an input of numbers, got one of BYTES"),
    ],
)
def test_a_range_that_the_datatype_does_not_have_is_refused(
    datatype: DataType, bounds: tuple[float, float], problem: str
) -> None:
    with pytest.raises(ServingError) as caught:
        Generator(one_input(datatype), DataOptions(ranges=(("X", *bounds),)))

    assert caught.value.message == problem


def test_a_range_of_no_input_is_refused() -> None:
    with pytest.raises(ServingError, match="expected an input of model 'm', 'X', got 'Y'"):
        Generator(one_input(DataType.FP32), DataOptions(ranges=(("Y", 0, 1),)))


def test_strings_have_the_length_or_the_text_asked_for() -> None:
    spec = one_input(DataType.BYTES, (2,))

    assert [len(text) for text in Generator(spec, DataOptions(string_length=5)).random()["X"].tolist()] == [5, 5]
    assert Generator(spec, DataOptions(string_data="hé")).random()["X"].tolist() == ["hé".encode()] * 2


def test_zeros() -> None:
    assert Generator(one_input(DataType.INT32, (2, 2))).zero()["X"].tolist() == [[0, 0], [0, 0]]
    assert Generator(one_input(DataType.BYTES, (2,))).zero()["X"].tolist() == [b"", b""]


def test_optional_inputs_are_left_out_unless_a_range_names_them() -> None:
    spec = one_input(DataType.FP32, (2,), optional=True)

    assert Generator(spec).random() == {}
    assert list(Generator(spec, DataOptions(ranges=(("X", 0, 1),))).random()) == ["X"]


def test_variable_dimensions_need_a_shape() -> None:
    spec = one_input(DataType.FP32, (-1, 3))

    with pytest.raises(ServingError) as caught:
        Generator(spec).random()

    assert str(caught.value) == (
        "input 'X' of model 'm': expected fixed dimensions, got [-1, 3] (hint: --shape X:D1,D2,... says which to send)"
    )
    assert Generator(with_shapes(spec, [("X", (2, 3))])).random()["X"].shape == (2, 3)


def test_a_shape_has_to_fit_the_model() -> None:
    spec = one_input(DataType.FP32, (-1, 3))

    with pytest.raises(ServingError, match=r"input 'X': expected a shape that fits \[-1, 3\], got \[2, 4\]"):
        with_shapes(spec, [("X", (2, 4))])
    with pytest.raises(ServingError, match="expected an input of model 'm', 'X', got 'Y'"):
        with_shapes(spec, [("Y", (2, 3))])


def test_the_batch_size_has_to_fit_the_model() -> None:
    with pytest.raises(ServingError, match="-b: expected at most 8, the max_batch_size of model 'm', got 9"):
        check_batch_size(one_input(DataType.FP32), 9)
    with pytest.raises(ServingError, match="-b: expected 1, as model 'flat' does not support batching, got 2"):
        check_batch_size(ModelSpec("flat", "", 0, ()), 2)
    check_batch_size(one_input(DataType.FP32), 8)


def test_metadata_and_configuration_make_the_specification() -> None:
    metadata = ModelMetadata(
        "m",
        ("1",),
        "onnxruntime_onnx",
        (
            TensorMetadata("IMAGE", DataType.UINT8, (-1, 224, 224, 3)),
            TensorMetadata("SCALE", DataType.FP32, (-1, 1)),
        ),
        (TensorMetadata("OUT", DataType.FP32, (-1, 10)),),
    )
    config = {
        "max_batch_size": 4,
        "input": [{"name": "IMAGE"}, {"name": "SCALE", "optional": True}],
    }

    spec = model_spec(metadata, config, "1")

    assert spec == ModelSpec(
        "m",
        "1",
        4,
        (
            TensorSpec("IMAGE", DataType.UINT8, (224, 224, 3)),
            TensorSpec("SCALE", DataType.FP32, (1,), True),
        ),
        (TensorSpec("OUT", DataType.FP32, (10,)),),
    )


def test_without_configuration_the_shape_is_the_whole_shape() -> None:
    metadata = ModelMetadata("m", (), "", (TensorMetadata("X", DataType.FP32, (2, 3)),), ())

    assert model_spec(metadata, {}).inputs[0].shape == (2, 3)
