"""Unpacks archives of conda-pack and of virtual environments, in a process with limited memory."""

import os
import sys
import tarfile
import time
from pathlib import Path, PurePosixPath

from charonia.archives import ArchiveLimits, explained, failure, limited, tar_entries, unpacked_bytes_max
from charonia.core.errors import invalid, unsupported
from charonia.server.backends.python.build import BUILD_S_MAX, CommandError, run_command, variables

UNPACKED_FILES_MAX = 1_000_000
UNPACKED_BYTES_MAX = 64 * 1024**3
"""Largest content of an archive, unpacked; `unpacked_bytes_max` holds as well."""


async def unpack_archive(path: Path, folder: Path) -> None:
    """Unpack an archive of conda-pack, and run its conda-unpack, which rewrites paths.

    Raises:
        ServingError: It is not a valid archive, or has unsafe content.
    """
    if not hasattr(tarfile, "data_filter"):
        raise unsupported(f"the archive '{path}' cannot be unpacked safely by this Python", hint="use 3.11.4 or newer")
    started = time.monotonic()
    own = [sys.executable, "-P", "-m", __name__, str(path), str(folder)]
    try:
        await run_command(own, limit_s=BUILD_S_MAX)
    except CommandError as error:
        raise failure(f"the archive '{path}'", error.output) from error
    adapt = folder / "bin" / "conda-unpack"
    if adapt.is_file():
        command = [str(folder / "bin" / "python"), str(adapt)]
        try:
            await run_command(command, limit_s=BUILD_S_MAX - (time.monotonic() - started), env=variables())
        except CommandError as error:
            raise invalid(f"the archive '{path}': conda-unpack failed: {error}\n{error.output}") from error


def extract(path: Path, folder: Path) -> None:
    """Extract an archive in this process. Raises as `unpack_archive`."""
    folder.mkdir()
    limits = ArchiveLimits(UNPACKED_FILES_MAX, min(UNPACKED_BYTES_MAX, unpacked_bytes_max(path)))
    hint = "expected a .tar.gz made by conda-pack, or of the content of a folder made by `python -m venv`"
    try:
        with explained(hint):
            for archive, entry in tar_entries(path, limits):
                archive.extract(entry, folder, filter=_checked)
    except tarfile.FilterError as error:
        raise invalid(f"it is refused: {error}", hint="its content must stay in its folder") from error


def _checked(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Return a member of an archive if it may be unpacked.

    Devices are refused, and paths and links that lead out of the folder. The interpreter of a virtual environment is
    such a link: it may lead to an interpreter of this machine.

    Raises:
        FilterError: It may not be unpacked.
        ServingError: INVALID_ARG for an interpreter that this machine does not have.
    """
    path = PurePosixPath(member.name)
    if not (member.issym() and path.parent.name == "bin" and path.name.startswith("python")):
        return tarfile.data_filter(member, folder)
    target = PurePosixPath(member.linkname)
    if not target.is_absolute():
        return tarfile.data_filter(member, folder)
    if not (target.name.startswith("python") and os.path.isfile(target) and os.access(target, os.X_OK)):
        raise invalid(
            f"its interpreter {member.name} is a link to '{target}', which is no program of this machine",
            hint="make the virtual environment on this machine, or with the same Python at the same path; an archive "
            "of conda-pack brings its own",
        )
    inside = tarfile.data_filter(member.replace(linkname=path.name, deep=False), folder)
    return inside.replace(linkname=member.linkname, deep=False)


if __name__ == "__main__":
    sys.exit(limited(lambda: extract(Path(sys.argv[1]), Path(sys.argv[2]))))
