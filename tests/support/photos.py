"""Photographs that installed packages bring, and image files made for tests."""

import io
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

PHOTOS = ("china.jpg", "flower.jpg")
"""Those of scikit-learn: 640 x 427."""


def photo(name: str = PHOTOS[0]) -> bytes:
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("scikit-learn, which brings the photographs, is not installed")
    return (Path(spec.origin).parent / "datasets" / "images" / name).read_bytes()


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    """Return the file of an image; PNG is lossless."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def noise(width: int, height: int, mode: str = "RGB", seed: int = 1) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)
