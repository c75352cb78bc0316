"""Decodes a picture and brings it to a size that the text detection copes with.

The sizes come from PP-OCR and from the pipeline of the package that ships the models.
"""

import io
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("JPEG", "PNG")
# A file of a few kilobytes can ask for gigabytes: larger pictures are refused before they are decoded.
PIXELS_MAX = 64_000_000
Image.MAX_IMAGE_PIXELS = None  # PIL's own limit warns only

# In pixels of the picture that lines are cut from.
SIDE_MAX = 2000
SIDE_MIN = 30
# A picture that is lower than 30 or more than 8 times as wide as high gets rows above and below.
ROWS_MIN = 30
ASPECT_MAX = 8
# The detection reads pictures whose shorter side has at least so many pixels, and whose sides are multiples of 32.
DETECTION_SIDE_MIN = 736
GRID = 32


class Source(NamedTuple):
    """How the pixels came from the picture that was sent: x = column * scale_x, y = (row - rows_above) * scale_y."""

    width: int
    height: int
    scale_x: float
    scale_y: float
    rows_above: int


def decode(file):
    """Return the picture in a file: UINT8 [rows, columns, 3], BGR, turned as its camera says, white where it is clear.

    Raises:
        ValueError: It is no picture, a broken one, or too large a one.
    """
    picture = opened(file)
    try:
        picture = ImageOps.exif_transpose(picture)
        if picture.has_transparency_data:
            clear = picture.convert("RGBA")
            picture = Image.new("RGBA", clear.size, "white")
            picture.alpha_composite(clear)
        return cv2.cvtColor(np.asarray(picture.convert("RGB")), cv2.COLOR_RGB2BGR)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"expected a whole JPEG or PNG file, got one that breaks off or is damaged ({error})"
        ) from None


def opened(file):
    """Return the picture in a file of which only the head has been read."""
    try:
        picture = Image.open(io.BytesIO(file), formats=FORMATS)
    except (UnidentifiedImageError, ValueError):
        raise ValueError(f"expected a JPEG or PNG file, got {len(file)} bytes that are neither") from None
    width, height = picture.size
    if width * height > PIXELS_MAX:
        raise ValueError(f"expected at most {PIXELS_MAX} pixels, got {width} x {height}")
    return picture


def prepare(picture):
    """Return the pixels that lines are cut from, and their `Source`.

    Raises:
        ValueError: One side is so much longer than the other that nothing would remain of the shorter one.
    """
    height, width = picture.shape[:2]
    if max(height, width) > SIDE_MAX:
        picture = resize(picture, SIDE_MAX / max(height, width))
    if min(picture.shape[:2]) < SIDE_MIN:
        picture = resize(picture, SIDE_MIN / min(picture.shape[:2]))
    rows, columns = picture.shape[:2]
    above = 0
    if rows <= ROWS_MIN or columns / rows > ASPECT_MAX:
        above = int(abs(max(int(columns / ASPECT_MAX), ROWS_MIN) * 2 - rows) / 2)
        picture = cv2.copyMakeBorder(picture, above, above, 0, 0, cv2.BORDER_CONSTANT)
    return picture, Source(width, height, width / columns, height / rows, above)


def detection_input(pixels):
    """Return the pixels as the text detection takes them: FP32 [1, 3, rows, columns] in [-1, 1]."""
    scale = max(1.0, DETECTION_SIDE_MIN / min(pixels.shape[:2]))
    return cv2.dnn.blobFromImage(resize(pixels, scale), 1 / 127.5, mean=(127.5, 127.5, 127.5))


def resize(picture, scale):
    """Return the picture `scale` times as large, its sides rounded to multiples of 32."""
    height, width = (round(int(side * scale) / GRID) * GRID for side in picture.shape[:2])
    if not height or not width:
        raise ValueError("expected a picture, got a strip: {1} x {0} pixels".format(*picture.shape))
    return cv2.resize(picture, (width, height))
