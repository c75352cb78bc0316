"""The addresses that a client was given: one server, a list of servers, or a DNS name that stands for several."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from charonia.client.balancing.pool import SERVERS_MAX
from charonia.core.errors import invalid
from charonia.wire.endpoint import Endpoint, parse_url

DNS = "dns+"
"""Before the scheme of a URL: its host name stands for a server per address, such as dns+grpc://models:8001."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a name, for connections to a port. Raises OSError."""


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """The addresses of a client.

    Attributes:
        endpoints: Servers, or the one whose name stands for several.
        is_name: Whether its name is looked up, again and again.
    """

    endpoints: tuple[Endpoint, ...]
    is_name: bool = False

    @property
    def is_single(self) -> bool:
        """Whether there is only one server, without a choice."""
        return len(self.endpoints) == 1 and not self.is_name

    def __str__(self) -> str:
        return DNS * self.is_name + ", ".join(map(str, self.endpoints))


def parse_addresses(url: str | Sequence[str]) -> ServerAddresses:
    """Return the addresses in a URL, in several with commas between them, or in a sequence of URLs.

    Raises:
        ServingError: INVALID_ARG for text that is not a URL, and for servers that differ in more than host and port.
    """
    urls = _split(url) if isinstance(url, str) else list(url)
    if not urls:
        raise invalid("expected the URL of a server, got none")
    if any(each.startswith(DNS) for each in urls):
        if len(urls) > 1:
            raise invalid(f"expected a single URL with '{DNS}', got {', '.join(urls)}")
        return ServerAddresses((parse_url(urls[0].removeprefix(DNS)),), is_name=True)
    endpoints = tuple(dict.fromkeys(map(parse_url, urls)))
    if len(endpoints) > SERVERS_MAX:
        raise invalid(f"expected at most {SERVERS_MAX} servers, got {len(endpoints)}")
    first = endpoints[0]
    for other in endpoints:
        if replace(other, host=first.host, port=first.port) != first:
            raise invalid(f"servers of one client differ in host and port only: got {first} and {other}")
    return ServerAddresses(endpoints)


def _split(text: str) -> list[str]:
    """Return URLs with commas between them; the scheme of the first is that of others without one."""
    parts = [part.strip() for part in text.split(",")]
    scheme, separator, _ = parts[0].rpartition("://")
    return [part if "://" in part else f"{scheme}{separator}{part}" for part in parts]


async def resolve(name: str, port: int) -> Sequence[str]:
    """Return all addresses of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
