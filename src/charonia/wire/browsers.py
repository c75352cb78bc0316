"""Requests that a browser sends for a page of another site. Pure.

A page can make a browser send requests to every server that the browser reaches, including servers on the same machine.
The page cannot read the responses, but a request can change something. A site can also give its own name the address of
such a server (DNS rebinding): to the browser, both are then the same site. Only the `Host` field tells them apart.

Sources: Fetch Metadata Request Headers (W3C); RFC 6454; RFC 9110, section 7.2.
"""

import ipaddress
from collections.abc import Mapping

SAFE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS"})
"""Methods that change nothing."""

PAGE_FIELDS = frozenset({b"origin", b"sec-fetch-site"})
"""Fields that browsers send, and programs do not."""

_OWN_SITES = (b"same-origin", b"none")
_LOCAL_ENDS = (".localhost", ".internal")


def foreign_page(method: bytes, headers: Mapping[bytes, bytes]) -> str:
    """Return the origin of the page of another site that sent a request which may change something, "" for none.

    `Sec-Fetch-Site` decides where a browser sends it, which is to HTTPS and loopback addresses. Otherwise, the page's
    origin must be the host of the request, as the browser or a proxy names it. Programs send neither field.

    Args:
        method: Method of the request.
        headers: Its fields by lower-case name.
    """
    if method in SAFE_METHODS:
        return ""
    origin = headers.get(b"origin", b"")
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return "" if site in _OWN_SITES else _text(origin or site)
    host = origin.partition(b"://")[2]
    is_own = not origin or (host and host in (headers.get(b"host"), headers.get(b"x-forwarded-host")))
    return "" if is_own else _text(origin)


def is_local_host(field: str) -> bool:
    """Whether a `Host` field has a name that no site on the internet can have.

    These are addresses, localhost, names without a domain, and the private domain `.internal`.
    """
    name = host_name(field)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(_LOCAL_ENDS)
    return True


def host_name(field: str) -> str:
    """Return the name in a `Host` field, in lower case, without brackets, port and final dot."""
    bracketed, bracket, _ = field.partition("]")
    name = bracketed[1:] if bracket and field.startswith("[") else field.partition(":")[0]
    return name.lower().removesuffix(".")


def listens_locally(address: str) -> bool:
    """Whether only programs of this machine reach a listener at an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _text(origin: bytes) -> str:
    return origin.decode("latin-1")[:256]
