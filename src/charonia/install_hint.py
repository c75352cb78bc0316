"""Commands that install missing packages, for hints: they fit how this package was installed, and the installer."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit

PACKAGE = "charonia"


def extra_hint(extra: str) -> str:
    return command(requirement(extra, _direct_url(), Path(__file__).parents[2]))


def package_hint(*packages: str) -> str:
    return command(" ".join(quote(package) for package in packages))


def requirement(extra: str, direct_url: Mapping[str, object], root: Path) -> str:
    """Return this package with an extra, as an argument of pip.

    Args:
        extra: The extra.
        direct_url: Where the package was installed from; empty for an index, or without installation.
        root: Two folders above the package: a checkout, where the package runs in one.
    """
    url = urlsplit(str(direct_url.get("url", "")))
    folder = Path(unquote(url.path)) if url.scheme == "file" else None
    if folder is None and (root / "pyproject.toml").is_file():
        folder = root
    if folder is None or not folder.exists():
        return quote(f"{PACKAGE}[{extra}]")
    if folder.is_file():  # a wheel
        return quote(f"{PACKAGE}[{extra}] @ {folder.as_uri()}")
    kind = direct_url.get("dir_info", {})
    is_editable = not direct_url or (isinstance(kind, Mapping) and bool(kind.get("editable")))
    return f"{'-e ' if is_editable else ''}{quote(f'{folder}[{extra}]')}"


def command(
    arguments: str,
    *,
    environment: Mapping[str, str] = os.environ,
    has: Callable[[str], object] = find_spec,
    which: Callable[[str], str | None] = shutil.which,
) -> str:
    """Return the command that installs requirements for this interpreter: with pip, or with uv where pip is not there.

    Args:
        arguments: The requirements, quoted for a shell.
        environment: Environment variables.
        has: Returns something for a module that can be imported.
        which: Returns the path of a program, None for none.
    """
    python = quote(sys.executable)
    if has("pip") is None:
        place = "" if environment.get("VIRTUAL_ENV") == sys.prefix else f"--python {python} "
        return f"uv pip install {place}{arguments}"
    pip = which("pip")
    is_own = pip is not None and Path(pip).parent == Path(sys.executable).parent
    return f"{'' if is_own else f'{python} -m '}pip install {arguments}"


def _direct_url() -> Mapping[str, object]:
    try:
        text = distribution(PACKAGE).read_text("direct_url.json")
        found = json.loads(text or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
