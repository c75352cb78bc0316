"""A digest of the content of a model version: equal on all servers that have the same files."""

import os
from collections.abc import Iterator
from hashlib import file_digest, sha256
from pathlib import Path

from charonia.core.errors import invalid
from charonia.server.lifecycle.repository.fingerprint import DEPTH_MAX, NOT_CONTENT
from charonia.server.lifecycle.repository.scan import ModelFolder


def content_digest(folder: ModelFolder, version: int) -> bytes:
    """Return a digest of the files in a model's folder, without its other versions. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG when a file cannot be read.
    """
    digest = sha256()
    try:
        for name, path in sorted(_files(folder.path, version)):
            with path.open("rb") as file:
                content = file_digest(file, "sha256").digest()
            digest.update(b"%d:%s" % (len(name), name.encode(errors="surrogateescape")) + content)
    except OSError as error:
        raise invalid(f"{error.filename}: {(error.strerror or str(error)).lower()}") from error
    return digest.digest()


def _files(folder: Path, version: int) -> Iterator[tuple[str, Path]]:
    for parent, folders, files in os.walk(folder, followlinks=True):
        depth = len(Path(parent).relative_to(folder).parts)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in NOT_CONTENT
            and depth < DEPTH_MAX
            and not (depth == 0 and name.isdigit() and name != str(version))
        ]
        for name in files:
            if not name.startswith("."):
                path = Path(parent) / name
                yield str(path.relative_to(folder)), path
