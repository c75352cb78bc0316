"""Cuts text lines out of a picture and scales them for the networks that read them."""

import math

import cv2
import numpy as np

# Inputs of the networks: lines 48 pixels high; at least 320 wide for recognition, 192 wide for the angle.
HEIGHT = 48
WIDTH_MIN = 320
ANGLE_WIDTH = 192
# Lines at least so many times as high as wide are columns, read from bottom to top.
COLUMN_ASPECT = 1.5
# PP-OCR reads lines of like width together, in batches of this size.
LINES_PER_BATCH = 6


def cut(pixels, box):
    """Return the line in a box [4, 2], straightened: UINT8 [rows, columns, 3]."""
    upper_left, upper_right, lower_right, lower_left = box
    width = int(max(np.linalg.norm(upper_right - upper_left), np.linalg.norm(lower_right - lower_left)))
    height = int(max(np.linalg.norm(lower_left - upper_left), np.linalg.norm(lower_right - upper_right)))
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    line = cv2.warpPerspective(
        pixels,
        cv2.getPerspectiveTransform(box, corners),
        (width, height),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return np.rot90(line) if height >= COLUMN_ASPECT * width else line


def blank():
    """Return a line without text."""
    return np.full((HEIGHT, WIDTH_MIN, 3), 255, np.uint8)


def widths_in_batches(lines, batch_size):
    """Return how many columns each line gets, and the numbers of the lines from the narrowest to the widest.

    Read in this order, `batch_size` at a time, each line gets the columns that PP-OCR gives it: rounded up, but for the
    widest of a batch, which is rounded down.

    Returns:
        INT32 [lines], INT32 [lines].
    """
    columns = np.array([HEIGHT * (line.shape[1] / line.shape[0]) for line in lines])
    by_width = np.argsort(columns)
    widths = np.zeros(len(lines), np.int32)
    for first in range(0, len(lines), batch_size):
        batch = by_width[first : first + batch_size]
        widths[batch] = np.minimum(np.ceil(columns[batch]), max(WIDTH_MIN, int(columns[batch[-1]])))
    return widths, by_width.astype(np.int32)


def recognition_input(lines, widths):
    """Return all lines as the text recognition takes them: FP32 [lines, 3, 48, width], padded on the right."""
    return _stacked(lines, widths, max(WIDTH_MIN, int(widths.max())))


def angle_input(lines):
    """Return all lines as the angle classification takes them: FP32 [lines, 3, 48, 192], wide ones squeezed."""
    widths = [min(ANGLE_WIDTH, math.ceil(HEIGHT * (line.shape[1] / line.shape[0]))) for line in lines]
    return _stacked(lines, widths, ANGLE_WIDTH)


def _stacked(lines, widths, width):
    stacked = np.zeros((len(lines), 3, HEIGHT, width), np.float32)
    for line, columns, place in zip(lines, widths, stacked, strict=True):
        scaled = cv2.resize(line, (int(columns), HEIGHT))
        place[:, :, :columns] = cv2.dnn.blobFromImage(scaled, 1 / 127.5, mean=(127.5, 127.5, 127.5))[0]
    return stacked
