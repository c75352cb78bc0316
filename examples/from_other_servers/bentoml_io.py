"""Images, tables, arrays and files in and out: BentoML's example of IO descriptors."""

from typing import Annotated

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL.Image import Image

import charonia


@charonia.model
def resize(image: Image, height: int = 64, width: int = 64) -> Image:
    return image.resize((width, height))


@charonia.model
def count_rows(input: pd.DataFrame) -> int:
    return len(input)


@charonia.model
def transpose(
    tensor: Annotated[NDArray[np.float32], charonia.Shape(2, 4)],
) -> Annotated[NDArray[np.float32], charonia.Shape(4, 2)]:
    return tensor.T


@charonia.model
def append(txt_file: bytes, input_string: str) -> charonia.Response:
    return charonia.Response(txt_file.decode() + input_string, "text/plain")
