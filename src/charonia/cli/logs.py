"""The server's log: standard `logging` with Triton's line formats.

    I1121 04:02:41.123456 4711 lifecycle.py:120] "loading: resnet:1"
    2026-11-21T04:02:41Z I 4711 lifecycle.py:120] "loading: resnet:1"

A message is quoted as JSON text with control characters escaped, so that no input of a client can forge a line or
control a terminal. Tables, tracebacks and the problems of a configuration follow their line as a block of lines that
are indented by two spaces.
"""

import json
import logging
import os
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime

from charonia.cli.terminal import CLEAR_LINE, Style, style_of
from charonia.core.errors import invalid
from charonia.server.log_file import LINES, LogFile
from charonia.wire.log_settings import AccessLogFormat, LogFormat, LogOptions

BLOCK = "block"
"""Key of `extra` for text to write below the line, with control characters escaped, except line breaks."""

# JSON escapes control characters below U+0020 only; these also move cursors, break lines or cannot be encoded.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_UNSAFE_IN_BLOCK = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_LETTERS = {logging.CRITICAL: "E", logging.ERROR: "E", logging.WARNING: "W"}


class LineFormatter(logging.Formatter):
    """Formats a record."""

    def __init__(self, line_format: LogFormat = LogFormat.DEFAULT, *, escape: bool = True) -> None:
        super().__init__()
        self._line_format = line_format
        self._escape = escape

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line and its block."""
        message, block = record.getMessage(), getattr(record, BLOCK, "")
        if getattr(record, LINES, False):
            message, _, block = message.partition("\n")
        lines = [self._head(record, message)]
        if record.exc_info:
            block = f"{block}\n{self.formatException(record.exc_info)}".strip("\n")
        if block:
            lines += [f"  {_UNSAFE_IN_BLOCK.sub(_escaped, line)}".rstrip() for line in block.split("\n")]
        return "\n".join(lines)

    def _head(self, record: logging.LogRecord, message: str) -> str:
        if self._escape:
            message = _UNSAFE.sub(_escaped, json.dumps(message, ensure_ascii=False))
        return f"{self._prefix(record)} {os.getpid()} {record.filename}:{record.lineno}] {message}"

    def _prefix(self, record: logging.LogRecord) -> str:
        letter = _LETTERS.get(record.levelno, "I")
        moment = datetime.fromtimestamp(record.created, UTC)
        if self._line_format is LogFormat.ISO8601:
            return f"{moment:%Y-%m-%dT%H:%M:%SZ} {letter}"
        return f"{letter}{moment:%m%d %H:%M:%S.%f}"


class TerminalFormatter(LineFormatter):
    """Formats a record for someone who started the server by hand: its message after a word for its severity."""

    def __init__(self, style: Style) -> None:
        super().__init__(escape=False)
        self._colours = style

    def _head(self, record: logging.LogRecord, message: str) -> str:
        style = self._colours
        word = style.bad("error:") if record.levelno >= logging.ERROR else style.warning("warning:")
        return f"{CLEAR_LINE}{word} {_UNSAFE_IN_BLOCK.sub(_escaped, message)}"


class SeverityFilter(logging.Filter):
    """Passes records of the enabled severities; each can be disabled separately."""

    def __init__(self, options: LogOptions) -> None:
        super().__init__()
        self._by_severity = {"E": options.error, "W": options.warning, "I": options.info}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; the logger's level has already dropped verbose records."""
        return record.levelno < logging.INFO or self._by_severity[_LETTERS.get(record.levelno, "I")]


class ServerLogControl:
    """The root logger as the server's log."""

    def __init__(self, handler: logging.Handler, options: LogOptions, *, terminal: bool = False) -> None:
        self._handler = handler
        self._terminal = terminal
        self._apply(options)

    async def change(self, options: LogOptions) -> None:
        """Change the settings, except for the file."""
        self._apply(options)

    def _apply(self, options: LogOptions) -> None:
        self.options = options
        is_plain = self._terminal and not options.verbose and options.access is AccessLogFormat.NONE
        self._handler.setFormatter(
            TerminalFormatter(style_of(sys.stderr))
            if is_plain
            else LineFormatter(options.format, escape=options.escape)
        )
        self._handler.filters = [SeverityFilter(replace(options, info=False) if is_plain else options)]
        logging.getLogger().setLevel(level_of(options.verbose))


def configure(options: LogOptions, *, terminal: bool = False) -> ServerLogControl:
    """Set up the root logger, replacing earlier handlers, and return its control.

    Args:
        terminal: Whether someone reads it in a terminal: only warnings and errors are written then, as plain text,
            unless the options ask for more.

    Raises:
        ServingError: INVALID_ARG if the log file cannot be written.
    """
    handler = _handler(options.file)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    logging.raiseExceptions = False  # a full disk or a closed pipe must not fill stderr with tracebacks
    return ServerLogControl(handler, options, terminal=terminal and not options.file)


def level_of(verbose: int) -> int:
    """Return the lowest level to write: INFO for 0, DEBUG for 1, and one less for each additional step."""
    return logging.INFO if verbose == 0 else max(1, logging.DEBUG + 1 - verbose)


def _handler(path: str) -> logging.Handler:
    if not path:
        return logging.StreamHandler(sys.stderr)
    try:
        return logging.StreamHandler(LogFile(path))
    except OSError as error:
        raise invalid(f"--log-file: cannot write '{path}': {(error.strerror or str(error)).lower()}") from error


def _escaped(found: "re.Match[str]") -> str:
    return f"\\u{ord(found[0]):04x}"
