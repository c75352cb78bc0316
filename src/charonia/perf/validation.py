"""Whether an answer holds what the validation data say it has to."""

from charonia.client import grpc_codec, http_codec
from charonia.client.wire import Answer
from charonia.core.errors import ServingError
from charonia.core.response import InferResponse
from charonia.perf.api import InputSource, Target
from charonia.perf.data.compare import mismatch
from charonia.perf.sequences import Part


class Validator:
    """Compares answers with what the data source expects.

    Args:
        source: The data source.
        target: How answers are encoded.
        tolerance: Of floating-point numbers, absolute and relative.
    """

    def __init__(self, source: InputSource, target: Target, tolerance: float) -> None:
        self._source = source
        self._target = target
        self._tolerance = tolerance

    def problem(self, part: Part, answer: Answer) -> str:
        """Return what is wrong with the answer to a request, in a sentence; "" for nothing."""
        expected = self._source.expected(part.stream, part.step)
        if expected is None:
            return ""
        try:
            response = self._decoded(answer)
        except ServingError as error:
            return error.message
        return mismatch(expected, {tensor.name: tensor for tensor in response.outputs}, self._tolerance)

    def _decoded(self, answer: Answer) -> InferResponse:
        if self._target.protocol == "http":
            return http_codec.decode_response(answer.body, answer.json_bytes)
        if not self._target.streaming:
            return grpc_codec.decode_response(answer.body)
        response = grpc_codec.decode_stream_response(answer.body)
        if isinstance(response, ServingError):
            raise response
        return response
