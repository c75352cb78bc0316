"""An image and an optional text from a form: BentoML's captions by BLIP. The stand-in sees colours only."""

from PIL.Image import Image

import charonia


@charonia.model(path="/generate")
def caption(img: Image, prompt: str | None = None) -> str:
    red, green, blue = img.convert("RGB").resize((1, 1)).getpixel((0, 0))
    name = max((red, "red"), (green, "green"), (blue, "blue"))[1]
    return f"{prompt or 'a picture that is'} {name}"
