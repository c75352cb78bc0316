"""Reads the text of a picture by calling the models of the steps, with decisions in between."""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils

# The recogniser reads lines at least this wide. A line is turned when it is upside down with at least this probability.
WIDTH_MIN = 320
UPSIDE_DOWN_MIN = 0.9


class StepError(Exception):
    """A step has failed; the text says which one and why."""

    def __init__(self, model, message, code):
        super().__init__(f"step '{model}': {message}")
        self.code = code


class TritonPythonModel:
    def initialize(self, args):
        self.lines_per_batch = int(json.loads(args["model_config"])["parameters"]["LINES_PER_BATCH"]["string_value"])

    async def execute(self, requests):
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        angles = pb_utils.get_input_tensor_by_name(request, "ANGLES")
        try:
            texts, scores, boxes = await self.read(
                pb_utils.get_input_tensor_by_name(request, "IMAGE"), angles is None or bool(angles.as_numpy()[0])
            )
        except StepError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), error.code))
        outputs = {"TEXT": texts, "SCORE": scores, "BOX": boxes}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

    async def read(self, image, with_angles):
        """Return the texts, scores and boxes of a picture."""
        pixels, source, network = await call(
            "detection_preprocessing", [image], ["PIXELS", "SOURCE", "DETECTION_INPUT"]
        )
        (probability,) = await call("text_detection", [renamed(network, "x")])
        wanted = ["BOXES", "LINES", "WIDTHS", "BY_WIDTH"] + ["ANGLE_INPUT"] * with_angles
        found = await call("detection_postprocessing", [pixels, source, renamed(probability, "PROBABILITY")], wanted)
        boxes, lines, widths, by_width = (tensor.as_numpy() for tensor in found[:4])
        if not len(boxes):
            # Nothing to read: the recogniser is not called.
            return np.zeros(0, np.object_), np.zeros(0, np.float32), boxes
        if with_angles:
            lines = await self.turned(lines, widths, found[4].as_numpy())
        batches = [
            by_width[first : first + self.lines_per_batch] for first in range(0, len(boxes), self.lines_per_batch)
        ]
        parts = await asyncio.gather(*(self.read_lines(batch, lines, widths, boxes) for batch in batches))
        texts, scores, kept_boxes, numbers = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.argsort(numbers)
        return texts[order], scores[order], kept_boxes[order]

    async def turned(self, lines, widths, angle_input):
        """Return the lines, with upside-down ones turned."""
        batches = np.split(angle_input, range(self.lines_per_batch, len(angle_input), self.lines_per_batch))
        answers = await asyncio.gather(
            *(call("angle_classification", [pb_utils.Tensor("x", batch)]) for batch in batches)
        )
        upside_down = np.concatenate([probability.as_numpy()[:, 1] for (probability,) in answers])
        (numbers,) = np.nonzero(upside_down > UPSIDE_DOWN_MIN)
        if len(numbers):
            lines = lines.copy()
        for number in numbers:
            line = lines[number, :, :, : widths[number]]
            line[:] = line[:, ::-1, ::-1].copy()
        return lines

    async def read_lines(self, batch, lines, widths, boxes):
        """Return texts, scores, boxes and numbers of those lines of a batch that could be read."""
        width = max(WIDTH_MIN, int(widths[batch].max()))
        (probability,) = await call("text_recognition", [pb_utils.Tensor("x", lines[batch, :, :, :width])])
        inputs = [renamed(probability, "PROBABILITY"), pb_utils.Tensor("LINE_BOXES", boxes[batch])]
        read = await call("recognition_postprocessing", inputs, ["TEXT", "SCORE", "BOX", "LINE"])
        texts, scores, kept_boxes, kept = (tensor.as_numpy() for tensor in read)
        return texts, scores, kept_boxes, batch[kept]


async def call(model, inputs, outputs=()):
    """Return the outputs of a model, all of them when none are named.

    Raises:
        StepError: It has failed, or the model does not exist.
    """
    request = pb_utils.InferenceRequest(model_name=model, inputs=inputs, requested_output_names=list(outputs))
    try:
        response = await request.async_exec()
    except pb_utils.TritonModelException as error:
        raise StepError(model, error, pb_utils.TritonError.UNAVAILABLE) from None
    if response.has_error():
        raise StepError(model, response.error().message(), response.error().code())
    if not outputs:
        return response.output_tensors()
    return [pb_utils.get_output_tensor_by_name(response, name) for name in outputs]


def renamed(tensor, name):
    """Return a tensor under another name."""
    return pb_utils.Tensor(name, tensor.as_numpy())
