import pytest

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.server.backends.image.options import (
    BYTES_MAX,
    PARAMETERS,
    PIXELS_MAX,
    AxisOrder,
    Color,
    Filter,
    Frame,
    ImagePlan,
    PixelValues,
    ResizeMode,
    read_plan,
)


def plan_of(datatype: DataType = DataType.FP32, /, **parameters: str) -> ImagePlan:
    plan, problems = read_plan(ModelConfig(parameters=parameters), datatype)
    assert problems == []
    return plan


def problems_of(datatype: DataType = DataType.FP32, /, **parameters: str) -> str:
    return "\n".join(map(str, read_plan(ModelConfig(parameters=parameters), datatype)[1]))


def test_without_parameters_an_image_keeps_its_size_and_becomes_numbers_up_to_1() -> None:
    plan = plan_of()

    assert plan == ImagePlan()
    assert plan.frame.fixed is None
    assert plan.dims == (3, -1, -1)
    assert (plan.values, plan.pixels_max, plan.bytes_max) == (PixelValues(1.0, 255.0), PIXELS_MAX, BYTES_MAX)
    assert plan.is_oriented
    assert plan.is_antialiased


def test_the_parameters_of_a_torchvision_classifier() -> None:
    plan = plan_of(resize="shorter_side", size="256", crop="224", mean="0.485, 0.456,0.406", std="0.229,0.224,0.225")

    assert plan.frame == Frame(ResizeMode.SHORTER_SIDE, (256, 256), (224, 224))
    assert plan.values == PixelValues(1.0, 255.0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert plan.dims == (3, 224, 224)


def test_a_size_is_width_by_height_and_the_dims_follow_the_layout() -> None:
    plan = plan_of(DataType.UINT8, resize="stretch", size="640x480", color="bgr", layout="nhwc")

    assert plan.dims == (480, 640, 3)
    assert (plan.color, plan.layout) == (Color.BGR, AxisOrder.NHWC)


def test_gray_images_have_one_channel() -> None:
    plan = plan_of(crop="8x4", color="GRAY", mean="0.5")

    assert plan.dims == (1, 4, 8)
    assert plan.values.mean == (0.5,)


@pytest.mark.parametrize(
    ("text", "factor", "divisor"), [("1/255", 1.0, 255.0), ("1", 1.0, 1.0), ("0.5", 0.5, 1.0), ("2/255", 2.0, 255.0)]
)
def test_a_scale_is_a_number_or_a_quotient(text: str, factor: float, divisor: float) -> None:
    assert (plan_of(scale=text).values.factor, plan_of(scale=text).values.divisor) == (factor, divisor)


def test_one_number_stands_for_all_channels() -> None:
    plan = plan_of(resize="letterbox", size="64", padding_value="114", std="0.5")

    assert plan.padding == (114, 114, 114)
    assert plan.values.std == (0.5, 0.5, 0.5)


def test_the_other_parameters() -> None:
    plan = plan_of(
        filter="lanczos", exact="true", background="255,0,0", exif_orientation="false", scaled_decode="TRUE",
        threads="3", max_pixels="89478485", max_bytes="2000", padding_position="end", resize="letterbox", size="9",
    )  # fmt: skip

    assert (plan.filter, plan.is_exact, plan.background) == (Filter.LANCZOS, True, (255, 0, 0))
    assert (plan.is_oriented, plan.has_scaled_decode, plan.threads) == (False, True, 3)
    assert (plan.pixels_max, plan.bytes_max, plan.frame.is_centered) == (89_478_485, 2000, False)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"resize": "bigger"}, "expected one of none, shorter_side, stretch, letterbox, got 'bigger'"),
        ({"resize": "stretch"}, "parameters['size']: resize 'stretch' needs it"),
        ({"size": "256"}, "parameters['resize']: size needs it"),
        ({"resize": "shorter_side", "size": "256x224"}, "the shorter side is one number, got 256x224"),
        ({"resize": "stretch", "size": "0"}, "parameters['size']: expected a number, or WIDTHxHEIGHT"),
        ({"resize": "stretch", "size": "1x2x3"}, "got '1x2x3'"),
        ({"crop": "99999"}, "each of 1 to 16384, got '99999'"),
        ({"resize": "letterbox", "size": "9", "crop": "8"}, "parameters['crop']: a letterbox shows the whole image"),
        ({"mean": "1,2"}, "parameters['mean']: expected 3 numbers, or one for all, got '1,2'"),
        ({"mean": "nan"}, "parameters['mean']: expected a number, or one for each channel, got 'nan'"),
        ({"std": "0"}, "parameters['std']: expected numbers above 0, got '0'"),
        ({"scale": "1/0"}, "parameters['scale']: expected a number above 0, or a quotient such as 1/255, got '1/0'"),
        ({"scale": "small"}, "got 'small'"),
        ({"padding_value": "256"}, "parameters['padding_value']: expected pixels of 0 to 255, got '256'"),
        ({"background": "0.5"}, "parameters['background']: expected whole numbers of 0 to 255"),
        ({"threads": "0"}, "parameters['threads']: expected a whole number of at least 1, got '0'"),
        ({"max_pixels": "100000000"}, "parameters['max_pixels']: expected at most 89478485, the limit of Pillow"),
        ({"antialias": "maybe"}, "parameters['antialias']: expected true or false, got 'maybe'"),
        ({"antialias": "false", "filter": "bicubic"}, "false is for the filter bilinear, and filter is bicubic"),
        ({"padding_valu": "1"}, "the image backend has no such parameter; did you mean 'padding_value'?"),
        ({"xyz": "1"}, "it has resize, size, crop"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(parameters: dict[str, str], message: str) -> None:
    assert message in problems_of(**parameters)


@pytest.mark.parametrize("key", ["scale", "mean", "std"])
def test_an_output_of_bytes_has_no_normalisation(key: str) -> None:
    assert f"parameters['{key}']: the output is UINT8" in problems_of(DataType.UINT8, **{key: "1"})


def test_an_output_of_bytes_has_whole_numbers_around_it() -> None:
    assert "expected whole numbers for a UINT8 output" in problems_of(DataType.UINT8, padding_value="127.5")


def test_all_problems_are_reported_at_once() -> None:
    assert len(problems_of(color="x", layout="y", filter="z").splitlines()) == 3


def test_parameters_of_the_server_are_not_this_backends() -> None:
    assert problems_of(front_end="no") == ""
    assert "front_end" not in PARAMETERS.names
