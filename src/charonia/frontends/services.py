"""What front ends offer beside the engine."""

from dataclasses import dataclass

from charonia.frontends.regions.registry import RegionRegistry
from charonia.frontends.log_settings import LogControl


@dataclass(frozen=True, slots=True)
class Services:
    """The server's collaborators of its front ends; one that is None is not offered.

    Attributes:
        regions: Shared memory of clients.
    """

    regions: RegionRegistry | None = None


NO_SERVICES = Services()
"""Nothing but the engine."""
