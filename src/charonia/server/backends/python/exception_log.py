"""The log of exceptions that models raise: each with its traceback, but not more than a reader can use."""

import asyncio
import logging
from collections.abc import Sequence

from charonia.core.request import CallFrame
from charonia.server.log_file import LINES

_log = logging.getLogger(__name__)

EXCEPTIONS_MAX = 10
"""Exceptions of one model version that are logged within `WINDOW_S`; more are counted."""

WINDOW_S = 60.0

REQUESTS_LISTED_MAX = 8
"""Requests of a batch whose ids are logged."""


class ExceptionLog:
    """Logs the exceptions of one model version. Use it on the event loop's thread.

    Attributes:
        suppressed: Exceptions that were not logged since the window began.
    """

    def __init__(self) -> None:
        self.suppressed = 0
        self._logged = 0

    def note(self, model: CallFrame, instance: str, request_ids: Sequence[str], traceback: str) -> None:
        """Log an exception, or count it if there were many.

        Args:
            model: The model and its version.
            instance: Name of the instance.
            request_ids: Ids of the requests of the batch, "" for one without.
            traceback: The exception with its traceback.
        """
        if not self._logged:
            asyncio.get_running_loop().call_later(WINDOW_S, self._end_window, model)
        if self._logged == EXCEPTIONS_MAX:
            self.suppressed += 1
            return
        self._logged += 1
        ids = ", ".join(repr(each) if each else "<id_unknown>" for each in request_ids[:REQUESTS_LISTED_MAX])
        more = len(request_ids) - REQUESTS_LISTED_MAX
        _log.error(
            "model '%s' version %s, instance '%s', request %s%s: execute raised an exception\n%s",
            model.model,
            model.version,
            instance,
            ids,
            f" and {more} more" if more > 0 else "",
            traceback.rstrip(),
            extra={"instance": instance, LINES: True},
        )

    def _end_window(self, model: CallFrame) -> None:
        if self.suppressed:
            _log.error(
                "model '%s' version %s: %d more exceptions within %g s were not logged",
                model.model,
                model.version,
                self.suppressed,
                WINDOW_S,
            )
        self._logged = self.suppressed = 0
