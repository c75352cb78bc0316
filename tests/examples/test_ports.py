import socket

import pytest
from examples.demo.server import Ports, demand_free, free_ports

from charonia import ServingError


def test_free_ports_are_free_and_different() -> None:
    ports = free_ports()

    demand_free(ports)

    assert len({ports.http, ports.grpc, ports.metrics} - {0}) == 3


def test_a_server_that_is_there_already_is_refused() -> None:
    free = free_ports()
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]

        with pytest.raises(ServingError, match=f"^in use by another program: port {port}") as refused:
            demand_free(Ports(free.http, port, free.metrics))

    assert "--once" in refused.value.hint
