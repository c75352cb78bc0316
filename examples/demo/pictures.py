"""The demo's pictures: a scanned page from a package, and a notice on a wall as a camera would see it."""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from ..ocr.make_repository import shipped_file

# The notice: text, its size and its distance from the top, in pixels of the board.
BOARD = (1000, 640)
NOTICE = (
    ("HARBOUR MUSEUM", 92, 60),
    ("Shells of the tropical seas", 58, 200),
    ("Charonia tritonis, the triton's trumpet", 42, 325),
    ("Open daily 10:00 - 18:30", 46, 430),
    ("Adults 12.50", 42, 530),
)
PRICE_OF_CHILDREN = ("Children free", 42, (560, 530))
LEFT = 60
SHOWN_WIDTH = 900
INK = (0, 95, 200)
PHOTO = (1280, 960)
# Where the corners of the board are in the photo: upper left, upper right, lower right, lower left.
CORNERS = ((190, 150), (1130, 260), (1090, 800), (230, 850))


def scanned_page() -> bytes:
    """Return the picture of a scanned page, in grey, that scikit-image ships: a PNG file."""
    return shipped_file("scikit-image", "skimage/data/page.png").read_bytes()


def photo() -> bytes:
    """Return the picture of a notice on a wall of bricks, aslant, in uneven light, with noise: a JPEG file.

    Every call returns the same bytes on one machine.
    """
    wall = Image.open(shipped_file("scikit-image", "skimage/data/brick.png")).convert("L").resize(PHOTO)
    scene = np.stack([np.asarray(wall, np.float32) * shade for shade in (0.95, 0.72, 0.62)], axis=2)
    board, mask = (np.asarray(aslant(picture), np.float32) for picture in notice())
    opaque = mask[:, :, np.newaxis] / 255
    scene = scene * (1 - opaque) + board * opaque

    rows, columns = np.mgrid[0 : PHOTO[1], 0 : PHOTO[0]] / max(PHOTO)
    light = 1.05 - 0.55 * np.hypot(columns - 0.35, rows - 0.25)
    noise = np.random.default_rng(1).normal(0, 6, scene.shape)
    exposed = np.clip(scene * light[:, :, np.newaxis] + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(exposed).filter(ImageFilter.GaussianBlur(0.8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def annotated(picture: bytes, boxes: NDArray[np.float32], texts: list[str], file: Path) -> None:
    """Write a picture with its boxes, and beside it the text of each box at its position, to a PNG file.

    `boxes` has corners [lines, 4, 2], clockwise from the upper left one, and `texts` the text of each box.
    """
    seen = Image.open(io.BytesIO(picture)).convert("RGB")
    scale = max(1, round(SHOWN_WIDTH / seen.width))
    width, height = seen.width * scale, seen.height * scale
    drawn = Image.new("RGB", (2 * width, height), "white")
    drawn.paste(seen.resize((width, height), Image.Resampling.LANCZOS))
    pen = ImageDraw.Draw(drawn)
    for box, text in zip(boxes * scale, texts, strict=True):
        corners = [(float(x), float(y)) for x, y in box]
        pen.line([*corners, corners[0]], fill=INK, width=3, joint="curve")
        (left, top), (right, _), _, (_, bottom) = corners
        # Written as high as it was read, and no wider.
        size = (bottom - top) * 0.7
        size *= min(1.0, (right - left) / max(1.0, ImageFont.load_default(size).getlength(text)))
        pen.text((width + left, (top + bottom) / 2), text, fill=INK, font=ImageFont.load_default(size), anchor="lm")
    drawn.save(file)


def notice() -> tuple[Image.Image, Image.Image]:
    """Return the notice, and the mask of where it is opaque."""
    board = Image.new("RGB", BOARD, (243, 238, 220))
    pen = ImageDraw.Draw(board)
    pen.rectangle((12, 12, BOARD[0] - 13, BOARD[1] - 13), outline=(30, 60, 110), width=6)
    for text, size, top in NOTICE:
        pen.text((LEFT, top), text, fill=(24, 40, 84), font=ImageFont.load_default(size))
    text, size, place = PRICE_OF_CHILDREN
    pen.text(place, text, fill=(160, 40, 30), font=ImageFont.load_default(size))
    return board, Image.new("L", BOARD, 255)


def aslant(picture: Image.Image) -> Image.Image:
    """Return a board as the camera sees it: its corners at `CORNERS`, black around."""
    return picture.transform(PHOTO, Image.Transform.PERSPECTIVE, perspective(), resample=Image.Resampling.BICUBIC)


def perspective() -> list[float]:
    """Return the eight coefficients that lead from a place in the photo to one on the board.

    With (x, y) in the photo, the place on the board is (ax + by + c, dx + ey + f) / (gx + hy + 1).
    """
    width, height = BOARD
    equations, values = [], []
    for (x, y), (u, v) in zip(CORNERS, ((0, 0), (width, 0), (width, height), (0, height)), strict=True):
        equations += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    return [float(value) for value in np.linalg.solve(np.array(equations, float), np.array(values, float))]
