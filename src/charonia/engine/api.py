"""The facade that front ends call. Plain records in, plain records out.

Everything here runs on the event loop's thread. `Engine` is a Protocol so that a front end can be tested with a fake,
and so that one in another process can stand behind a proxy with the same methods.
"""

from collections.abc import Mapping
from typing import Protocol

from charonia.config.model import ModelConfig
from charonia.core.calls import Reply, Ticket
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata
from charonia.core.request import InferRequest
from charonia.stats.model import ModelStatistics


class Engine(Protocol):
    """A server's models."""

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        """Run a request. Never raises for a request's fault: every outcome goes to `reply`."""
        ...

    def is_live(self) -> bool:
        """Whether the server can answer at all."""
        ...

    def is_ready(self) -> bool:
        """Whether the server is ready for inference (false while it starts and from the moment it shuts down)."""
        ...

    def is_exiting(self) -> bool:
        """Whether the server is shutting down."""
        ...

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a version of the model is ready, and says so where it has something to say.

        Raises:
            ServingError: NOT_FOUND for an unknown model, INVALID_ARG for a version that is no number.
        """
        ...

    def server_metadata(self) -> ServerMetadata:
        """Return name, version and extensions of the server."""
        ...

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Return a model's tensors and ready versions.

        Raises:
            ServingError: NOT_FOUND, INVALID_ARG, or UNAVAILABLE when it is not ready.
        """
        ...

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """Return the complete configuration in use. Raises as `model_metadata`."""
        ...

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Return statistics of all loaded models, of one, or of one version.

        Raises:
            ServingError: INVALID_ARG when the model or version asked for is not loaded.
        """
        ...

    def repository_index(self, ready_only: bool = False) -> list[ModelIndexEntry]:
        """Return every model in the repositories with the state of its versions."""
        ...

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model; returns when it is ready, or failed.

        Args:
            name: Model name.
            config: Configuration as JSON text to use instead of the model's own.
            files: Content by path relative to the model's folder; the folder on disk is then ignored. Needs `config`.

        Raises:
            ServingError: UNAVAILABLE unless in explicit mode; INVALID_ARG with the reason when the model fails to load.
        """
        ...

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Begin to unload a model: requests in flight finish. Unknown names are accepted.

        Raises:
            ServingError: UNAVAILABLE unless in explicit mode.
        """
        ...
