"""The OCR part of the demo: one request per picture to a pipeline, and a client that calls the steps one by one."""

import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from ..ocr import make_repository as ocr
from .client import Arrays, Client
from .pictures import annotated, photo, scanned_page

# Number of times that each way reads, in turn with the others: one slow reading does not move the median of three.
ROUNDS = 3
COLUMN = 24

# The recogniser's smallest width, and how many lines of like width it is given at a time: as `ocr_bls` does.
WIDTH_MIN = 320
LINES_PER_BATCH = 6


async def read_by(model: str, client: Client, picture: bytes) -> Arrays:
    """Return TEXT [lines], SCORE [lines] and BOX [lines, 4, 2] of a picture from one request to a pipeline."""
    return await client.infer(model, {"IMAGE": np.array([picture], np.object_)})


async def read_step_by_step(client: Client, picture: bytes) -> Arrays:
    """Return the same from the models of the steps: every tensor crosses the network twice."""
    prepared = await client.infer(ocr.DETECTION_PREPROCESSING, {"IMAGE": np.array([picture], np.object_)})
    detected = await client.infer(ocr.TEXT_DETECTION, {"x": prepared["DETECTION_INPUT"]})
    (probability,) = detected.values()
    found = await client.infer(
        ocr.DETECTION_POSTPROCESSING,
        {"PIXELS": prepared["PIXELS"], "SOURCE": prepared["SOURCE"], "PROBABILITY": probability},
        outputs=["BOXES", "LINES", "WIDTHS", "BY_WIDTH"],
    )
    boxes, by_width = found["BOXES"], found["BY_WIDTH"]
    parts, numbers = [], []
    for first in range(0, len(boxes), LINES_PER_BATCH):
        batch = by_width[first : first + LINES_PER_BATCH]
        width = max(WIDTH_MIN, int(found["WIDTHS"][batch].max()))
        recognised = await client.infer(ocr.TEXT_RECOGNITION, {"x": found["LINES"][batch, :, :, :width]})
        (probability,) = recognised.values()
        read = await client.infer(
            ocr.RECOGNITION_POSTPROCESSING, {"PROBABILITY": probability, "LINE_BOXES": boxes[batch]}
        )
        numbers.append(batch[read["LINE"]])
        parts.append(read)
    if not parts:
        return {"TEXT": np.zeros(0, np.object_), "SCORE": np.zeros(0, np.float32), "BOX": boxes}
    order = np.argsort(np.concatenate(numbers))
    return {name: np.concatenate([part[name] for part in parts])[order] for name in ("TEXT", "SCORE", "BOX")}


STEP_BY_STEP = "step by step"
WAYS: dict[str, Callable[[Client, bytes], Awaitable[Arrays]]] = {
    f"ensemble {ocr.ENSEMBLE}": functools.partial(read_by, ocr.ENSEMBLE),
    f"BLS model {ocr.BLS}": functools.partial(read_by, ocr.BLS),
    STEP_BY_STEP: read_step_by_step,
}


@dataclass
class Cost:
    """The times of reading a picture repeatedly, and the bytes sent and received each time."""

    times_ms: list[float] = field(default_factory=list)
    request_count: int = 0
    payload_bytes: int = 0

    def times(self) -> str:
        """Return median, minimum and maximum."""
        return f"{median(self.times_ms):.0f} ms [{min(self.times_ms):.0f}-{max(self.times_ms):.0f}]"


Costs = dict[tuple[str, str], Cost]
"""By way and protocol."""


async def show_reading(clients: dict[str, Client], folder: Path) -> None:
    """Read the demo's pictures and write them with their boxes; compare the ways to read the last one."""
    print("\n== OCR: a picture in, text and boxes out, in one request")
    client = next(iter(clients.values()))
    for name, title, picture in (("page", "A scanned page", scanned_page()), ("photo", "A photograph", photo())):
        read = await read_by(ocr.ENSEMBLE, client, picture)
        texts = [text.decode() for text in read["TEXT"]]
        print(f"\n{title}, {len(picture) / 1e3:.0f} kB\n\n    score  text")
        for text, score in zip(texts, read["SCORE"], strict=True):
            print(f"     {score:.2f}  {text}")
        file = folder / f"{name}_read.png"
        annotated(picture, read["BOX"], texts, file)
        print(f"\n    {len(texts)} lines, drawn with their boxes: {file}")
    different, costs = await read_in_every_way(clients, picture, read)
    if different:
        print(f"    {different} of {len(costs)} ways below read another text in it\n")
    else:
        print(f"    all {len(costs)} ways below read the same in it\n")
    print_table(list(clients), costs)


async def read_in_every_way(clients: dict[str, Client], picture: bytes, read: Arrays) -> tuple[int, Costs]:
    """Return how many ways read another text than `read`, and the cost of each way."""
    costs = {(way, protocol): Cost() for way in WAYS for protocol in clients}
    different = set()
    for _ in range(ROUNDS):
        for (way, protocol), cost in costs.items():
            client = clients[protocol]
            requests_before, bytes_before = client.request_count, client.payload_bytes
            begin = time.perf_counter()
            result = await WAYS[way](client, picture)
            cost.times_ms.append((time.perf_counter() - begin) * 1e3)
            cost.request_count = client.request_count - requests_before
            cost.payload_bytes = client.payload_bytes - bytes_before
            if not np.array_equal(result["TEXT"], read["TEXT"]):
                different.add((way, protocol))
    return len(different), costs


def print_table(protocols: list[str], costs: Costs) -> None:
    heads = "".join(f"{protocol:<{COLUMN}}" for protocol in protocols)
    print(f"    {'':<{COLUMN}}{heads}{'requests':>8}{'on the wire':>14}")
    for way in WAYS:
        cells = "".join(f"{costs[way, protocol].times():<{COLUMN}}" for protocol in protocols)
        one = costs[way, protocols[0]]
        print(f"    {way:<{COLUMN}}{cells}{one.request_count:>8}{one.payload_bytes / 1e6:>11.2f} MB")
    print(f"    Medians of {ROUNDS} [least-greatest], one picture at a time.")
