"""What a Python file says about its models: asked of a worker process that ends afterwards."""

import asyncio
from dataclasses import replace
from pathlib import Path

import orjson

from charonia.config.json_form import from_json, to_json
from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.server.backends.api import BackendSettings
from charonia.server.backends.python.environment import Environment, environment_of_file
from charonia.server.backends.python.process import WorkerProcess
from charonia.server.channel.channel import Incoming

ANSWER_S_MAX = 120.0
"""Time that a file has to be imported and to answer."""

DESCRIBED_MAX = 64
"""Files whose descriptions are kept."""

_State = tuple[int, int]

_described: dict[Path, tuple[_State, ModelConfig, dict[str, ModelConfig]]] = {}
"""State of a file, the configuration that its models began with, and complete configurations by name: a file that is
served right after it was described is not imported again for every one of its models."""


async def ask_worker(
    name: str,
    environment: Environment,
    question: tuple[object, ...],
    *,
    failed: str,
    lost: str,
    late: str,
    limit_s: float = ANSWER_S_MAX,
) -> str:
    """Return the answer of a worker process that ends afterwards.

    Args:
        name: Name of the process, for the log.
        environment: Its environment.
        question: The message.
        failed: Begins the error for an exception in the model's code.
        lost: Begins the error for a process that ends without an answer.
        late: Begins the error for a process that does not answer in time.
        limit_s: Time limit of the answer.

    Raises:
        ServingError: INVALID_ARG, one of these.
    """
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def message(received: Incoming) -> None:
        kind, text = received.header[:2]
        if not answer.done():
            if kind == "completed":
                answer.set_result(text)
            else:
                answer.set_exception(invalid(f"{failed}: {text}"))

    def end(reason: str) -> None:
        if not answer.done():
            answer.set_exception(invalid(f"{lost}: {reason}"))

    process = WorkerProcess(name, environment=environment, on_message=message, on_end=end)
    try:
        process.send(question)
        return await asyncio.wait_for(answer, limit_s)
    except TimeoutError:
        raise invalid(f"{late} within {limit_s:g} s") from None
    finally:
        process.kill("it has answered")
        await process.stop(0)


async def describe(path: Path, start: ModelConfig, settings: BackendSettings) -> dict[str, ModelConfig]:
    """Return the complete configurations of the models that a service file defines, by name; none if it defines none.

    Args:
        path: The file.
        start: What their configurations begin with.
        settings: Settings of the Python backend.

    Raises:
        ServingError: INVALID_ARG with the reason why it cannot be imported, or its environment not built.
    """
    environment = await environment_of_file(path, settings)
    state = _state(path)
    text = await ask_worker(
        path.name,
        environment,
        ("describe", str(path), orjson.dumps(to_json(start)).decode()),
        failed=f"'{path.name}' cannot be served",
        lost=f"'{path.name}' cannot be imported",
        late=f"the import of '{path.name}' did not finish",
    )
    configs = {name: from_json(orjson.dumps(config).decode()) for name, config in orjson.loads(text).items()}
    if len(_described) >= DESCRIBED_MAX:
        _described.clear()
    _described[path] = (state, start, configs)
    return configs


def described(path: Path, config: ModelConfig) -> ModelConfig | None:
    """Return the complete configuration of a model whose file has just been described, None otherwise."""
    state, start, configs = _described.get(path, ((0, 0), config, {}))
    known = configs.get(config.name)
    beginning = replace(start, name=config.name, default_model_filename=config.default_model_filename)
    if known is None or beginning != config or _state(path) != state:
        return None
    return replace(known, default_model_filename=config.default_model_filename)


def _state(path: Path) -> _State:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
