"""The interface between the platform and a place where deployments run: a target.

A target applies one revision of a deployment at a time. It stores nothing in the platform's database: it finds
running servers in the place itself, so a restarted platform adopts them. All calls block, and come from threads.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from charonia.platform.artifacts.manifest import Manifest
from charonia.platform.deployments.spec import DeploymentSpec


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model with the versions to serve.

    Attributes:
        name: Its name.
        versions: By number, the folder with its files on this machine.
        config: Its configuration including the deployment's changes: the text of a config.pbtxt.
        size: Bytes of all files.
        digests: Hash of the content by number of the version.
        files: Entries of the artifact store for each version, by path within the model's folder.
    """

    name: str
    versions: Mapping[int, Path]
    config: str
    size: int
    digests: Mapping[int, str]
    files: Mapping[int, Manifest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """A revision with everything it refers to.

    Attributes:
        deployment: "PROJECT/NAME".
        revision: Its number.
        spec: The specification.
        models: The models.
        python: The interpreter of its environment, None for the platform's own.
        keys: Lines of the file of API keys of its servers for clients; see `key_files`.
        packages: Requirements of its environment in pip's syntax, where the environment is built elsewhere.
        project_id: Number of its project.
        variables: Environment variables of its servers, with the values of secrets.
        runs_code: Whether a version is not known to be data, or the configuration or a variable may make it code.
    """

    deployment: str
    revision: int
    spec: DeploymentSpec
    models: tuple[PlacedModel, ...]
    python: Path | None = None
    keys: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    project_id: int = 0
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    runs_code: bool = False


def make_model_folder(repository: Path, model: PlacedModel) -> None:
    """Create a model's folder with hard links to the files of its versions; shared files are those in the latest."""
    folder = repository / model.name
    for number, source in sorted(model.versions.items()):
        for path in sorted(source.rglob("*")):
            parts = path.relative_to(source).parts
            target = folder.joinpath(str(number) if parts[0] == "1" else parts[0], *parts[1:])
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                os.link(path, target)
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
    config = folder / "config.pbtxt"
    config.unlink(missing_ok=True)
    config.write_text(model.config, encoding="utf-8")


KEYS_FILE = "keys.txt"
OPEN_KEYS_FILE = "open-keys.txt"


def key_files(platform_key: str, keys: Sequence[str]) -> dict[str, str]:
    """Return the files of API keys of the servers of a deployment by name.

    Servers whose clients need keys read `KEYS_FILE`, others `OPEN_KEYS_FILE`. In both, administrative calls need the
    platform's own key, or a client's with the scope admin.
    """
    digest = hashlib.sha256(platform_key.encode()).hexdigest()
    lines = [f"platform admin sha256:{digest}", *keys]
    return {
        KEYS_FILE: "\n".join(lines) + "\n",
        OPEN_KEYS_FILE: "\n".join([*lines, "clients infer,read none"]) + "\n",
    }


def key_file(spec: DeploymentSpec) -> str:
    return KEYS_FILE if spec.keys else OPEN_KEYS_FILE


class RevisionPhase(Enum):
    """State of a revision at a target."""

    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"
    """It gets all new requests."""
    FAILED = "failed"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class Replica:
    """A server of a deployment.

    Attributes:
        name: "pid 4711", the name of a pod.
        is_ready: Whether it answers.
        restarts: How often it was restarted.
        reason: Why it is unhealthy, for display; "" if it is healthy.
        doing: Its current step if it is healthy but not ready: "it starts".
        http: Address of its own HTTP endpoint, "" if it has none.
        metrics: Address of its metrics, "" if it has none.
    """

    name: str
    is_ready: bool
    restarts: int = 0
    reason: str = ""
    doing: str = ""
    http: str = ""
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """State of a deployment as its target reports it.

    Attributes:
        serving: The revision that answers requests, 0 for none.
        applying: The revision being applied, or one that has failed; 0 for none.
        phase: Progress of `applying`, or of `serving` if nothing is being applied.
        doing: The current step, for display.
        reason: Why `applying` failed, for display.
        http: Address of the protocol's HTTP endpoint, "" where nothing serves: "http://127.0.0.1:9000".
        grpc: Address of its gRPC endpoint.
        metrics: Address of its metrics.
        key: The API key with which the platform calls its servers, "" where it has none.
        replicas: Its servers.
        wanted_replicas: Number of servers to run.
        scaled_by: Who sets the number of servers within the bounds, for display; "" for the platform.
    """

    serving: int = 0
    applying: int = 0
    phase: RevisionPhase = RevisionPhase.ABSENT
    doing: str = ""
    reason: str = ""
    http: str = ""
    grpc: str = ""
    metrics: str = ""
    key: str = field(default="", repr=False)
    replicas: Sequence[Replica] = field(default_factory=tuple)
    wanted_replicas: int = 0
    scaled_by: str = ""


class DeploymentTarget(Protocol):
    """A place where deployments run.

    Attributes:
        name: As specifications name it: "local", "kubernetes", "kserve".
    """

    name: str

    def problems(self, workload: Workload) -> Sequence[str]:
        """Return why a workload does not fit here, one sentence per reason: memory, devices, ports. Starts nothing."""
        ...

    def apply(self, workload: Workload) -> None:
        """Begin to replace the serving revision with a workload, and return immediately.

        The serving revision continues until the new one is ready, and stays if the new one fails. Applying a workload
        that is being applied, or already serves, changes nothing; one that has failed starts again.

        Raises:
            ServingError: UNAVAILABLE if the target cannot be reached, or has not finished the previous change.
        """
        ...

    def scale(self, deployment: str, replicas: int) -> str:
        """Scale a deployment, starting from its current servers.

        The reconciler calls this on each pass over a running deployment, so a target that works server by server can
        take its next step.

        Returns:
            Why there is no room for this many servers; "" if there is, or if they already run.

        Raises:
            ServingError: UNAVAILABLE when the target cannot be reached.
        """
        ...

    def abandon(self, deployment: str) -> None:
        """Cancel the revision being applied, if any; the serving one stays."""
        ...

    def observe(self, deployment: str) -> Observed:
        """Return the current state.

        Raises:
            ServingError: UNAVAILABLE when the target cannot be reached.
        """
        ...

    def stop(self, deployment: str) -> None:
        """Begin to stop a deployment: it completes requests in flight and keeps its address.

        The reconciler repeats the call until nothing is left, so the target can kill a server that does not exit.
        """
        ...

    def remove(self, deployment: str) -> None:
        """Remove the leftovers of a stopped deployment."""
        ...

    def set_keys(self, deployment: str, keys: Sequence[str]) -> None:
        """Replace the lines of a deployment's file of API keys immediately."""
        ...

    def deployments(self) -> Sequence[str]:
        """Return the names of all deployments that have left a trace here, so that orphans can be removed."""
        ...

    def log(self, deployment: str, lines: int) -> str:
        """Return the last lines of the logs."""
        ...
