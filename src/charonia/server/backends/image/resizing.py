"""Resizes the part of an image that its output shows. Images are of mode RGB or L."""

import logging
from functools import partial
from typing import Any, Protocol

import PIL
from PIL import Image

from charonia.server.backends.image.framing import Framing, within
from charonia.server.backends.image.options import Filter, ImagePlan

try:
    import cykooz_resizer as simd
except ModuleNotFoundError:  # no wheels for this platform
    simd = None

PILLOW_MAJOR_MAX = 13
"""Newest version of Pillow whose images cykooz-resizer is known to read: it relies on their layout in memory."""

_log = logging.getLogger(__name__)

_PILLOW = {
    Filter.BILINEAR: Image.Resampling.BILINEAR,
    Filter.BICUBIC: Image.Resampling.BICUBIC,
    Filter.LANCZOS: Image.Resampling.LANCZOS,
    Filter.BOX: Image.Resampling.BOX,
    Filter.NEAREST: Image.Resampling.NEAREST,
}
_SIMD = {
    Filter.BILINEAR: "bilinear",
    Filter.BICUBIC: "catmull_rom",
    Filter.LANCZOS: "lanczos3",
    Filter.BOX: "box",
}
_SUPPORT = {Filter.BILINEAR: 1.0, Filter.BICUBIC: 2.0, Filter.LANCZOS: 3.0, Filter.BOX: 0.5}


class Resize(Protocol):
    """A way to resize."""

    def __call__(self, image: Image.Image, framing: Framing) -> Image.Image:
        """Return the part of the resized image that is in the output."""
        ...


def chosen_resize(plan: ImagePlan) -> Resize:
    """Return the fastest way that keeps to the plan."""
    if not plan.is_antialiased:
        return _sampled
    if plan.is_exact or plan.filter is Filter.NEAREST:
        return partial(_exact, _PILLOW[plan.filter])
    major = int(PIL.__version__.partition(".")[0])
    if simd is None or major > PILLOW_MAJOR_MAX:
        reason = "cykooz-resizer is not installed" if simd is None else f"Pillow {major} is too new for cykooz-resizer"
        _log.info("images are resized by Pillow, several times slower: %s", reason)
        return partial(_exact, _PILLOW[plan.filter])
    algorithm = simd.ResizeAlg.convolution(getattr(simd.FilterType, _SIMD[plan.filter]))
    return partial(_fast, algorithm, _SUPPORT[plan.filter])


def _exact(resample: Image.Resampling, image: Image.Image, framing: Framing) -> Image.Image:
    whole = image if image.size == framing.resized else image.resize(framing.resized, resample)
    return whole if whole.size == _size_of(framing) else whole.crop(framing.part)


def _sampled(image: Image.Image, framing: Framing) -> Image.Image:
    """Do what OpenCV's INTER_LINEAR does: a pixel comes from the four nearest ones, however small the image becomes."""
    left, top, width, height = framing.source(image.size)
    transform: Any = Image.Transform.EXTENT
    box = (left, top, left + width, top + height)
    return image.transform(_size_of(framing), transform, box, Image.Resampling.BILINEAR)


def _fast(algorithm: Any, support: float, image: Image.Image, framing: Framing) -> Image.Image:
    """Resize columns, then rows, as Pillow does it: the other way around, single values would differ by up to 14."""
    width, height = _size_of(framing)
    if image.size == framing.resized:
        return image if image.size == (width, height) else image.crop(framing.part)
    left, top, box_width, box_height = framing.source(image.size)
    first, end = framing.rows(image.size, support)
    resizer = simd.Resizer()
    columns = Image.new(image.mode, (width, end - first), None)
    box = simd.CropBox(left, first, box_width, end - first)
    resizer.resize_pil(image, columns, simd.ResizeOptions(algorithm, crop_box=box))
    done = Image.new(image.mode, (width, height), None)
    box = simd.CropBox(0, top - first, width, within(top - first, box_height, end - first))
    resizer.resize_pil(columns, done, simd.ResizeOptions(algorithm, crop_box=box))
    return done


def _size_of(framing: Framing) -> tuple[int, int]:
    left, top, right, bottom = framing.part
    return right - left, bottom - top
