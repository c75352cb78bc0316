"""Loads variants into the server one after the other, and restores the models at the end.

Only tuned models are ever loaded with another configuration. Other models are loaded again if a reload unloaded them,
as servers do with the ensembles of a model.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from charonia.client.errors import ClientError
from charonia.client.sync_client import Client
from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError, invalid, not_found
from charonia.core.metadata import ModelState
from charonia.tools.tune.servers import MeasuredServer, fate_of
from charonia.tools.tune.variants import BaseModel, depth, load_text
from charonia.wire.answer import Failure

PROBE = "charonia-tune-is-this-mode-explicit"
"""Name of a model that does not exist: a request to load it reveals whether the server is in mode explicit."""

NOT_EXPLICIT = "explicit model load"
"""What servers in another mode answer."""

Note = Callable[[str], None]


class ServerLostError(ServingError):
    """The server is gone."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.UNAVAILABLE, message)


@dataclass(frozen=True, slots=True)
class Before:
    """A tuned model as it was.

    Attributes:
        config: Its configuration on the server, None where it was not loaded.
    """

    is_ready: bool
    config: dict[str, object] | None


class Deployment:
    """The tuned models of a server."""

    def __init__(self, server: MeasuredServer) -> None:
        self._server = server
        self._before: dict[str, Before] = {}
        self._ready_before: set[str] = set()
        self._loaded: dict[str, str] = {}
        self._touched: set[str] = set()
        self._overridden: set[str] = set()

    @property
    def client(self) -> Client:
        return self._server.client

    def check_explicit(self) -> None:
        """Check that the server loads models on request."""
        try:
            self.client.load_model(PROBE)
        except ClientError as error:
            if error.failure is not Failure.STATUS:
                raise
            if NOT_EXPLICIT in error.message.lower():
                raise invalid(
                    f"the server at {self._server.control_url} does not load models when asked to",
                    hint="start it with --model-control-mode=explicit, or measure the loads alone: "
                    "--reload-model-disable",
                ) from None

    def remember(self, models: Iterable[str]) -> None:
        """Remember how the models to tune are, and which others are ready.

        Raises:
            ServingError: NOT_FOUND for a model that the server does not have.
        """
        index = self.client.repository_index()
        known = {entry.name for entry in index}
        self._ready_before |= {entry.name for entry in index if entry.state is ModelState.READY} - self._touched
        for name in models:
            if name not in known:
                listed = ", ".join(sorted(known)[:20]) or "none"
                raise not_found(f"the server does not have the model '{name}'; its models are: {listed}")
            if name not in self._before:
                is_ready = name in self._ready_before
                self._before[name] = Before(is_ready, dict(self.client.model_config(name)) if is_ready else None)

    def load_own(self, model: str, instead: ModelConfig | None = None) -> dict[str, object]:
        """Load a model with its own configuration unless it is ready, and return the completed configuration.

        Args:
            instead: Replacement of its configuration, None for none.
        """
        if not self._before[model].is_ready and model not in self._loaded:
            self._load(model, "" if instead is None else load_text(instead))
        return dict(self.client.model_config(model))

    def load(self, bases: Mapping[str, BaseModel], configs: Mapping[str, ModelConfig]) -> None:
        """Load the models of a variant, the steps of an ensemble before the ensemble.

        Args:
            configs: Configuration by model; of unchanged models, their own.

        Raises:
            ServerLostError: The server is gone.
            ServingError: A model cannot be loaded.
        """
        texts = {name: self._text(bases[name], configs[name]) for name in configs}
        changed: list[str] = []
        for name in sorted(configs, key=lambda name: depth(bases, name)):
            if self._loaded.get(name) != texts[name] or set(changed) & set(bases[name].composing):
                changed.append(name)
        try:
            # A loaded ensemble is checked against its models while they change, and would refuse them.
            for name in reversed(changed):
                if bases[name].composing:
                    self._touched.add(name)
                    self._loaded.pop(name, None)
                    with self._watched():
                        self.client.unload_model(name)
            for name in changed:
                self._load(name, texts[name])
        except ServingError:
            # The server may have unloaded other models with them.
            self._loaded.clear()
            raise

    def forget(self) -> None:
        """Reset the record of loaded models, because the server was restarted."""
        self._loaded.clear()
        self._overridden.clear()

    def restore(self, note: Note) -> None:
        """Restore the server's models. A failure is noted, and the rest continues.

        A server that this tool started serves other models next: the tuned models are unloaded.
        """
        touched = sorted(self._touched)
        if self._server.is_ours:
            with contextlib.suppress(ServingError):  # it may have ended, and ends soon in any case
                for name in touched:
                    self.client.unload_model(name)
        else:
            self._restore(touched, note)
        self._touched.clear()
        self.forget()

    def _restore(self, touched: Iterable[str], note: Note) -> None:
        for name in touched:
            before = self._before[name]
            with _told(note, f"model '{name}' is not as it was"):
                if not before.is_ready:
                    self.client.unload_model(name)
                    continue
                self.client.load_model(name)
                if before.config is not None and dict(self.client.model_config(name)) != before.config:
                    # A client had loaded it with another configuration.
                    self.client.load_model(name, config=before.config)
        with _told(note, "models that depend on others may not be loaded"):
            ready = {entry.name for entry in self.client.repository_index(ready=True)}
            for name in sorted(self._ready_before - ready):
                with _told(note, f"model '{name}' is not loaded again"):
                    self.client.load_model(name)

    def _text(self, base: BaseModel, config: ModelConfig) -> str:
        """Return the text of a configuration in a load request.

        Triton does not reload a model whose files have not changed, even if it runs with another configuration. So
        after such a load, the model's own configuration is sent in full, too.
        """
        return "" if config == base.config and base.name not in self._overridden else load_text(config)

    def _load(self, name: str, text: str) -> None:
        self._touched.add(name)
        self._loaded.pop(name, None)
        with self._watched():
            if self._server.is_ours and self.client.model_ready(name):
                # Loaded side by side, both would need memory, and the measured peak would include both.
                self.client.unload_model(name)
            self.client.load_model(name, config=text)
        self._loaded[name] = text
        if text:
            self._overridden.add(name)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise ServerLostError for errors of the connection, and let refusals of the server pass."""
        try:
            yield
        except ClientError as error:
            if error.failure is not Failure.STATUS or self._server.fate():
                raise ServerLostError(fate_of(self._server) or f"the server was lost: {error.message}") from None
            raise


@contextlib.contextmanager
def _told(note: Note, what: str) -> Iterator[None]:
    try:
        yield
    except ServingError as error:
        note(f"{what}: {error.message}")
