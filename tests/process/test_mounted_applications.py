"""ASGI applications beside the models: FastAPI over the server's port, with its WebSockets, keys and limits."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.support.process import SHAPES, ServeProcess, eventually
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

APPLICATION = """
import os

import charonia
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import StreamingResponse


@charonia.model
def greet(name: str) -> str:
    return f"Hello, {name}"


app = FastAPI()


@app.get("/greeting")
async def greeting(name: str, request: Request):
    answer = await charonia.call_async("greet", name=name)
    headers = dict(request.headers)
    return {"text": answer["output"][0].decode(), "url": str(request.url_for("greeting")), "headers": headers}


@app.get("/sync")
def sync(name: str):
    return charonia.call("greet", name=name)["output"][0].decode()


@app.post("/size")
async def size(request: Request):
    return len(await request.body())


@app.get("/pieces")
def pieces():
    return StreamingResponse(iter(["a", "b", "c"]), headers={"X-Pieces": "3"})


@app.get("/status/{code}")
def status(code: int):
    return Response(status_code=code)


@app.get("/pid")
def pid():
    return os.getpid()


@app.websocket("/echo")
async def echo(socket: WebSocket):
    await socket.accept()
    while True:
        answer = await charonia.call_async("greet", name=await socket.receive_text())
        await socket.send_text(answer["output"][0].decode())
"""

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("application") / "service.py"
    path.write_text(APPLICATION)
    return path


@pytest.fixture(scope="module", params=SHAPES)
def server(file: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with ServeProcess(file, "--mount=app:/ui", "--http-max-input-size=100000", *request.param) as started:
        yield started


def test_an_application_answers_below_its_path_and_calls_models(server: ServeProcess) -> None:
    with requests.Session() as session:
        forged = {"X-Forwarded-For": "6.6.6.6"}
        found = session.get(f"http://{server.http}/ui/greeting", params={"name": "Ada"}, headers=forged).json()

        assert (found["text"], found["url"]) == ("Hello, Ada", f"http://{server.http}/ui/greeting")
        assert found["headers"]["x-forwarded-for"] == "127.0.0.1"
        assert session.get(f"http://{server.http}/ui/sync?name=Bob").json() == "Hello, Bob"
        assert session.post(f"http://{server.http}/ui/size", data=b"x" * 90_000).json() == 90_000
        assert session.post(f"http://{server.http}/ui/size", data=b"x" * 110_000).status_code in (400, 413)
        pieces = session.get(f"http://{server.http}/ui/pieces")
        assert (pieces.text, pieces.headers["X-Pieces"]) == ("abc", "3")
        assert [session.get(f"http://{server.http}/ui/status/{code}").status_code for code in (204, 304, 418)] == [
            204,
            304,
            418,
        ]
        assert session.get(f"http://{server.http}/ui", allow_redirects=False).headers["Location"] == "/ui/"
        assert session.get(f"http://{server.http}/uix").status_code == 404
        assert session.get(f"http://{server.http}/v2/models/greet").json()["name"] == "greet"


def test_its_websockets_work_and_other_sites_get_none(server: ServeProcess) -> None:
    url = f"ws://{server.http}/ui/echo"

    async def talk() -> list[Any]:
        async with connect(url, origin=f"http://{server.http}", max_size=None) as socket:  # type: ignore[arg-type]
            await socket.send("Ada")
            found: list[Any] = [await socket.recv()]
            for _ in range(4):
                await socket.send("x" * 500_000)
            found += [len(await socket.recv()) for _ in range(4)]
        for origin, path in (("http://other.org", "/ui/echo"), (None, "/ui/none"), (None, "/v2")):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(f"ws://{server.http}{path}", origin=origin):  # type: ignore[arg-type]
                    pass
            found.append(refused.value.response.status_code)
        return found

    assert asyncio.run(talk()) == ["Hello, Ada", *[500_007] * 4, 403, 403, 200]


def test_an_application_that_ends_is_started_again(server: ServeProcess) -> None:
    url = f"http://{server.http}/ui/pid"
    first = requests.get(url).json()

    os.kill(first, signal.SIGKILL)

    assert eventually(lambda: (answer := requests.get(url)).status_code == 200 and answer.json() != first)


def test_an_application_requires_keys_and_known_hosts(file: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"a infer {KEY}\nb read {KEY[::-1]}\n")
    keys.chmod(0o600)
    with ServeProcess(file, "--mount=app:/ui", f"--api-keys={keys}", "--allowed-hosts=known.org") as server:
        url, own = f"http://{server.http}/ui/greeting?name=a", {"X-API-Key": KEY}
        answers = [
            requests.get(url, headers=headers).status_code
            for headers in ({}, {"X-API-Key": KEY[::-1]}, own, own | {"Host": "other.org"}, own | {"Host": "known.org"})
        ]

        assert answers == [401, 403, 200, 403, 200]
        assert "x-api-key" not in requests.get(url, headers=own).json()["headers"]

        async def connects(headers: dict[str, str]) -> bool:
            try:
                async with connect(f"ws://{server.http}/ui/echo", additional_headers=headers):
                    return True
            except InvalidStatus:
                return False

        assert [asyncio.run(connects(headers)) for headers in ({}, own)] == [False, True]


@pytest.mark.parametrize(
    ("mount", "problem"),
    [
        ("app:/v2/ui", "with a path that the server does not have"),
        ("other:/ui", "has no application 'other'"),
        ("none.py:app:/ui", "expected a Python file with 'app'"),
    ],
)
def test_a_mount_that_cannot_be_ends_the_start(file: Path, mount: str, problem: str) -> None:
    with pytest.raises(RuntimeError, match=problem), ServeProcess(file, f"--mount={mount}"):
        pass
