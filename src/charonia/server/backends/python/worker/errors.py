"""Errors of `triton_python_backend_utils`, and checks of arguments."""

from __future__ import annotations

import contextlib
import os
import traceback
from typing import TYPE_CHECKING

from ....channel import datatypes
from ....channel.datatypes import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Mapping

    Parameter = bool | int | str


class ArgumentTypeError(TritonModelException, TypeError):
    """Raised for arguments that are missing or of another type than expected; `except TypeError` catches it, too."""


class TritonError:
    """An error to answer a request with."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: object, code: int = INTERNAL) -> None:
        if not isinstance(code, int) or not 0 <= code <= 7:
            raise ArgumentTypeError(f"TritonError: expected one of its codes 0 to 7, got {code!r}")
        self._message = str(message)
        self._code = int(code)

    def code(self) -> int:
        """Return the code."""
        return self._code

    def message(self) -> str:
        """Return the message."""
        return self._message

    def __str__(self) -> str:
        return self._message


_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1

RESCHEDULED = 8
"""Pseudo error code: the model reschedules the request."""


def failures() -> tuple[type[BaseException], ...]:
    """Return what a model may raise that is its failure and no more: exceptions, and that its coroutine was cancelled.

    Called where something was raised: a worker whose model needs no asyncio starts a fifth sooner without it.
    """
    import asyncio

    return (Exception, asyncio.CancelledError)


_STEP = "_charonia_step"


def record_step(error: BaseException, step: str) -> None:
    """Have `describe` say which step of a model's start an exception ended: "'model.py' cannot be imported"."""
    with contextlib.suppress(Exception):  # a model's own exceptions may refuse it
        setattr(error, _STEP, step)


PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Packages whose modules have another name, by that name."""


_FOLDERS = [os.path.dirname(file) for file in (__file__, datatypes.__file__)]
"""The folders of our own code."""


def describe(error: BaseException) -> str:
    """Return type and text of an exception, and where the model's own code raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.dirname(f.filename) not in _FOLDERS]
    frames = [f for f in frames if "importlib" not in f.filename]
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # a model's own exceptions may fail at this, too
        text = f"{type(error).__name__}, whose text cannot be had"
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        line = PACKAGES.get(error.name, error.name)
        text += (
            f" (hint: add the line '{line}' to requirements.txt in the model's folder, or to the dependencies at the "
            "start of a service file)"
        )
    step = getattr(error, _STEP, "")
    if step:
        text = f"{step}: {text}"
    if frames:
        text += "\n\nAt:\n" + "\n".join(f"  {f.filename}({f.lineno}): {f.name}" for f in reversed(frames))
    return text


TRACEBACK_CHARS_MAX = 16 * 1024
"""A longer traceback is cut to its end."""


def traced(error: BaseException) -> str:
    """Return an exception with its traceback."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return text[-TRACEBACK_CHARS_MAX:]


def checked_parameters(owner: str, parameters: object) -> dict[str, Parameter]:
    """Return request or response parameters as plain values.

    Args:
        parameters: Dictionary or None.

    Raises:
        TritonModelException: They are no dictionary, or hold something else than strings, integers of 64 bits and
            booleans.
    """
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise ArgumentTypeError(f"{owner}: expected a dict as parameters, got {type(parameters).__name__}")
    mapping: Mapping[object, object] = parameters
    plain: dict[str, Parameter] = {}
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise TritonModelException(f"{owner}: expected strings as names of parameters, got {key!r}")
        if isinstance(value, bool):
            plain[str(key)] = value
        elif isinstance(value, int):
            if not _INT64_MIN <= value <= _UINT64_MAX:
                raise TritonModelException(f"{owner}: parameter {key!r} does not fit 64 bits")
            plain[str(key)] = int(value)
        elif isinstance(value, str):
            plain[str(key)] = str(value)
        else:
            raise TritonModelException(
                f"{owner}: parameter {key!r} must be a string, an integer or a boolean, got {type(value).__name__}"
            )
    return plain


def checked_text(owner: str, what: str, value: object) -> str:
    """Return a string argument; bytes, as the elements of string tensors are, count as UTF-8.

    Raises:
        TritonModelException: It is neither.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{owner}: expected a string as {what}, got {type(value).__name__}")
    return str(value)
