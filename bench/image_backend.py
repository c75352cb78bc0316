"""The image backend compared with a Python model that does the same with Pillow, as most services begin.

python -m bench.image_backend

Two servers get the same load in turn. Each has an ensemble: the images are prepared, and a network of one average takes
them, so that the answer is three numbers and the link counts little. The Python model has one worker; `--workers` gives
it more. A ratio is of one pair.
"""

import argparse
import asyncio
import io
import json
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tests.support.models import write_model
from tests.support.onnx_writer import GraphWriter
from tests.support.photos import encoded, photo

from bench.compare import RESULTS
from bench.image_service import Way, load
from bench.machine import machine
from bench.models import MODEL, MODELS
from bench.servers import Server
from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.tensor import Array
from charonia.server.backends.image.instance import Renderer, chosen_resize, decode
from charonia.server.backends.image.options import Framing, read_plan

BATCH = 8
"""Images that run together."""


class Recipe(NamedTuple):
    """A way to prepare images.

    Attributes:
        parameters: Parameters of the image backend.
        size: Width and height of the output.
        code: The same with Pillow: the body of a function of `data`, an image file.
    """

    parameters: Mapping[str, str]
    size: int
    code: str


RECIPES = {
    "classifier": Recipe(
        {
            "resize": "shorter_side",
            "size": "256",
            "crop": "224",
            "mean": "0.485, 0.456, 0.406",
            "std": "0.229, 0.224, 0.225",
        },
        224,
        """\
    image = Image.open(io.BytesIO(data)).convert("RGB")
    width, height = image.size
    size = (256, 256 * height // width) if width <= height else (256 * width // height, 256)
    left, top = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
    image = image.resize(size, Image.Resampling.BILINEAR).crop((left, top, left + 224, top + 224))
    return ((np.asarray(image, np.float32) / np.float32(255) - MEAN) / STD).transpose(2, 0, 1)
""",
    ),
    "letterbox": Recipe(
        {"resize": "letterbox", "size": "640", "padding_value": "114"},
        640,
        """\
    image = Image.open(io.BytesIO(data)).convert("RGB")
    scale = min(640 / image.width, 640 / image.height)
    size = (round(image.width * scale), round(image.height * scale))
    framed = Image.new("RGB", (640, 640), (114, 114, 114))
    framed.paste(image.resize(size, Image.Resampling.BILINEAR), ((640 - size[0]) // 2, (640 - size[1]) // 2))
    return (np.asarray(framed, np.float32) / np.float32(255)).transpose(2, 0, 1)
""",
    ),
}

_PYTHON = """\
import io

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def pixels(data):
{code}

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().ravel()
        return pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", np.stack([pixels(file) for file in files]))])
"""

_TENSORS = """\
max_batch_size: {batch}
input {{ name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }}
output {{ name: "{output}" data_type: TYPE_FP32 dims: {dims} }}
"""

_STEPS = """\
ensemble_scheduling {
  step { model_name: "preparation"
    input_map { key: "IMAGE" value: "IMAGE" } output_map { key: "PIXELS" value: "pixels" } }
  step { model_name: "average"
    input_map { key: "pixels" value: "pixels" } output_map { key: "mean" value: "MEAN" } }
}
"""


def average(size: int) -> bytes:
    """Return a network that takes the mean of each channel."""
    graph = GraphWriter()
    pixels = graph.input("pixels", DataType.FP32, ["batch", 3, size, size])
    graph.node("Flatten", [graph.node("GlobalAveragePool", [pixels], "average")], "mean")
    graph.output("mean", DataType.FP32, ["batch", 3])
    return graph.model()


def write(repository: Path, recipe: Recipe, *, workers: int) -> None:
    """Write the ensemble and its steps; with `workers`, the first one is the Python model."""
    head = f'backend: "{"python" if workers else "image"}"\n'
    config = head + _TENSORS.format(batch=BATCH, output="PIXELS", dims=[3, recipe.size, recipe.size])
    config += "dynamic_batching { }\n"
    if workers:
        config += f"instance_group {{ kind: KIND_CPU count: {workers} }}\n"
        write_model(repository, "preparation", _PYTHON.format(code=recipe.code), config=config)
    else:
        for key, value in recipe.parameters.items():
            config += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        write_model(repository, "preparation", "", config=config)
    write_model(
        repository, "average", average(recipe.size), config=f"max_batch_size: {BATCH}\ndynamic_batching {{ }}\n"
    )
    ensemble = 'platform: "ensemble"\n' + _TENSORS.format(batch=BATCH, output="MEAN", dims=[3]) + _STEPS
    write_model(repository, MODEL, "", config=ensemble)


def large_photo() -> bytes:
    """Return a photograph enlarged to 12 million pixels, with the noise of a sensor, as a phone would store it."""
    enlarged = Image.open(io.BytesIO(photo())).resize((4000, 3000), Image.Resampling.BICUBIC)
    noise = np.random.default_rng(1).normal(0, 4, (3000, 4000, 1))
    pixels = np.clip(np.asarray(enlarged) + noise, 0, 255).astype(np.uint8)
    return encoded(Image.fromarray(pixels), "JPEG", quality=90)


PHOTOS: Mapping[str, Callable[[], bytes]] = {"640x427": photo, "4000x3000": large_photo}


