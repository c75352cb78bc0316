"""helm and kubectl for tests: `tools/kubernetes_tools.sh DIR` fetches both."""

import os
import shutil
from pathlib import Path

import pytest

TOOLS_VARIABLE = "CHARONIA_KUBERNETES_TOOLS"
"""Names a folder with the programs; without it, they are looked for on the PATH."""


def tool(name: str) -> Path:
    """Return the path of a program. Without it, the test is skipped; under CI it fails."""
    found = shutil.which(name, path=os.environ.get(TOOLS_VARIABLE))
    if found is None:
        reason = f"there is no {name}: tools/kubernetes_tools.sh DIR fetches it, {TOOLS_VARIABLE}=DIR names the folder"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return Path(found)
