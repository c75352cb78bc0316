"""Real clients of OpenAI's API, each in `drive.py` in an environment of the clients, against SmolLM2 in llama.cpp.

LlamaIndex needs another version of the package openai, so its packages are in a folder of the environment, which comes
first. The AI SDK runs in Node, with its packages in another folder, and does the same in `drive.mjs`.
"""

import json
import os
import subprocess
from collections import ChainMap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.process.test_llama_cpp_server import TOOLS_TEMPLATE, place
from tests.support import smollm2
from tests.support.process import ServeProcess, eventually

PYTHON = os.environ.get("CHARONIA_OPENAI_CLIENTS", "")
NEEDED = pytest.mark.skipif(not PYTHON, reason="needs CHARONIA_OPENAI_CLIENTS, a Python with the clients")
PAGE = Path(__file__).parents[2] / "docs" / "openai.md"

ALL = ("chat", "stream", "tools", "structured", "error", "cancel")
WORKS = {
    "openai": ALL,
    "openai-responses": ALL,
    "langchain-openai": ALL,
    "litellm": ALL,
    "instructor": ALL,
    "pydantic-ai": ("chat", "stream", "structured", "error", "cancel"),
    "openai-agents": ("chat", "stream", "structured", "error", "cancel"),
    "smolagents": ("chat", "stream", "structured", "error", "cancel"),
    "haystack": ("chat", "stream", "tools", "structured", "error"),
    "dspy": ("chat", "error"),
    "llama-index": ("chat", "stream", "structured", "error"),
    "ai-sdk": ALL,
}
"""What is tried with each client, and works."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    repository = tmp_path_factory.mktemp("clients")
    file = smollm2.gguf()
    assert file is not None
    place(
        repository / "smol",
        file,
        {"n_threads": 1, "n_parallel": 1, "n_ctx": 2048, "n_batch": 64, "chat_template": TOOLS_TEMPLATE},
    )
    with ServeProcess(repository) as running:
        yield running


def cancelled(server: ServeProcess) -> int:
    """Return the number of responses that the engine did not finish."""
    (model,) = server.ask("/v2/models/smol/stats")["model_stats"]
    return sum(each["cancel"]["count"] for each in model["response_stats"].values())


@pytest.fixture(scope="module")
def drive(server: ServeProcess) -> Callable[[str], dict[str, str]]:
    """Returns what became of a client's features. Clients that can share a process do, and most of their imports."""
    alone = ("llama-index", "ai-sdk")
    beside = Path(PYTHON).absolute().parents[1]
    common = (f"http://{server.http}/v1", "smol")

    @cache
    def run(*clients: str) -> dict[str, dict[str, str]]:
        before = cancelled(server)
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command = [PYTHON, str(Path(__file__).with_name("drive.py")), *common, *clients]
        if clients == ("llama-index",):
            environment["PYTHONPATH"] = str(beside / "llama-index")
        if clients == ("ai-sdk",):
            command = ["node", str(Path(__file__).with_name("drive.mjs")), str(beside / "ai-sdk"), *common]
        driven = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert driven.returncode == 0, driven.stderr
        print(driven.stderr)
        cancelling = sum("cancel" in WORKS[client] for client in clients)
        assert eventually(lambda: cancelled(server) >= before + cancelling, 60)
        found = [json.loads(line) for line in driven.stdout.splitlines() if line.startswith("{")]
        return {"ai-sdk": found[-1]} if clients == ("ai-sdk",) else dict(ChainMap(*found))

    def of(client: str) -> dict[str, str]:
        if client in alone and not (beside / client).is_dir():
            pytest.skip(f"{beside} has no {client}: make .venv-clients/ready")
        together = (client,) if client in alone else tuple(each for each in WORKS if each not in alone)
        return run(*together)[client]

    return of


@smollm2.needed
@NEEDED
@pytest.mark.timeout(660)
@pytest.mark.parametrize("client", WORKS)
def test_a_client_works(drive: Callable[[str], dict[str, str]], client: str) -> None:
    assert drive(client) == dict.fromkeys(WORKS[client], "")


def test_the_page_has_the_table_of_clients() -> None:
    rows = [
        tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in PAGE.read_text(encoding="utf-8").splitlines()
    ]

    for client, works in WORKS.items():
        assert (client, *("yes" if feature in works else "" for feature in ALL)) in rows
