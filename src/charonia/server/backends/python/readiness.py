"""Asks the model of one instance whether it is ready, as its `is_ready` says."""

import asyncio
import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)

IS_READY_S_MAX = 5.0
"""Time that `is_ready` has, the batch that runs before it included; then the model is not ready."""


class Readiness:
    """Has at most one question open: whoever asks meanwhile waits for the same answer.

    To be used on the event loop's thread.

    Args:
        name: Instance name.
        send: Puts the question of a number to the model.
    """

    def __init__(self, name: str, send: Callable[[int], None]) -> None:
        self._name = name
        self._send = send
        self._number = 0
        self._answer: asyncio.Future[bool | str] | None = None  # of the open question
        self._logged = ""

    async def ask(self) -> bool:
        """Return what the model says; False where it says nothing in time, or fails to."""
        answer = self._answer
        if answer is None:
            self._number += 1
            answer = self._answer = asyncio.get_running_loop().create_future()
            self._send(self._number)
        try:
            async with asyncio.timeout(IS_READY_S_MAX):
                said = await asyncio.shield(answer)
        except TimeoutError:
            said = f"it has not answered within {IS_READY_S_MAX:g} s"
        reason = said if isinstance(said, str) else ""
        if reason and reason != self._logged:  # whoever asks does so every few seconds
            _log.warning("is_ready of '%s': %s", self._name, reason)
        self._logged = reason
        return said is True

    def answered(self, number: int, said: bool | str) -> None:
        """Take the model's answer: whether it is ready, or in words why it does not say."""
        if number == self._number:
            self._close(said)

    def gone(self) -> None:
        """The model has ended."""
        self._close(False)

    def _close(self, said: bool | str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.set_result(said)
