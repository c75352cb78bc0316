"""A picture file becomes pixels and the input of the text detection."""

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils
from picture import decode, detection_input, prepare  # picture.py is beside this file


class TritonPythonModel:
    def initialize(self, args):
        # More requests at a time come from more instances, not from threads that take cores from the ONNX models.
        cv2.setNumThreads(1)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        (file,) = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        try:
            pixels, source = prepare(decode(bytes(file)))
        except ValueError as error:
            # Only this request gets the error.
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"IMAGE: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("PIXELS", pixels),
                pb_utils.Tensor("SOURCE", np.array(source, np.float32)),
                pb_utils.Tensor("DETECTION_INPUT", detection_input(pixels)),
            ]
        )
