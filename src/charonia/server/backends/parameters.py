"""Parameters of a model that its backend does not have. Pure."""

import difflib
from collections.abc import Collection, Iterator

from charonia.config.model import ModelConfig
from charonia.config.parameters import SERVER_PARAMETERS


def unknown_parameters(config: ModelConfig, backend: str, known: Collection[str]) -> Iterator[str]:
    """Yield a warning for each unknown parameter, with the known one that is written almost like it.

    Args:
        config: The model's configuration.
        backend: Name of its backend.
        known: The backend's parameters.
    """
    names = {name.lower(): name for name in known}
    for key in sorted(config.parameters.keys() - SERVER_PARAMETERS - set(known)):
        near = difflib.get_close_matches(key.lower(), names, n=1)
        hint = f"; did you mean '{names[near[0]]}'?" if near else ""
        yield f"model '{config.name}': the {backend} backend has no parameter '{key}', it has no effect{hint}"
