"""Where the pixels of an image go: how large it becomes, and what is cropped or padded. Pure. Sizes are width, height.

Rounding is that of torchvision's Resize and CenterCrop, and of YOLO's letterbox.
"""

import math
from dataclasses import dataclass
from enum import Enum

Size = tuple[int, int]


class ResizeMode(Enum):
    """How the size of a resized image follows from its own."""

    NONE = "none"
    SHORTER_SIDE = "shorter_side"
    STRETCH = "stretch"
    LETTERBOX = "letterbox"


@dataclass(frozen=True, slots=True)
class Frame:
    """What the parameters say about sizes.

    Attributes:
        resize: How to resize.
        size: The size for `resize`; twice the same for the shorter side.
        crop: Size of the centre that is kept, None for everything.
        is_centered: Whether a letterbox has padding on both sides; else right and below.
    """

    resize: ResizeMode = ResizeMode.NONE
    size: Size = (0, 0)
    crop: Size | None = None
    is_centered: bool = True

    @property
    def fixed(self) -> Size | None:
        """Size of every output, None if each image has its own."""
        if self.crop is not None:
            return self.crop
        return self.size if self.resize in (ResizeMode.STRETCH, ResizeMode.LETTERBOX) else None

    def place(self, size: Size) -> "Framing":
        """Return where an image of this size goes."""
        resized = self._resized(size)
        frame = self.fixed or resized
        if self.resize is ResizeMode.LETTERBOX and not self.is_centered:
            return Framing(size, resized, frame, (0, 0))
        left, top = (_margin(outer, inner) for outer, inner in zip(frame, resized, strict=True))
        return Framing(size, resized, frame, (left, top))

    def _resized(self, size: Size) -> Size:
        width, height = size
        if self.resize is ResizeMode.NONE:
            return size
        if self.resize is ResizeMode.STRETCH:
            return self.size
        if self.resize is ResizeMode.LETTERBOX:
            ratio = min(self.size[0] / width, self.size[1] / height)
            return max(1, round(width * ratio)), max(1, round(height * ratio))
        side = self.size[0]
        return (side, int(side * height / width)) if width <= height else (int(side * width / height), side)


def _margin(outer: int, inner: int) -> int:
    return -round((inner - outer) / 2) if inner > outer else (outer - inner) // 2


@dataclass(frozen=True, slots=True)
class Framing:
    """Where one image goes.

    Attributes:
        original: Its size.
        resized: Its size after resizing.
        frame: Size of the output.
        offset: Left and top of the resized image in the output: positive with padding, negative where it is cropped.
    """

    original: Size
    resized: Size
    frame: Size
    offset: Size

    @property
    def part(self) -> tuple[int, int, int, int]:
        """The part of the resized image that is in the output: left, top, right, bottom."""
        (left, top), (width, height) = self.offset, self.resized
        return max(0, -left), max(0, -top), min(width, self.frame[0] - left), min(height, self.frame[1] - top)

    @property
    def target(self) -> tuple[slice, slice]:
        """The rows and columns of the output that this part takes; the others are padding."""
        left, top, right, bottom = self.part
        x, y = self.offset
        return slice(top + y, bottom + y), slice(left + x, right + x)

    @property
    def scale(self) -> tuple[float, float]:
        """Resized by original, in x and y. A point x of the output is at (x - offset) / scale of the original."""
        return self.resized[0] / self.original[0], self.resized[1] / self.original[1]

    def source(self, size: Size) -> tuple[float, float, float, float]:
        """Return the box of an image that becomes `part`: left, top, width, height.

        Args:
            size: Size of the image, which may have been decoded at a fraction of the original's.
        """
        left, top, right, bottom = self.part
        x, width = _span(left, right, self.resized[0], size[0])
        y, height = _span(top, bottom, self.resized[1], size[1])
        return x, y, width, height

    def rows(self, size: Size, support: float) -> tuple[int, int]:
        """Return the first row of an image that a filter needs for `part`, and the one after the last.

        Args:
            size: Size of the image.
            support: Half the width of the filter, in pixels of the smaller image.
        """
        _, top, _, height = self.source(size)
        reach = math.ceil(support * max(1.0, size[1] / self.resized[1])) + 1
        return max(0, math.floor(top) - reach), min(size[1], math.ceil(top + height) + reach)


def _span(start: int, end: int, resized: int, size: int) -> tuple[float, float]:
    """Return start and length in an image of what lies between two borders of the resized one."""
    first = start * size / resized
    return first, within(first, end * size / resized - first, size)


def within(start: float, length: float, size: int) -> float:
    """Return a length from `start` that does not end behind `size`, where rounding would put it."""
    length = min(length, size - start)
    return math.nextafter(length, 0.0) if start + length > size else length
