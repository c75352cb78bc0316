"""The parameters of an image model. Pure."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from charonia.config.parameters import SERVER_PARAMETERS
from charonia.config.problems import Problem, short
from charonia.core.dtypes import DataType
from charonia.server.backends.image.framing import Frame, ResizeMode, Size

PIXELS_MAX = 50_000_000
"""Default of `max_pixels`: largest image before and after resizing. While it is decoded, a pixel takes 4 bytes."""

PILLOW_PIXELS_MAX = 89_478_485
"""Largest `max_pixels`: beyond it, Pillow itself takes a file for an attack."""

BYTES_MAX = 32 * 2**20
"""Default of `max_bytes`: largest file."""

SIDE_MAX = 16_384
"""Largest width or height of an output."""

PARAMETERS = (
    *("resize", "size", "crop", "filter", "antialias", "exact", "color", "background", "exif_orientation"),
    *("scale", "mean", "std", "layout", "padding_value", "padding_position", "scaled_decode"),
    *("threads", "max_pixels", "max_bytes"),
)
"""Every parameter."""

_FLAGS = {"true": True, "false": False}
_T = TypeVar("_T")
_E = TypeVar("_E", bound=Enum)


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
class Values:
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


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What a model does with each image.

    Attributes:
        frame: Resizing, cropping and padding.
        filter: Filter of resizing.
        is_antialiased: Whether the filter grows with the reduction, as in Pillow and torchvision; not so in OpenCV.
        is_exact: Whether Pillow resizes: slower, and not one bit differs.
        color: Channels.
        background: What shows through transparent pixels, a value for each channel of RGB; None: alpha is dropped.
        is_oriented: Whether an image is turned as its EXIF data says.
        values: From pixels to values.
        layout: Order of the dimensions.
        datatype: Datatype of the pixels.
        padding: Pixel value around an image, one for each channel.
        has_scaled_decode: Whether a large JPEG is decoded at a fraction of its size.
        threads: Threads of an instance; 0 for its share of the cores.
        pixels_max: Largest image.
        bytes_max: Largest file.
    """

    frame: Frame = field(default_factory=Frame)
    filter: Filter = Filter.BILINEAR
    is_antialiased: bool = True
    is_exact: bool = False
    color: Color = Color.RGB
    background: tuple[int, int, int] | None = None
    is_oriented: bool = True
    values: Values = field(default_factory=Values)
    layout: AxisOrder = AxisOrder.NCHW
    datatype: DataType = DataType.FP32
    padding: tuple[float, ...] = (0.0, 0.0, 0.0)
    has_scaled_decode: bool = False
    threads: int = 0
    pixels_max: int = PIXELS_MAX
    bytes_max: int = BYTES_MAX

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


def read_plan(parameters: Mapping[str, str], datatype: DataType) -> tuple[ImagePlan, list[Problem]]:
    """Return the plan, and all problems of the parameters.

    Args:
        parameters: Parameters of the model.
        datatype: Datatype of the pixels: FP32, FP16 or UINT8.
    """
    reader = _Reader(parameters)
    color = reader.choice("color", Color, Color.RGB)
    channels = 1 if color is Color.GRAY else 3
    frame = _frame(reader)
    kind = reader.choice("filter", Filter, Filter.BILINEAR)
    is_antialiased = reader.flag("antialias", True)
    if not is_antialiased and kind is not Filter.BILINEAR:
        reader.fail("antialias", f"false is for the filter bilinear, and filter is {kind.value}")
    factor, divisor = reader.read("scale", _ratio, (1.0, 255.0))
    mean = reader.per_channel("mean", channels)
    std = reader.per_channel("std", channels)
    if any(value <= 0 for value in std):
        reader.fail("std", f"expected numbers above 0, got '{parameters['std']}'")
    padding = reader.per_channel("padding_value", channels) or (0.0,) * channels
    if not all(0 <= value <= 255 for value in padding):
        reader.fail("padding_value", f"expected pixels of 0 to 255, got '{parameters['padding_value']}'")
    background = reader.per_channel("background", 3)
    if not all(0 <= value <= 255 and value.is_integer() for value in background):
        reader.fail("background", f"expected whole numbers of 0 to 255, got '{parameters['background']}'")
    if datatype is DataType.UINT8:
        _for_bytes(reader, padding)
    plan = ImagePlan(
        frame,
        kind,
        is_antialiased,
        reader.flag("exact", False),
        color,
        (int(background[0]), int(background[1]), int(background[2])) if background else None,
        reader.flag("exif_orientation", True),
        Values(factor, divisor, mean, std),
        reader.choice("layout", AxisOrder, AxisOrder.NCHW),
        datatype,
        padding,
        reader.flag("scaled_decode", False),
        reader.number("threads", 0),
        reader.number("max_pixels", PIXELS_MAX),
        reader.number("max_bytes", BYTES_MAX),
    )
    if plan.pixels_max > PILLOW_PIXELS_MAX:
        reader.fail("max_pixels", f"expected at most {PILLOW_PIXELS_MAX}, the limit of Pillow, got {plan.pixels_max}")
    return plan, [*reader.problems, *_unknown(parameters)]


