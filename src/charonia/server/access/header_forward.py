"""Request headers that become request parameters. Pure.

The pattern matches anywhere in the name of a header, and ignores case unless it begins with `(?-i)`. Source: Triton's
header forwarding. Its patterns are in RE2 syntax, which Python's `re` supports except for named Unicode classes.
"""

import re
from collections.abc import Iterable

from charonia.core.errors import invalid

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
        """Compile a pattern.

        Raises:
            ValueError: It is not a regular expression, or too long.
        """
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