def request_of(image: bytes, count: int) -> Way:
    """Return a request with an image so many times."""
    element = len(image).to_bytes(4, "little") + image
    entry = {"name": "IMAGE", "datatype": "BYTES", "shape": [count, 1]}
    head = json.dumps(
        {
            "inputs": [entry | {"parameters": {"binary_data_size": len(element) * count}}],
            "outputs": [{"name": "MEAN", "parameters": {"binary_data": False}}],
        }
    ).encode()
    headers = f"Inference-Header-Content-Length: {len(head)}"
    return Way("charonia", f"/v2/models/{MODEL}/infer", headers, head + element * count)


def measure(server: Server, way: Way, clients: int, images: int, seconds: float) -> dict[str, float]:
    """Load a server; return images a second, its CPU time of an image in ms, and the median latency in ms."""
    port = int(server.http.rpartition(":")[2])
    before = server.cpu_seconds()
    latencies = asyncio.run(load(way, port, clients, seconds))
    count = len(latencies) * images
    return {
        "images_per_s": count / seconds,
        "cpu_ms": (server.cpu_seconds() - before) / count * 1e3,
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
    }


def print_steps() -> None:
    """Print the CPU time of each step of the classifier, here and with Pillow and numpy, in ms: medians, one thread."""
    plan, _ = read_plan(ModelConfig(parameters=RECIPES["classifier"].parameters), DataType.FP32)
    renderer, resize = Renderer(plan), chosen_resize(plan)
    mean, std = (np.array(values, np.float32) for values in (plan.values.mean, plan.values.std))
    out = np.empty((3, 224, 224), np.float32)
    for size, file in PHOTOS.items():
        data = file()
        image, framing = decode(data, plan, "image")
        steps: Mapping[str, Callable[[], object]] = {
            "decode": partial(decode, data, plan, "image"),
            "decode, Pillow": partial(_decode, data),
            "resize and crop": partial(resize, image, framing),
            "resize and crop, Pillow": partial(_resize, image, framing),
            "normalise, numpy": partial(_normalise, np.asarray(resize(image, framing)), mean, std),
            "all": partial(renderer.render, data, "image", out),
        }
        for name, step in steps.items():
            print(f"{size:9} {name:24} {_cpu_ms(step):6.2f}")


def _decode(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _resize(image: Image.Image, framing: Framing) -> Image.Image:
    return image.resize(framing.resized, Image.Resampling.BILINEAR).crop(framing.part)


def _normalise(pixels: NDArray[np.uint8], mean: NDArray[np.float32], std: NDArray[np.float32]) -> Array:
    return np.ascontiguousarray(((pixels.astype(np.float32) / np.float32(255) - mean) / std).transpose(2, 0, 1))


def _cpu_ms(step: Callable[[], object], runs: int = 31) -> float:
    step()
    times = []
    for _ in range(runs):
        start = time.thread_time_ns()
        step()
        times.append(time.thread_time_ns() - start)
    return statistics.median(times) / 1e6


def main() -> None:
    """Measure, print and write after each line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", choices=sorted(RECIPES), default=sorted(RECIPES))
    parser.add_argument("--photo", nargs="+", choices=sorted(PHOTOS), default=list(PHOTOS))
    parser.add_argument("--clients", type=int, default=8, help="requests in flight")
    parser.add_argument("--images", type=int, default=1, help="images in a request")
    parser.add_argument("--workers", type=int, default=1, help="workers of the Python model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--output", type=Path, default=RESULTS / "image_backend.json")
    parser.add_argument("--steps", action="store_true", help="only the CPU time of each step, without servers")
    given = parser.parse_args()
    if given.steps:
        print_steps()
        return
    settings = {key: value for key, value in vars(given).items() if key != "output"}
    points: list[dict[str, object]] = []
    record = {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": settings,
        "points": points,
    }
    print("recipe, photo | images/s: image, Python, ratio | server CPU ms an image | p50 ms; medians of pairs")
    for name in given.recipe:
        MODELS["image_backend"] = partial(write, recipe=RECIPES[name], workers=0)
        MODELS["image_in_python"] = partial(write, recipe=RECIPES[name], workers=given.workers)
        with Server("charonia:image_backend") as ours, Server("charonia:image_in_python") as python:
            for size in given.photo:
                way = request_of(PHOTOS[size](), given.images)
                for server in (ours, python):
                    measure(server, way, given.clients, given.images, 1.0)
                pairs = []
                for number in range(given.rounds):
                    order = (ours, python) if number % 2 else (python, ours)
                    each = {s.model: measure(s, way, given.clients, given.images, given.seconds) for s in order}
                    pairs.append((each[ours.model], each[python.model]))
                ratios = sorted(a["images_per_s"] / b["images_per_s"] for a, b in pairs)
                rate, cpu, p50 = (
                    [statistics.median(side[key] for side in sides) for sides in zip(*pairs, strict=True)]
                    for key in ("images_per_s", "cpu_ms", "p50_ms")
                )
                print(
                    f"{name:10} {size:9} | {rate[0]:7.1f} {rate[1]:7.1f} {statistics.median(ratios):5.2f} "
                    f"[{ratios[0]:.2f}-{ratios[-1]:.2f}] | {cpu[0]:6.2f} {cpu[1]:6.2f} | {p50[0]:6.1f} {p50[1]:6.1f}",
                    flush=True,
                )
                points.append({"recipe": name, "photo": size, "ratios": ratios, "pairs": pairs})
                given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