def _frame(reader: "_Reader") -> Frame:
    resize = reader.choice("resize", ResizeMode, ResizeMode.NONE)
    size = reader.read("size", _size, None)
    crop = reader.read("crop", _size, None)
    is_centered = reader.one_of("padding_position", {"center": True, "end": False}, True)
    if "size" not in reader.given and resize is not ResizeMode.NONE:
        reader.fail("size", f"resize '{resize.value}' needs it: 640, or 640x480 (width x height)")
    if size is not None and resize is ResizeMode.NONE:
        reader.fail("resize", "size needs it: shorter_side, stretch or letterbox")
    if size is not None and resize is ResizeMode.SHORTER_SIDE and size[0] != size[1]:
        reader.fail("size", f"the shorter side is one number, got {size[0]}x{size[1]}")
    if crop is not None and resize is ResizeMode.LETTERBOX:
        reader.fail("crop", "a letterbox shows the whole image: resize by shorter_side or stretch to crop")
    return Frame(resize, size or (0, 0), crop, is_centered)


def _for_bytes(reader: "_Reader", padding: tuple[float, ...]) -> None:
    """Report what an output of bytes cannot have."""
    for key in ("scale", "mean", "std"):
        if key in reader.given:
            reader.fail(key, "the output is UINT8, which has the pixels as they are: make it TYPE_FP32 or TYPE_FP16")
    if not all(value.is_integer() for value in padding):
        reader.fail("padding_value", f"expected whole numbers for a UINT8 output, got {list(padding)}")


def _unknown(parameters: Mapping[str, str]) -> Iterator[Problem]:
    for key in sorted(parameters.keys() - SERVER_PARAMETERS - set(PARAMETERS)):
        near = difflib.get_close_matches(key.lower(), PARAMETERS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(PARAMETERS)}"
        yield Problem(f"parameters['{short(key)}']", f"the image backend has no such parameter; {hint}")


class _Reader:
    """Reads values, and collects the problems."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = given
        self.problems: list[Problem] = []

    def fail(self, key: str, message: str) -> None:
        self.problems.append(Problem(f"parameters['{key}']", message))

    def read(self, key: str, parse: Callable[[str], _T], default: _T) -> _T:
        """Return a parsed value; `parse` raises a ValueError that says what was expected."""
        if key not in self.given:
            return default
        try:
            return parse(self.given[key].strip())
        except ValueError as error:
            self.fail(key, f"expected {error}, got '{short(self.given[key])}'")
            return default

    def one_of(self, key: str, choices: Mapping[str, _T], default: _T) -> _T:
        by_name = {name.lower(): value for name, value in choices.items()}

        def parse(text: str) -> _T:
            if text.lower() not in by_name:
                raise ValueError(f"one of {', '.join(choices)}")
            return by_name[text.lower()]

        return self.read(key, parse, default)

    def choice(self, key: str, kind: type[_E], default: _E) -> _E:
        return self.one_of(key, {str(member.value): member for member in kind}, default)

    def flag(self, key: str, default: bool) -> bool:
        return self.one_of(key, _FLAGS, default)

    def number(self, key: str, default: int) -> int:
        def parse(text: str) -> int:
            if not (text.isascii() and text.isdigit() and int(text) > 0):
                raise ValueError("a whole number of at least 1")
            return int(text)

        return self.read(key, parse, default)

    def per_channel(self, key: str, channels: int) -> tuple[float, ...]:
        """Return a number for each channel, of which one may stand for all; none where the parameter is absent."""

        def parse(text: str) -> tuple[float, ...]:
            expected = f"{channels} numbers, or one for all" if channels > 1 else "a number"
            try:
                values = tuple(float(part) for part in text.split(","))
            except ValueError:
                raise ValueError(expected) from None
            if len(values) not in (1, channels) or not all(map(math.isfinite, values)):
                raise ValueError(expected)
            return values * channels if len(values) == 1 else values

        return self.read(key, parse, ())


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
