"""The parameters of an image model, and where the pixels of an image go: its size, cropping and padding. Pure.

Sizes are width, height. Rounding is that of torchvision's Resize and CenterCrop, and of YOLO's letterbox.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem, short
from charonia.core.dtypes import DataType
from charonia.server.backends.parameters import Param, Params, Values, declared_by, parameter

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


PIXELS_MAX = 50_000_000
"""Default of `max_pixels`: largest image before and after resizing. While it is decoded, a pixel takes 4 bytes."""

PILLOW_PIXELS_MAX = 89_478_485
"""Largest `max_pixels`: beyond it, Pillow itself takes a file for an attack."""

BYTES_MAX = 32 * 2**20
"""Default of `max_bytes`: largest file."""

SIDE_MAX = 16_384
"""Largest width or height of an output."""


class Filter(Enum):
    """Filters of resizing."""

    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"
    BOX = "box"
    NEAREST = "nearest"


class Color(Enum):
    """Channels of the output, in order."""

    RGB = "RGB"
    BGR = "BGR"
    GRAY = "GRAY"


class AxisOrder(Enum):
    """Order of the dimensions of the output."""

    NCHW = "NCHW"
    NHWC = "NHWC"


@dataclass(frozen=True, slots=True)
class PixelValues:
    """From a pixel of 0 to 255 to a value of the output: (pixel x factor / divisor - mean) / std.

    Attributes:
        factor: Multiplies; 1.0 where `divisor` divides.
        divisor: Divides.
        mean: One for each channel, or none.
        std: One for each channel, or none.
    """

    factor: float = 1.0
    divisor: float = 255.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def _size(text: str) -> Size | None:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and 0 < int(part) <= SIDE_MAX for part in parts):
        raise ValueError(f"a number, or WIDTHxHEIGHT, each of 1 to {SIDE_MAX}")
    return int(parts[0]), int(parts[-1])


def _ratio(text: str) -> tuple[float, float]:
    """Return factor and divisor of "1/255" or "0.0039": a quotient is computed as one, to the last bit."""
    top, slash, bottom = text.partition("/")
    try:
        factor, divisor = float(top), float(bottom) if slash else 1.0
    except ValueError:
        factor, divisor = 0.0, 1.0
    if not (0 < factor < math.inf and 0 < divisor < math.inf):
        raise ValueError("a number above 0, or a quotient such as 1/255")
    return factor, divisor


def _channels(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (math.nan,)
    if not all(map(math.isfinite, values)):
        raise ValueError("a number, or one for each channel")
    return values


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What a model does with each image.

    Attributes:
        frame: Resizing, cropping and padding.
        background: What shows through transparent pixels, a value for each channel of RGB; None: alpha is dropped.
        padding: Pixel value around an image, one for each channel.
        threads: Threads of an instance; 0 for its share of the cores.
    """

    # fmt: off
    filter: Filter = parameter(  # noqa: RUF009 # it returns a field
        "filter", "`bilinear`, `bicubic`, `lanczos`, `box` or `nearest`", Filter, Filter.BILINEAR, "`bilinear`")
    is_antialiased: bool = parameter("antialias", "`false`, for `bilinear`: as OpenCV's `INTER_LINEAR`", bool, True)
    is_exact: bool = parameter("exact", "`true`: resize with Pillow, see [below](#the-same-pixels)", bool, False)
    color: Color = parameter(  # noqa: RUF009 # as above
        "color", "`RGB`, `BGR` or `GRAY` (one channel)", Color, Color.RGB, "`RGB`")
    is_oriented: bool = parameter("exif_orientation", "turn photographs upright. torchvision's datasets do not; OpenCV "
                                  "and browsers do", bool, True)
    layout: AxisOrder = parameter(  # noqa: RUF009 # as above
        "layout", "`NHWC`: dims are [height, width, 3]", AxisOrder, AxisOrder.NCHW, "`NCHW`")
    has_scaled_decode: bool = parameter("scaled_decode", "`true`: decode a large JPEG at 1/2, 1/4 or 1/8, down to "
                                        "twice the size that it is resized to. Faster, with slightly other pixels",
                                        bool, False)
    threads: int = parameter("threads", "images in work at a time, in all instances together", int, 0,
                             "the share of the cores", ge=1)
    pixels_max: int = parameter("max_pixels", "largest image, before and after resizing; at most 89,478,485. While it "
                                "is decoded, a pixel takes 4 bytes", int, PIXELS_MAX, "50,000,000", ge=1)
    bytes_max: int = parameter("max_bytes", "largest file", int, BYTES_MAX, "33,554,432", ge=1)
    # fmt: on
    frame: Frame = field(default_factory=Frame)
    background: tuple[int, int, int] | None = None
    values: PixelValues = field(default_factory=PixelValues)
    datatype: DataType = DataType.FP32
    padding: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def channels(self) -> int:
        return 1 if self.color is Color.GRAY else 3

    @property
    def dims(self) -> tuple[int, int, int]:
        """Shape of an output, -1 for a side that each image has of its own."""
        return self.shape(self.frame.fixed or (-1, -1))

    def shape(self, size: Size) -> tuple[int, int, int]:
        """Return the shape of an output of this width and height."""
        width, height = size
        if self.layout is AxisOrder.NCHW:
            return self.channels, height, width
        return height, width, self.channels


