"""What to say about a name that nobody knows."""

import difflib
from collections.abc import Sequence

SIMILARITY_MIN = 0.6
"""Similarity from which a name is suggested for an unknown one."""


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """Return a sentence on an unknown name, with the nearest known one or all of them."""
    similar = difflib.get_close_matches(name, known, n=1, cutoff=SIMILARITY_MIN)
    if similar:
        return f"unknown {kind} '{name}' (hint: did you mean {similar[0]}?)"
    return f"unknown {kind} '{name}' (hint: known are {', '.join(known)})"
