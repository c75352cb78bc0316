import socket

import pytest

from charonia.core.errors import ServingError
from charonia.demo.process import Ports, demand_free, free_ports


def test_ports_that_nobody_listens_on_are_fine() -> None:
    ports = free_ports()

    demand_free(ports)

    assert len({ports.http, ports.grpc, ports.metrics} - {0}) == 3


def test_a_server_that_is_there_already_is_not_taken_for_ours() -> None:
    free = free_ports()
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]

        with pytest.raises(ServingError, match=f"^in use by another program: port {port}") as refused:
            demand_free(Ports(free.http, port, free.metrics))

    assert "--once" in refused.value.hint
