"""Runs batches: each image in a thread, from the bytes of a file straight into the array of the response.

Of a file with several pictures, the first one counts. Color profiles are ignored, as by Pillow and torchvision.
"""

import io
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import PIL
from PIL import Image, UnidentifiedImageError

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal, invalid, unavailable
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import Execution, Outputs, Result
from charonia.server.backends.batch import input_plans, output_plans, scatter
from charonia.server.backends.image.options import (
    PILLOW_PIXELS_MAX,
    AxisOrder,
    Color,
    Filter,
    Framing,
    ImagePlan,
    within,
)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats that are decoded, as Pillow names them. Each additional one would be a parser that an attacker may choose."""

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


Resize = Callable[[Image.Image, Framing], Image.Image]
"""A way to resize: returns the part of the resized image that is in the output."""


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


SCALE, PADDING, ORIGINAL_SIZE = "SCALE", "PADDING", "ORIGINAL_SIZE"
GEOMETRY = {SCALE: DataType.FP32, PADDING: DataType.INT32, ORIGINAL_SIZE: DataType.INT32}
"""Datatype of each output that tells where the pixels come from. Each has two values, of x and y."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One image of a batch, done."""

    pixels: Array
    framing: Framing

    def geometry(self, name: str) -> tuple[float, float]:
        """Return the values of one of the outputs in `GEOMETRY`."""
        if name == SCALE:
            return self.framing.scale
        return self.framing.offset if name == PADDING else self.framing.original


class Renderer:
    """Turns files into pixels. Any thread may call it."""

    def __init__(self, plan: ImagePlan) -> None:
        self._plan = plan
        self._resize = chosen_resize(plan)
        values = plan.values
        self._mean = np.array(values.mean, np.float32)[:, None, None]
        self._std = np.array(values.std, np.float32)[:, None, None]
        padding = np.array(plan.padding, np.float32)[:, None, None]
        self._padding = padding if plan.datatype is DataType.UINT8 else self._normalised(padding)

    def render(self, data: bytes, place: str, out: Array | None) -> Rendered:
        """Return the output of an image.

        Args:
            out: Where the pixels go; None for an array of their own.

        Raises:
            ServingError: INVALID_ARG for a bad file, UNAVAILABLE when there is no memory for the image.
        """
        plan = self._plan
        try:
            image, framing = decode(data, plan, place)
            small = np.asarray(self._resize(image, framing))
            if out is None:
                out = np.empty(plan.shape(framing.frame), plan.datatype.numpy)
        except MemoryError:
            raise unavailable(f"{place}: there is not enough memory to decode it") from None
        pixels = small[None] if small.ndim == 2 else small.transpose(2, 0, 1)
        if plan.color is Color.BGR:
            pixels = pixels[::-1]
        planes = out if plan.layout is AxisOrder.NCHW else out.transpose(2, 0, 1)
        region = planes[:, *framing.target]
        if region.shape != planes.shape:
            planes[...] = self._padding
        if plan.datatype is DataType.UINT8:
            region[...] = pixels
        elif plan.datatype is DataType.FP32 and plan.layout is AxisOrder.NCHW:
            region[...] = pixels
            self._normalised(region)
        else:
            region[...] = self._normalised(pixels.astype(np.float32, order="C"))
        return Rendered(out, framing)

    def _normalised(self, planes: Array) -> Array:
        """Compute in place, with the operations of torchvision's ToTensor and Normalize: not one bit differs."""
        values = self._plan.values
        if values.factor != 1.0:
            np.multiply(planes, np.float32(values.factor), out=planes)
        if values.divisor != 1.0:
            np.divide(planes, np.float32(values.divisor), out=planes)
        if values.mean:
            np.subtract(planes, self._mean, out=planes)
        if values.std:
            np.divide(planes, self._std, out=planes)
        return planes


class ImageInstance:
    """An instance.

    Args:
        pool: Threads that all instances share; None to use the calling one.
    """

    def __init__(self, config: ModelConfig, plan: ImagePlan, pool: ThreadPoolExecutor | None) -> None:
        self._plan = plan
        self.is_batched = config.max_batch_size > 0
        [self._input] = input_plans(config)
        self._outputs = output_plans(config)
        self._renderer = Renderer(plan)
        self._pool = pool
        self._is_closed = False

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        """Run the requests as one batch; a bad image fails its own request."""
        if self._is_closed:
            raise internal("the instance is closed")
        files = [self._files(request) for request in requests]
        rows = [*chain.from_iterable(files)]
        pixels = np.empty((len(rows), *self._plan.dims), self._plan.datatype.numpy) if self.is_batched else None
        input_end_ns = time.monotonic_ns()
        outs: Iterable[Array | None] = repeat(None) if pixels is None else pixels
        if self._pool is None or len(rows) == 1:
            done = list(map(self._render, rows, outs))
        else:
            done = list(self._pool.map(self._render, rows, outs))
        output_start_ns = time.monotonic_ns()
        sizes = list(map(len, files))
        parts: Sequence[Array | None] = (
            [None] * len(files) if pixels is None else scatter(self._input.name, pixels, sizes)
        )
        rest = iter(done)
        results = [
            self._answer([next(rest) for _ in range(size)], part) for size, part in zip(sizes, parts, strict=True)
        ]
        return Execution(results, input_end_ns, output_start_ns)

    def close(self) -> None:
        self._is_closed = True

    def _files(self, request: InferRequest) -> list[tuple[str, bytes]]:
        """Return the files of a request, each with its name for errors."""
        array = request.inputs[self._input.name].array
        name = f"input '{self._input.name}'"
        if self._input.datatype is DataType.UINT8:
            return [(name, array.tobytes())]
        files = array.reshape(-1).tolist()
        return [(name, *files)] if len(files) == 1 else [(f"{name}[{row}]", file) for row, file in enumerate(files)]

    def _render(self, row: tuple[str, bytes], out: Array | None) -> Rendered | ServingError:
        place, data = row
        try:
            return self._renderer.render(data, place, out)
        except ServingError as error:
            return error

    def _answer(self, done: list[Rendered | ServingError], pixels: Array | None) -> Result:
        """Return the result of a request: `pixels` of a batch, else those of its only image."""
        images = []
        for each in done:
            if isinstance(each, ServingError):
                return each
            images.append(each)
        tensors = []
        for plan in self._outputs:
            array: Array
            if plan.name in GEOMETRY:
                array = np.array([image.geometry(plan.name) for image in images], plan.datatype.numpy)
                array = array if self.is_batched else array[0]
            else:
                array = images[0].pixels if pixels is None else pixels
            tensors.append(Tensor(plan.name, plan.datatype, plan.reshape(array, self.is_batched)))
        return Outputs(tensors)
