"""Requests to the engines of language models without a server, and stand-ins for the engines' packages."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from charonia.server.backends.python.worker.errors import TritonError

_ROOT = Path(__file__).parents[2]


class RefusedError(Exception):
    """What is wrong with a request, as `language/worker/model.py` says it."""

    def __init__(self, message: str, code: int = TritonError.INVALID_ARG) -> None:
        super().__init__(message)
        self.code = code


class Asked:
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


def openai(route: str, body: Mapping[str, Any], **members: Any) -> Asked:
    """Return a request of OpenAI's API to the model `lm`."""
    return Asked(json.dumps({"model": "lm", **body}), route, **members)


WithEngine = Callable[..., None]
"""Calls a coroutine function with an engine that has started, and stops the engine."""


def answered_by(with_engine: WithEngine, asked: Asked, **options: Any) -> Asked:
    with_engine(lambda engine: engine.answer(asked), **options)
    assert asked.is_over
    return asked


def refused_by(with_engine: WithEngine, asked: Asked, **options: Any) -> RefusedError:
    found: list[RefusedError] = []

    async def use(engine: Any) -> None:
        with pytest.raises(RefusedError) as caught:
            await engine.answer(asked)
        found.append(caught.value)

    with_engine(use, **options)
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
