"""What a deployment is to be: the record, from and to the form of files and the API. Pure.

name: reader                    # what clients and pages call it
target: local
environment: pytorch            # optional
models:
  - name: detection
    versions: [1, 2]            # or: latest
    traffic: {weights: {1: 90, 2: 10}}   # as POST /v2/models/M/traffic takes it
    instances: {min: 1, max: 4}
    batching: {max_batch_size: 8, max_queue_delay_microseconds: 100}
    config: {}                  # any other field of the model configuration, as JSON
device: {cpu_cores: 2, gpus: [0], memory_mib: 2048, gpu_memory_mib: 4096}
replicas: {min: 1, max: 1}
keys: true                      # whether clients need an API key
ready_within_s: 600
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """A model of a deployment.

    Attributes:
        name: Its name in the registry and in the server.
        versions: The versions that are loaded; empty for the latest one that is ready.
        traffic: How requests that name no version are split, as the server's API takes it; empty for the latest.
        instances_min: Instances of each version, 0 for what its configuration says.
        instances_max: Bound of instances by load, 0 for no more than the minimum.
        max_batch_size: Largest batch, None for what its configuration says.
        max_queue_delay_us: Longest wait for a fuller batch in microseconds, None for what its configuration says.
        config: Further fields of the model configuration, in the form of its JSON.
    """

    name: str
    versions: tuple[int, ...] = ()
    traffic: Mapping[str, Any] = field(default_factory=dict)
    instances_min: int = 0
    instances_max: int = 0
    max_batch_size: int | None = None
    max_queue_delay_us: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """A deployment.

    Attributes:
        name: Its name.
        target: Where it runs.
        models: Its models; a pipeline has several.
        environment: Name of its environment, "" for the platform's own Python.
        cpu_cores: Cores that its models may use, 0 for all.
        gpus: Numbers of the GPUs that it sees.
        memory_mib: Memory that each of its servers may use, 0 for no limit.
        gpu_memory_mib: Memory that each of them may use on each of these GPUs, 0 where nothing is said.
        replicas_min: Servers at least.
        replicas_max: Servers at most.
        keys: Whether clients need an API key.
        ready_within_s: A revision that is not ready after this has failed.
    """

    name: str
    target: str = "local"
    models: tuple[DeployedModel, ...] = ()
    environment: str = ""
    cpu_cores: int = 0
    gpus: tuple[int, ...] = ()
    memory_mib: int = 0
    gpu_memory_mib: int = 0
    replicas_min: int = 1
    replicas_max: int = 1
    keys: bool = False
    ready_within_s: float = 600.0
