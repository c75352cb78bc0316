"""Runs batches: each image in a thread, straight into the array of the response."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import Execution, Outputs, Result
from charonia.server.backends.batch import input_plans, output_plans, scatter
from charonia.server.backends.image.decoding import decode
from charonia.server.backends.image.framing import Framing
from charonia.server.backends.image.options import AxisOrder, Color, ImagePlan
from charonia.server.backends.image.resizing import chosen_resize

SCALE, PADDING, ORIGINAL_SIZE = "SCALE", "PADDING", "ORIGINAL_SIZE"
GEOMETRY = {SCALE: DataType.FP32, PADDING: DataType.INT32, ORIGINAL_SIZE: DataType.INT32}
"""Datatype of each output that tells where the pixels come from. Each has two values, of x and y."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One image of a batch, done.

    Attributes:
        pixels: Its output.
        framing: Where it lies there.
    """

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
            data: The file.
            place: Name of the element, for errors.
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
        config: The complete configuration.
        plan: What to do with each image.
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
        """Run nothing more. The threads belong to the model."""
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
