"""KServe's SDK, which has an environment of its own: its dependencies exclude those of the tests."""

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("CHARONIA_KSERVE_SDK", "")
"""The interpreter of an environment with the package `kserve`."""

CALL_SECONDS_MAX = 200

needs_sdk = pytest.mark.skipif(
    not PYTHON and not os.environ.get("CI"),
    reason="CHARONIA_KSERVE_SDK names no interpreter with the packages kserve==0.21.* and kubernetes<34",
)


def run_with_sdk(program: str, *arguments: str, given: str = "") -> str:
    """Run a program of this folder with the SDK, and return what it prints.

    Raises:
        RuntimeError: There is no SDK, or the program fails; the message has its errors.
    """
    if not PYTHON:
        raise RuntimeError("CHARONIA_KSERVE_SDK names no interpreter with kserve")
    command = [PYTHON, str(Path(__file__).with_name(program)), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=CALL_SECONDS_MAX)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def through_the_models(objects: Iterable[Any]) -> list[Any]:
    """Return objects of KServe as the SDK's models hold them, which are made from what KServe publishes.

    What they have no field for is missing.
    """
    back: list[Any] = json.loads(run_with_sdk("kserve_sdk_objects.py", given=json.dumps(list(objects))))
    for each in back:
        each["spec"].get("predictor", {}).get("model", {}).pop("name", None)  # the SDK's own default, ""
    return back
