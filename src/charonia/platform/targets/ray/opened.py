"""Opens the target `ray` as the settings of the platform say."""

import secrets
from pathlib import Path

from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.data_folder import write_private
from charonia.platform.settings import RaySettings
from charonia.platform.targets.kubernetes.repositories import ClaimRepositories, open_repositories
from charonia.platform.targets.ray.dashboard import Dashboard
from charonia.platform.targets.ray.target import RayTarget

OWNER_FILE = "ray-owner"
"""File of the data folder with the name of this platform among others, where no setting has it."""

SECRET_FILE = "ray-secret"
"""File of the data folder from which the API keys of the platform in servers are derived."""


def open_ray(settings: RaySettings, store: ArtifactStore, data: Path) -> RayTarget:
    """Return the target. It asks the cluster nothing yet.

    Args:
        settings: Of the cluster.
        store: The artifact store.
        data: The data folder of the platform.
    """
    repositories = ClaimRepositories(store.local.folder) if settings.folder else open_repositories(store, "")
    owner = settings.owner or _kept(data / OWNER_FILE, 8)
    secret = _kept(data / SECRET_FILE, 32)
    return RayTarget(Dashboard(settings.dashboard, settings.token), owner, repositories, settings, secret)


def _kept(path: Path, random_bytes: int) -> str:
    """Return the random text of a file, which is created if it is missing."""
    if not path.exists():
        write_private(path, secrets.token_hex(random_bytes))
    return path.read_text().strip()
