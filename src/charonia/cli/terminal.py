"""How text looks in a terminal."""

import asyncio
import os
import time
from typing import TextIO

CLEAR_LINE = "\r\033[K"

PROGRESS_S = 0.5
"""Time between two updates of a line of progress."""


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal with cursor control."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def style_of(stream: TextIO) -> "Style":
    """Return colours for a terminal, and none for other streams or where the environment has NO_COLOR."""
    return Style(is_terminal(stream) and not os.environ.get("NO_COLOR"))


class Style:
    """How text looks; without colours, it is unchanged."""

    def __init__(self, has_colours: bool) -> None:
        self.has_colours = has_colours

    def bold(self, text: str) -> str:
        return self._with("1", text)

    def dim(self, text: str) -> str:
        """Return text that steps back."""
        return self._with("2", text)

    def bad(self, text: str) -> str:
        return self._with("31", text)

    def warning(self, text: str) -> str:
        """Return a word of warning."""
        return self._with("33", text)

    def prompt(self, text: str) -> str:
        """Return the text before the user's input; the marks tell readline its width."""
        return f"\001\033[1;36m\002{text}\001\033[0m\002" if self.has_colours else text

    def _with(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.has_colours else text


class ProgressSpinner:
    """A line of a terminal that says what the user waits for, and for how long. To be used in an event loop.

    Args:
        stream: The terminal, None for nothing.
    """

    def __init__(self, stream: TextIO | None, text: str) -> None:
        self._stream = stream
        self._text = text
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = time.monotonic()

    def show(self) -> None:
        """Show the line, and keep it up to date until `clear`."""
        if self._stream is not None:
            self._stream.write(f"{CLEAR_LINE}  {self._text} ({time.monotonic() - self._began_s:.0f} s)")
            self._stream.flush()
            self._timer = asyncio.get_running_loop().call_later(PROGRESS_S, self.show)

    def clear(self) -> None:
        """Remove the line; ignored where there is none."""
        if self._stream is not None and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._stream.write(CLEAR_LINE)
            self._stream.flush()
