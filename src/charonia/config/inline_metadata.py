"""Inline script metadata (PEP 723): the packages and the version of Python that a file requires. Pure."""

import re
import tomllib
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from charonia.core.errors import invalid

_BLOCK = re.compile(r"(?m)^# /// script$\s(?P<content>(?:^#(?:| .*)$\s)+)^# ///$")
_OWN = re.compile(r"\s*charonia(?![A-Za-z0-9._-])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class InlineMetadata:
    """What a file needs.

    Attributes:
        dependencies: Requirements.
        requires_python: Specifier of the interpreter's version, "" for any.
    """

    dependencies: tuple[str, ...] = ()
    requires_python: str = ""

    @property
    def packages(self) -> tuple[str, ...]:
        """The requirements without this package, which workers have in every environment."""
        return tuple(each for each in self.dependencies if not _OWN.match(each))

    def accepts(self, version: tuple[int, ...]) -> bool:
        return SpecifierSet(self.requires_python).contains(".".join(map(str, version)), prereleases=True)


def inline_metadata(text: str, what: str) -> InlineMetadata | None:
    """Return the metadata in the text of a file, None where it has none.

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
    try:
        SpecifierSet(python)
    except (InvalidSpecifier, TypeError):
        raise invalid(f"{what}: requires-python: expected text such as '>=3.11', got {python!r}") from None
    return InlineMetadata(tuple(dependencies), python)
