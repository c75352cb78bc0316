"""From the bytes of a file to an upright image of the wanted color.

Of a file with several pictures, the first one counts. Color profiles are ignored, as by Pillow and torchvision.
"""

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from charonia.core.errors import ServingError, invalid
from charonia.server.backends.image.framing import Framing
from charonia.server.backends.image.options import PILLOW_PIXELS_MAX, Color, ImagePlan

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats that are decoded, as Pillow names them. Each further one would be a parser that an attacker may choose."""

SCALED_DECODE_GAP = 2
"""A JPEG is not decoded at less than this times the size that it is resized to."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPPING = {_TURNS[orientation] for orientation in (5, 6, 7, 8)}

START_SHOWN_BYTES = 8
"""So many of the first bytes does an error show of a file that is no image."""


def decode(data: bytes, plan: ImagePlan, place: str) -> tuple[Image.Image, Framing]:
    """Return an image of mode RGB or L, and where it goes.

    Args:
        data: The file.
        plan: What to do with it.
        place: Name of the element, for errors.

    Raises:
        ServingError: INVALID_ARG: the file is too large, of another format or damaged.
    """
    if len(data) > plan.bytes_max:
        raise invalid(
            f"{place}: expected a file of at most {plan.bytes_max} bytes, got {len(data)}",
            hint="send a smaller image, or raise the parameter max_bytes",
        )
    image = _open(data, plan, place)
    try:
        return _decoded(image, plan, place)
    except (ServingError, MemoryError):
        raise
    except Exception as error:  # what Pillow raises on damaged files has no common base class
        raise invalid(
            f"{place}: expected a whole {image.format} file, got one that cannot be decoded: {error}",
            hint="the file is damaged or cut short",
        ) from error


def _open(data: bytes, plan: ImagePlan, place: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        names = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        start = data[:START_SHOWN_BYTES]
        got = f"{len(data)} bytes that begin with {start!r}" if data else "nothing"
        raise invalid(
            f"{place}: expected a file of format {names}, got {got}",
            hint="send the bytes of the file itself, not its path, its URL or base64",
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise invalid(
            f"{place}: expected an image of at most {plan.pixels_max} pixels, got more than {PILLOW_PIXELS_MAX}",
            hint="send a smaller image",
        ) from None
    except Exception as error:  # as above
        raise invalid(f"{place}: the header of the file cannot be read: {error}", hint="the file is damaged") from error
    image.decodermaxblock = len(data)  # in one call: each takes the GIL anew, and copies what the last one left over
    width, height = image.size
    if width * height > plan.pixels_max:
        raise invalid(
            f"{place}: expected an image of at most {plan.pixels_max} pixels, got {width} x {height}",
            hint="send a smaller image, or raise the parameter max_pixels",
        )
    return image


def _decoded(image: Image.Image, plan: ImagePlan, place: str) -> tuple[Image.Image, Framing]:
    turn = _turn(image) if plan.is_oriented else None
    width, height = image.size
    framing = plan.frame.place((height, width) if turn in _SWAPPING else (width, height))
    _check_work(framing, plan, place)
    if plan.has_scaled_decode:
        columns, rows = reversed(framing.resized) if turn in _SWAPPING else framing.resized
        image.draft(None, (columns * SCALED_DECODE_GAP, rows * SCALED_DECODE_GAP))
    image.load()
    upright = _colored(image, plan)
    return upright if turn is None else upright.transpose(turn), framing


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # as above; viewers show an image with broken EXIF data, too
        return None
    return _TURNS.get(orientation or 1)


def _check_work(framing: Framing, plan: ImagePlan, place: str) -> None:
    """Refuse a picture of extreme proportions: resizing it would need more memory than decoding it."""
    left, top, right, bottom = framing.part
    width, height = framing.resized if plan.is_exact else (right - left, bottom - top)
    box_height = framing.source(framing.original)[3]
    if max(width * height, width * box_height) > plan.pixels_max:
        raise invalid(
            f"{place}: expected an image that takes at most {plan.pixels_max} pixels while it is resized, got one of "
            f"{framing.original[0]} x {framing.original[1]} to be {framing.resized[0]} x {framing.resized[1]}",
            hint="its proportions are extreme; crop it first",
        )


def _colored(image: Image.Image, plan: ImagePlan) -> Image.Image:
    mode = "L" if plan.color is Color.GRAY else "RGB"
    if image.mode in ("I", "I;16", "I;16B"):  # 16 bits of gray, of which Pillow would cut off all above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA"):
        image = image.convert("RGBA")
        if plan.background is not None:
            opaque = Image.new("RGBA", image.size, (*plan.background, 255))
            opaque.alpha_composite(image)
            image = opaque
    return image if image.mode == mode else image.convert(mode)
