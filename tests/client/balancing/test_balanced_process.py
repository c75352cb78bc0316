"""A client of three real servers that are killed, stopped for a while, drained and restarted under load.

The model appends the id of each execution to a file, so that what ran is known even of a server that was killed.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess, Shape, until
from tests.support.sequence_models import RUNNING_SUM, sequence_pbtxt

from charonia.client import AsyncClient, Balancing, ClientError, EndpointStatus, Failure, SequencePart
from charonia.client.balancing import transport as balanced

MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        descriptor = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        answers = []
        for request in requests:
            os.write(descriptor, (request.request_id() + "\\n").encode())
            time.sleep(0.002)
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
        os.close(descriptor)
        return answers
"""
MINUTE = "max_sequence_idle_microseconds: 60000000 direct { }"
CALLERS = 16
BALANCING = Balancing(stall_s=0.5, probe_timeout_s=0.5, eject_s=0.3, eject_s_max=1.0)
PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])


FAILED_MAX = 1000
"""With so many errors, no more answers are waited for."""


class Load:
    """Callers that send one request after the other."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.done: list[str] = []
        self.failed: dict[str, ClientError] = {}
        self._number = 0
        self._is_over = False

    async def _call(self) -> None:
        while not self._is_over:
            self._number += 1
            name = str(self._number)
            value = np.array([self._number], np.float32)
            try:
                result = await self.client.infer("counted", {"INPUT0": value}, request_id=name, timeout_s=200)
                assert result["OUTPUT0"][0] == value[0]
                self.done.append(name)
            except ClientError as error:
                self.failed[name] = error

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        callers = [asyncio.create_task(self._call()) for _ in range(CALLERS)]
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(*callers)

    async def more(self, count: int) -> None:
        """Wait until so many more requests were answered."""
        wanted = len(self.done) + count
        while len(self.done) < wanted:
            assert len(self.failed) < FAILED_MAX, self.failed
            await asyncio.sleep(0.01)

    async def until(self, condition: Callable[[EndpointStatus], bool]) -> None:
        """Wait until it holds for the first server."""
        await until(lambda: condition(self.client.endpoints()[0]))


@pytest.fixture
def executed(tmp_path: Path) -> Callable[[], Counter[str]]:
    return lambda: Counter((tmp_path / "executed").read_text().split())


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    code = MODEL.format(path=str(tmp_path / "executed"))
    config = identity_pbtxt("python", dims=(1,), max_batch_size=0)
    write_model(tmp_path / "models", "counted", code, config=config)
    return tmp_path / "models"


def url(server: ServeProcess, protocol: str) -> str:
    return f"{protocol}://{server.http if protocol == 'http' else server.grpc}"


def nothing_ran_twice(load: Load, executed: Counter[str]) -> None:
    assert set(executed.values()) == {1}
    assert set(load.done) <= set(executed)


@PROTOCOLS
def test_a_server_that_is_killed_costs_only_what_it_was_working_on(
    repository: Path, executed: Callable[[], Counter[str]], protocol: str
) -> None:
    async def scenario(servers: list[ServeProcess]) -> None:
        urls = [url(server, protocol) for server in servers]
        async with AsyncClient(urls, balancing=BALANCING) as client:
            load = Load(client)
            async with load.running():
                await load.more(300)
                await asyncio.to_thread(servers[0].kill)
                await load.more(300)
                await load.until(lambda status: not status.is_in)
                with ServeProcess(repository, *_ports(urls[0], protocol)):
                    await load.until(lambda status: status.is_in)
                    await load.more(300)
                    load._is_over = True
            assert {error.failure for error in load.failed.values()} <= {Failure.RESET}
            assert len(load.failed) <= CALLERS
            nothing_ran_twice(load, executed())

    with ExitStack() as stack:
        asyncio.run(scenario([stack.enter_context(ServeProcess(repository)) for _ in range(3)]))


def _ports(url: str, protocol: str) -> tuple[str, ...]:
    return (f"--{protocol}-port={url.rsplit(':', 1)[1]}",)


@PROTOCOLS
def test_a_server_that_stands_still_gets_no_more_requests_and_is_back_when_it_goes_on(
    repository: Path, executed: Callable[[], Counter[str]], protocol: str
) -> None:
    async def scenario(servers: list[ServeProcess]) -> None:
        async with AsyncClient([url(server, protocol) for server in servers], balancing=BALANCING) as client:
            load = Load(client)
            async with load.running():
                await load.more(300)
                servers[0].process.send_signal(signal.SIGSTOP)
                await load.until(lambda status: not status.is_in)
                await load.more(300)
                servers[0].process.send_signal(signal.SIGCONT)
                await load.until(lambda status: status.is_in)
                await load.more(300)
            assert load.failed == {}
            nothing_ran_twice(load, executed())

    with ExitStack() as stack:
        asyncio.run(scenario([stack.enter_context(ServeProcess(repository)) for _ in range(3)]))


@PROTOCOLS
@pytest.mark.parametrize("shape", SHAPES)
def test_a_server_that_is_drained_loses_no_request_that_it_received(
    repository: Path, executed: Callable[[], Counter[str]], protocol: str, shape: Shape
) -> None:
    async def scenario(servers: list[ServeProcess]) -> None:
        async with AsyncClient([url(server, protocol) for server in servers], balancing=BALANCING) as client:
            load = Load(client)
            async with load.running():
                await load.more(300)
                await asyncio.to_thread(servers[0].stop)
                await load.until(lambda status: not status.is_in)
                await load.more(300)
            # Over HTTP/1.1 nobody tells whether a request was read from a connection that ends: the server may have
            # closed it, or its socket before it was accepted, while the request was on its way.
            lost = {name: str(error) for name, error in load.failed.items()}
            assert len(lost) <= (CALLERS if protocol == "http" else 0), lost
            assert all("closed the connection before any response" in text for text in lost.values()), lost
            assert not lost.keys() & executed().keys()
            nothing_ran_twice(load, executed())

    with ExitStack() as stack:
        asyncio.run(scenario([stack.enter_context(ServeProcess(repository, *shape)) for _ in range(3)]))


def test_a_name_finds_new_servers_while_requests_run(
    repository: Path, executed: Callable[[], Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balanced, "RESOLVE_AGAIN_S", 0.05)
    addresses, allowed = ["127.0.0.1"], ("--allowed-hosts=models.test",)

    async def resolve(name: str, port: int) -> list[str]:
        return addresses

    async def scenario(server: ServeProcess) -> None:
        port = server.http.rsplit(":", 1)[1]
        async with AsyncClient(f"dns+http://models.test:{port}", balancing=Balancing(resolve_s=0.1)) as client:
            assert client._servers._all is not None
            client._servers._all._resolve = resolve
            load = Load(client)
            async with load.running():
                await load.more(100)
                addresses[:] = ["127.0.0.2", "127.0.0.3"]
                with ServeProcess(repository, f"--http-port={port}", "--http-address=127.0.0.2", *allowed):
                    await until(lambda: len(client.endpoints()) >= 2)
                    await load.more(200)  # nobody listens at the other one
                    addresses[:] = ["127.0.0.1"]
                    await until(lambda: len(client.endpoints()) <= 1)
                    await load.more(100)
            assert load.failed == {}
            nothing_ran_twice(load, executed())

    with ServeProcess(repository, *allowed) as server:
        asyncio.run(scenario(server))


@PROTOCOLS
def test_a_sequence_of_a_killed_server_says_so_and_begins_again_elsewhere(tmp_path: Path, protocol: str) -> None:
    write_model(tmp_path, "sum", RUNNING_SUM, config=sequence_pbtxt(MINUTE, max_batch_size=16))
    names = range(1, 17)

    async def scenario(servers: list[ServeProcess]) -> None:
        async with AsyncClient([url(server, protocol) for server in servers], balancing=BALANCING) as client:

            async def add(name: int, *, start: bool = False) -> int:
                part = SequencePart(name, start=start)
                result = await client.infer("sum", {"INPUT": np.array([[2]], np.int32)}, sequence=part)
                return int(result["OUTPUT"][0, 0])

            assert {await add(name, start=True) for name in names} == {2}
            await asyncio.to_thread(servers[0].kill)
            await asyncio.sleep(0.1)  # until the connections have ended
            ended = []
            for name in names:
                try:
                    assert await add(name) == 4
                except ClientError as error:
                    ended.append(error.message)
                    assert await add(name, start=True) == 2
            assert 0 < len(ended) < len(names)
            assert all("is gone; start a new sequence" in message for message in ended), ended

    with ExitStack() as stack:
        asyncio.run(scenario([stack.enter_context(ServeProcess(tmp_path)) for _ in range(2)]))


def test_a_hedged_request_does_not_wait_for_a_server_that_stands_still(
    repository: Path, executed: Callable[[], Counter[str]]
) -> None:
    balancing = Balancing(hedge_after_s=0.1, idempotent_models=["counted"])

    async def scenario(servers: list[ServeProcess]) -> None:
        async with AsyncClient([url(server, "grpc") for server in servers], balancing=balancing) as client:
            servers[0].process.send_signal(signal.SIGSTOP)
            for number in range(12):
                value = np.array([number], np.float32)
                await asyncio.wait_for(client.infer("counted", {"INPUT0": value}, request_id=str(number)), 20)
            servers[0].process.send_signal(signal.SIGCONT)
            await asyncio.to_thread(servers[0].stop)
        assert executed().total() == 12  # it has greeted nobody, so nothing was sent there

    with ExitStack() as stack:
        asyncio.run(scenario([stack.enter_context(ServeProcess(repository)) for _ in range(2)]))
