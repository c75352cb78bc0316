"""Access restrictions of an endpoint, and the headers that it forwards. Pure.

The pattern of forwarded headers matches anywhere in the name of a header, and ignores case unless it begins with
`(?-i)`. Source: Triton's header forwarding. Its patterns are in RE2 syntax, which Python's `re` supports except for
named Unicode classes.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from charonia.core.errors import invalid
from charonia.server.access.rules import Api, Gate, KeyRing, Restriction

PATTERN_LENGTH_MAX = 1024
"""Longest pattern, in characters."""

NAME_BYTES_MAX = 256
"""Headers with longer names are not forwarded, because matching them could take long."""

REMEMBERED_MAX = 1024
"""Limit of cached matches; beyond it, the cache is cleared."""

RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
"""Names of parameters that a header cannot set."""

_CASE_COUNTS = "(?-i)"


class HeaderForward:
    """A pattern for names of headers."""

    def __init__(self, pattern: str) -> None:
        """Compile a pattern. Raises ValueError for one that is not a regular expression, or too long."""
        if len(pattern) > PATTERN_LENGTH_MAX:
            raise ValueError(f"expected at most {PATTERN_LENGTH_MAX} characters, got {len(pattern)}")
        flags = re.ASCII if pattern.startswith(_CASE_COUNTS) else re.ASCII | re.IGNORECASE
        if "[[" in pattern or "[^[" in pattern:  # Python and RE2 read these differently
            raise ValueError(f"expected classes of characters like [a-z], got '{pattern}'")
        try:
            self._pattern = re.compile(pattern.removeprefix(_CASE_COUNTS), flags)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"expected a regular expression, got '{pattern}': {error}") from error
        self._matches: dict[bytes, bool] = {}

    def parameters(self, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """Return the parameters that headers set, by the header's name as sent.

        Raises:
            ServingError: INVALID_ARG for a header that has a reserved name.
        """
        found: dict[str, str] = {}
        for name, value in headers:
            if self.is_match(name):
                key = name.decode("latin-1")
                if key.lower() in RESERVED or key.lower().startswith("triton_"):
                    raise invalid(
                        f"header '{key}' is reserved for Triton usage and cannot be forwarded",
                        hint="send it under another name, or make the pattern of forwarded headers narrower",
                    )
                found[key] = value.decode("utf-8", "replace")
        return found

    def is_match(self, name: bytes) -> bool:
        """Return whether a header of this name is forwarded."""
        known = self._matches.get(name)
        if known is None:
            known = (
                len(name) <= NAME_BYTES_MAX
                and not name.startswith(b":")
                and self._pattern.search(name.decode("latin-1")) is not None
            )
            if len(self._matches) >= REMEMBERED_MAX:
                self._matches.clear()
            self._matches[name] = known
        return known


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
