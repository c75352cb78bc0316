"""Repository agents: Python hooks before and after a model is loaded and unloaded.

An agent is a file `<name>/agent.py` in `--repoagent-directory` with a class `RepositoryAgent`, or one of `BUILT_IN`.
A model's configuration names its agents, in order. Hooks run in threads and may block. The built-in agent `checksum`
refuses a model whose files do not match the digests in its configuration.
"""

import hashlib
import logging
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from charonia.config.json_form import to_json
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.server.lifecycle.repository.scan import ModelFolder, is_inside
from charonia.server.machine.private_folder import PrivateFolder

_log = logging.getLogger(__name__)

ALGORITHMS = ("md5", "sha1", "sha256", "sha384", "sha512")


class ChecksumAgent:
    """Compares files with their digests before the model is loaded."""

    def __init__(self, parameters: dict[str, str]) -> None:
        self._expected = [(*_parsed(key), digest) for key, digest in parameters.items()]

    def on_load(self, model: "AgentModel") -> None:
        """Compare the files with their digests."""
        for algorithm, path, expected in self._expected:
            subject = f"checksum of '{path}' in model '{model.name}'"
            try:
                with open(f"{model.folder}/{path}", "rb") as file:
                    got = hashlib.file_digest(file, algorithm).hexdigest()
            except OSError as error:
                raise invalid(f"{subject}: {(error.strerror or str(error)).lower()}") from error
            if got != expected.strip().lower():
                raise invalid(f"{subject}: mismatched {algorithm.upper()}, expected {expected}, got {got}")


def _parsed(key: str) -> tuple[str, str]:
    algorithm, colon, path = key.partition(":")
    if not colon:
        raise invalid(f"repository agent 'checksum': expected <algorithm>:<file>, got '{key}'")
    if algorithm.lower() not in ALGORITHMS:
        raise unsupported(
            f"repository agent 'checksum': unsupported algorithm '{algorithm}'",
            hint=f"there are {', '.join(ALGORITHMS)}",
        )
    if not is_inside(path):
        raise invalid(f"repository agent 'checksum': '{path}' must stay within the model's folder")
    return algorithm.lower(), path


AGENT_FILE = "agent.py"
AGENT_CLASS = "RepositoryAgent"

HOOKS = ("on_load", "on_load_complete", "on_load_fail", "on_unload", "on_unload_complete")
"""Methods of an agent, each with an `AgentModel`. One that is missing does nothing."""

BUILT_IN: Mapping[str, Callable[[dict[str, str]], object]] = {"checksum": ChecksumAgent}
"""Makes an agent from its parameters, by name."""


class AgentModel:
    """A model as an agent sees it.

    Attributes:
        name: Name of the model.
        folder: The folder of its files, which a previous agent may have replaced.
        config: Its configuration as written, in the form of the protocol's JSON.
    """

    def __init__(self, name: str, folder: Path, config: dict[str, Any]) -> None:
        self.name = name
        self.folder = folder
        self.config = config
        self._made: list[PrivateFolder] = []

    def make_folder(self) -> Path:
        """Return a new private folder, for an agent that replaces the model's files.

        It is removed when the model is unloaded or its load fails.
        """
        top = PrivateFolder()
        self._made.append(top)
        folder = top.path / self.name
        folder.mkdir()
        return folder

    def remove_folders(self) -> None:
        while self._made:
            self._made.pop().remove()


