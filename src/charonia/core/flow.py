"""Flows: the requests of one client, which share a model fairly with those of others."""

from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

NAME_LENGTH_MAX = 128
"""Longest name of a flow, in characters; what follows in a header is ignored."""

_SITE_BITS = 64
"""Part of an IPv6 address that stands for a client, who can choose the rest."""


class Flow(NamedTuple):
    """The client of a request, as far as fairness is concerned.

    Attributes:
        name: Name of its API key, its address, or the value of a header.
        weight: Its share of a busy model, relative to the shares of other flows; at least 1.
    """

    name: str = ""
    weight: int = 1


NO_FLOW = Flow()
"""The flow of requests of unknown clients."""


def flow_of_peer(peer: object) -> Flow:
    """Return the flow of a connection from an address as sockets give it."""
    if not isinstance(peer, tuple) or not peer:
        return NO_FLOW
    try:
        address = ip_address(str(peer[0]).partition("%")[0])
    except ValueError:  # a socket of another family
        return NO_FLOW
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return Flow(str(address.ipv4_mapped))
        address = IPv6Address(int(address) >> _SITE_BITS << _SITE_BITS)
    return Flow(str(address))
