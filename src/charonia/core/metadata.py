"""Records that describe servers and models to clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from charonia.core.dtypes import DataType

USUAL_NAME = "triton"
"""The default name of servers of this protocol (`--id`); programs test for it."""

PRODUCT = "charonia"
"""The extension that distinguishes Charonia from other servers of that name."""


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """Name and version of a server, and its protocol extensions."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A model's input or output. `shape` has -1 for variable dimensions and includes the batch dimension.

    `parameters` are other facts: the names of the "columns" of a matrix, the "values" that elements have, "examples".
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    parameters: Mapping[str, object] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model's ready versions and its tensors."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class ModelState(Enum):
    """State of a model version."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


@dataclass(frozen=True, slots=True)
class ModelIndexEntry:
    """One line of the repository index. A model that was never loaded has a name only."""

    name: str
    version: str = ""
    state: ModelState | None = None
    reason: str = ""


def model_key(namespace: str, name: str) -> str:
    """Return the key that identifies a model in the server; without namespaces, its name."""
    return f"{namespace}/{name}" if namespace else name


def name_of(key: str) -> str:
    return key.rpartition("/")[2]


def namespace_of(key: str) -> str:
    """Return the namespace in a key, "" if there is none."""
    return key.rpartition("/")[0]
