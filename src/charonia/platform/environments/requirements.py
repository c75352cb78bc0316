"""The requirements of an environment: its checked lines, and the hash of the result. Pure.

A line is a requirement as pip takes it ("pillow>=10"), or an option that says where packages are found. `charonia` may
have extras ("charonia[torch]"); its release is always that of the platform, because servers of deployments run in the
environment.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from charonia.config.inline_metadata import InlineMetadata, inline_metadata
from charonia.core.errors import invalid

CHARS_MAX = 65536
LINES_MAX = 1000
OWN = "charonia"

_OPTIONS = ("--index-url", "--extra-index-url", "--find-links", "--pre", "--only-binary", "--no-binary")
_PYTHON = re.compile(r"3\.[0-9]{1,2}")


@dataclass(frozen=True, slots=True)
class Requirements:
    """Lines, read.

    Attributes:
        lines: Packages and options, without `charonia`.
        extras: The extras of `charonia`.
    """

    lines: tuple[str, ...]
    names: tuple[str, ...]
    extras: tuple[str, ...] = ()

    def digest(self, python: str, own: str, imports: Sequence[str]) -> str:
        """Return the digest of an environment: equal ones, tested by equal imports, share a folder."""
        content = json.dumps([python, own, sorted(self.lines), sorted(self.extras), sorted(imports)])
        return hashlib.sha256(content.encode()).hexdigest()


def read_requirements(text: str) -> Requirements:
    """Return the requirements of a text."""
    if len(text) > CHARS_MAX or text.count("\n") >= LINES_MAX:
        raise invalid(f"requirements: expected at most {LINES_MAX} lines and {CHARS_MAX} characters")
    lines, names, extras, problems = list[str](), list[str](), set[str](), list[str]()
    for number, whole in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", whole).strip()
        if not line:
            continue
        if line.startswith("-"):
            if line.partition(" ")[0].partition("=")[0] in _OPTIONS:
                lines.append(line)
            else:
                problems.append(
                    f"line {number}: '{line}' is refused: expected a package, or one of {', '.join(_OPTIONS)}"
                )
            continue
        try:
            found = Requirement(line)
        except InvalidRequirement:
            problems.append(f"line {number}: '{line}' is not a requirement: expected a package such as 'pillow>=10'")
            continue
        if canonicalize_name(found.name) == OWN:
            extras |= found.extras
        else:
            lines.append(line)
            names.append(found.name)
    if problems:
        raise invalid("\n".join(f"requirements: {problem}" for problem in problems))
    return Requirements(tuple(lines), tuple(names), tuple(sorted(extras)))


def read_script(text: str) -> tuple[str, str]:
    """Return version of Python, "" for any, and requirements from the header of a Python file (PEP 723)."""
    found = inline_metadata(text, "script")
    if found is None:
        raise invalid("script: it states no dependencies", hint="expected a comment '# /// script', as PEP 723 has it")
    return _least(found), "\n".join(found.dependencies)


def check_python(version: str, known: Sequence[str]) -> str:
    """Return a version of Python; the first that is known for ""."""
    if not version:
        return known[0]
    if not _PYTHON.fullmatch(version) or version not in known:
        raise invalid(f"python: expected one of {', '.join(known)}, got '{version}'")
    return version


def _least(found: InlineMetadata) -> str:
    """Return the oldest matching version, "" if any matches."""
    if not found.requires_python:
        return ""
    for minor in (*range(11, 30), 10, 9, 8):  # the last three have no servers
        if found.accepts((3, minor, 99)):
            return f"3.{minor}"
    raise invalid(f"script: requires-python: expected a range with 3.8 or newer, got '{found.requires_python}'")
