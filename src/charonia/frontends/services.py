"""What front ends offer beside the engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Services:
    """The server's collaborators of its front ends; one that is None is not offered."""


NO_SERVICES = Services()
"""Nothing but the engine."""
