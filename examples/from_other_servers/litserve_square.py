"""A number in, its square out: LitServe's first example, at the address that its clients ask."""

import charonia


@charonia.model(path="/predict")
def square(input: float) -> dict:
    return {"output": input**2}
