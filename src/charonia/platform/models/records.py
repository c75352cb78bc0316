"""Records of models and versions: the only place for the shapes of records and reports.

The database stores a `VersionReport` as JSON; the API sends these records unchanged.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

ARRIVING = "arriving"
CHECKING = "checking"
READY = "ready"
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """An input or output.

    Attributes:
        data_type: Its type: "FP32".
        shape: Its dimensions without the batch, -1 for variable ones.
        is_optional: Whether an input may be left out.
    """

    name: str
    data_type: str
    shape: list[int]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class NeededPackageRecord:
    """A package without which a version cannot be loaded.

    Attributes:
        name: As package indexes have it: "torch".
        is_here: Whether the platform's own Python had it when the version was checked.
    """

    name: str
    extra: str
    is_here: bool


@dataclass(frozen=True, slots=True)
class VersionReport:
    """Result of the check of a version.

    Attributes:
        is_checked: Whether the configuration was completed from the model. If not, a package was missing.
        checked_with: Name of the environment that was used, "" for the platform's own Python.
        backend: Its backend: "onnxruntime".
        config: The complete configuration in the form of its JSON; unchanged if it was not checked.
        inferred: Inferred values, a sentence each.
        max_batch_size: The largest batch, 0 for a model without batches.
        requirements: Python packages that it declares, a line each.
        calls: Models that it calls: the steps of an ensemble, or constant names in the source of a Python model.
        code: Why loading it runs code that it contains, a phrase each; none for data.
        warnings: What `charonia doctor` and the check found, a sentence each.
        load: Whether it loads, "" if that was not tried.
        left_out: Uploaded files that are not part of it.
        same_as: Number of the version that has the same files, 0 for none.
        problem: Why it was refused, "" if it was not.
    """

    is_checked: bool = False
    checked_with: str = ""
    backend: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    inferred: list[str] = field(default_factory=list)
    inputs: list[TensorRecord] = field(default_factory=list)
    outputs: list[TensorRecord] = field(default_factory=list)
    max_batch_size: int = 0
    needs: list[NeededPackageRecord] = field(default_factory=list)
    requirements: str = ""
    calls: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    load: str = ""
    left_out: list[str] = field(default_factory=list)
    same_as: int = 0
    problem: str = ""
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "VersionReport":
        """Return a report from the database; fields that an earlier release did not write have their defaults."""
        known = {each.name for each in fields(cls)}
        values = {key: value for key, value in record.items() if key in known}
        for key in ("inputs", "outputs"):
            values[key] = [TensorRecord(**each) for each in values.get(key, [])]
        values["needs"] = [NeededPackageRecord(**each) for each in values.get("needs", [])]
        return cls(**values)


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A file of a version.

    Attributes:
        path: Path in the folder of the model; files of the version itself begin with "1/".
        size: Bytes.
    """

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class VersionSummary:
    """A version, in lists.

    Attributes:
        state: "arriving", "checking", "ready" or "refused".
        created: Seconds since the epoch.
        size: Bytes of all files.
        backend: Its backend, "" if not known yet.
        runs_code: Whether it is not known to be data, so that loading it may run code.
        problem: Why it was refused, "" if it was not.
    """

    number: int
    state: str
    created: float
    author: str
    size: int
    backend: str
    runs_code: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model, in lists.

    Attributes:
        name: Its name, also in servers.
        created: Seconds since the epoch.
        latest: The version with the highest number, None for none.
    """

    name: str
    project: str
    owner: str
    description: str
    tags: list[str]
    created: float
    version_count: int
    latest: VersionSummary | None


@dataclass(frozen=True, slots=True)
class ModelPage:
    """A part of a list of models.

    Attributes:
        models: The models, by name.
        tags: All tags of the project with the number of their models.
    """

    models: list[ModelSummary]
    total: int
    tags: dict[str, int]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model with its versions.

    Attributes:
        created: Seconds since the epoch.
        versions: Its versions, latest first.
        deployments: Names of the deployments that use it.
    """

    name: str
    project: str
    owner: str
    description: str
    tags: list[str]
    links: dict[str, str]
    created: float
    versions: list[VersionSummary]
    deployments: list[str]


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version.

    Attributes:
        state: "arriving", "checking", "ready" or "refused".
        digest: Hash of all its files, "" until they have arrived.
        size: Bytes of all files.
        runs_code: Whether it is not known to be data, so that loading it may run code.
        created: Seconds since the epoch.
        task: The latest task about it, 0 for none: its progress and log.
        deployments: Names of the deployments that use it.
    """

    model: str
    project: str
    number: int
    state: str
    digest: str
    size: int
    source: str
    notes: str
    runs_code: bool
    author: str
    created: float
    report: VersionReport
    files: list[VersionFile]
    task: int
    deployments: list[str]


@dataclass(frozen=True, slots=True)
class AddedVersion:
    """A version that is being imported.

    Attributes:
        task: The task that imports its files and checks it.
    """

    model: str
    number: int
    task: int


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """A file being uploaded.

    Attributes:
        batch: Identifier shared by all files of one version.
        path: Its name, with its folders.
        size: Its final size in bytes.
        received: Bytes that have arrived; the upload continues from there.
    """

    key: str
    batch: str
    path: str
    size: int
    received: int


ADD = "model.add"
"""Imports the files of a version and checks it."""

CHECK = "model.check"
"""Checks a version again."""

COLLECT = "artifacts.collect"
"""Removes files that belong to no version, and abandoned uploads."""
