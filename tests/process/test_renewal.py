"""Front ends take the place of others on the same listening sockets: by an upgrade, a signal, or after a crash."""

import asyncio
import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tests.process.test_guarded_server import BODY, INFER, ask, child, restarts
from tests.process.test_upgrade import upgrade
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import ServeProcess, eventually, wait_until_ended
from tests.support.stock_clients import infer_input

CONNECTIONS = 16
REQUEST = f"POST {INFER.format('echo')} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    write_model(folder, "echo", b"", config=identity_pbtxt("identity", dims=(4,)))
    return folder


@pytest.fixture
def server(repository: Path) -> Iterator[ServeProcess]:
    with ServeProcess(repository, "--front-ends=2") as started:
        yield started


class FullLoad:
    """Clients of both protocols that send as fast as they can over connections that stay open, and never try again.

    A gRPC client only has the retries that cannot be seen: of calls that it has never sent. It fails such a call by
    itself where it was about to start on a connection when it read there that it should leave.
    """

    def __init__(self, server: ServeProcess, pause_s: float = 0) -> None:
        self.answers = {"http": 0, "grpc": 0}
        self._pause_s = pause_s
        self.lost: list[str] = []
        self.opened = 0
        self._http, self._grpc = server.http, server.grpc
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.go_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(200)

    def go_on(self) -> None:
        """Return when further requests of both protocols were answered."""
        before = dict(self.answers)
        assert eventually(lambda: all(self.answers[name] > before[name] + 100 for name in before)), self.lost

    async def _run(self) -> None:
        clients = [self._send_http() for _ in range(CONNECTIONS)] + [self._send_grpc() for _ in range(4)]
        await asyncio.gather(*clients)

    async def _send_http(self) -> None:
        host, port = self._http.split(":")
        while not self._is_over:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                self.opened += 1
                with contextlib.closing(writer):
                    while not (self._is_over or await self._exchange(reader, writer)):
                        self.answers["http"] += 1
                        await asyncio.sleep(self._pause_s)
            except (OSError, EOFError) as error:
                self.lost.append(f"http: {error!r}")

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send a request, and return whether the server then closes the connection."""
        writer.write(REQUEST)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        if not head.startswith(b"http/1.1 200 "):
            self.lost.append(f"http: {head!r}")
        return b"\r\nconnection: close\r\n" in head

    async def _send_grpc(self) -> None:
        given = infer_input(grpcclient, "INPUT0", np.ones((1, 4), np.float32))
        message = grpcclient._client._get_inference_request(
            *("echo", [given], "", "", None, 0, False, False, 0, None, None)
        ).SerializeToString()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._grpc, options=options) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

            async def send() -> None:
                while not self._is_over:
                    try:
                        await call(message, timeout=200)
                        self.answers["grpc"] += 1
                        await asyncio.sleep(self._pause_s)
                    except grpc.aio.AioRpcError as error:
                        self.lost.append(f"grpc: {error.code()} {error.details()}")

            await asyncio.gather(*(send() for _ in range(4)))


def renewals(server: ServeProcess) -> dict[tuple[str, str], int]:
    return {(name, reason): count for (name, reason), count in restarts(server).items() if reason == "renewed"}


def test_an_upgrade_renews_the_front_ends_under_full_load_and_loses_nothing(server: ServeProcess) -> None:
    with FullLoad(server) as load:
        for number in (2, 3):
            before = [child(server, f"front_end_{name}") for name in (("1", "2") if number == 2 else ("1_2", "2_2"))]
            done = upgrade(server)
            assert done.returncode == 0, done.stderr
            for process in before:
                wait_until_ended(process)
            assert all(child(server, f"front_end_{slot}_{number}") for slot in (1, 2))
            load.go_on()

    assert load.lost == []
    assert CONNECTIONS < load.opened <= 5 * CONNECTIONS  # each was told to come again, and did so
    assert eventually(lambda: renewals(server) == {("front_end_1", "renewed"): 2, ("front_end_2", "renewed"): 2})
    assert server.stop() == 0


def test_a_front_end_that_is_told_to_stop_is_replaced_and_loses_nothing(server: ServeProcess) -> None:
    with FullLoad(server) as load:
        for name in ("front_end_1", "front_end_2", "front_end_1_2"):
            before = child(server, name)
            before.terminate()
            wait_until_ended(before)
            load.go_on()

    assert load.lost == []
    assert eventually(lambda: renewals(server) == {("front_end_1", "renewed"): 2, ("front_end_2", "renewed"): 1})


def test_a_front_end_that_is_killed_costs_only_what_its_connections_were_doing(server: ServeProcess) -> None:
    with FullLoad(server) as load:
        for slot in (1, 2):
            child(server, f"front_end_{slot}").kill()
            assert server.logs(f"front_end_{slot} (pid ", times=2)  # it has ended, and is ready again
            load.go_on()
        opened = load.opened

    # Twice, each connection had one request over HTTP, or four over gRPC. None that was opened meanwhile was refused.
    assert 0 < len(load.lost) <= 2 * (CONNECTIONS + 4 * 4)
    assert opened <= 3 * CONNECTIONS
    assert not [text for text in load.lost if "refused" in text.lower()]


def test_who_comes_while_the_only_front_end_is_away_is_served_when_it_is_back(repository: Path) -> None:
    with ServeProcess(repository, "--front-ends=1") as server:
        child(server, "front_end_1").kill()
        assert server.logs("front_end_1 (pid ")
        assert ask(server.http, "POST", INFER.format("echo"), BODY)[0] == 200
        child(server, "front_end_1").terminate()
        assert server.logs("front_end_1_2 (pid ")  # it is ready
        assert ask(server.http, "POST", INFER.format("echo"), BODY)[0] == 200


def test_a_stream_goes_on_over_the_front_end_before(server: ServeProcess) -> None:
    came: queue.Queue[Any] = queue.Queue()
    given = infer_input(grpcclient, "INPUT0", np.ones((1, 4), np.float32))
    before = [child(server, f"front_end_{slot}") for slot in (1, 2)]
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: came.put(error))
        client.async_stream_infer("echo", [given])
        assert came.get(timeout=200) is None
        for process in before:
            process.terminate()
        assert server.logs(") is ready again", times=2)
        for _ in range(30):
            client.async_stream_infer("echo", [given])
            assert came.get(timeout=200) is None
            threading.Event().wait(0.1)
        assert sum(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in before) == 1
        client.stop_stream()
    for process in before:
        wait_until_ended(process)


def test_a_system_that_binds_no_threads_to_cores_has_front_ends(repository: Path) -> None:
    program = "import os; del os.sched_setaffinity, os.sched_getaffinity; from charonia.cli.main import main; main()"
    free = [f"--{name}-{field}" for name in ("http", "grpc", "metrics") for field in ("address=127.0.0.1", "port=0")]
    arguments = ["serve", f"--model-repository={repository}", "--front-ends=2", *free]
    with Pretended([sys.executable, "-c", program, *arguments]) as server:
        inodes = [listening(child(server, f"front_end_{slot}")) for slot in (1, 2)]
        assert [len(each) for each in inodes] == [2, 2]
        assert not inodes[0] & inodes[1]
        with FullLoad(server, pause_s=0.02) as load:
            assert upgrade(server).returncode == 0
            load.go_on()
            assert load.lost == []
            child(server, "front_end_1_2").kill()
            assert server.logs("front_end_1_2 (pid ", times=3)
            load.go_on()
        address = server.http
        assert server.stop() == 0
        assert "Traceback" not in server.log
        assert "Exception" not in server.log
    with pytest.raises(ConnectionRefusedError):
        ask(address, "GET", "/v2/health/live")


def listening(process: psutil.Process) -> set[str]:
    """Return the listening sockets of a process, as the system names them."""
    lines = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
    inodes = {f"socket:[{line.split()[9]}]" for line in lines if line.split()[3] == "0A"}
    folder = Path(f"/proc/{process.pid}/fd")
    return {os.readlink(link) for link in folder.iterdir()} & inodes


class Pretended(ServeProcess):
    """A server that is started by a program of its own."""

    def __init__(self, command: list[str]) -> None:
        super().__init__("")
        self._command = command

    def _start(self) -> Any:
        return subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
