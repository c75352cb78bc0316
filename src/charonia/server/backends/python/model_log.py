"""What models log, in the server's log."""

import logging

_log = logging.getLogger(__name__)

_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
"""By the number that `Logger` of the models' API has for them."""


def log_of_model(instance: str, level: int, text: str, file: str, line: int) -> None:
    """Write what a model has logged at a place in its code. Callable from any thread."""
    _log.log(_LEVELS[level], "%s (%s:%d)", text, file, line, extra={"instance": instance})
