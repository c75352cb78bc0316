"""The file of `charonia tune -f`: YAML with the options by their names. Unknown keys are errors."""

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from charonia.core.errors import invalid
from charonia.tools.tune.nearest import unknown

_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

FILE_BYTES_MAX = 4 * 1024 * 1024
"""Somebody wrote it; anything larger is another file."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, without numbers to the base of 60, which ranges look like, and without keys twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is there twice", key.start_mark)
            if isinstance(key.value, str):
                seen.add(key.value)
        return dict(super().construct_mapping(node, deep=deep))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBER_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.[0-9]+)$"),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> dict[str, object]:
    """Return the keys and values of a YAML file. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG, with the path, when it cannot be read or is no mapping.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise invalid(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    if len(content) > FILE_BYTES_MAX:
        raise invalid(f"{path}: expected a file of at most {FILE_BYTES_MAX} bytes")
    try:
        document = yaml.load(content, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise invalid(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise invalid(f"{path}: nested too deeply") from error
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise invalid(f"{path}: expected options by name, got {type(document).__name__}")
    return {str(name): value for name, value in document.items()}


def unknown_keys(document: Mapping[str, object], known: Mapping[str, object]) -> list[str]:
    """Return a sentence for each key that is no option."""
    return [unknown("key", name, tuple(known)) for name in document if name not in known]
