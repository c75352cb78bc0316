"""A content type of one's own, images: MLServer's Pillow codec. An annotation takes its place."""

from PIL.Image import Image

import charonia


@charonia.model
def picture(image: Image) -> dict:
    return {"mode": image.mode, "size": image.size, "darkest": min(image.convert("L").getdata())}
