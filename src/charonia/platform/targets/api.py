"""What the platform asks of a place where deployments run.

A target brings about one revision of a deployment at a time. It keeps nothing in the platform's database: what runs is
found where it runs, so that a platform that starts again adopts it. All calls block, and come from threads.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from charonia.platform.artifacts.manifest import Manifest
from charonia.platform.deployments.spec import DeploymentSpec


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model with the versions that are to run.

    Attributes:
        name: Its name.
        versions: By number, the folder with its files on this machine.
        config: Its configuration, with what the deployment changes: the text of a config.pbtxt.
        size: Bytes of all files.
        digests: Hash of the content by number of the version.
        files: What the store of models' files has of each version, by path within the model's folder.
    """

    name: str
    versions: Mapping[int, Path]
    config: str
    size: int
    digests: Mapping[int, str]
    files: Mapping[int, Manifest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """A revision, with all that it names.

    Attributes:
        deployment: "PROJECT/NAME".
        revision: Its number.
        spec: What was asked for.
        models: The models.
        python: The interpreter of its environment, None for the platform's own.
        keys: Lines of the file of API keys of its servers for clients; see `key_files`.
        packages: What its environment asks for, as pip takes it, where that is built elsewhere.
        project_id: Number of its project.
    """

    deployment: str
    revision: int
    spec: DeploymentSpec
    models: tuple[PlacedModel, ...]
    python: Path | None = None
    keys: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    project_id: int = 0


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
    """Return the name of the file of API keys that the servers of a deployment read."""
    return KEYS_FILE if spec.keys else OPEN_KEYS_FILE


class RevisionPhase(Enum):
    """What a revision does at a target."""

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
        restarts: How often it was started again.
        reason: What is wrong with it, in words; "" for nothing.
        doing: What it does if it is not ready and nothing is wrong: "it starts".
        http: Address of the HTTP endpoint that it alone has, "" where there is none.
        metrics: Address of its metrics, "" where there is none.
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
    """What a target sees of a deployment.

    Attributes:
        serving: The revision that answers requests, 0 for none.
        applying: The revision that is being brought about, or has failed to be; 0 for none.
        phase: How far that one is; of the one that serves where none is being brought about.
        doing: What is being done now, for people.
        reason: Why it failed, in words.
        http: Address of the protocol's HTTP endpoint, "" where nothing serves: "http://127.0.0.1:9000".
        grpc: Address of its gRPC endpoint.
        metrics: Address of its metrics.
        key: The API key with which the platform calls its servers, "" where it has none.
        replicas: Its servers.
        wanted_replicas: How many there are to be.
        scaled_by: Who decides how many there are between the bounds, in words; "" for the platform.
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
        """Return why a workload does not fit here, a sentence each: memory, devices, ports. Nothing is started."""
        ...

    def apply(self, workload: Workload) -> None:
        """Begin to bring a workload about, in place of what serves; return at once.

        What serves goes on until the new one is ready, and stays if that fails. Applying what is being applied
        already, or serves, changes nothing; what has failed begins again.

        Raises:
            ServingError: UNAVAILABLE when the target cannot be reached, or is not done with what was applied before.
        """
        ...

    def scale(self, deployment: str, replicas: int) -> str:
        """Let a deployment have so many servers, beginning with those that it has.

        It is called at each look at a deployment that is to run, so that a target which brings things about server by
        server can take its next step.

        Returns:
            Why there is no room for so many, in words; "" where there is, or they are there.

        Raises:
            ServingError: UNAVAILABLE when the target cannot be reached.
        """
        ...

    def abandon(self, deployment: str) -> None:
        """Give up what is being brought about, if anything; what serves stays."""
        ...

    def observe(self, deployment: str) -> Observed:
        """Return what is there now.

        Raises:
            ServingError: UNAVAILABLE when the target cannot be reached.
        """
        ...

    def stop(self, deployment: str) -> None:
        """Begin to end a deployment: requests in flight are finished. Its address stays its own.

        It is called again until nothing is left, so that what does not end can be killed.
        """
        ...

    def remove(self, deployment: str) -> None:
        """Remove what is left of a deployment that has been stopped."""
        ...

    def set_keys(self, deployment: str, keys: Sequence[str]) -> None:
        """Let these be the lines of the file of API keys of a deployment, at once."""
        ...

    def deployments(self) -> Sequence[str]:
        """Return the names of all deployments that there is anything of, so that what nobody wants can be removed."""
        ...

    def log(self, deployment: str, lines: int) -> str:
        """Return the last lines of the logs."""
        ...
