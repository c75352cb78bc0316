"""The map of the text detection becomes boxes, and the text lines in them the input of the recognition."""

import cv2
import triton_python_backend_utils as pb_utils
from boxes import find_boxes, in_source  # boxes.py and lines.py lie beside this file
from lines import angle_input, blank, cut, recognition_input, widths_by_batch


class TritonPythonModel:
    def initialize(self, args):
        cv2.setNumThreads(1)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        pixels, source, probability = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("PIXELS", "SOURCE", "PROBABILITY")
        )
        boxes = find_boxes(probability[0, 0], pixels.shape[:2])
        # An ensemble has no conditions: a page without text sends one empty line on, and no box.
        lines = [cut(pixels, box) for box in boxes] or [blank()]
        widths, by_width = widths_by_batch(lines)
        outputs = {"BOXES": in_source(boxes, source), "WIDTHS": widths, "BY_WIDTH": by_width}
        wanted = request.requested_output_names()
        if "LINES" in wanted:
            outputs["LINES"] = recognition_input(lines, widths)
        if "ANGLE_INPUT" in wanted:
            outputs["ANGLE_INPUT"] = angle_input(lines)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, outputs[name]) for name in wanted if name in outputs])
