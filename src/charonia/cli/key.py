"""`charonia key`: make an API key for `charonia serve --api-keys`."""

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from charonia.cli.arguments import Parser
from charonia.core.errors import ServingError
from charonia.server.access.rules import Scope, digest_of, parse_keys

KEY_BYTES = 32
"""Randomness of a key."""

_FILE_MODE = 0o600


def run(arguments: Sequence[str]) -> int:
    """Make a key: print it, and add its digest to the file where one is given."""
    given = _parser().parse_args(arguments)
    key = secrets.token_urlsafe(KEY_BYTES)
    line = f"{given.name} {given.scopes} {digest_of(key)}"
    try:
        parse_keys(line)
    except ServingError as error:
        print(f"charonia key: {error.message.removeprefix('line 1: ')}", file=sys.stderr)
        return 2
    if given.file:
        try:
            _append(Path(given.file), line)
        except OSError as error:
            print(f"charonia key: cannot write '{given.file}': {error.strerror}", file=sys.stderr)
            return 1
        print(key)
    else:
        print(key)
        print(f"the line for the file of keys: {line}", file=sys.stderr)
    return 0


def _append(path: Path, line: str) -> None:
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _FILE_MODE), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(f"{line}\n".encode())


def _parser() -> Parser:
    made = Parser(
        prog="charonia key",
        description="Make an API key for `charonia serve --api-keys`. The key is printed once and kept nowhere.",
    )
    made.add_argument("name", metavar="NAME", help="whose key it is")
    made.add_argument("scopes", metavar="SCOPES", help=f"of {', '.join(s.value for s in Scope)}, with commas between")
    made.add_argument("--file", metavar="PATH", help="file of keys to add it to; made where there is none")
    return made
