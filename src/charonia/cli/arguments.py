"""The parser of the commands with few options: argparse, which also says which option was meant."""

import argparse
import difflib
from typing import Any, NoReturn

_UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and names the nearest option where one is unknown."""

    def __init__(self, **settings: Any) -> None:
        self._names: list[str] = []
        super().__init__(allow_abbrev=False, **settings)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add an argument, as argparse does."""
        self._names += [name for name in names if name.startswith("-")]
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        """End the program with status 2, the usage and what is wrong."""
        if message.startswith(_UNKNOWN):
            wrong = message.removeprefix(_UNKNOWN).partition(" ")[0].partition("=")[0]
            near = difflib.get_close_matches(wrong, self._names, 1)
            message += f" (hint: did you mean {near[0]}?)" if near else ""
        super().error(message)
