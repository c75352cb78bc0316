"""The built-in repository agent `checksum`: refuses a model whose files are not those that its configuration names."""

import hashlib
from pathlib import PurePosixPath
from typing import Protocol

from charonia.core.errors import invalid, unsupported

ALGORITHMS = ("md5", "sha1", "sha256", "sha384", "sha512")


class Checked(Protocol):
    """What is looked at of a model."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def folder(self) -> object:
        """Where its files are."""
        ...


class ChecksumAgent:
    """Compares files with their digests before the model is loaded.

    Args:
        parameters: Hexadecimal digest by `<algorithm>:<path of a file in the model's folder>`.
    """

    def __init__(self, parameters: dict[str, str]) -> None:
        self._expected = [(*_parsed(key), digest) for key, digest in parameters.items()]

    def on_load(self, model: Checked) -> None:
        """Compare.

        Raises:
            ServingError: INVALID_ARG for a file that is not there or has another digest.
        """
        for algorithm, path, expected in self._expected:
            subject = f"checksum of '{path}' in model '{model.name}'"
            try:
                with open(f"{model.folder}/{path}", "rb") as file:
                    got = hashlib.file_digest(file, algorithm).hexdigest()
            except OSError as error:
                raise invalid(f"{subject}: {(error.strerror or str(error)).lower()}") from error
            if got != expected.strip().lower():
                raise invalid(f"{subject}: mismatched {algorithm.upper()}, expected {expected}, got {got}")


def _parsed(key: str) -> tuple[str, str]:
    algorithm, colon, path = key.partition(":")
    if not colon:
        raise invalid(f"repository agent 'checksum': expected <algorithm>:<file>, got '{key}'")
    if algorithm.lower() not in ALGORITHMS:
        raise unsupported(
            f"repository agent 'checksum': unsupported algorithm '{algorithm}'",
            hint=f"there are {', '.join(ALGORITHMS)}",
        )
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or not relative.parts or "\0" in path:
        raise invalid(f"repository agent 'checksum': '{path}' must stay within the model's folder")
    return algorithm.lower(), path
