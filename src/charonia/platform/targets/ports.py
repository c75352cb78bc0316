"""Ports of this machine that nobody has."""

import socket
from collections.abc import Container, Sequence

HOST = "127.0.0.1"


class FreePorts:
    """Looks for free ports in a row.

    Args:
        ports: First and last port.
        count: How many in a row.
    """

    def __init__(self, ports: tuple[int, int], count: int) -> None:
        self.first, self.last = ports
        self._count = count

    def find_many(self, taken: Container[int], rows: int) -> list[list[int]]:
        """Return as many rows of ports that nobody listens on, without those that are taken, or fewer."""
        found: list[list[int]] = []
        for first in range(self.first, self.last - self._count + 2, self._count):
            ports = list(range(first, first + self._count))
            if len(found) < rows and not any(port in taken for port in ports) and all(map(_is_free, ports)):
                found.append(ports)
        return found

    def are_free(self, ports: Sequence[int]) -> bool:
        """Return whether these are as many as wanted, and nobody listens on any of them."""
        return len(ports) == self._count and all(map(_is_free, ports))


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
        except OSError:
            return False
        return True
