"""The functions beside the example's models, without a server."""

import importlib.util
import io
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

MODELS = Path(__file__).parents[2] / "examples" / "ocr" / "models"


def beside(model: str, module: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{model}_{module}", MODELS / model / "1" / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


picture = beside("detection_preprocessing", "picture")
boxes = beside("detection_postprocessing", "boxes")
lines = beside("detection_postprocessing", "lines")
decoding = beside("recognition_postprocessing", "decoding")


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def box(left: float, top: float, right: float, bottom: float) -> list[list[float]]:
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def test_a_picture_is_read_as_bgr() -> None:
    decoded = picture.decode(encoded(Image.new("RGB", (4, 3), (200, 100, 50))))

    assert decoded.shape == (3, 4, 3)
    assert decoded[0, 0].tolist() == [50, 100, 200]


def test_a_grey_picture_has_three_equal_channels() -> None:
    assert picture.decode(encoded(Image.new("L", (2, 2), 77)))[1, 1].tolist() == [77, 77, 77]


def test_what_is_clear_in_a_picture_is_white() -> None:
    assert picture.decode(encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 0))))[0, 0].tolist() == [255, 255, 255]


def test_a_picture_is_turned_as_its_camera_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright

    decoded = picture.decode(encoded(Image.new("RGB", (40, 20)), "JPEG", exif=exif))

    assert decoded.shape == (40, 20, 3)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"", "expected a JPEG or PNG file, got 0 bytes that are neither"),
        (b"this is no picture", "expected a JPEG or PNG file, got 18 bytes that are neither"),
        (encoded(Image.new("RGB", (64, 64)), "BMP"), "expected a JPEG or PNG file, got 12342 bytes that are neither"),
        (encoded(Image.effect_noise((200, 200), 50))[:5000], "breaks off or is damaged"),
        (encoded(Image.new("1", (10_000, 10_000))), "expected at most 64000000 pixels, got 10000 x 10000"),
    ],
    ids=["nothing", "text", "another format", "half a file", "too large"],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_reason(file: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        picture.decode(file)


def test_a_picture_of_common_size_is_taken_as_it_is() -> None:
    pixels, source = picture.prepare(np.zeros((480, 640, 3), np.uint8))

    assert pixels.shape == (480, 640, 3)
    assert source == (640, 480, 1.0, 1.0, 0)


def test_a_large_picture_is_reduced_to_2000_pixels() -> None:
    pixels, source = picture.prepare(np.zeros((3000, 4000, 3), np.uint8))

    assert pixels.shape == (1504, 1984, 3)
    assert (source.scale_x, source.scale_y) == (4000 / 1984, 3000 / 1504)


def test_a_single_line_gets_rows_above_and_below() -> None:
    pixels, source = picture.prepare(np.full((40, 800, 3), 255, np.uint8))

    assert pixels.shape == (200, 800, 3)
    assert source.rows_above == 80
    assert pixels[:80].max() == 0
    assert pixels[80:120].min() == 255


def test_a_strip_of_a_few_pixels_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a picture, got a strip: 5000 x 1 pixels"):
        picture.prepare(np.zeros((1, 5000, 3), np.uint8))


def test_the_detection_gets_multiples_of_32_and_no_less_than_736() -> None:
    tensor = picture.detection_input(np.full((100, 250, 3), 255, np.uint8))

    assert tensor.shape == (1, 3, 736, 1856)
    assert tensor.dtype == np.float32
    assert tensor.min() == tensor.max() == 1


def test_a_region_of_the_map_becomes_a_box_around_its_line() -> None:
    probability = np.zeros((320, 640), np.float32)
    probability[100:120, 200:400] = 0.9

    (found,) = boxes.find_boxes(probability, (160, 320))  # the picture is half the size of the map

    assert found[0, 0] < 100 < 200 < found[2, 0]
    assert found[0, 1] < 50 < 60 < found[2, 1]
    assert found[2, 1] - found[0, 1] < 30


def test_faint_and_tiny_regions_are_no_lines() -> None:
    probability = np.zeros((320, 640), np.float32)
    probability[100:120, 200:400] = 0.4
    probability[200:202, 300:301] = 0.9

    assert boxes.find_boxes(probability, (320, 640)).shape == (0, 4, 2)


def test_a_thousand_regions_are_looked_at_and_no_more() -> None:
    probability = np.zeros((1600, 1600), np.float32)
    for top in range(0, 1600, 40):
        for left in range(0, 1600, 40):
            probability[top : top + 15, left : left + 30] = 0.9

    assert len(boxes.find_boxes(probability, (1600, 1600))) == 1000


def test_corners_are_given_clockwise_from_the_upper_left_one() -> None:
    shuffled = np.array([[[90.0, 50], [10, 20], [10, 50], [90, 20]]])

    assert boxes.clockwise(shuffled)[0].tolist() == box(10, 20, 90, 50)


def test_lines_are_read_from_top_to_bottom_and_those_of_one_height_from_left_to_right() -> None:
    right, left, below = box(300, 10, 400, 30), box(20, 16, 200, 36), box(20, 60, 200, 80)

    ordered = boxes.reading_order(np.array([below, right, left]))

    assert ordered.tolist() == [left, right, below]


def test_boxes_are_given_in_the_picture_that_was_sent() -> None:
    made = boxes.in_source(np.array([box(10, 90, 50, 110)]), (100, 40, 2.0, 0.5, 80))

    assert made[0].tolist() == box(20, 5, 100, 15)
    assert made.dtype == np.float32


def test_a_line_aslant_is_cut_out_straight() -> None:
    pixels = np.zeros((100, 200, 3), np.uint8)
    corners = np.array([[20, 40], [120, 20], [126, 50], [26, 70]], np.float32)

    assert lines.cut(pixels, corners).shape == (30, 101, 3)


def test_a_column_is_read_from_bottom_to_top() -> None:
    pixels = np.zeros((200, 100, 3), np.uint8)
    pixels[150:] = 255

    line = lines.cut(pixels, np.array(box(40, 20, 60, 180), np.float32))

    assert line.shape == (20, 160, 3)
    assert line[:, -10:].max() == 0 or line[:, :10].max() == 0


def test_the_widest_line_of_a_batch_of_six_is_rounded_down_and_the_others_up() -> None:
    of_widths = [np.zeros((70, width, 3), np.uint8) for width in (700, 600, 500, 510, 520, 530, 540)]

    widths, by_width = lines.widths_in_batches(of_widths, 6)

    # 48 / 70 of each; the six narrowest are one batch, 700 is alone in its own.
    assert by_width.tolist() == [2, 3, 4, 5, 6, 1, 0]
    assert widths.tolist() == [480, 411, 343, 350, 357, 364, 371]


def test_lines_are_padded_on_the_right_to_the_widest() -> None:
    some = [np.full((48, 100, 3), 255, np.uint8), np.full((24, 200, 3), 0, np.uint8)]
    widths, _ = lines.widths_in_batches(some, 2)

    tensor = lines.recognition_input(some, widths)

    assert tensor.shape == (2, 3, 48, 400)
    assert tensor[0, :, :, :100].min() == 1
    assert not tensor[0, :, :, 100:].any()
    assert tensor[1].max() == -1


def test_wide_lines_are_squeezed_to_see_how_they_stand() -> None:
    assert lines.angle_input([np.zeros((48, 900, 3), np.uint8)]).shape == (1, 3, 48, 192)


def test_repeated_classes_are_one_character_and_a_blank_divides_them() -> None:
    probability = np.eye(3, dtype=np.float32)[[[1, 1, 0, 1, 2, 2]]] * np.float32(0.75)

    texts, scores = decoding.decode(probability, ["", "a", "b"])

    assert texts == ["aab"]
    assert scores.tolist() == [0.75]


def test_a_line_without_characters_has_no_text_and_no_score() -> None:
    texts, scores = decoding.decode(np.eye(3, dtype=np.float32)[[[0, 0, 0]]], ["", "a", "b"])

    assert texts == [""]
    assert scores.tolist() == [0]


def test_no_lines_are_no_texts() -> None:
    texts, scores = decoding.decode(np.zeros((0, 40, 3), np.float32), ["", "a", "b"])

    assert texts == []
    assert scores.shape == (0,)
