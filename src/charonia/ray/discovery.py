"""Addresses on which the replicas of an application listen, for clients and balancers that bypass Ray's proxy."""

from typing import Any, TypedDict

from ray import serve


class ReplicaAddress(TypedDict):
    """Where one replica listens: `host:port` for each protocol.

    Attributes:
        replica: Name of the replica.
        http: HTTP.
        grpc: gRPC.
        metrics: The metrics page.
    """

    replica: str
    http: str
    grpc: str
    metrics: str


def addresses(application: str = "default", *, timeout_s: float = 10.0) -> list[ReplicaAddress]:
    """Return the addresses of each running replica of an application, by name of the replica.

    A replica that does not answer, because it is being stopped, is left out.

    Args:
        application: Name of the application.
        timeout_s: Longest time to wait for the replicas, in seconds.

    Raises:
        RayServeException: The application does not exist.
        TimeoutError: Replicas did not answer in time.
    """
    handle = serve.get_app_handle(application)
    if not handle.is_initialized:
        # Its own would need an event loop here with RAY_SERVE_THROUGHPUT_OPTIMIZED. Ray has no public name for this.
        handle._init(_run_router_in_separate_loop=True)  # type: ignore[no-untyped-call]
    response = handle.broadcast("address")
    return _listening(response.results(timeout_s=timeout_s, return_exceptions=True))


async def addresses_async(handle: Any, *, timeout_s: float = 10.0) -> list[ReplicaAddress]:
    """The same for the application of a handle, from an event loop."""
    response = handle.broadcast("address")
    return _listening(await response.results_async(timeout_s=timeout_s, return_exceptions=True))


def _listening(found: list[Any]) -> list[ReplicaAddress]:
    listening: list[ReplicaAddress] = [each for each in found if not isinstance(each, Exception)]
    return sorted(listening, key=lambda each: each["replica"])
