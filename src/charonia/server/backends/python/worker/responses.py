"""Responses of Python models, and how they are sent."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import TYPE_CHECKING, cast

from ....channel.datatypes import TritonModelException
from .errors import ArgumentTypeError, TritonError, checked_parameters
from .tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .errors import Parameter
    from .host import Answer, Binding, Failure, Host, ModelBatch, Outputs, Result

FINAL = 1
"""Flag of `send`: nothing more follows."""


class InferenceResponse:
    """The answer to one request."""

    __slots__ = ("__weakref__", "_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._outputs = list(output_tensors)
        for tensor in self._outputs:
            if not isinstance(tensor, Tensor):
                raise ArgumentTypeError(
                    f"InferenceResponse: expected Tensor objects as outputs, got {type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            raise ArgumentTypeError(f"InferenceResponse: expected a TritonError as error, got {type(error).__name__}")
        self._error = error
        self._parameters = checked_parameters("InferenceResponse", parameters) if parameters is not None else {}

    def output_tensors(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._outputs

    def has_error(self) -> bool:
        """Return whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the response parameters as JSON text."""
        return json.dumps(self._parameters)


def result_of(response: InferenceResponse, wanted: tuple[str, ...], binding: Binding) -> Result:
    """Return a response as the host takes it, with the wanted outputs only; the model may leave out some of them.

    Args:
        response: What the model returned.
        wanted: Names of the outputs that the request wants.
        binding: Knows the outputs of the configuration, and logs others once each.
    """
    error = response._error
    if error is not None:
        return (error._code, error._message)
    outputs = [tensor for tensor in response._outputs if tensor._name in wanted]
    if len(outputs) != len(response._outputs):
        binding.note_outputs([tensor._name for tensor in response._outputs])
    return (-1, outputs, response._parameters)


def response_of(result: Result) -> InferenceResponse:
    """Return the response that a host has received from another model."""
    if result[0] >= 0:
        code, text = cast("Failure", result)
        return InferenceResponse(error=TritonError(text, code))
    _, outputs, parameters = cast("Outputs", result)
    response = InferenceResponse(outputs)
    response._parameters = parameters
    return response


class InferenceResponseSender:
    """Sends the responses to one request, from any thread, also after `execute` has returned."""

    __slots__ = ("__weakref__", "_batch", "_binding", "_has_sent", "_index", "_is_closed", "_lock", "_wanted")

    def __init__(self, binding: Binding, batch: ModelBatch, index: int, wanted: tuple[str, ...]) -> None:
        self._binding = binding
        self._batch = batch
        self._index = index
        self._wanted = wanted
        self._lock = threading.Lock()
        self._has_sent = False
        self._is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; with the flag `TRITONSERVER_RESPONSE_COMPLETE_FINAL` it, or what was before, is the last.

        Raises:
            TritonModelException: Nothing can be sent any more, or not this.
        """
        with self._lock:
            answer = self._answer(response, flags)
            if answer is not None:
                self._binding.reach().respond(*answer)

    def _answer(self, response: InferenceResponse | None, flags: int) -> Answer | None:
        """Return a response as hosts take it, with the lock, and note that it is sent; None for nothing to send."""
        if flags not in (0, FINAL):
            raise TritonModelException(f"Unable to send response. Unsupported flag provided: {flags!r}.")
        if response is None:
            if not flags:
                raise TritonModelException(
                    "Inference Response object must be provided when the response flags is set to zero."
                )
        elif not isinstance(response, InferenceResponse):
            raise TritonModelException(
                f"Unable to send response. Expected an InferenceResponse, got {type(response).__name__}."
            )
        if self._is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        final = bool(flags)
        self._binding.reach()
        if self._binding.is_decoupled:
            result = None if response is None else result_of(response, self._wanted, self._binding)
            self._is_closed = final
            return (self._batch, self._index, result, final)
        answer: Answer | None = None
        if response is None:
            if not self._has_sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
        elif self._has_sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        else:
            # The only response is always the last, even without the flag, so that the caller does not wait for it.
            self._has_sent = True
            answer = (self._batch, self._index, result_of(response, self._wanted, self._binding), True)
        self._is_closed = final
        return answer

    def is_cancelled(self) -> bool:
        """Return whether the caller has gone."""
        self._binding.reach().poll()
        return self._index in self._batch.cancelled

    def when_cancelled(self, listener: Callable[[], None]) -> None:
        """Call `listener` once when the caller goes, in the thread that notices it; at once if it has gone.

        It is noticed while `execute` is not running, or whenever the model waits for something of the server.
        """
        self._batch.listen(self._index, listener)

    def _is_open(self) -> bool:
        """Return whether the request has no final answer."""
        return not (self._is_closed or self._has_sent)

    def _close(self) -> bool:
        """Send nothing more; return whether the request had no final answer, which is now up to others."""
        with self._lock:
            is_open = self._is_open()
            self._is_closed = True
        return is_open

    def __del__(self) -> None:
        host = self._binding.host
        if self._is_open() and host is not None:
            host.later(partial(host.respond, self._batch, self._index, _DROPPED, True))


def send_together(responses: Iterable[tuple[InferenceResponseSender, InferenceResponse | None, int]]) -> None:
    """Send responses of any number of senders, each with its flags, at the cost of little more than one.

    Other threads may not use these senders meanwhile.

    Raises:
        TritonModelException: One of them cannot be sent; the others were.
    """
    answers: list[Answer] = []
    host: Host | None = None
    error: TritonModelException | None = None
    for sender, response, flags in responses:
        try:
            with sender._lock:
                answer = sender._answer(response, flags)
        except TritonModelException as refused:
            error = refused
            continue
        if answer is not None:
            host = sender._binding.reach()
            answers.append(answer)
    if host is not None:
        host.respond_together(answers)
    if error is not None:
        raise error


_DROPPED = (TritonError.INTERNAL, "the model dropped the response sender of the request without a final response")
