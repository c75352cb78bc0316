"""The client against a server in a process of its own, which dies."""

import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import ServeProcess, eventually

from charonia.client import Client, ClientError, Failure

SLOW = """
parameters { key: "execute_delay_ms" value { string_value: "60000" } }
"""
ROW = np.zeros((1, 16), np.float32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "quick", b"", config=identity_pbtxt())
    write_model(folder, "slow", b"", config=identity_pbtxt() + SLOW)
    return folder


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_that_is_killed_fails_what_is_in_flight_and_leaves_no_socket(repository: Path, protocol: str) -> None:
    with ServeProcess(repository) as server:
        url = f"{protocol}://{server.http if protocol == 'http' else server.grpc}"
        with Client(url) as client:
            assert client.infer("quick", {"INPUT0": ROW})["OUTPUT0"].shape == (1, 16)
            caught: list[ClientError] = []

            def wait() -> None:
                try:
                    client.infer("slow", {"INPUT0": ROW})
                except ClientError as error:
                    caught.append(error)

            threads = [threading.Thread(target=wait) for _ in range(2)]
            for thread in threads:
                thread.start()
            assert eventually(lambda: bool(server.pending("slow")))  # one waits, so the other runs
            server.kill()
            for thread in threads:
                thread.join()

            assert [error.failure for error in caught] == [Failure.RESET] * 2
            with pytest.raises(ClientError, match="no connection to") as refused:
                client.infer("quick", {"INPUT0": ROW})
            assert refused.value.failure is Failure.REFUSED
    port = int(url.rsplit(":", 1)[1])
    left = [c for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port]
    assert [c for c in left if c.status != "TIME_WAIT"] == []
