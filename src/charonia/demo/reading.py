"""The OCR part of the demo: pictures in one request each, against a client that calls the steps one by one."""

import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from charonia.demo.ocr import BLS, ENSEMBLE
from charonia.demo.pictures import annotated, photo, scanned_page
from charonia.demo.steps import read_step_by_step
from charonia.demo.traffic import Arrays, Client

# Each way is timed so many times, in turn with the others, after one time that is not counted.
_ROUNDS = 3
_COLUMN = 24

Way = Callable[[Client, bytes], Awaitable[Arrays]]


@dataclass(frozen=True)
class _Measured:
    """What reading a picture took, one time after the other, and what it sent and received for it."""

    times_ms: list[float]
    request_count: int
    payload_bytes: int

    def times(self) -> str:
        """Return the median, and the least and the greatest."""
        return f"{median(self.times_ms):.0f} ms [{min(self.times_ms):.0f}-{max(self.times_ms):.0f}]"


async def read_by(model: str, client: Client, picture: bytes) -> Arrays:
    """Return TEXT, SCORE and BOX of a picture from one request to a pipeline."""
    return await client.infer(model, {"IMAGE": np.array([picture], np.object_)})


WAYS: dict[str, Way] = {
    f"ensemble {ENSEMBLE}": functools.partial(read_by, ENSEMBLE),
    f"BLS model {BLS}": functools.partial(read_by, BLS),
    "step by step": read_step_by_step,
}


async def show_reading(clients: dict[str, Client], folder: Path) -> None:
    """Read the demo's pictures, print what they say and what reading took, and write them with their boxes.

    Args:
        clients: A client for each protocol.
        folder: Where to write the pictures.

    Raises:
        tritonclient.utils.InferenceServerException: A request failed.
    """
    print("\n== OCR: a picture in, text and boxes out, in one request")
    for name, title, picture in (("page", "A scanned page", scanned_page()), ("photo", "A photograph", photo())):
        read, others, measured = await _read(clients, picture)
        texts = [text.decode() for text in read["TEXT"]]
        print(f"\n{title}, {len(picture) / 1e3:.0f} kB\n\n    score  text")
        for text, score in zip(texts, read["SCORE"], strict=True):
            print(f"     {score:.2f}  {text}")
        file = folder / f"{name}_read.png"
        annotated(picture, read["BOX"], texts, file)
        print(f"\n    {len(texts)} lines, drawn with their boxes: {file}")
        ways = len(WAYS) * len(clients)
        print(
            f"    {others} of {ways} ways below read another text\n"
            if others
            else f"    all {ways} ways below read the same\n"
        )
        _print_table(list(clients), measured)


async def _read(clients: dict[str, Client], picture: bytes) -> tuple[Arrays, int, dict[tuple[str, str], _Measured]]:
    """Return what was read, how many ways read something else, and what was measured for each way and protocol."""
    pairs = [(way, protocol) for way in WAYS for protocol in clients]
    results = {(way, protocol): await WAYS[way](clients[protocol], picture) for way, protocol in pairs}
    first = results[pairs[0]]
    others = sum(not np.array_equal(each["TEXT"], first["TEXT"]) for each in results.values())

    times: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    requests, payload = {}, {}
    for _ in range(_ROUNDS):
        for way, protocol in pairs:
            client = clients[protocol]
            requests_before, bytes_before = client.request_count, client.payload_bytes
            begin = time.perf_counter()
            await WAYS[way](client, picture)
            times[way, protocol].append((time.perf_counter() - begin) * 1e3)
            requests[way, protocol] = client.request_count - requests_before
            payload[way, protocol] = client.payload_bytes - bytes_before
    return first, others, {pair: _Measured(times[pair], requests[pair], payload[pair]) for pair in pairs}


def _print_table(protocols: list[str], measured: dict[tuple[str, str], _Measured]) -> None:
    heads = "".join(f"{protocol:<{_COLUMN}}" for protocol in protocols)
    print(f"    {'':<{_COLUMN}}{heads}{'requests':>8}{'on the wire':>14}")
    for way in WAYS:
        cells = "".join(f"{measured[way, protocol].times():<{_COLUMN}}" for protocol in protocols)
        one = measured[way, protocols[0]]
        print(f"    {way:<{_COLUMN}}{cells}{one.request_count:>8}{one.payload_bytes / 1e6:>11.2f} MB")
    print(f"    Medians of {_ROUNDS} [least-greatest], one picture at a time.")
