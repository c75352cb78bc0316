"""The response of a request whose caller takes exactly one, from a model that may send any number."""

from charonia.core.errors import ServingError
from charonia.core.response import InferResponse, Outcome


class SingleResponse:
    """Collects the outcomes of a request to a decoupled model, and refuses unless there is exactly one response.

    Front ends need it only when the first outcome is not final.

    Args:
        refusal: The answer to a request with no response, or more than one.

    Attributes:
        is_over: Whether the last outcome has arrived.
    """

    __slots__ = ("_refusal", "_response", "is_over")

    def __init__(self, refusal: ServingError) -> None:
        self._refusal = refusal
        self._response: InferResponse | None = None
        self.is_over = False

    def take(self, outcome: Outcome, final: bool) -> InferResponse | ServingError | None:
        """Take an outcome; return the answer, None while it is undecided. Not to be called after an answer."""
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
