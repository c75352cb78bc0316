"""The one error type that crosses layers, and its transport-neutral codes.

A `Code` travels unchanged from where a problem is found to the wire; the two tables in `charonia.wire` turn it
into an HTTP and a gRPC status. Nothing between those two points knows a transport.
"""

from collections.abc import Sequence
from enum import Enum

NAMES_SHOWN = 10
"""Most models or versions that a hint lists."""

COMPARED_NAMES_MAX = 256
"""Most known names that an unknown one is compared with."""

COMPARED_CHARS_MAX = 120
"""Longest unknown name that is compared."""


class Code(Enum):
    """The kind of an error, named as in the Triton C API."""

    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    CANCELLED = "CANCELLED"


class ServingError(Exception):
    """A problem to report to the caller, as a sentence and a code.

    Attributes:
        code: The kind of problem.
        message: One sentence: the thing, the expected value, the received value.
        hint: What to do about it, or "" if the message is enough.
        is_unexecuted: Whether no model has seen the request for certain, so that another server may be asked.
        retry_after_s: When the caller, who has used up a limit, may send the request again; 0 for any other problem.
    """

    def __init__(
        self, code: Code, message: str, *, hint: str = "", is_unexecuted: bool = False, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.is_unexecuted = is_unexecuted
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message

    def __repr__(self) -> str:
        return f"ServingError({self.code.name}, {str(self)!r})"


class TooLargeError(ServingError):
    """The caller sent something larger than allowed."""


class TooManyError(ServingError):
    """The caller has as much in progress as allowed."""


def invalid(message: str, *, hint: str = "") -> ServingError:
    """Return an INVALID_ARG error: the caller sent something wrong."""
    return ServingError(Code.INVALID_ARG, message, hint=hint)


def conflict(message: str, *, hint: str = "") -> ServingError:
    """Return an ALREADY_EXISTS error: a name is taken, or an operation in progress excludes the request."""
    return ServingError(Code.ALREADY_EXISTS, message, hint=hint)


def too_large(message: str, *, hint: str = "") -> TooLargeError:
    """Return an INVALID_ARG error: the caller sent something larger than allowed."""
    return TooLargeError(Code.INVALID_ARG, message, hint=hint)


def too_many(message: str, *, hint: str) -> TooManyError:
    """Return an UNAVAILABLE error: the caller must wait for its own earlier calls."""
    return TooManyError(Code.UNAVAILABLE, message, hint=hint)


def not_found(message: str, *, hint: str = "") -> ServingError:
    """Return a NOT_FOUND error: the named thing does not exist here."""
    return ServingError(Code.NOT_FOUND, message, hint=hint)


def unavailable(message: str, *, hint: str = "") -> ServingError:
    """Return an UNAVAILABLE error: a valid request at the wrong time."""
    return ServingError(Code.UNAVAILABLE, message, hint=hint)


def turned_away(message: str, *, hint: str = "") -> ServingError:
    """Return an UNAVAILABLE error for a request that no model has seen: another server may be asked."""
    return ServingError(Code.UNAVAILABLE, message, hint=hint, is_unexecuted=True)


def over_limit(message: str, *, retry_after_s: int) -> ServingError:
    """Return an UNAVAILABLE error for a caller that has used up a limit for some time."""
    hint = f"retry in {retry_after_s} s"
    return ServingError(Code.UNAVAILABLE, message, hint=hint, retry_after_s=retry_after_s)


def unsupported(message: str, *, hint: str = "") -> ServingError:
    """Return an UNSUPPORTED error: understood, but not supported."""
    return ServingError(Code.UNSUPPORTED, message, hint=hint)


def internal(message: str, *, hint: str = "") -> ServingError:
    """Return an INTERNAL error: a fault of the server or the model."""
    return ServingError(Code.INTERNAL, message, hint=hint)


class RefusalKind(Enum):
    """Why a call may not be made."""

    RESTRICTED = "restricted"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the known name that is most similar to an unknown one, "" for none.

    A name longer than any real one, and more than `COMPARED_NAMES_MAX` known ones, would only cost time.
    """
    if len(name) > COMPARED_CHARS_MAX or len(known) > COMPARED_NAMES_MAX:
        return ""
    import difflib  # rarely needed, and the base stays light to import

    return next(iter(difflib.get_close_matches(name, known, n=1)), "")


def models_hint(name: str, known: Sequence[str]) -> str:
    """Return a hint for the unknown name of a model: a similar name of a ready model, or some ready models."""
    near = nearest(name, known)
    listed = f"models that are ready: {', '.join(known[:NAMES_SHOWN])}" if known else ""
    return f"did you mean '{near}'?" if near else listed
