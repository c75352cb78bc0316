"""Literals of a config.pbtxt as protobuf's C++ parser reads them, which is the one that Triton has.

Python's parser unescapes texts by rules of Python's own, and wants a minus right before its number. `python_literals`
writes such literals in the way that it understands, so that a file means the same for both. In comments anything may
stand, also bytes in another encoding than UTF-8, which come here as lone surrogates.

Source: the grammar of protobuf's text format.
"""

import re
from collections.abc import Callable

from charonia.core.errors import ServingError

_LITERAL = re.compile(
    r"""
    \#[^\n]*                                                            # a comment
    | (?P<quote>["'])(?P<inner>(?:(?!(?P=quote))[^\n\\]|\\.)*)(?P=quote)
    | ["'][^\n]*                                                        # a text without an end: the parser says so
    | -(?P<gap>(?:[ \t\n\v\f\r]|\#[^\n]*\n)+)(?=[0-9.]|inf|nan)
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(
    r"""\\(?:
    (?P<plain>[abfnrtv\\'"] | (?![4-7][0-7]{2})[0-7]{1,3} | x[0-9a-fA-F]{1,2}
        | u(?![dD][89a-fA-F])[0-9a-fA-F]{4} | U(?:0010|000(?!0[dD][89a-fA-F])[0-9a-fA-F])[0-9a-fA-F]{4})
    | (?P<question>\?)
    | X(?P<hex>[0-9a-fA-F]{1,2})
    | u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})
    | (?P<wrong>[0-7]{3} | u[0-9a-fA-F]{4} | U[0-9a-fA-F]{8} | .)
    )""",
    re.VERBOSE,
)

_NO_CHARACTER = re.compile("[\ud800-\udfff]")


def python_literals(text: str, refuse: Callable[[int, str, str], ServingError]) -> str:
    """Return the text with its literals as Python's parser reads them, everything else in the place where it was.

    Args:
        text: A config.pbtxt.
        refuse: Makes the error for the offset of what is wrong, a sentence and a hint.

    Raises:
        ServingError: From `refuse`, for an escape that C++ does not have.
    """

    def rewritten(literal: re.Match[str]) -> str:
        if literal["gap"]:
            return _NO_CHARACTER.sub("?", literal["gap"]) + "-"
        if literal[0].startswith("#"):
            return _NO_CHARACTER.sub("?", literal[0])
        if not literal["quote"] or "\\" not in literal[0]:
            return literal[0]
        start = literal.start("inner")
        inner = _ESCAPE.sub(lambda escape: _escape(escape, start, refuse), literal["inner"])
        # What follows keeps its column, so that errors are where the file has them.
        return (literal["quote"] + inner + literal["quote"]).ljust(len(literal[0]))

    return _LITERAL.sub(rewritten, text)


def _escape(escape: re.Match[str], start: int, refuse: Callable[[int, str, str], ServingError]) -> str:
    if escape["wrong"]:
        sentence = f"a text cannot have the escape {escape[0]}"
        raise refuse(start + escape.start(), sentence, "a backslash itself is written twice: \\\\")
    if escape["question"]:
        return "?"
    if escape["hex"]:
        return f"\\x{escape['hex']}"
    if escape["high"]:
        # JSON writes a character beyond 16 bits as two.
        return chr(0x10000 + ((int(escape["high"], 16) & 0x3FF) << 10) + (int(escape["low"], 16) & 0x3FF))
    return escape[0]
