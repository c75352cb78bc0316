"""Turns errors of PyTorch into readable ones, and recognises exhausted memory and lost devices."""

import re

import torch

from charonia.core.errors import Code, ServingError, unavailable

_MESSAGE_CHARS_MAX = 1000
_FRAMES = re.compile(r"(?:Exception raised from .*|C\+\+ CapturedTraceback:.*|frame #\d+: .*)", re.DOTALL)
_TERMINAL = re.compile(r"\x1b\[[0-9;]*m")
_INTERPRETER = "The following operation failed in the TorchScript interpreter."
_INTERNAL = re.compile(r"This is an internal miniz error\..*", re.DOTALL)
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
_DEVICE_LOST = ("CUDA error:", "CUDA driver error", "device-side assert")


class DeviceLostError(ServingError):
    """The GPU is lost for this process: nothing can run on it until the server is restarted."""


def plain_error(what: str, error: BaseException, code: Code = Code.INTERNAL) -> ServingError:
    """Return an error of PyTorch without its stack of C++ frames and advice to programmers.

    Args:
        what: What failed.
        error: The error of PyTorch.
        code: Code of the result, unless memory or a device is the cause.
    """
    text = plain_text(error)
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in _NO_MEMORY):
        return unavailable(
            f"{what}: out of memory: {text}",
            hint="smaller batches (max_batch_size), fewer instances, or ENABLE_WEIGHT_SHARING need less",
        )
    if isinstance(error, torch.AcceleratorError) or any(sign in text for sign in _DEVICE_LOST):
        return DeviceLostError(
            Code.INTERNAL,
            f"{what}: the GPU failed: {text}",
            hint="a process cannot use a GPU again after such an error: restart the server",
        )
    return ServingError(code, f"{what}: {text}")


def plain_text(error: BaseException) -> str:
    """Return the message of an error as one line."""
    text = _TERMINAL.sub("", str(error))
    if text.startswith(_INTERPRETER):
        # The last line is the error, the lines before are source code.
        text = text.strip().splitlines()[-1].removeprefix("RuntimeError: ")
    text = _INTERNAL.sub("", _FRAMES.sub("", text))
    text = " ".join(text.split())[:_MESSAGE_CHARS_MAX]
    name = type(error).__name__
    return text if isinstance(error, RuntimeError) and text else f"{name}: {text}" if text else name
