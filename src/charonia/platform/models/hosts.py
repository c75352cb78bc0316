"""Decides which servers a version may be read from: users name them, and the platform reaches more than users do."""

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from charonia.core.errors import invalid, unavailable
from charonia.stores.location import StoreAddress

ANY = "*"

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_ACCOUNT_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
"""Characters of an account of Azure, which becomes a part of the name of a host."""


def resolve(host: str) -> list[str]:
    """Return the addresses of a host. Raises OSError if there are none."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Servers that may be read from. Unknown servers are refused wherever they are: they may redirect to any other.

    Attributes:
        entries: Names, addresses, networks such as 10.1.0.0/16; "*" for all.
    """

    entries: Sequence[str] = ()
    resolve: Callable[[str], Sequence[str]] = resolve

    def check_store(self, place: StoreAddress) -> None:
        """Check the server of a store; an address without one means the cloud's, or the platform's own setting."""
        if not set(place.account) <= _ACCOUNT_CHARACTERS and ANY not in self.entries:
            raise invalid(f"account of '{place.uri}': expected small letters, digits and '-'")
        if place.endpoint:
            self.check(place.endpoint)

    def check(self, url: str) -> None:
        """Check that a server may be read from. Blocks."""
        try:
            host = urlsplit(url).hostname or ""
        except ValueError as error:
            raise invalid(f"'{url}' is not an address: {error}") from None
        if host in self.entries or ANY in self.entries or self._is_in_networks(host, url):
            return
        raise invalid(
            f"'{url}': expected a cloud, or a server that the platform may read from, got '{host}'",
            hint=f"`charonia platform --store-hosts {host}` allows it; administrators of all projects may name any",
        )

    def _is_in_networks(self, host: str, url: str) -> bool:
        networks = [network for entry in self.entries if (network := _network(entry)) is not None]
        if not networks:
            return False
        try:
            found = [_plain(ipaddress.ip_address(text.partition("%")[0])) for text in self.resolve(host)]
        except (OSError, UnicodeError, ValueError):
            raise unavailable(f"the host '{host}' of '{url}' is unknown") from None
        return bool(found) and all(any(address in network for network in networks) for address in found)


def _plain(address: _Address) -> _Address:
    """Return the IPv4 address that an IPv6 address stands for, else the address."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None
