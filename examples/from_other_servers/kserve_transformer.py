"""Images of KServe's v1 protocol become tensors for another model: KServe's image transformer."""

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

import charonia

Pixels = Annotated[NDArray[np.float32], charonia.Shape(-1, 3, 8, 8)]
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)


@charonia.model(max_batch_size=8)
def brightness(pixels: Pixels) -> list[float]:
    return pixels.mean((1, 2, 3)).tolist()


@charonia.model(max_batch_size=8)
def transformer(image: list[Image]) -> list[float]:
    pixels = np.stack([each.convert("RGB").resize((8, 8)) for each in image]).astype(np.float32) / 255
    scaled = (pixels - MEAN) / DEVIATION
    return charonia.call("brightness", pixels=scaled.transpose(0, 3, 1, 2))["output"].ravel().tolist()
