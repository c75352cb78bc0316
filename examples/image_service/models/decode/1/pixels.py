"""From an image file to the input of a network that was trained on ImageNet."""

import io

import numpy as np
from PIL import Image

SHORT_SIDE, CROP = 256, 224
MEAN = np.array([0.485, 0.456, 0.406], np.float32) * 255
SPREAD = np.array([0.229, 0.224, 0.225], np.float32) * 255


def pixels(data: bytes) -> np.ndarray:
    """Return the centre of an image, normalised, as FP32 [3, 224, 224].

    Raises:
        OSError: The data is not an image.
    """
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB", (SHORT_SIDE, SHORT_SIDE))  # a large JPEG is decoded at a fraction of its size
        scale = SHORT_SIDE / min(image.size)
        size = (max(CROP, round(image.width * scale)), max(CROP, round(image.height * scale)))
        left, top = (size[0] - CROP) // 2, (size[1] - CROP) // 2
        small = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
        array = np.asarray(small.crop((left, top, left + CROP, top + CROP)), np.float32)
    return np.ascontiguousarray(((array - MEAN) / SPREAD).transpose(2, 0, 1))
