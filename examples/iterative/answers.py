"""How requests become texts, and texts responses; the same for both models."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


def begin(language, request, row):
    """Return the text of a request, None after the answer that it is refused."""
    prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0]
    wanted = json.loads(request.parameters())
    known = {name: wanted[name] for name in ("max_tokens", "ignore_eos") if name in wanted}
    try:
        return language.begin(row, prompt.decode(), **known)
    except ValueError as error:
        refusal = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
        response = pb_utils.InferenceResponse(error=refusal)
        request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None


def send(request, text):
    """Send the last step's addition to a text."""
    piece = pb_utils.Tensor("text_output", np.array([[text.piece.encode()]], object))
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if text.is_done else 0
    request.get_response_sender().send(pb_utils.InferenceResponse([piece]), flags)
