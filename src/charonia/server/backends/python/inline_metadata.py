"""Dependencies that a Python file names in a comment: inline script metadata. Pure.

    # /// script
    # requires-python = ">=3.11"
    # dependencies = ["torch", "pillow>=10"]
    # ///

Source: the Python packaging specification "Inline script metadata" (PEP 723).
"""

import re
import tomllib
from dataclasses import dataclass

from charonia.core.errors import invalid

_BLOCK = re.compile(r"(?m)^# /// script$\s(?P<content>(?:^#(?:| .*)$\s)+)^# ///$")
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|~=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?\s*")
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")

OWN_PACKAGE = "charonia"
"""A dependency that workers have in every environment."""


@dataclass(frozen=True, slots=True)
class InlineMetadata:
    """What a file needs.

    Attributes:
        dependencies: Requirements, without this package.
        requires_python: Specifier of the interpreter's version, "" for any.
    """

    dependencies: tuple[str, ...] = ()
    requires_python: str = ""

    def accepts(self, version: tuple[int, ...]) -> bool:
        return all(_holds(clause, version) for clause in self.requires_python.split(",") if clause.strip())


def inline_metadata(text: str, what: str) -> InlineMetadata | None:
    """Return the metadata in the text of a file, None where it has none.

    Args:
        text: The file's text.
        what: The file, for errors.

    Raises:
        ServingError: INVALID_ARG for a block that is no such metadata.
    """
    blocks = list(_BLOCK.finditer(text.replace("\r\n", "\n")))
    if not blocks:
        return None
    if len(blocks) > 1:
        raise invalid(f"{what}: expected one block '# /// script', got {len(blocks)}")
    lines = (line[2:] if line.startswith("# ") else line[1:] for line in blocks[0]["content"].splitlines())
    try:
        document = tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise invalid(f"{what}: the block '# /// script' is not valid TOML: {error}") from error
    dependencies, python = document.get("dependencies", []), document.get("requires-python", "")
    if not isinstance(dependencies, list) or not all(isinstance(each, str) for each in dependencies):
        raise invalid(f"{what}: dependencies: expected a list of strings, got {dependencies!r}")
    if not isinstance(python, str) or not all(_CLAUSE.fullmatch(c) for c in python.split(",") if c.strip()):
        raise invalid(f"{what}: requires-python: expected text such as '>=3.11', got {python!r}")
    others = tuple(each for each in dependencies if _name(each) != OWN_PACKAGE)
    return InlineMetadata(others, python)


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    return found[1].lower() if found else ""


def _holds(clause: str, version: tuple[int, ...]) -> bool:
    found = _CLAUSE.fullmatch(clause)
    if found is None:
        return False
    operator, text, wildcard = found.groups()
    wanted = tuple(int(part) for part in text.split("."))
    if wildcard or operator == "~=":
        width = len(wanted) if wildcard else len(wanted) - 1
        same = version[:width] == wanted[:width]
        return not same if operator == "!=" else same and (operator == "==" or version >= wanted)
    size = max(len(wanted), len(version))
    one, other = (tuple(part[:size]) + (0,) * (size - len(part)) for part in (version, wanted))
    return {
        ">=": one >= other,
        "<=": one <= other,
        "==": one == other,
        "!=": one != other,
        "<": one < other,
        ">": one > other,
    }[operator]
