"""Access restrictions of an endpoint, and the headers that it forwards. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from charonia.server.access.header_forward import HeaderForward
from charonia.server.access.rules import Api, Gate, KeyRing, Restriction

GRPC_HEADER_PREFIX = "triton-grpc-protocol-"
"""Prefix of the headers of restrictions over gRPC. Source: Triton."""


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Restrictions and header forwarding of one endpoint.

    Attributes:
        restricted: Parts of the protocol that require a header.
        header_forward_pattern: Regular expression for names of headers that become request parameters, "" for none.
    """

    restricted: tuple[Restriction, ...] = ()
    header_forward_pattern: str = ""

    def problems(self, restricted_option: str, pattern_option: str) -> Iterator[str]:
        """Yield all problems; the arguments are the names of the options."""
        seen: set[Api] = set()
        for restriction in self.restricted:
            for api in restriction.apis:
                if api in seen:
                    yield f"{restricted_option}: '{api.value}' can not be specified in multiple config groups"
                seen.add(api)
        if self.header_forward_pattern:
            try:
                HeaderForward(self.header_forward_pattern)
            except ValueError as error:
                yield f"{pattern_option}: {error}"


def read_restriction(text: str) -> Restriction:
    """Parse `<api>[,<api>]:<header>=<value>`.

    Raises:
        ValueError: The text has another form.
    """
    names, colon, rest = text.partition(":")
    header, equals, value = rest.partition("=")
    if not (colon and equals and names and header.strip() and value):
        raise ValueError(f"expected <api>[,<api>]:<header>=<value>, got '{text}'")
    known = {api.value: api for api in Api}
    apis: list[Api] = []
    for name in names.split(","):
        api = known.get(name.strip())
        if api is None:
            raise ValueError(f"unknown API '{name}': expected of {', '.join(known)}")
        apis.append(api)
    return Restriction(tuple(apis), header.strip(), value)


def http_gate(options: AccessOptions, keys: KeyRing | None) -> Gate | None:
    """Return the gate for calls over HTTP, None where every caller may make every call."""
    return Gate(options.restricted, keys, what="API") if options.restricted or keys is not None else None


def grpc_gate(options: AccessOptions, keys: KeyRing | None) -> Gate | None:
    """Return the gate for calls over gRPC, None where every caller may make every call."""
    if not options.restricted and keys is None:
        return None
    return Gate(options.restricted, keys, what="protocol", prefix=GRPC_HEADER_PREFIX)


def forwarded_headers(options: AccessOptions) -> HeaderForward | None:
    """Return which headers become request parameters, None where none do."""
    return HeaderForward(options.header_forward_pattern) if options.header_forward_pattern else None
