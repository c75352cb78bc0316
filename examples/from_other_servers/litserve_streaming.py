"""Three responses to one request: LitServe's `stream=True`."""

from collections.abc import Iterator

import charonia


@charonia.model
def repeat(input: str) -> Iterator[str]:
    for number in range(3):
        yield f"{number}: {input}"
