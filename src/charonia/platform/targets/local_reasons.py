"""Explains why a server has not started, or could not be upgraded, from its output. Pure."""

import re

MOVED = "new requests go to it"
"""Message of `charonia upgrade` when the new engine receives all new requests."""

_LOGGED = re.compile(r'^E\d{4} [^\]]*\] "(.*)"$', re.MULTILINE)
_SAID = re.compile(r'[A-Z]\d{4} [\d:.]+ +\d+ \S+\] "(.*?)"?')
_TOLD = re.compile(r"^charonia serve: (.*)$", re.MULTILINE)
_OF_THE_GUARD = re.compile(r"(engine|front_end)\S* \(pid \d+\) ended")
_UPGRADE = "charonia upgrade: "
_IN_USE = re.compile(r"cannot listen on \S+: Address already in use")
_REST = " (hint: the previous engine continues to serve"


def why_ended(log: str) -> str:
    """Return why a server has exited, from its log since it was started."""
    errors = [text for text in _LOGGED.findall(log) or _TOLD.findall(log) if not _OF_THE_GUARD.match(text)]
    return "\n".join(dict.fromkeys(errors)) or last_line(log) or "the server has ended without a word"


def has_lost_port(log: str) -> bool:
    """Whether a server has exited because another program had taken one of its ports, from its log."""
    return _IN_USE.search(log) is not None


def why_not_upgraded(steps: str) -> str:
    """Return why an upgrade has failed, from the output of `charonia upgrade`."""
    lines = [line.removeprefix(_UPGRADE.strip()).strip() for line in steps.partition(_UPGRADE)[2].splitlines()]
    reason = "\n".join(line for line in lines if line).removeprefix("the new engine cannot start: ")
    return reason.partition(_REST)[0] or last_line(steps) or "the upgrade was cut off"


def last_line(text: str) -> str:
    """Return the last line of a text, "" for none."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def last_said(log: str) -> str:
    """Return the text of the last line of a log, without time and source."""
    line = last_line(log)
    found = _SAID.fullmatch(line)
    return found[1] if found is not None else line
