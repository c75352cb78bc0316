"""Model parameters that mean something to the server whatever the backend; the others are the backend's."""

from charonia.config.padding import PADDING
from charonia.config.support import CUSTOM_BATCHING, PYTHON_STRATEGY

ADAPT_DELAY = "ADAPT_QUEUE_DELAY"
"""Model parameter: "false" makes every lone request wait for the whole queue delay."""

PINNED = "pinned"
"""Model parameter: "true" keeps a model loaded in mode `auto`."""

SERVER_PARAMETERS = frozenset({ADAPT_DELAY, PADDING, PINNED, CUSTOM_BATCHING, PYTHON_STRATEGY})
"""All of them."""
