"""Names of projects, models, environments, deployments and keys. Pure."""

import re

from charonia.core.errors import invalid

NAME_CHARS_MAX = 128

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{NAME_CHARS_MAX - 1}}}")


def check_name(kind: str, name: str) -> str:
    """Return a name.

    Raises:
        ServingError: INVALID_ARG unless it consists of letters, digits, "_", "." and "-", and begins with one of the
            first two.
    """
    if not _NAME.fullmatch(name):
        raise invalid(
            f"{kind}: expected a name of letters, digits, '_', '.' and '-', got '{name[:NAME_CHARS_MAX]}'",
            hint=f"it begins with a letter or a digit and has at most {NAME_CHARS_MAX} characters",
        )
    return name
