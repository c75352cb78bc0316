"""The errors of loads: how they begin, which code they have, and their line in the log."""

import logging
from collections.abc import Collection
from typing import TypeVar

from charonia.core.errors import Code, ServingError, internal
from charonia.server.log_file import LINES

_log = logging.getLogger(__name__)

NOT_ALL_LOADED = "not every model could be loaded"
"""Start of the error with which a server ends because models failed to load; the error of each is in the log."""

_Error = TypeVar("_Error", bound=BaseException)


class PollError(ServingError):
    """What a repository or a load request has of a model cannot be used: nothing of it was loaded.

    The code is INTERNAL and the message has a fixed start, for which programs look; UNAVAILABLE where a store cannot be
    reached, so that a later attempt may succeed.

    Attributes:
        reason: The error of the part that failed, with its hint.
    """

    def __init__(self, name: str, error: ServingError) -> None:
        """Make the error of the model `name` from that of the part which failed."""
        start = f"failed to load '{name}', failed to poll from model repository: "
        code = Code.UNAVAILABLE if error.code is Code.UNAVAILABLE else Code.INTERNAL
        super().__init__(code, start + error.message.removeprefix(start), hint=error.hint)
        self.reason = str(error)


def load_error(name: str, reason: str, error: Exception) -> ServingError:
    """Return the error of a load of the model `name` that failed for `reason`, because of `error`."""
    if isinstance(error, PollError):
        return error
    if isinstance(error, ServingError):
        code = Code.INVALID_ARG if error.code is Code.NOT_FOUND else error.code
        return ServingError(code, f"load failed for model '{name}': {reason}")
    _log.warning("loading '%s'", name, exc_info=error)
    return internal(f"load failed for model '{name}': {reason}")


def reason_of(error: BaseException) -> str:
    """Return why something failed, for a message."""
    return str(error) if isinstance(error, ServingError) else f"{type(error).__name__}: {error}"


def logged(error: _Error) -> _Error:
    """Write the error of a load into the log as one line, and return it. What follows an empty line is to be copied."""
    reason, gap, block = reason_of(error).partition("\n\n")
    first, *others = (line.strip() for line in reason.splitlines() if line.strip())
    line = f"{first}{'' if first.endswith(':') else ':'} {'; '.join(others)}" if others else first
    text = f"{line}{gap}{block}"
    _log.error("%s", text.rstrip(";") if others or block else text, extra={LINES: True} if block else None)
    return error


def log_failure(name: str, error: BaseException, culprits: Collection[str]) -> None:
    """Log that a model could not be loaded, with its error unless other models are the reason.

    Args:
        name: The model.
        error: Its error.
        culprits: The models that it needs and that could not be loaded; their errors are in the log.
    """
    if culprits:
        _log.warning("'%s' cannot be loaded without %s", name, ", ".join(f"'{each}'" for each in sorted(culprits)))
    else:
        logged(error)
