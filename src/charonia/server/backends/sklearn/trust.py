"""Which files of estimators may be read: pickles run code, so only where the model is trusted."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

from charonia.archives import open_zip
from charonia.core.errors import invalid, unsupported

CATBOOST = ".cbm"
"""Suffix of CatBoost's own files, which hold data only."""

_SCHEMA = "schema.json"
"""Entry of a file of skops that no other zip archive has."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What a file may do while it is read, and how its owner says so.

    Attributes:
        is_full: Whether it may do anything: pickles are read, which run code, and files of skops make any type.
        types: Types that a file of skops may make beyond those that skops trusts itself, by full name.
        pickles_hint: How to allow pickles.
        types_hint: How to allow types; `{types}` stands for their names.
    """

    is_full: bool
    types: tuple[str, ...]
    pickles_hint: str
    types_hint: str


def check_trust(path: Path, trust: Trust) -> bool:
    """Check that a file may be read, and return whether it is one of skops.

    Raises:
        ServingError: UNSUPPORTED for a pickle that is not trusted, INVALID_ARG for a zip archive of something else.
    """
    if path.suffix.lower() == CATBOOST:
        return False
    is_skops = _is_skops(path)
    if not is_skops and not trust.is_full:
        raise unsupported(
            f"{path.name} is a pickle, which can run any code when it is read: it is read only if it is trusted",
            hint=trust.pickles_hint,
        )
    return is_skops


def _is_skops(path: Path) -> bool:
    """Return whether a file is one of skops."""
    try:
        with open_zip(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        if path.suffix == ".skops":
            raise invalid(
                f"cannot read {path.name}: {error}", hint="a file of skops is a zip archive; was it copied as a whole?"
            ) from error
        return False
    if _SCHEMA not in names:
        raise invalid(
            f"{path.name} is no estimator: it is a zip archive of {', '.join(sorted(names)[:5]) or 'nothing'}"
        )
    return True