class AgentRun:
    """The agents of one load of a model. Everything blocks.

    Args:
        agents: Name and agent, in the order of the configuration.
        model: The model that they see.
    """

    def __init__(self, agents: Sequence[tuple[str, object]], model: AgentModel) -> None:
        self._agents = list(agents)
        self._model = model
        self._told: list[tuple[str, object]] = []

    def load(self) -> Path:
        """Call `on_load` of the agents and return the folder of the model's files.

        Raises:
            ServingError: INVALID_ARG: an agent refused. `on_load_fail` of the agents before it was called.
        """
        for name, agent in self._agents:
            try:
                replaced = _call(agent, "on_load", self._model)
                if replaced is not None:
                    self._model.folder = _folder(name, replaced)
            except Exception as error:  # any exception of an agent is a reason not to load the model
                self.fail()
                if isinstance(error, ServingError):
                    raise
                raise invalid(
                    f"repository agent '{name}' of model '{self._model.name}' refused: {type(error).__name__}: {error}"
                ) from error
            self._told.append((name, agent))
        return self._model.folder

    def complete(self) -> None:
        """Call `on_load_complete`, in reverse order."""
        self._tell("on_load_complete", reversed(self._told))

    def fail(self) -> None:
        """Call `on_load_fail`, in reverse order, and remove the model's private folders."""
        self._tell("on_load_fail", reversed(self._told))
        self._model.remove_folders()

    def unload(self) -> None:
        """Call `on_unload`: the model is about to be unloaded."""
        self._tell("on_unload", self._told)

    def unloaded(self) -> None:
        """Call `on_unload_complete`, in reverse order, and remove the model's private folders."""
        self._tell("on_unload_complete", reversed(self._told))
        self._model.remove_folders()

    def _tell(self, hook: str, agents: Any) -> None:
        for name, agent in agents:
            try:
                _call(agent, hook, self._model)
            except Exception:  # it is too late for an agent to refuse
                _log.exception("repository agent '%s' of model '%s': %s failed", name, self._model.name, hook)


def prepare_agents(folder: ModelFolder, config: ModelConfig, directory: Path | None) -> AgentRun | None:
    """Return the agents that a model's configuration names, None where it names none.

    Args:
        folder: The model's folder.
        config: Its configuration.
        directory: Folder of agents, None for the built-in ones only.

    Raises:
        ServingError: INVALID_ARG for an agent that does not exist or cannot be made.
    """
    section = config.model_repository_agents
    if section is None or not section.agents:
        return None
    agents = [(a.name, _make(a.name, dict(a.parameters), folder.name, directory)) for a in section.agents]
    return AgentRun(agents, AgentModel(folder.name, folder.path, to_json(config)))


def _make(name: str, parameters: dict[str, str], model: str, directory: Path | None) -> object:
    subject = f"repository agent '{name}' of model '{model}'"
    if not name or "/" in name or name in (".", "..") or "\0" in name:
        raise invalid(f"model '{model}': model_repository_agents: {name!r} is not the name of a repository agent")
    path = directory / name / AGENT_FILE if directory is not None else None
    if path is None or not path.is_file():
        if name in BUILT_IN:
            return BUILT_IN[name](parameters)
        where = f"there is no '{path}'" if path is not None else f"built in: {', '.join(BUILT_IN)}"
        raise invalid(
            f"unable to find {subject}: {where}",
            hint=f"--repoagent-directory names a folder with {name}/{AGENT_FILE}",
        )
    try:
        found = runpy.run_path(str(path), run_name=f"charonia_repository_agent_{name}")
        if AGENT_CLASS not in found:
            raise AttributeError(f"it has no attribute '{AGENT_CLASS}'")
        agent: object = found[AGENT_CLASS](parameters)
    except ServingError:
        raise
    except Exception as error:  # foreign code
        raise invalid(f"{subject} cannot be made from '{path}': {type(error).__name__}: {error}") from error
    if not any(hasattr(agent, hook) for hook in HOOKS):
        raise invalid(f"{subject}: {AGENT_CLASS} in '{path}' has none of the methods {', '.join(HOOKS)}")
    return agent


def _call(agent: object, hook: str, model: AgentModel) -> object:
    method = getattr(agent, hook, None)
    return method(model) if method is not None else None


def _folder(name: str, replaced: object) -> Path:
    path = Path(str(replaced)).absolute()
    if not path.is_dir():
        raise invalid(f"repository agent '{name}' replaced the model's folder with '{path}', which is not a folder")
    return path
