"""The report of `charonia doctor`, and its text and JSON forms. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: The checked property.
        value: Its value.
        problem: Its problem, "" for none.
        hint: How to solve the problem.
    """

    name: str
    value: str
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A group of checks.

    Attributes:
        title: Its title.
        findings: The checks.
    """

    title: str
    findings: tuple[Check, ...]


def problem_count(sections: list[Section]) -> int:
    return sum(bool(finding.problem) for section in sections for finding in section.findings)


def to_text(sections: list[Section]) -> str:
    """Return the report as text for a terminal."""
    lines: list[str] = []
    for section in sections:
        lines += ["", section.title] if lines else [section.title]
        width = max((len(finding.name) for finding in section.findings), default=0)
        for finding in section.findings:
            mark = "!" if finding.problem else " "
            lines.append(f"{mark} {finding.name:<{width}}  {finding.value}".rstrip())
            lines += [f"  {'':<{width}}  {text}" for text in finding.problem.splitlines()]
            lines += [f"  {'':<{width}}  hint: {finding.hint}"] if finding.hint else []
    return "\n".join(lines)


def to_json(sections: list[Section]) -> dict[str, object]:
    """Return the report as JSON: a list of findings by section, those without a problem without that field."""
    return {
        section.title: [
            {key: value for key in ("name", "value", "problem", "hint") if (value := getattr(finding, key))}
            for finding in section.findings
        ]
        for section in sections
    }


def bytes_text(size: float) -> str:
    """Return a number of bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
