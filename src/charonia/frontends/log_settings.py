"""The settings of the server's log, as front ends offer them."""

from typing import Protocol

from charonia.config.server import LogOptions

NO_LOG_CONTROL = "changing log settings is not offered by this server: its log is that of the program it runs in"
"""What is said where the log is not the server's."""


class LogControl(Protocol):
    """The server's log.

    Attributes:
        options: How it is written now.
    """

    options: LogOptions

    def change(self, options: LogOptions) -> None:
        """Write it like this from now on."""
        ...
