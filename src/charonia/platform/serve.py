"""Runs the platform: the folder, the socket, the server."""

import gc
import signal
import socket
from dataclasses import replace

import uvicorn

from charonia.core.errors import invalid
from charonia.platform.app import make_app
from charonia.platform.connections import IDLE_TIMEOUT_S, BoundedProtocol, BoundedServer
from charonia.platform.data_folder import announce, claim
from charonia.platform.people import local, login
from charonia.platform.settings import PlatformSettings

FINISH_S = 5
"""Time that calls in progress have when the platform ends."""


def serve(settings: PlatformSettings) -> None:
    """Run a platform until SIGTERM or SIGINT, and print a link that signs its owner in.

    Raises:
        ServingError: INVALID_ARG for an address that cannot be used; UNAVAILABLE for a folder in use, or without the
            database.
    """
    with claim(settings.data), _listening(settings) as listener:
        settings = replace(settings, port=listener.getsockname()[1])
        app = make_app(settings)
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=bool(settings.public_url),
            server_header=False,
            timeout_keep_alive=int(IDLE_TIMEOUT_S),
            timeout_graceful_shutdown=FINISH_S,
        )
        server = BoundedServer(config)

        def end(number: int, frame: object) -> None:
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):  # before and after it handles them itself
            signal.signal(number, end)
        with app.state.platform.database.transaction() as session:
            secret = local.prepare(session, settings.data)
        announce(settings.data, settings.local_url)
        print(f"Charonia platform at {settings.url}, data in {settings.data}")
        print(f"To sign in, open this once: {login.link(settings, secret)}", flush=True)
        gc.collect()
        gc.freeze()  # what all calls share stays: a collection that walks it takes longer than most pages
        server.run(sockets=[listener])


def _listening(settings: PlatformSettings) -> socket.socket:
    try:
        family, kind, number, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
    except OSError as error:
        raise invalid(f"--host: '{settings.host}' cannot be used: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise invalid(
            f"port {settings.port} of {settings.host} cannot be used: {error.strerror}", hint="choose one with --port"
        ) from None
    return listener
