"""A scanned page as input for text recognition: cut into words, and read back from the model's answers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

Grey = NDArray[np.uint8]
Mask = NDArray[np.bool_]

# In pixels of the page: the paper's shade is the mean over this radius, ink is darker than that by at least this much.
_SHADE_RADIUS = 15
_INK_CONTRAST = 20
# A row of a line has at least this much ink, a line is at least this high, a space between words at least this wide.
_ROW_INK_MIN = 24
_LINE_HEIGHT_MIN = 7
_SPACE_MIN = 4
_MARGIN = 5

# PP-OCR reads 48 pixels high. Requests share a batch only when they have the same shape, hence a few widths.
_HEIGHT = 48
_WIDTH_STEP = 160


def words_of_page(page: Grey) -> list[list[Grey]]:
    """Cut a page into its words.

    Args:
        page: Grey levels [height, width], dark ink on lighter paper.

    Returns:
        For each text line, from top to bottom, the pictures of its words from left to right.
    """
    shade = np.asarray(Image.fromarray(page).filter(ImageFilter.GaussianBlur(_SHADE_RADIUS)), dtype=np.int16)
    ink: Mask = np.asarray(shade - page > _INK_CONTRAST)
    lines = []
    for top, bottom in _runs(ink.sum(axis=1, dtype=np.int64) > _ROW_INK_MIN, gap_min=1):
        if bottom - top >= _LINE_HEIGHT_MIN:
            words = _runs(np.any(ink[top:bottom], axis=0), gap_min=_SPACE_MIN)
            lines.append([_cut(page, top, bottom, left, right) for left, right in words])
    return lines


def recognition_input(word: Grey) -> NDArray[np.float32]:
    """Return a word as the model takes it: FP32 [1, 3, 48, width] in [-1, 1], the width padded to a multiple of 160."""
    height, width = word.shape
    scaled_width = max(1, round(width * _HEIGHT / height))
    scaled = np.asarray(Image.fromarray(word).resize((scaled_width, _HEIGHT), Image.Resampling.BICUBIC))
    tensor = np.zeros((1, 3, _HEIGHT, -(-scaled_width // _WIDTH_STEP) * _WIDTH_STEP), dtype=np.float32)
    tensor[:, :, :, :scaled_width] = scaled / np.float32(127.5) - np.float32(1)
    return tensor


def read_word(scores: NDArray[Any], characters: Sequence[str]) -> str:
    """Read one answer of the model.

    Args:
        scores: Probabilities [1, steps, characters]; class 0 is the blank.
        characters: The character of each class.

    Source: greedy decoding of connectionist temporal classification, Graves et al. (2006).
    """
    best = scores[0].argmax(axis=1)
    is_new = np.concatenate([[True], best[1:] != best[:-1]])
    return "".join(characters[index] for index in best[is_new & (best != 0)]).strip()


def _cut(page: Grey, top: int, bottom: int, left: int, right: int) -> Grey:
    return page[max(top - _MARGIN, 0) : bottom + _MARGIN, max(left - _MARGIN, 0) : right + _MARGIN]


def _runs(mask: Mask, gap_min: int) -> list[tuple[int, int]]:
    """Return start and end of each run of True; gaps of fewer than `gap_min` do not end a run."""
    (places,) = np.nonzero(mask)
    if not len(places):
        return []
    (breaks,) = np.nonzero(np.diff(places) > gap_min)
    starts = places[np.concatenate([[0], breaks + 1])]
    ends = places[np.concatenate([breaks, [len(places) - 1]])] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
