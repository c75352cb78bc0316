"""Restrictions, API keys and forwarded headers, with the stock clients."""

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.models import answering, write_model
from tests.support.process import SHAPES, ServeProcess, Shape
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

from charonia.cli.main import main

PARAMETERS = answering("np.array([request.parameters().encode()], object)", "PARAMETERS")
CONFIG = """
backend: "python"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "PARAMETERS" data_type: TYPE_STRING dims: [ -1 ] }
"""
SECRET = "x" * 20
PATTERN = "^(x-|my_|priority)"

PROTOCOLS = pytest.mark.parametrize("module", [httpclient, grpcclient], ids=["http", "grpc"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_model(made, "parameters", PARAMETERS, config=CONFIG)
    return made


@pytest.fixture(scope="module", params=SHAPES)
def restricted(folder: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    options = [f"--http-header-forward-pattern={PATTERN}", f"--grpc-header-forward-pattern={PATTERN}"]
    for option in ("--http-restricted-api", "--grpc-restricted-protocol"):
        options += [f"{option}=model-repository,statistics:Admin={SECRET}", f"{option}=model-config:Config=value"]
    with ServeProcess(folder, *options, *request.param) as started:
        yield started


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.txt"


@pytest.fixture(scope="module")
def made_keys(keys: Path) -> dict[str, str]:
    keys.write_text(f"infer infer {'i' * 20}\nread read {'r' * 20}\nadmin admin {'a' * 20}\n")
    return {"infer": "i" * 20, "read": "r" * 20, "admin": "a" * 20}


@pytest.fixture(scope="module", params=SHAPES)
def keyed(
    folder: Path, keys: Path, made_keys: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[ServeProcess]:
    options = (f"--api-keys={keys}", "--model-control-mode=explicit", "--load-model=*")
    with ServeProcess(folder, *options, *request.param) as started:
        yield started


def client_of(module: Any, server: ServeProcess) -> Any:
    return module.InferenceServerClient(server.http if module is httpclient else server.grpc)


def infer(module: Any, client: Any, headers: dict[str, str] | None = None, **more: Any) -> Any:
    given = infer_input(module, "INPUT0", np.zeros(1, np.float32))
    return json.loads(client.infer("parameters", [given], headers=headers, **more).as_numpy("PARAMETERS")[0])


def status_of(error: InferenceServerException) -> str:
    return str(error.status())


# Restrictions.


@PROTOCOLS
def test_restricted_parts_ask_for_their_header(restricted: ServeProcess, module: Any) -> None:
    is_http = module is httpclient
    prefix = "" if is_http else "triton-grpc-protocol-"
    with client_of(module, restricted) as client:
        for call in (client.get_model_repository_index, client.get_inference_statistics):
            for wrong in ({}, {f"{prefix}admin": "wrong"}, {"admin-of-what": SECRET}):
                with pytest.raises(InferenceServerException, match="is restricted, expecting header") as caught:
                    call(headers=wrong)
                assert f"'{prefix}Admin'" in caught.value.message()
                assert status_of(caught.value) == ("403" if is_http else "StatusCode.UNAVAILABLE")
            assert call(headers={f"{prefix}admin": SECRET}) is not None
        with pytest.raises(InferenceServerException, match="is restricted"):
            client.load_model("parameters", headers={f"{prefix}config": "value"})
        assert client.get_model_config("parameters", headers={f"{prefix}config": "value"}) is not None
        assert client.is_server_ready()
        assert client.get_model_metadata("parameters") is not None
        assert infer(module, client) == {}


# Forwarded headers.


@PROTOCOLS
def test_headers_that_match_become_parameters_of_the_request(restricted: ServeProcess, module: Any) -> None:
    with client_of(module, restricted) as client:
        sent = {"x-user": "ann", "my_header": "1", "other": "no"}

        assert infer(module, client, sent) == {"x-user": "ann", "my_header": "1"}
        assert infer(module, client, {"x-user": "ann"}, parameters={"x-user": "bob", "a": 1}) == {
            "x-user": "ann",
            "a": 1,
        }


def test_generate_forwards_headers_too(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path, "parameters", PARAMETERS, config=CONFIG.replace("TYPE_FP32", "TYPE_INT32"))
    with ServeProcess(tmp_path, "--http-header-forward-pattern=x-user") as server:
        request = urllib.request.Request(
            f"http://{server.http}/v2/models/parameters/generate", b'{"INPUT0": 1}', {"X-User": "ann"}
        )
        with urllib.request.urlopen(request, timeout=200) as answer:
            assert json.loads(json.loads(answer.read())["PARAMETERS"]) == {"X-User": "ann"}


def test_headers_are_forwarded_on_streams(restricted: ServeProcess) -> None:
    answers: Any = queue.Queue()
    with client_of(grpcclient, restricted) as client:
        client.start_stream(lambda result, error: answers.put(error or result), headers={"x-user": "ann"})
        client.async_stream_infer("parameters", [infer_input(grpcclient, "INPUT0", np.zeros(1, np.float32))])
        answer = answers.get(timeout=200)
        client.stop_stream()

    assert json.loads(answer.as_numpy("PARAMETERS")[0]) == {"x-user": "ann"}


# Keys.


@PROTOCOLS
def test_a_call_needs_a_key_with_its_scope(keyed: ServeProcess, made_keys: dict[str, str], module: Any) -> None:
    is_http = module is httpclient
    with client_of(module, keyed) as client:
        calls: dict[str, Callable[[dict[str, str]], Any]] = {
            "infer": lambda headers: infer(module, client, headers),
            "read": lambda headers: client.get_model_metadata("parameters", headers=headers),
            "admin": lambda headers: client.unload_model("none", headers=headers),
        }
        for needed, call in calls.items():
            for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
                with pytest.raises(InferenceServerException, match="API key") as caught:
                    call(headers)
                assert status_of(caught.value) == ("401" if is_http else "StatusCode.UNAUTHENTICATED")
            for name, key in made_keys.items():
                for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
                    if name in (needed, "admin"):
                        call(headers)
                    else:
                        with pytest.raises(InferenceServerException, match=f"needs the scope '{needed}'") as caught:
                            call(headers)
                        assert status_of(caught.value) == ("403" if is_http else "StatusCode.PERMISSION_DENIED")


def test_a_client_without_a_key_is_told_how_to_show_one(keyed: ServeProcess) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://{keyed.http}/v2", timeout=200)

    assert caught.value.code == 401
    assert caught.value.headers["WWW-Authenticate"] == "Bearer"
    caught.value.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_change_of_the_file_counts_without_a_restart(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: Shape
) -> None:
    path, processes = tmp_path / "keys", 2 if shape else 1  # each of which reads the file
    assert main(["key", "first", "infer", "--file", str(path)]) == 0
    first = capsys.readouterr().out.strip()
    with ServeProcess(folder, f"--api-keys={path}", *shape) as server, client_of(httpclient, server) as client:
        assert infer(httpclient, client, {"x-api-key": first}) == {}
        assert main(["key", "second", "infer", "--file", str(path)]) == 0
        second = capsys.readouterr().out.strip()
        assert server.logs("2 read from", times=processes)
        assert infer(httpclient, client, {"x-api-key": second}) == {}
        lines = path.read_text().splitlines()
        path.write_text("\n".join(["nonsense", *lines[1:]]))
        assert server.logs("line 1: expected NAME SCOPES KEY", times=processes)
        assert infer(httpclient, client, {"x-api-key": second}) == {}
        with pytest.raises(InferenceServerException, match="not known"):
            infer(httpclient, client, {"x-api-key": first})
        path.unlink()
        assert server.logs("there is none in", times=processes)
        with pytest.raises(InferenceServerException, match="not known"):
            infer(httpclient, client, {"x-api-key": second})
    assert first not in server.log
    assert second not in server.log


@pytest.mark.parametrize("content", [None, "a b c"])
def test_a_file_that_cannot_be_used_is_reported_at_start(folder: Path, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)

    with pytest.raises(RuntimeError, match="--api-keys"), ServeProcess(folder, f"--api-keys={path}"):
        pytest.fail("it started")
