"""A log file that other programs may rename or delete, and whose disk may fill up, while the server writes to it."""

import os

LINES = "lines"
"""Key of `extra` of a record: whether the lines of its message stay lines in the server's log."""


class LogFile:
    """Appends text to a file. It has what `logging.StreamHandler` needs of a stream.

    Each write checks the path: after a rename or a removal, as by logrotate, it opens a new file there. Nothing is
    buffered, so a full disk loses only the text that it refuses.
    """

    def __init__(self, path: str, mode: int = 0o666) -> None:
        """Open the file; a new one gets these permissions, as far as the umask leaves them. Raises OSError."""
        self._path, self._mode = os.path.abspath(os.path.expanduser(path)), mode
        self._file = _open(self._path, mode)
        self._is_cut_off = False

    def write(self, text: str) -> None:
        """Append a text of whole lines.

        Raises:
            OSError: The text, or the rest of it, is lost.
        """
        if not self._is_current():
            file = _open(self._path, self._mode)
            os.close(self._file)
            self._file = file
            self._is_cut_off = False
        data = text.encode(errors="backslashreplace")
        if self._is_cut_off:
            data = b"\n" + data
        written = 0
        while written < len(data):
            written += os.write(self._file, data[written:])
            self._is_cut_off = data[written - 1 : written] != b"\n"

    def flush(self) -> None:
        """Do nothing: texts are not buffered."""

    def close(self) -> None:
        os.close(self._file)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False


def _open(path: str, mode: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
