"""Runs a program to its end, with a time limit and the end of its output."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from charonia.die_with_parent import tethered

OUTPUT_BYTES_MAX = 64 * 1024
"""Output of a program that is kept: its end."""


class CommandError(Exception):
    """A program failed.

    Attributes:
        output: The end of what it wrote.
    """

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


async def run_command(
    command: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a program and return the end of its output, both streams together.

    Raises:
        CommandError: It cannot be started, has failed or took too long. It is not running any more.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *tethered(command, signal.SIGKILL),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandError(f"'{command[0]}' cannot be started: {error}", "") from error
    kept = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            status = await _finished(process, kept)
    except TimeoutError:
        raise CommandError(f"'{command[0]}' did not finish within {limit_s:g} s and was ended", _text(kept)) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if status:
        raise CommandError(f"'{' '.join(command)}' failed with status {status}", _text(kept))
    return _text(kept)


async def _finished(process: asyncio.subprocess.Process, kept: bytearray) -> int:
    if process.stdout is None:
        raise RuntimeError("the program has no output pipe")
    while data := await process.stdout.read(OUTPUT_BYTES_MAX):
        kept += data
        del kept[: -OUTPUT_BYTES_MAX - 1]  # one more than is shown, to know that something is missing
    return await process.wait()


def _text(kept: bytearray) -> str:
    text = kept[-OUTPUT_BYTES_MAX:].decode(errors="replace").strip()
    return f"[...]\n{text}" if len(kept) > OUTPUT_BYTES_MAX else text