# fmt: off
PARAMETERS = Params(
    "image",
    Param("resize", "`shorter_side`: the shorter side gets `size`, as torchvision's `Resize(256)`. `stretch`: width "
          "and height get `size`. `letterbox`: the whole image, as large as it fits, with padding around it",
          ResizeMode, ResizeMode.NONE, "`none`"),
    Param("size", "`640`, or `640x480`: width x height", _size),
    Param("crop", "the centre of this size, as torchvision's `CenterCrop(224)`; a smaller image is padded", _size,
          shown="no crop"),
    Param("padding_value", "pixel of the padding, 0 to 255; one number, or one for each channel of the output. It is "
          "normalised like the image", _channels, (), "`0`"),
    Param("padding_position", "`end`: a letterbox has its padding right and below", {"center": True, "end": False},
          True, "`center`"),
    *declared_by(ImagePlan),
    Param("background", "color behind transparent pixels: `255,255,255`. Without it, transparency is dropped, as by "
          '`convert("RGB")`', _channels, (), "none"),
    Param("scale", "factor for pixels: a number or a quotient", _ratio, (1.0, 255.0), "`1/255`"),
    Param("mean", "(pixel x scale - mean) / std; one number, or one for each channel in the order of the output",
          _channels, (), "none"),
    Param("std", "see `mean`", _channels, (), "none"),
)
# fmt: on


def read_plan(config: ModelConfig, datatype: DataType) -> tuple[ImagePlan, list[Problem]]:
    """Return the plan for pixels in FP32, FP16 or UINT8, and all problems of the parameters."""
    values = PARAMETERS.values(config)
    channels = 1 if values["color"] is Color.GRAY else 3
    frame = _frame(values)
    if not values["antialias"] and values["filter"] is not Filter.BILINEAR:
        values.fail("antialias", f"false is for the filter bilinear, and filter is {values['filter'].value}")
    mean, std = _per_channel(values, "mean", channels), _per_channel(values, "std", channels)
    if any(value <= 0 for value in std):
        values.fail("std", f"expected numbers above 0, got '{config.parameters['std']}'")
    padding = _per_channel(values, "padding_value", channels) or (0.0,) * channels
    if not all(0 <= value <= 255 for value in padding):
        values.fail("padding_value", f"expected pixels of 0 to 255, got '{config.parameters['padding_value']}'")
    background = _per_channel(values, "background", 3)
    if not all(0 <= value <= 255 and value.is_integer() for value in background):
        values.fail("background", f"expected whole numbers of 0 to 255, got '{config.parameters['background']}'")
    if datatype is DataType.UINT8:
        _for_bytes(values, padding)
    if values["max_pixels"] > PILLOW_PIXELS_MAX:
        values.fail(
            "max_pixels", f"expected at most {PILLOW_PIXELS_MAX}, the limit of Pillow, got {values['max_pixels']}"
        )
    plan = values.into(
        ImagePlan,
        frame=frame,
        background=(int(background[0]), int(background[1]), int(background[2])) if background else None,
        values=PixelValues(values["scale"][0], values["scale"][1], mean, std),
        datatype=datatype,
        padding=padding,
    )
    return plan, [*values.problems, *_unknown(config)]


def _frame(values: Values) -> Frame:
    resize, size, crop = values["resize"], values["size"], values["crop"]
    if "size" not in values and resize is not ResizeMode.NONE:
        values.fail("size", f"resize '{resize.value}' needs it: 640, or 640x480 (width x height)")
    if size is not None and resize is ResizeMode.NONE:
        values.fail("resize", "size needs it: shorter_side, stretch or letterbox")
    if size is not None and resize is ResizeMode.SHORTER_SIDE and size[0] != size[1]:
        values.fail("size", f"the shorter side is one number, got {size[0]}x{size[1]}")
    if crop is not None and resize is ResizeMode.LETTERBOX:
        values.fail("crop", "a letterbox shows the whole image: resize by shorter_side or stretch to crop")
    return Frame(resize, size or (0, 0), crop, values["padding_position"])


def _for_bytes(values: Values, padding: tuple[float, ...]) -> None:
    """Report what an output of bytes cannot have."""
    for key in ("scale", "mean", "std"):
        if key in values:
            values.fail(key, "the output is UINT8, which has the pixels as they are: make it TYPE_FP32 or TYPE_FP16")
    if not all(value.is_integer() for value in padding):
        values.fail("padding_value", f"expected whole numbers for a UINT8 output, got {list(padding)}")


def _per_channel(values: Values, key: str, channels: int) -> tuple[float, ...]:
    """Return a number for each channel, of which one may stand for all; none where the parameter is absent."""
    found: tuple[float, ...] = values[key]
    if len(found) not in (0, 1, channels):
        expected = f"{channels} numbers, or one for all" if channels > 1 else "a number"
        values.fail(key, f"expected {expected}, got '{short(values.entries[key][1])}'")
        return ()
    return found * channels if len(found) == 1 else found


def _unknown(config: ModelConfig) -> Iterator[Problem]:
    for key, near in PARAMETERS.unknown(config):
        hint = f"did you mean '{near}'?" if near else f"it has {', '.join(PARAMETERS.names)}"
        yield Problem(f"parameters['{short(key)}']", f"the image backend has no such parameter; {hint}")
