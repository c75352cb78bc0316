"""`charonia key`: create an API key for `charonia serve --api-keys`."""

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from charonia.cli.command_line import CommandLine, Option, carry_out
from charonia.cli.values import integer
from charonia.core.errors import conflict, unavailable
from charonia.server.access.rules import PER_MINUTE_MAX, Scope, digest_of, parse_keys

KEY_BYTES = 32
"""Random bytes in a key."""

_FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class KeyOptions:
    """The owner of the key, its scopes, the file of keys to add it to, and its limits a minute."""

    name: str = ""
    scopes: str = ""
    file: Path | None = None
    requests: int = 0
    tokens: int = 0


LINE = CommandLine(
    command="charonia key",
    intro="""\
usage: charonia key [OPTIONS] NAME SCOPES

Create an API key for `charonia serve --api-keys`. The key is printed one time and not stored.
""",
    groups={
        "Options": (
            Option("NAME", "name", str, "NAME", "Owner of the key"),
            Option("SCOPES", "scopes", str, "SCOPES", f"Of {', '.join(s.value for s in Scope)}, separated by commas"),
            Option("--file", "file", Path, "PATH", "File of keys to add it to; created if it does not exist"),
            Option(
                "--requests-per-min",
                "requests",
                integer(0, PER_MINUTE_MAX),
                "N",
                "Limit of its requests a minute, 0 for none",
            ),
            Option(
                "--tokens-per-min",
                "tokens",
                integer(0, PER_MINUTE_MAX),
                "N",
                "Limit of its tokens of language models a minute, 0 for none",
            ),
        )
    },
    record=KeyOptions(),
)


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _make)


def _make(options: KeyOptions) -> int:
    key = secrets.token_urlsafe(KEY_BYTES)
    line = f"{options.name} {options.scopes} {digest_of(key)}"
    limits = {"requests/min": options.requests, "tokens/min": options.tokens}
    line += "".join(f" {name}={limit}" for name, limit in limits.items() if limit)
    keys, problems = parse_keys(line)
    if [each.name for each in keys] != [options.name]:
        problem = problems[0].removeprefix("line 1: ") if problems else "expected a NAME without '#', and one line"
        print(f"charonia key: {problem}", file=sys.stderr)
        return 2
    if options.file is not None:
        try:
            _add(options.file, options.name, line)
        except OSError as error:
            raise unavailable(f"cannot write '{options.file}': {error.strerror}") from None
    print(key)
    if options.file is None:
        print(f"the line for the file of keys: {line}", file=sys.stderr)
    return 0


def _add(path: Path, name: str, line: str) -> None:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if any(key.name == name for key in parse_keys(text).keys):
        raise conflict(
            f"'{path}' has a key of '{name}' already",
            hint=f"to have two while clients change over, choose another name such as {name}-2; to replace it, "
            "remove its line first",
        )
    separator = "" if text.endswith("\n") or not text else "\n"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, _FILE_MODE), "a", encoding="utf-8") as file:
        file.write(f"{separator}{line}\n")
