"""A page of another site in Chromium, which tries to change a server that listens on the same machine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser
from tests.support.browser import chromium, needed, new_tab
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess, Shape

pytestmark = needed

RUNS = """
import pathlib
pathlib.Path({path!r}).write_text("ran")
class TritonPythonModel:
    def execute(self, requests):
        return []
"""
TRIES = """
async ([base, calls]) => {
    const answers = []
    for (const [path, body] of calls) {
        for (const mode of ["no-cors", "cors"]) {
            try {
                const headers = {"Content-Type": "text/plain"}
                const answer = await fetch(base + path, {method: "POST", mode, body, headers})
                answers.push(answer.type)
            } catch (error) {
                answers.push("refused")
            }
        }
    }
    const form = document.createElement("form")
    form.method = "POST"
    form.enctype = "text/plain"
    form.action = base + calls[0][0]
    form.target = "answer"
    document.body.append(form)
    form.submit()
    await new Promise(done => document.querySelector("iframe").addEventListener("load", done, {once: true}))
    return answers
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@contextmanager
def hostile_site() -> Iterator[str]:
    """Serve an empty page from another port of this machine: the same site, but another origin."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'<!doctype html><iframe name="answer"></iframe>'
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{site.server_port}"
        finally:
            site.shutdown()
            thread.join()


def ready(server: ServeProcess) -> str:
    with urlopen(Request(f"http://{server.http}/v2/repository/index", method="POST", data=b"{}")) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_page_of_another_site_changes_nothing(browser: Browser, tmp_path: Path, shape: Shape, host: str) -> None:
    write_model(tmp_path / "models", "good", b"", config=identity_pbtxt(dims=(4,), max_batch_size=0))
    write_model(tmp_path / "models", "evil", RUNS.format(path=str(tmp_path / "ran")), config='backend: "python"')
    arguments = ("--model-control-mode=explicit", "--load-model=good", "--allow-client-shm=true", *shape)
    calls = [
        ("/v2/repository/models/evil/load", ""),
        ("/v2/repository/models/good/unload", ""),
        ("/v2/models/good/traffic", '{"weights": {"1": 1}}'),
        ("/v2/systemsharedmemory/region/r/register", '{"key": "/r", "byte_size": 4}'),
        ("/v2/logging", '{"log_verbose_level": 1}'),
        ("/v2/models/good/infer", '{"inputs": []}'),
    ]
    with ServeProcess(tmp_path / "models", *arguments) as server, hostile_site() as site:
        before = ready(server)
        tab = new_tab(browser)
        tab.goto(site)
        answers = tab.evaluate(TRIES, [f"http://{server.http.replace('127.0.0.1', host)}", calls])
        tab.context.close()

        assert set(answers) == {"opaque", "refused"}  # the page learns nothing either way
        assert ready(server) == before
        assert not (tmp_path / "ran").exists()
        with urlopen(f"http://{server.http}/v2/systemsharedmemory/status") as status:
            assert status.read() == b"[]"
