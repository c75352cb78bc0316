"""Completes configurations of image models from their parameters, and loads them. There is no model file."""

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from PIL import Image

from charonia.config.complete import Signature, SignatureTensor, check_signature, merge_signature
from charonia.config.model import InstanceGroup, ModelConfig, ModelOutput
from charonia.config.problems import Problem, check_problems
from charonia.core.dtypes import DataType
from charonia.core.statistics import MemoryUsage
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.array_backend import PlannedBackend
from charonia.server.backends.image.instance import GEOMETRY, ImageInstance
from charonia.server.backends.image.options import PARAMETERS, ImagePlan, ResizeMode, read_plan

INPUT, OUTPUT = "IMAGE", "PIXELS"
"""Names of tensors that the configuration does not name."""

DATATYPES = (DataType.FP32, DataType.FP16, DataType.UINT8)
"""Datatypes that pixels may have; the first one unless the configuration says another."""


INSTANCES = 2
"""Instances of a model that does not say how many. They share the threads: while the last images of one batch are in
work, those of the next one fill the cores."""


class ImageModel:
    """A loaded version, with the threads of its instances."""

    def __init__(self, config: ModelConfig, plan: ImagePlan) -> None:
        self._config = config
        self._plan = plan
        self._pool: ThreadPoolExecutor | None = None

    async def create_instance(self, placement: Placement) -> ImageInstance:
        """Make one more instance. A batch may use the threads of all: each one's share of the cores."""
        count = sum(group.count for group in self._config.instance_group)
        threads = self._plan.threads or placement.threads * max(1, count)
        if self._pool is None and threads > 1:
            self._pool = ThreadPoolExecutor(threads, "image")
        return ImageInstance(self._config, self._plan, self._pool)

    def memory(self) -> list[MemoryUsage]:
        return []

    async def aclose(self) -> None:
        """End the threads."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.shutdown)


class ImageBackend(PlannedBackend[ImagePlan, ImageModel]):
    """The `image` backend."""

    name = "image"
    parameters = PARAMETERS
    gpu_hint = "images are decoded on the CPU: use KIND_CPU"

    def read_plan(self, config: ModelConfig, settings: Mapping[str, str]) -> tuple[ImagePlan, list[Problem]]:
        output = _pixels(config)
        datatype = output.data_type if output is not None and output.data_type in DATATYPES else DATATYPES[0]
        return read_plan(config, datatype)

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        """Fill in inputs, outputs, batching and instances from the parameters."""
        plan = self.plan(config, settings)
        check_problems(config.name, _batch_problems(config, plan))
        can_batch = plan.frame.fixed is not None and not _takes_bytes(config)
        signature = _signature(config, plan, is_batched=can_batch)
        merged, notes = merge_signature(config, signature, default_max_batch_size=settings.default_max_batch_size)
        notes = [note.replace("from the model", "from the parameters") for note in notes]
        if not merged.instance_group:
            merged = replace(merged, instance_group=(InstanceGroup(count=INSTANCES),))
            notes.append(f"instance_group: {INSTANCES} instances, so that no core waits for the last image of a batch")
        return Completion(merged, tuple(notes))

    async def open(
        self, files: ModelFiles, config: ModelConfig, plan: ImagePlan, settings: BackendSettings
    ) -> ImageModel:
        signature = _signature(config, plan, is_batched=config.max_batch_size > 0)
        problems = [*_batch_problems(config, plan), *_side_problems(config, plan)]
        problems = problems or check_signature(config, signature)
        check_problems(config.name, problems)
        await asyncio.to_thread(Image.init)  # imports the decoders
        return ImageModel(config, plan)


def _pixels(config: ModelConfig) -> ModelOutput | None:
    """Return the output that has the pixels: the first one that is not named like one of the others."""
    return next((output for output in config.output if output.name not in GEOMETRY), None)


def _takes_bytes(config: ModelConfig) -> bool:
    return any(tensor.data_type is DataType.UINT8 for tensor in config.input)


def _signature(config: ModelConfig, plan: ImagePlan, *, is_batched: bool) -> Signature:
    lead = (-1,) if is_batched else ()
    source = config.input[0].name if config.input else INPUT
    encoded = (DataType.UINT8, (-1,)) if _takes_bytes(config) else (DataType.BYTES, (*lead, 1))
    output = _pixels(config)
    outputs = [SignatureTensor(output.name if output else OUTPUT, plan.datatype, (*lead, *plan.dims))]
    if config.output or plan.frame.resize is ResizeMode.LETTERBOX:
        outputs += [SignatureTensor(name, datatype, (*lead, 2)) for name, datatype in GEOMETRY.items()]
    return Signature((SignatureTensor(source, *encoded),), tuple(outputs))


def _batch_problems(config: ModelConfig, plan: ImagePlan) -> Iterator[Problem]:
    if config.max_batch_size > 0 and plan.frame.fixed is None:
        yield Problem(
            "max_batch_size",
            "a batch needs images of one size, and with these parameters each has its own: set it to 0, or crop, or "
            "resize by stretch or letterbox",
        )
    if config.max_batch_size > 0 and _takes_bytes(config):
        yield Problem(
            "max_batch_size", "an input of TYPE_UINT8 is the bytes of one file: set it to 0, or make it TYPE_STRING"
        )


def _side_problems(config: ModelConfig, plan: ImagePlan) -> Iterator[Problem]:
    for index, output in enumerate(config.output):
        if output.name in GEOMETRY:
            continue
        if output.data_type not in DATATYPES:
            known = ", ".join(datatype.config for datatype in DATATYPES)
            given = output.data_type.config if output.data_type else "none"
            yield Problem(f"output[{index}].data_type", f"pixels are one of {known}, got {given}")
        if output.inner_dims != plan.dims:
            yield Problem(
                f"output[{index}].dims",
                f"the parameters make {list(plan.dims)} of an image ({plan.layout.value}), "
                f"got {list(output.inner_dims)}",
            )
        return  # check_signature names the other outputs
