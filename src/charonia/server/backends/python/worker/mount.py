"""An ASGI application as a Python model without inputs: uvicorn serves it at a Unix socket, in a thread of the worker.

Front ends connect clients to the socket. A new instance listens before it takes the name of the socket, so that a
reload refuses nothing. If the thread ends, so does the worker, and another one is started.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from ....channel.datatypes import TritonModelException
from .functions import ServiceCalls
from .service import running

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ....channel.datatypes import Array

APP, PATH, SOCKET = "MOUNTED_APP", "MOUNTED_AT", "MOUNTED_SOCKET"
"""Model parameters: name of the application in the file, its path, and the socket to serve it at."""

START_S_MAX = 60.0
"""Time that the application's startup may take."""

END_S_MAX = 5
"""Time that its requests have to end when the instance does."""

_POLL_S = 0.01


class MountedApp:
    """A `TritonPythonModel`.

    Args:
        app: The application.
        calls: Calls other models.
    """

    def __init__(self, app: Any, calls: ServiceCalls) -> None:
        self._app = app
        self._calls = _CallsInThreads(calls)

    def initialize(self, args: dict[str, str]) -> None:
        """Start to serve the application.

        Raises:
            ImportError: uvicorn is missing.
            RuntimeError: Its startup has failed.
        """
        try:
            import uvicorn
        except ImportError:
            raise ImportError("--mount needs uvicorn, which is not installed: pip install uvicorn websockets") from None
        parameters = json.loads(args["model_config"])["parameters"]
        path, name = (parameters[each]["string_value"] for each in (PATH, SOCKET))
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(f"{name}.{os.getpid()}")
        config = uvicorn.Config(
            self._app,
            root_path=path,
            proxy_headers=True,
            forwarded_allow_ips="*",  # only the front ends can connect
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=END_S_MAX,
        )
        self._server = uvicorn.Server(config)
        self._is_ending = False
        self._thread = threading.Thread(target=self._serve, args=(listening,), name=path, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S_MAX
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self._is_ending = True
                raise RuntimeError(f"the application at {path} has not started; the log has the reason")
            time.sleep(_POLL_S)
        os.rename(f"{name}.{os.getpid()}", name)

    def execute(self, requests: list[Any]) -> Any:
        """Refuse: the application takes HTTP requests."""
        raise TritonModelException("this is an application, not a model: it answers HTTP requests at its path")

    def is_ready(self) -> bool:
        return self._thread.is_alive()

    def finalize(self) -> None:
        self._is_ending = self._server.should_exit = True
        self._thread.join(2 * END_S_MAX)

    def _serve(self, listening: socket.socket) -> None:
        running.set(self._calls)
        try:
            self._server.run([listening])
        finally:
            if self._server.started and not self._is_ending:
                os._exit(1)


class _CallsInThreads:
    """Calls other models from an event loop that is not the model's own."""

    def __init__(self, calls: ServiceCalls) -> None:
        self.call = calls.call

    async def call_async(self, model: str, inputs: Mapping[str, object]) -> dict[str, Array]:
        return await asyncio.to_thread(self.call, model, inputs)
