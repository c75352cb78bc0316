"""Text in, text out: Cog's first example."""

from typing import Annotated

from pydantic import Field

import charonia


@charonia.model
def hello(text: Annotated[str, Field(description="Text to prefix with 'hello '")]) -> str:
    return f"hello {text}"
