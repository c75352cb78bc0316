"""Requests share a batch: LitServe's `max_batch_size` and `batch_timeout`."""

import charonia


@charonia.model(max_batch_size=4, max_delay_ms=50)
def squares(input: list[float]) -> list[float]:
    return [value**2 for value in input]
