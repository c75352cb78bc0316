"""Text tools as models: `charonia serve examples/functions/service.py`."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

import charonia

SIZE = 256
Vectors = Annotated[NDArray[np.float32], charonia.Shape(-1, SIZE)]


@charonia.model(max_batch_size=64, max_delay_ms=1, example={"text": "The harbour is closed."})
def features(text: list[str]) -> Vectors:
    """Count groups of three letters: a batch of texts at a time."""
    rows = np.zeros((len(text), SIZE), np.float32)
    for row, each in zip(rows, text, strict=True):
        letters = f"  {each.lower()}  "
        for start in range(len(letters) - 2):
            row[sum(map(ord, letters[start : start + 3])) % SIZE] += 1
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@dataclass
class Comparison:
    first: str
    second: str

    def __post_init__(self) -> None:
        if not (self.first.strip() and self.second.strip()):
            raise charonia.BadRequest("first, second: expected some letters")


@dataclass
class Similarity:
    similarity: float
    same: bool


@charonia.model(example={"first": "The harbour is closed.", "second": "The harbor was closed"})
class Similar:
    """Compare two texts by calling the model `features`, whose batches it shares with every other caller."""

    def __init__(self) -> None:
        self.threshold = 0.6  # a model would load its weights here

    async def __call__(self, texts: Comparison) -> Similarity:
        calls = (charonia.call_async("features", text=text) for text in (texts.first, texts.second))
        first, second = await asyncio.gather(*calls)
        similarity = float((first["output"] * second["output"]).sum())
        return Similarity(similarity, similarity > self.threshold)


@charonia.model
async def words(text: str, delay_ms: int = 0) -> AsyncIterator[str]:
    """Send a text word by word."""
    for word in text.split():
        await asyncio.sleep(delay_ms / 1000)
        yield f"{word} "


class Average:
    """An object with `predict`, like scikit-learn's."""

    def predict(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x.mean(axis=1)


charonia.serve(Average(), example=np.array([[1.0, 2.0, 6.0], [4.0, 5.0, 0.0]]))
