"""Finds the boxes of text lines in the map of the text detection.

Source: differentiable binarization, Liao et al. (2020), with the limits that PP-OCR uses.
"""

import cv2
import numpy as np
import pyclipper

# A pixel of the map above this belongs to text; the mean of a box is above the other.
PIXEL_PROBABILITY_MIN = 0.3
BOX_PROBABILITY_MIN = 0.5
# The map shows the cores of the lines: each grows by its area / its perimeter x this.
GROWTH = 1.6
# In pixels of the map: the shorter side of a core, and of the box that it grows to.
CORE_SIDE_MIN = 3
GROWN_SIDE_MIN = 5
# In pixels of the picture: sides of boxes are longer; boxes that begin within so many rows of each other are one line.
SIDE_MIN = 3
SAME_LINE_ROWS = 10
# More regions than this are noise, and no page to read.
REGIONS_MAX = 1000
# Closes gaps of a pixel.
KERNEL = np.ones((2, 2), np.uint8)


def find_boxes(probability, size):
    """Return the boxes of the lines in reading order.

    Args:
        probability: FP32 [rows, columns] of the map.
        size: Rows and columns of the picture.

    Returns:
        FP32 [lines, 4, 2]: x and y of the corners in the picture, whole numbers, clockwise from the upper left one.
    """
    mask = cv2.dilate(np.greater(probability, PIXEL_PROBABILITY_MIN).view(np.uint8), KERNEL)
    regions, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    grown = [box for region in regions[:REGIONS_MAX] if (box := grow(region, probability)) is not None]
    if not grown:
        return np.zeros((0, 4, 2), np.float32)
    rows, columns = size
    scale = np.array([columns, rows]) / probability.shape[::-1]
    boxes = clockwise(np.clip(np.rint(np.stack(grown) * scale), 0, [columns - 1, rows - 1]))
    across = np.linalg.norm(boxes[:, 0] - boxes[:, 1], axis=1).astype(int)
    down = np.linalg.norm(boxes[:, 0] - boxes[:, 3], axis=1).astype(int)
    return reading_order(boxes[(across > SIDE_MIN) & (down > SIDE_MIN)]).astype(np.float32)


def in_source(boxes, source):
    """Return boxes in the picture that was sent, from boxes in the pixels that were made of it."""
    width, height, scale_x, scale_y, rows_above = source
    return np.clip((boxes - [0, rows_above]) * [scale_x, scale_y], 0, [width, height]).astype(np.float32)


def grow(region, probability):
    """Return the box [4, 2] in the map of the line whose core is the region, or None where that is no line."""
    core = cv2.minAreaRect(region)
    across, down = core[1]
    corners = cv2.boxPoints(core)
    if min(across, down) < CORE_SIDE_MIN or mean_within(probability, corners) < BOX_PROBABILITY_MIN:
        return None
    offset = pyclipper.PyclipperOffset()
    offset.AddPath(corners, pyclipper.JT_ROUND, pyclipper.ET_CLOSEDPOLYGON)
    outlines = offset.Execute(across * down * GROWTH / (2 * (across + down)))
    grown = cv2.minAreaRect(np.concatenate([np.array(outline, np.int32) for outline in outlines]))
    return None if min(grown[1]) < GROWN_SIDE_MIN else cv2.boxPoints(grown)


def mean_within(probability, corners):
    """Return the mean of the map over the pixels of a box."""
    rows, columns = probability.shape
    left, top = np.clip(np.floor(corners.min(axis=0)).astype(int), 0, [columns - 1, rows - 1])
    right, bottom = np.clip(np.ceil(corners.max(axis=0)).astype(int), 0, [columns - 1, rows - 1])
    inside = np.zeros((bottom - top + 1, right - left + 1), np.uint8)
    cv2.fillPoly(inside, [(corners - [left, top]).astype(np.int32)], 1)
    return cv2.mean(probability[top : bottom + 1, left : right + 1], inside)[0]


def clockwise(boxes):
    """Return boxes [n, 4, 2] with the upper left corner first: of the two left corners the upper one, and so on."""
    pairs = np.take_along_axis(boxes, np.argsort(boxes[:, :, :1], axis=1, kind="stable"), axis=1).reshape(-1, 2, 2, 2)
    pairs = np.take_along_axis(pairs, np.argsort(pairs[..., 1:], axis=2, kind="stable"), axis=2)
    (upper_left, lower_left), (upper_right, lower_right) = pairs.transpose(1, 2, 0, 3)
    return np.stack([upper_left, upper_right, lower_right, lower_left], axis=1)


def reading_order(boxes):
    """Return boxes from top to bottom, and from left to right if they begin at about the same height."""
    ordered = []
    for box in boxes[np.lexsort((boxes[:, 0, 0], boxes[:, 0, 1]))]:
        left, top = box[0]
        place = len(ordered)
        while place and abs(top - ordered[place - 1][0, 1]) < SAME_LINE_ROWS and left < ordered[place - 1][0, 0]:
            place -= 1
        ordered.insert(place, box)
    return np.array(ordered).reshape(-1, 4, 2)
