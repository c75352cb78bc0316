"""What happens to a pod that is deleted, and to the connections of its clients, with a real server in its place.

A Service is an address in front of pods: each new connection goes to one of its endpoints and stays there. When a pod
is deleted, two things begin at the same moment and know nothing of each other: the endpoint is taken out of the
Service, which takes some time to arrive everywhere, and the kubelet runs the hook preStop, then sends SIGTERM, then,
when the grace period is over since the deletion, SIGKILL.
"""

import contextlib
import random
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.process import ServeProcess

PIECE_BYTES = 65536


class Service:
    """An address whose connections go to one of the endpoints each, as kube-proxy does it.

    Attributes:
        endpoints: Addresses of the pods, for new connections.
        address: The address of the service, `host:port`.
    """

    def __init__(self, *endpoints: str) -> None:
        self.endpoints = list(endpoints)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._choose = random.Random(7).choice
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._join, args=(client, self._choose(self.endpoints)), daemon=True).start()

    def _join(self, client: socket.socket, endpoint: str) -> None:
        host, port = endpoint.split(":")
        try:
            pod = socket.create_connection((host, int(port)))
        except OSError:
            client.close()
            return
        for each in (client, pod):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_copy, args=(pod, client), daemon=True)
        back.start()
        _copy(client, pod)
        back.join()
        client.close()
        pod.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE_BYTES):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class End:
    """How a pod ended.

    Attributes:
        was_killed: Whether the grace period was over before the server had ended.
    """

    status: int
    seconds: float
    was_killed: bool


def delete(pod: ServeProcess, spec: dict[str, Any], services: dict[Service, str], lag_s: float) -> End:
    """Delete a pod, and return when it has ended.

    Args:
        services: The services that it is an endpoint of, with its address there.
        lag_s: Time until its endpoint is gone everywhere.
    """
    begun_s = time.monotonic()

    def take_out() -> None:
        for service, address in services.items():
            service.endpoints.remove(address)

    removal = threading.Timer(lag_s, take_out)
    removal.start()
    (container,) = spec["containers"]
    hook = container.get("lifecycle", {}).get("preStop", {})
    assert hook.keys() <= {"sleep"}
    time.sleep(hook.get("sleep", {}).get("seconds", 0))
    pod.process.send_signal(signal.SIGTERM)
    due_s = begun_s + spec["terminationGracePeriodSeconds"]
    while pod.process.poll() is None and time.monotonic() < due_s:
        time.sleep(0.01)
    was_killed = pod.process.poll() is None
    if was_killed:
        pod.kill()
    removal.join()
    return End(pod.wait(), time.monotonic() - begun_s, was_killed)


def mount_config_map(data: dict[str, str], items: list[dict[str, str]], folder: Path) -> Path:
    """Lay out the volume of a ConfigMap as the kubelet does, with links through `..data`, and return its folder."""
    folder.mkdir()
    behind = folder / "..2026_01_01_00_00_00.123456789"
    for item in items:
        path = behind / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data[item["key"]], encoding="utf-8")
    (folder / "..data").symlink_to(behind.name)
    for name in {item["path"].split("/")[0] for item in items}:
        (folder / name).symlink_to(f"..data/{name}")
    return folder
