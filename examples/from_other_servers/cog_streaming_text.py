"""Tokens while they are generated: Cog's streaming text. The stand-in repeats the prompt's words."""

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Annotated

from pydantic import Field

import charonia


@charonia.model
def generate(prompt: str, max_new_tokens: Annotated[int, Field(ge=1, le=512)] = 128) -> Iterator[str]:
    for word in islice(cycle(prompt.split()), max_new_tokens):
        yield f"{word} "
