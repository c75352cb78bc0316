"""Sizes and positions. The expected ones are what torchvision and YOLO's letterbox make of the same image."""

import pytest

from charonia.server.backends.image.options import Frame, ResizeMode, Size

SHORTER = Frame(ResizeMode.SHORTER_SIDE, (256, 256))
BOX = Frame(ResizeMode.LETTERBOX, (640, 640))


@pytest.mark.parametrize(
    ("size", "resized"),
    [((640, 427), (383, 256)), ((427, 640), (256, 383)), ((256, 256), (256, 256)), ((1, 3), (256, 768))],
)
def test_the_shorter_side_gets_the_size_and_the_longer_one_is_cut_to_a_whole_number(size: Size, resized: Size) -> None:
    framing = SHORTER.place(size)

    assert (framing.resized, framing.frame, framing.offset) == (resized, resized, (0, 0))
    assert framing.part == (0, 0, *resized)


@pytest.mark.parametrize(
    ("size", "offset", "part"),
    [
        ((640, 427), (-80, -16), (80, 16, 304, 240)),  # round((383 - 224) / 2) is 80: half to even
        ((427, 640), (-16, -80), (16, 80, 240, 304)),
        ((256, 256), (-16, -16), (16, 16, 240, 240)),
    ],
)
def test_the_center_is_cropped(size: Size, offset: Size, part: tuple[int, int, int, int]) -> None:
    framing = Frame(ResizeMode.SHORTER_SIDE, (256, 256), (224, 224)).place(size)

    assert (framing.offset, framing.part, framing.frame) == (offset, part, (224, 224))
    assert framing.target == (slice(0, 224), slice(0, 224))


def test_a_crop_that_is_larger_than_the_image_pads_it() -> None:
    framing = Frame(crop=(10, 4)).place((7, 9))

    assert (framing.offset, framing.part) == ((1, -2), (0, 2, 7, 6))
    assert framing.target == (slice(0, 4), slice(1, 8))


@pytest.mark.parametrize(
    ("size", "resized", "offset"),
    [
        ((1280, 720), (640, 360), (0, 140)),
        ((720, 1280), (360, 640), (140, 0)),
        ((640, 427), (640, 427), (0, 106)),
        ((100, 50), (640, 320), (0, 160)),
        ((10000, 1), (640, 1), (0, 319)),
    ],
)
def test_a_letterbox_shows_the_whole_image_in_the_middle(size: Size, resized: Size, offset: Size) -> None:
    framing = BOX.place(size)

    assert (framing.resized, framing.offset, framing.frame) == (resized, offset, (640, 640))


def test_a_letterbox_may_have_its_padding_right_and_below() -> None:
    framing = Frame(ResizeMode.LETTERBOX, (192, 48), is_centered=False).place((100, 50))

    assert (framing.resized, framing.offset) == ((96, 48), (0, 0))
    assert framing.target == (slice(0, 48), slice(0, 96))


def test_stretching_changes_the_proportions() -> None:
    framing = Frame(ResizeMode.STRETCH, (300, 200)).place((640, 480))

    assert (framing.resized, framing.offset) == ((300, 200), (0, 0))
    assert framing.scale == (300 / 640, 200 / 480)


def test_scale_and_offset_lead_from_the_output_back_to_the_image() -> None:
    framing = BOX.place((1280, 720))

    # The lower right corner of the image lies at (640, 500) of the output.
    corner = [(at - off) / scale for at, off, scale in zip((640, 500), framing.offset, framing.scale, strict=True)]

    assert corner == [1280, 720]


def test_only_the_rows_that_a_crop_and_the_filter_need_are_resized() -> None:
    framing = Frame(ResizeMode.SHORTER_SIDE, (100, 100), (100, 100)).place((1000, 100_000))

    left, top, width, height = framing.source(framing.original)
    first, end = framing.rows(framing.original, 1.0)

    assert (left, top, width, height) == (0, 49_500, 1000, 1000)
    assert first <= top - 10
    assert end >= top + height + 10
    assert end - first < 1050


def test_the_box_fits_an_image_that_was_decoded_at_a_fraction_of_its_size() -> None:
    framing = Frame(ResizeMode.SHORTER_SIDE, (256, 256), (224, 224)).place((4000, 3000))

    whole, quarter = framing.source((4000, 3000)), framing.source((1000, 750))

    assert quarter == pytest.approx([value / 4 for value in whole])
