"""Decodes the images of a batch."""

import numpy as np
import triton_python_backend_utils as pb_utils
from pixels import pixels


class TritonPythonModel:
    """IMAGE, an image file each -> PIXELS."""

    def execute(self, requests):
        """Return the pixels of each request; a file that is not an image fails only its request."""
        return [self._decoded(request) for request in requests]

    def _decoded(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().ravel()
        try:
            decoded = np.stack([pixels(file) for file in files])
        except OSError as error:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"IMAGE: {error}", pb_utils.TritonError.INVALID_ARG)
            )
        return pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", decoded)])
