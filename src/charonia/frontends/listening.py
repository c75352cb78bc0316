"""What is said when an address cannot be listened on."""

import errno
import os
import socket

from charonia.core.errors import ServingError, unavailable

_HINTS = {
    errno.EADDRINUSE: "another program listens there; --http-port, --grpc-port and --metrics-port take other ports",
    errno.EACCES: "ports below 1024 may need a privilege",
    errno.EADDRNOTAVAIL: "no network interface of this machine has that address; 0.0.0.0 stands for all of them",
}


def cannot_listen(host: str, port: int, error: OSError) -> ServingError:
    """Return the UNAVAILABLE error for `error`, which listening on `host` and `port` has met.

    The event loops put the address and a sentence of their own into the text of the error, so the system's is asked.
    """
    if isinstance(error, socket.gaierror) or not error.errno:
        reason = error.strerror or str(error)
    else:
        reason = os.strerror(error.errno)
    return unavailable(f"cannot listen on {host}:{port}: {reason}", hint=_HINTS.get(error.errno or 0, ""))
