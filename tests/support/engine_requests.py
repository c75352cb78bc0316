"""Requests to the engines of language models without a server, and stand-ins for the engines' packages."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from charonia.server.backends.python.worker.errors import TritonError

_ROOT = Path(__file__).parents[2]


class RefusedError(Exception):
    """What is wrong with a request, as `language/worker/model.py` says it."""

    def __init__(self, message: str, code: int = TritonError.INVALID_ARG) -> None:
        super().__init__(message)
        self.code = code


class EngineRequest:
    """A request as `language/worker/model.py` makes one, and its responses."""

    def __init__(self, text: str = "", route: str = "", **members: Any) -> None:
        self.id = ""
        self.text = text
        self.route = route
        self.stream = False
        self.excludes_input: bool | None = None
        self.returns: frozenset[str] = frozenset()
        self.sampling: dict[str, Any] = {}
        self.images: list[str] = []
        self.parameters: dict[str, Any] = {}
        self.responses: list[dict[str, Any]] = []
        self.usage: dict[str, Any] | None = None
        self.is_over = False
        self.__dict__.update(members)

    def send(self, outputs: dict[str, Any], parameters: dict[str, Any] | None = None, *, final: bool = False) -> None:
        assert not self.is_over
        self.is_over = final
        if outputs:
            self.responses.append(outputs)
        self.usage = parameters or self.usage

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found

    def chunks(self) -> list[dict[str, Any]]:
        """Return the responses to a request of OpenAI's API."""
        return [json.loads(response["text_output"]) for response in self.responses]


def openai(route: str, body: Mapping[str, Any], **members: Any) -> EngineRequest:
    """Return a request of OpenAI's API to the model `lm`."""
    return EngineRequest(json.dumps({"model": "lm", **body}), route, **members)


Started = Callable[..., AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def started_by(make: Callable[[Any], Any], **setup: Any) -> AsyncIterator[Any]:
    """Start an engine, which is stopped in the end.

    Args:
        make: Its class.
        setup: Attributes of its `EngineSetup`.
    """
    names = {"model_name": "lm", "version_dir": "/nowhere/1", "invalid": RefusedError, "error": RefusedError}
    engine = make(SimpleNamespace(**names, **setup))
    await engine.start()
    yield engine
    await engine.stop()


def answered_by(started: Started, asked: EngineRequest, **options: Any) -> EngineRequest:
    async def answer() -> None:
        async with started(**options) as engine:
            await engine.answer(asked)

    asyncio.run(answer())
    assert asked.is_over
    return asked


def refused_by(started: Started, asked: EngineRequest, **options: Any) -> RefusedError:
    async def answer() -> None:
        async with started(**options) as engine:
            with pytest.raises(RefusedError) as caught:
                await engine.answer(asked)
        found.append(caught.value)

    found: list[RefusedError] = []
    asyncio.run(answer())
    assert not asked.is_over
    return found[0]


@contextmanager
def pretended(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Put modules of a stand-in in place; the environment of this process is afterwards what it was before."""
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield
    os.environ.clear()
    os.environ.update(before)


def pretended_environment(folder: Path, package: str, init: str) -> Path:
    """Make an environment for workers in which a stand-in is a package, and return its folder."""
    packages = folder / "packages"
    (packages / package).mkdir(parents=True)
    (packages / package / "__init__.py").write_text(init)
    python = folder / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages}:{_ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder / "environment"
