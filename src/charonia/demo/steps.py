"""Reads a picture by calling the models of the OCR steps one by one: what a client does where there is no pipeline."""

import numpy as np

from charonia.demo import ocr
from charonia.demo.traffic import Arrays, Client

# The recogniser's smallest width, and how many lines of like width it is given at a time: as `ocr_bls` does.
_WIDTH_MIN = 320
_LINES_PER_BATCH = 6


async def read_step_by_step(client: Client, picture: bytes) -> Arrays:
    """Return TEXT [lines], SCORE [lines] and BOX [lines, 4, 2] of a picture; every tensor crosses the network twice.

    Raises:
        tritonclient.utils.InferenceServerException: A step failed.
    """
    image = np.array([picture], np.object_)
    prepared = await client.infer(ocr.DETECTION_PREPROCESSING, {"IMAGE": image})
    detected = await client.infer(ocr.TEXT_DETECTION, {"x": prepared["DETECTION_INPUT"]})
    (probability,) = detected.values()
    found = await client.infer(
        ocr.DETECTION_POSTPROCESSING,
        {"PIXELS": prepared["PIXELS"], "SOURCE": prepared["SOURCE"], "PROBABILITY": probability},
        outputs=["BOXES", "LINES", "WIDTHS", "BY_WIDTH"],
    )
    boxes, by_width = found["BOXES"], found["BY_WIDTH"]
    parts, numbers = [], []
    for first in range(0, len(boxes), _LINES_PER_BATCH):
        batch = by_width[first : first + _LINES_PER_BATCH]
        width = max(_WIDTH_MIN, int(found["WIDTHS"][batch].max()))
        recognised = await client.infer(ocr.TEXT_RECOGNITION, {"x": found["LINES"][batch, :, :, :width]})
        (probability,) = recognised.values()
        read = await client.infer(
            ocr.RECOGNITION_POSTPROCESSING, {"PROBABILITY": probability, "LINE_BOXES": boxes[batch]}
        )
        numbers.append(batch[read["LINE"]])
        parts.append(read)
    if not parts:
        return {"TEXT": np.zeros(0, np.object_), "SCORE": np.zeros(0, np.float32), "BOX": boxes}
    order = np.argsort(np.concatenate(numbers))
    return {name: np.concatenate([part[name] for part in parts])[order] for name in ("TEXT", "SCORE", "BOX")}
