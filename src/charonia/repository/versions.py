"""Versions of a model: the folders with a number for a name, and the choice that the version policy makes."""

import os
import re
from collections.abc import Sequence

from charonia.config.model import Latest, VersionPolicy
from charonia.core.errors import ServingError, invalid
from charonia.repository.scan import ModelFolder

VERSION_MAX = 2**63 - 1
"""Versions are signed 64-bit integers in the configuration."""

DEFAULT_POLICY = VersionPolicy(latest=Latest(1))

VERSION_NAME = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)
"""Names of folders that are versions."""


def versions(folder: ModelFolder) -> tuple[int, ...]:
    """Return the version numbers in the model's folder, ascending. Blocks on the disk.

    Folders with another name, with a leading zero, and version 0 are none.

    Raises:
        ServingError: INVALID_ARG when the folder cannot be read.
    """
    try:
        with os.scandir(folder.path) as entries:
            numbers = [int(entry.name) for entry in entries if VERSION_NAME.fullmatch(entry.name) and entry.is_dir()]
    except OSError as error:
        raise unreadable(folder, error) from error
    return tuple(sorted(number for number in numbers if number <= VERSION_MAX))


def unreadable(folder: ModelFolder, error: OSError) -> ServingError:
    """Return the error for a model folder that is gone or cannot be read."""
    reason = (error.strerror or str(error)).lower()
    return invalid(f"failed to load '{folder.name}', failed to poll from model repository: {folder.path}: {reason}")


def select(policy: VersionPolicy | None, available: Sequence[int], *, model_name: str) -> tuple[int, ...]:
    """Return the versions that the policy serves, ascending.

    Args:
        policy: None for the default, the highest version.
        available: Versions that there are.
        model_name: For the error.

    Raises:
        ServingError: INVALID_ARG when it serves none of them.
    """
    policy = policy or DEFAULT_POLICY
    ascending = tuple(sorted(set(available)))
    if policy.specific is not None:
        wanted = set(policy.specific.versions)
        selected = tuple(version for version in ascending if version in wanted)
    elif policy.all is not None:
        selected = ascending
    else:
        count = (policy.latest or Latest(1)).num_versions
        selected = ascending[max(0, len(ascending) - count) :] if count > 0 else ()
    if not selected:
        raise none_selected(model_name, ascending, hint="`version_policy` of the configuration selects others")
    return selected


def none_selected(model_name: str, available: Sequence[int], *, hint: str) -> ServingError:
    """Return the error for a model without a version to serve."""
    found = f"version {', '.join(map(str, available))}" if available else "none"
    return invalid(
        f"at least one version must be available under the version policy of model '{model_name}', found {found}",
        hint=hint,
    )
