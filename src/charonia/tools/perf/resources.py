"""CPU time and memory of the server's processes, if they run on this machine."""

import ipaddress
import socket
import time

import psutil

from charonia.wire.endpoint import parse_url


class ProcessTree:
    """The process that listens at an address, and its children.

    Args:
        root: The process.
    """

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._spent_by_gone = 0.0
        self._last: dict[int, float] = {}

    def is_within(self, process: psutil.Process) -> bool:
        """Whether a process has started the server, or is the server."""
        try:
            return process in (self._root, *self._root.parents())
        except psutil.Error:
            return False

    def sample(self) -> tuple[float, int, int] | None:
        """Return CPU seconds so far, resident bytes and number of processes; None if the server has exited."""
        try:
            members = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return None
        rss = 0
        now: dict[int, float] = {}
        for process in members:
            try:
                times = process.cpu_times()
                rss += process.memory_info().rss
            except psutil.Error:
                continue  # it has just exited
            now[process.pid] = times.user + times.system
        # The CPU time of exited processes counts too, so that a restart does not look like negative time.
        self._spent_by_gone += sum(spent for pid, spent in self._last.items() if pid not in now)
        self._last = now
        return self._spent_by_gone + sum(now.values()), rss, len(now)


_RELAYS = frozenset({"docker-proxy", "rootlessport", "slirp4netns", "pasta", "kubectl", "ssh"})
"""Programs that listen on behalf of a server elsewhere: in a container, or on another machine."""


def find(url: str) -> ProcessTree | None:
    """Return the processes of the server at a URL; None if it is on another machine, or not visible."""
    endpoint = parse_url(url)
    if not is_here(endpoint.host):
        return None
    try:
        listening = [
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (endpoint.port,) and connection.pid
        ]
        if not listening:
            return None
        # Of processes that share a port, the oldest has started the others.
        root = min(map(psutil.Process, set(listening)), key=lambda process: process.create_time())
        return None if root.name() in _RELAYS else ProcessTree(root)
    except psutil.Error:
        return None


def is_here(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    own = {address.address for family in psutil.net_if_addrs().values() for address in family}
    return any(address in own or ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


Sample = tuple[int, float, int, int]
"""Monotonic time in nanoseconds, CPU seconds, resident bytes, processes."""


def timed(processes: ProcessTree) -> Sample | None:
    """Return a sample with its time."""
    now = time.monotonic_ns()
    found = processes.sample()
    return (now, *found) if found is not None else None
