"""Model parameters that the server interprets for every backend; the others belong to the backend."""

PADDING = "PADDING"
"""The model parameter."""

CUSTOM_BATCHING = "TRITON_BATCH_STRATEGY_PATH"
"""Model parameter that names a library with a batching strategy of its own."""


PYTHON_STRATEGY = "BATCHING_STRATEGY"
"""Model parameter that names a Python file with one: its path, relative to the model's folder."""


ADAPT_DELAY = "ADAPT_QUEUE_DELAY"
"""Model parameter: "false" makes every lone request wait for the whole queue delay."""

PINNED = "pinned"
"""Model parameter: "true" keeps a model loaded in mode `auto`."""

EXAMPLE = "EXAMPLE"
"""Model parameter with an example request: a JSON object of plain values by input name."""

TRY_EXAMPLE = "TRY_EXAMPLE"
"""Model parameter of a model served from a file: when it is loaded, an example request that it accepts is sought."""

EXAMPLE_REFUSED = "EXAMPLE_REFUSED"
"""Model parameter that replaces it if no example was accepted: the error of the model."""

FRONT_END = "front_end"
"""Model parameter: whether the model runs in the processes of front ends: "yes", "no" or "auto"."""

SERVER_PARAMETERS = frozenset(
    {
        *(ADAPT_DELAY, CUSTOM_BATCHING, EXAMPLE, EXAMPLE_REFUSED, FRONT_END, PADDING, PINNED, PYTHON_STRATEGY),
        TRY_EXAMPLE,
    }
)
"""All of them."""
