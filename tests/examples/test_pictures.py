import io
from pathlib import Path

import numpy as np
from examples.demo.pictures import annotated, photo, scanned_page
from PIL import Image


def test_the_page_is_grey_and_the_photo_coloured() -> None:
    page, notice = (Image.open(io.BytesIO(picture())) for picture in (scanned_page, photo))

    assert (page.format, page.mode) == ("PNG", "L")
    assert (notice.format, notice.mode, notice.size) == ("JPEG", "RGB", (1280, 960))


def test_the_photo_is_the_same_each_time() -> None:
    assert photo() == photo()


def test_what_was_read_stands_beside_the_picture_at_the_height_where_it_was_read(tmp_path: Path) -> None:
    box = np.array([[[20, 100], [300, 100], [300, 140], [20, 140]]], np.float32)

    annotated(scanned_page(), box, ["some words"], tmp_path / "read.png")

    shown = np.asarray(Image.open(tmp_path / "read.png").convert("L"))
    assert shown.shape == (382, 1536)  # twice as large, and as much again beside it
    (rows,) = np.nonzero((shown[:, 768:] < 255).any(axis=1))
    assert 200 <= rows.min() < rows.max() <= 280
