"""The server may open as many files as the system's hard limit allows, and as many connections as its options say."""

import http.client
import resource
import socket
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as grpcclient
from tests.support.process import ServeProcess
from tritonclient.utils import InferenceServerException


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        with ServeProcess(tmp_path) as server:
            assert psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_live(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/v2/health/live")
    response = connection.getresponse()
    response.read()
    return response.status == 200


def test_one_connection_too_many_is_refused_while_the_others_are_served(tmp_path: Path) -> None:
    limits = ("--http-max-connections=1", "--grpc-max-connections=1")
    with ServeProcess(tmp_path, *limits) as server, grpcclient.InferenceServerClient(server.grpc) as over_grpc:
        over_http = http.client.HTTPConnection(server.http)
        assert is_live(over_http)
        assert over_grpc.is_server_live()

        host, port = server.http.split(":")
        with socket.create_connection((host, int(port))) as refused:
            answer = b"".join(iter(lambda: refused.recv(4096), b""))
        own_connection = [("grpc.use_local_subchannel_pool", 1)]
        with (
            grpcclient.InferenceServerClient(server.grpc, channel_args=own_connection) as other,
            pytest.raises(InferenceServerException, match="UNAVAILABLE"),
        ):
            other.is_server_live()

        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"the server has too many connections" in answer
        assert is_live(over_http)
        assert over_grpc.is_server_live()
        over_http.close()
