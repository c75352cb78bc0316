"""An image in, an image file out: Cog's blur."""

from typing import Annotated

from PIL import ImageFilter
from PIL.Image import Image
from pydantic import Field

import charonia


@charonia.model
def blur(image: Image, blur: Annotated[float, Field(ge=0, description="Blur radius")] = 5) -> Image:
    return image.filter(ImageFilter.BoxBlur(blur))
