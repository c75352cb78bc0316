"""Where the environment says that caches belong."""

from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CHARONIA_CACHE"
"""Environment variable: folder of everything that the server keeps to be faster the next time."""

_BACKEND = "python"
_SETTING = "environment-cache"


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of everything that is kept, None for each part's own default.

    Args:
        environment: Environment variables; `VARIABLE` comes before XDG's.
    """
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE])
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"], "charonia")
    return None


def with_cache(
    backends: Mapping[str, Mapping[str, str]], environment: Mapping[str, str]
) -> Mapping[str, Mapping[str, str]]:
    """Return backend settings with the folder for the environments of Python models, unless they name one.

    Args:
        backends: Settings by backend and key.
        environment: Environment variables.
    """
    cache = cache_folder(environment)
    if cache is None or any(_SETTING in backends.get(name, ()) for name in ("", _BACKEND)):
        return backends
    return {**backends, _BACKEND: {**backends.get(_BACKEND, {}), _SETTING: str(cache / "environments")}}
