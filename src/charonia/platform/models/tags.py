"""Tags and links of models. Pure."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from charonia.core.errors import invalid

TAGS_MAX = 50
LINKS_MAX = 50
TEXT_CHARS_MAX = 200
ADDRESS_CHARS_MAX = 2000

_SCHEMES = ("https://", "http://")


def check_details(tags: Sequence[str] | None, links: Mapping[str, str] | None) -> None:
    """Check tags and links. None is not given.

    Raises:
        ServingError: INVALID_ARG for too many, for empty or long ones, and for links that browsers cannot follow.
    """
    if len(tags or ()) > TAGS_MAX or len(links or {}) > LINKS_MAX:
        raise invalid(f"expected at most {TAGS_MAX} tags and {LINKS_MAX} links")
    for text in [*(tags or ()), *(links or {})]:
        if not text.strip() or len(text) > TEXT_CHARS_MAX:
            raise invalid(
                f"expected tags and labels of 1 to {TEXT_CHARS_MAX} characters, got '{text[:TEXT_CHARS_MAX]}'"
            )
    for label, address in (links or {}).items():
        if not address.startswith(_SCHEMES) or len(address) > ADDRESS_CHARS_MAX:
            raise invalid(f"link '{label}': expected an address that begins with https:// or http://")


def tag_counts(tags: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return all tags with the number of models that have them, the most frequent first."""
    counts = Counter(tag for each in tags for tag in each)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def tag_text(text: str) -> str:
    """Return a text as it stands within the JSON of the tags."""
    return json.dumps(text)[1:-1]
