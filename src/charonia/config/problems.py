"""What is wrong with a configuration: collected, so that all of it can be reported at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from charonia.core.errors import invalid


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
        path: Where, as in config.pbtxt: "input[1].dims[0]". An element of a map is named by its key.
        message: What, as one sentence.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def raise_problems(name: str, problems: Sequence[Problem]) -> NoReturn:
    """Raise the problems of model `name` as one error, a line for each where there are several.

    Raises:
        ServingError: INVALID_ARG.
    """
    if len(problems) == 1:
        raise invalid(f"model '{name}': {problems[0]}")
    lines = "\n".join(f"  {problem}" for problem in problems)
    raise invalid(f"model '{name}': {len(problems)} problems in the model configuration\n{lines}")
