"""Headers of a request that become its parameters. Pure.

The pattern is looked for anywhere in the name of a header, in any case unless it begins with `(?-i)`. Source: Triton's
header forwarding; its patterns are RE2's, of which Python's `re` knows all but classes by their Unicode name.
"""

import re
from collections.abc import Iterable

from charonia.core.errors import invalid

PATTERN_LENGTH_MAX = 1024
"""Longest pattern, in characters."""

NAME_BYTES_MAX = 256
"""A header with a longer name is not forwarded: matching it could take long."""

REMEMBERED_MAX = 1024
"""Most names whose match is remembered; at more it starts again."""

RESERVED = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
"""Names of parameters that a header cannot set."""

_CASE_COUNTS = "(?-i)"


class HeaderForward:
    """A pattern for names of headers."""

    def __init__(self, pattern: str) -> None:
        """Compile a pattern.

        Raises:
            ValueError: It is no regular expression, or too long.
        """
        if len(pattern) > PATTERN_LENGTH_MAX:
            raise ValueError(f"expected at most {PATTERN_LENGTH_MAX} characters, got {len(pattern)}")
        flags = re.ASCII if pattern.startswith(_CASE_COUNTS) else re.ASCII | re.IGNORECASE
        if "[[" in pattern or "[^[" in pattern:  # Python reads them otherwise than RE2
            raise ValueError(f"expected classes of characters like [a-z], got '{pattern}'")
        try:
            self._pattern = re.compile(pattern.removeprefix(_CASE_COUNTS), flags)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"expected a regular expression, got '{pattern}': {error}") from error
        self._matches: dict[bytes, bool] = {}

    def parameters(self, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """Return the parameters that headers set, by the name as it was sent.

        Args:
            headers: Names and values.

        Raises:
            ServingError: INVALID_ARG for a header that has a reserved name.
        """
        found: dict[str, str] = {}
        for name, value in headers:
            if self._is_match(name):
                key = name.decode("latin-1")
                if key.lower() in RESERVED or key.lower().startswith("triton_"):
                    raise invalid(
                        f"header '{key}' is reserved for Triton usage and cannot be forwarded",
                        hint="send it under another name, or make the pattern of forwarded headers narrower",
                    )
                found[key] = value.decode("utf-8", "replace")
        return found

    def _is_match(self, name: bytes) -> bool:
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
