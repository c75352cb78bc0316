"""The pytest plugin: a fixture that starts servers in the test's own process.

pytest imports this module in every run on a machine that has this package, so it imports only `pytest` and the
names of `charonia`; the server is imported by the first test that starts one. It has no hooks and no options.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import charonia

StartServer = Callable[..., "charonia.Server"]
"""The type of `charonia_server`, for annotations: it takes the arguments of `charonia.Server`."""


@pytest.fixture
def charonia_server() -> Iterator[StartServer]:
    """Start servers in this process: a call with the folder of the models returns a running charonia.Server.

    It takes the arguments of charonia.Server; http=True and grpc=True open endpoints on free ports. Every server is
    stopped when the test ends. A model that does not load raises charonia.ServingError with the reason.
    """
    with ExitStack() as running:

        def start(repositories: str | Path, **arguments: Any) -> charonia.Server:
            __tracebackhide__ = True
            try:
                return running.enter_context(charonia.Server(repositories, **arguments))
            except charonia.ServingError as error:
                # The report shows the line of the test and the reason, not the inside of the server.
                raise error.with_traceback(None) from None

        yield start
