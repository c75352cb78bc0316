"""The map of the text detection becomes boxes, and the text lines in them the input of the recognition."""

import cv2
import triton_python_backend_utils as pb_utils
from boxes import find_boxes, in_source  # boxes.py and lines.py are beside this file
from lines import LINES_PER_BATCH, angle_input, blank, cut, recognition_input, widths_in_batches


class TritonPythonModel:
    def initialize(self, args):
        cv2.setNumThreads(1)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        pixels, source, probability = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("PIXELS", "SOURCE", "PROBABILITY")
        )
        wanted = request.requested_output_names()
        boxes = find_boxes(probability[0, 0], pixels.shape[:2])
        # An ensemble has no conditions: a page without text sends one empty line on, and no box.
        lines = [cut(pixels, box) for box in boxes] or [blank()]
        # Who does not ask which lines are of like width, as the ensemble, reads all of them as one batch.
        widths, by_width = widths_in_batches(lines, LINES_PER_BATCH if "BY_WIDTH" in wanted else len(lines))
        outputs = {"BOXES": in_source(boxes, source), "WIDTHS": widths, "BY_WIDTH": by_width}
        if "LINES" in wanted:
            outputs["LINES"] = recognition_input(lines, widths)
        if "ANGLE_INPUT" in wanted:
            outputs["ANGLE_INPUT"] = angle_input(lines)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, outputs[name]) for name in wanted])
