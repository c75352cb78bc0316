"""Wheels of tests, from which environments are built without a network."""

import json
import zipfile
from pathlib import Path

import numpy as np

SITE_PACKAGES = str(Path(np.__file__).parents[1])


def wheel(folder: Path, name: str, files: dict[str, str], version: str = "1.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*content, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**content, f"{info}/RECORD": record}.items():
            archive.writestr(member, text)
    return path


def offline_index(folder: Path, *, numpy: bool = True) -> None:
    """Write wheels of a package `tiny` and of a "numpy" that leads to the one of these tests."""
    wheel(folder, "tiny", {"tiny.py": "WORD = 'tiny'\n"})
    if numpy:
        wheel(folder, "numpy", {"numpy_of_the_tests.pth": SITE_PACKAGES + "\n"}, np.__version__)


def inline_metadata(folder: Path) -> str:
    """Write these wheels, and return the comment in which a Python file names them as its dependencies."""
    offline_index(folder)
    requirements = [f"{path.name.split('-')[0]} @ {path.as_uri()}" for path in sorted(folder.iterdir())]
    return f"# /// script\n# dependencies = {json.dumps(requirements)}\n# ///\n"
