"""The one response of a request whose caller takes just one, whatever the model may send."""

from charonia.core.calls import Outcome
from charonia.core.errors import ServingError
from charonia.core.response import InferResponse


class SoleResponse:
    """Waits until a request is over, and knows whether it had exactly one response.

    For the outcomes of decoupled models. One outcome that is the last is that of an ordinary model and needs none of
    this.

    Args:
        refusal: The answer where there was no response, or more than one.

    Attributes:
        is_over: Whether the last outcome has come.
    """

    __slots__ = ("_refusal", "_response", "is_over")

    def __init__(self, refusal: ServingError) -> None:
        self._refusal = refusal
        self._response: InferResponse | None = None
        self.is_over = False

    def take(self, outcome: Outcome, final: bool) -> InferResponse | ServingError | None:
        """Take an outcome; return what to answer, None while that is open. Not to be called after an answer."""
        self.is_over = final
        if isinstance(outcome, ServingError):
            return outcome
        if outcome is not None:
            if self._response is not None:
                return self._refusal
            self._response = outcome
        if not final:
            return None
        return self._response if self._response is not None else self._refusal
