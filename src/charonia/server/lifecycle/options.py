"""How models are found and loaded."""

from dataclasses import dataclass, field
from pathlib import Path

from charonia.server.lifecycle.configure import ConfigureOptions
from charonia.server.lifecycle.repository.sources import StoreOptions
from charonia.server.model_options import ControlMode


@dataclass(frozen=True, slots=True)
class LifecycleOptions:
    """How models are found and loaded.

    Attributes:
        repositories: Folders that hold model folders, and URIs of stores.
        control_mode: Who decides what is loaded.
        configure: How configurations are completed.
        cores: Cores that this process may use.
        load_threads: Models that load at the same time.
        load_retries: Retries of a load that fails.
        stores: How stores are read.
        has_namespaces: Whether the repository is part of a model's key.
        agents: Folder of repository agents, None for the built-in ones only.
        summarizes: Whether models keep summaries of latencies.
        strict_versions: Whether one version that fails to load keeps all others of that load from answering.
    """

    repositories: tuple[str | Path, ...]
    control_mode: ControlMode = ControlMode.NONE
    configure: ConfigureOptions = field(default_factory=ConfigureOptions)
    cores: int = 1
    load_threads: int = 4
    load_retries: int = 0
    stores: StoreOptions = field(default_factory=StoreOptions)
    has_namespaces: bool = False
    agents: Path | None = None
    summarizes: bool = False
    strict_versions: bool = False
