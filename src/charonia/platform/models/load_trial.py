"""Loads a version as a server does, in a process with limits: its configuration and its files may disagree."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.config.backends import ENSEMBLE, record_of
from charonia.core.errors import Code, ServingError
from charonia.platform.models.child import CheckRun, charonia

LOAD_S_MAX = 120.0
"""Time limit for loading a version."""

MEMORY_SHARE_MAX = 0.5
"""Share of the machine's memory that it may use."""

PROBLEM_CHARS_MAX = 2000

_READY = "Started HTTPService"
_ERROR = re.compile(r'[EF]\d{4} [^\]]*\] "(.*)"')
_LOGGED = re.compile(r"[A-Z]\d{4} \d\d:")
_PREFIX = re.compile(r"load failed for model '[^']*': version \d+ is at UNAVAILABLE state: ")


@dataclass(frozen=True, slots=True)
class LoadTrial:
    """The result of a trial.

    Attributes:
        text: Whether it loads, or why it was not tried.
        problem: Why it does not load, "" if it does.
    """

    text: str
    problem: str = ""


def try_to_load(check: CheckRun, config: Mapping[str, Any]) -> LoadTrial:
    """Load the model of a repository, without a GPU.

    Args:
        check: The check, whose repository has just this model.

    Raises:
        CancelledTaskError: If the task was cancelled.
    """
    reason = obstacle(config)
    if reason:
        return LoadTrial(f"not tried: {reason}")
    memory = int(MEMORY_SHARE_MAX * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    arguments = ["serve", f"--model-repository={check.repository}", "--host=127.0.0.1", "--port=0"]
    arguments += ["--allow-grpc=false", "--allow-metrics=false"]
    started = time.monotonic()
    try:
        ran = charonia(check, arguments, timeout_s=LOAD_S_MAX, memory_bytes=memory, enough=lambda line: _READY in line)
    except ServingError as error:
        if error.code is not Code.INTERNAL:
            raise
        problem = f"it was not ready after {LOAD_S_MAX:.0f} s"
    else:
        if ran.status == 0:
            return LoadTrial(f"yes, in {time.monotonic() - started:.1f} s")
        problem = why_not_loaded(ran.output, ran.status).replace(f"{check.repository}/", "")
    limits = f"{LOAD_S_MAX:.0f} s, {memory >> 20} MiB"
    return LoadTrial("no", f"it does not load on this machine (limits: {limits}): {problem[:PROBLEM_CHARS_MAX]}")


def obstacle(config: Mapping[str, Any]) -> str:
    """Return why a model cannot be loaded alone and without a GPU, "" if it can."""
    if config.get("platform") == ENSEMBLE or "ensemble_scheduling" in config:
        return "its steps are other models"
    kinds = {group.get("kind") for group in config.get("instance_group", ())}
    if record_of(config.get("backend") or "").needs_gpu or "KIND_GPU" in kinds:
        return "it asks for a GPU"
    return ""


def why_not_loaded(lines: Sequence[str], status: int) -> str:
    """Return why a server of one model has exited, from its output."""
    found: list[str] = []
    is_error = False
    for line in lines:
        if error := _ERROR.fullmatch(line):
            found.append(_PREFIX.sub("", error[1]))
            is_error = True
        elif _LOGGED.match(line):
            is_error = False
        elif is_error and line.startswith(" "):
            found.append(line.strip())
    if not found and status < 0:
        found.append(f"the process that loaded it was ended by signal {-status}")
    return "\n".join(dict.fromkeys(found)) or next((line for line in reversed(lines) if line.strip()), "it has ended")
