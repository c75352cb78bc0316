"""The server's log, for models."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from charonia.server.backends.python.worker.charonia_errors import TritonModelException
    from charonia.server.backends.python.worker.charonia_host import Binding
else:  # siblings of the worker's script; the package is not there
    from charonia_errors import TritonModelException
    from charonia_host import Binding

if TYPE_CHECKING:
    from typing import ClassVar


class Logger:
    """Writes to the server's log."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    _binding: ClassVar[Binding] = Binding(None)
    """Of the model that the class is for; see `bound_to`."""

    @classmethod
    def log(cls, message: object, level: int = INFO) -> None:
        """Write a message of a level."""
        cls._log(message, level)

    @classmethod
    def log_info(cls, message: object) -> None:
        """Write an informational message."""
        cls._log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: object) -> None:
        """Write a warning."""
        cls._log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: object) -> None:
        """Write an error."""
        cls._log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: object) -> None:
        """Write a message that appears with verbose logging only."""
        cls._log(message, cls.VERBOSE)

    @classmethod
    def _log(cls, message: object, level: int) -> None:
        if level not in (cls.INFO, cls.WARNING, cls.ERROR, cls.VERBOSE):
            raise TritonModelException(f"Logger: expected one of its levels, got {level!r}")
        caller = sys._getframe(2)
        host = cls._binding.host
        if host is not None:
            host.log(int(level), str(message), caller.f_code.co_filename, caller.f_lineno)
