"""The example of iterative batching: both models make the same texts, and only one lets short texts pass long ones."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType

import openai
import pytest
from tests.support.gate import Gate, gated
from tests.support.process import ServeProcess, eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "iterative"
NOTE_THE_END = """
    if text.is_done:
        with open(__file__ + ".ends", "a") as ends:
            print(pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().item().decode(), file=ends)
"""
PROMPTS = ["Once upon a time", "In 1984", "?", "a b c d e f g h i j k l m n o p q r s t u v w x y z", "The end."]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's models, which can be held up and note the order in which texts end."""
    for name in ("torch", "safetensors", "tokenizers"):
        pytest.importorskip(name, reason="the example needs it")
    repository = tmp_path_factory.mktemp("texts")
    command = [sys.executable, str(EXAMPLE / "make_repository.py"), str(repository), "--tiny"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert made.returncode == 0, made.stderr
    for folder in repository.glob("*/1"):
        (folder / "model.py").write_text(gated((folder / "model.py").read_text()))
        (folder / "answers.py").write_text((folder / "answers.py").read_text() + NOTE_THE_END)
    return repository


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServeProcess]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")  # the network is too small for more
        with ServeProcess(repository) as running:
            yield running


@pytest.fixture(scope="module")
def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("load", EXAMPLE / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pieces(server: ServeProcess, load: ModuleType, model: str, prompt: str, tokens: int) -> Iterator[str]:
    for piece, _ in load.generate(f"http://{server.http}", model, load.Request(0, prompt, tokens)):
        yield piece


def text(server: ServeProcess, load: ModuleType, model: str, prompt: str, tokens: int) -> str:
    made = list(pieces(server, load, model, prompt, tokens))
    assert len(made) == tokens
    return "".join(made)


def test_both_models_make_the_same_texts_alone_and_together(server: ServeProcess, load: ModuleType) -> None:
    alone = [text(server, load, "simple", prompt, 20 + len(prompt)) for prompt in PROMPTS]

    with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
        found = {
            (model, place): pool.submit(text, server, load, model, prompt, 20 + len(prompt))
            for place, prompt in enumerate(PROMPTS)
            for model in ("simple", "iterative")
        }

    assert len(set(alone)) == len(PROMPTS)
    for (_, place), made in found.items():
        assert made.result() == alone[place]


@pytest.mark.parametrize(("model", "first"), [("simple", "long"), ("iterative", "short")])
def test_only_in_the_iterative_model_a_short_text_passes_a_long_one(
    server: ServeProcess, repository: Path, load: ModuleType, model: str, first: str
) -> None:
    gate = Gate(repository / model / "1")
    before = gate.runs
    with ThreadPoolExecutor(2) as pool:
        with gate.closed():
            long = pool.submit(text, server, load, model, "long", 100)
            assert eventually(lambda: gate.runs > before)
            short = pool.submit(text, server, load, model, "short", 3)
            assert eventually(lambda: server.pending(model) > 0)
        assert long.result()
        assert short.result()

    def ends() -> list[str]:
        lines = (repository / model / "1" / "answers.py.ends").read_text().splitlines()
        return [line for line in lines if line in ("long", "short")]

    assert eventually(lambda: len(ends()) == 2)  # an end is noted after its text has been sent
    assert ends()[0] == first


def test_the_row_of_a_client_that_has_left_is_free_for_the_next(server: ServeProcess, load: ModuleType) -> None:
    def rows() -> list[object]:
        found: list[object] = server.ask("/v2/models/iterative/sequences")["instances"][0]["sequences"]
        return found

    leaving = HTTPConnection(server.http)
    body = {"text_input": "Once upon a time", "max_tokens": 1000, "ignore_eos": True}
    leaving.request("POST", "/v2/models/iterative/generate_stream", json.dumps(body))
    with leaving.getresponse() as response:
        assert response.readline().startswith(b"data: ")
        assert len(rows()) == 1
    leaving.close()

    assert eventually(lambda: not rows())
    assert text(server, load, "iterative", "The end.", 30) == text(server, load, "simple", "The end.", 30)


@pytest.mark.parametrize("model", ["simple", "iterative"])
def test_a_request_that_cannot_be_fulfilled_is_refused_with_the_reason(
    server: ServeProcess, load: ModuleType, model: str
) -> None:
    for prompt, tokens, reason in (
        *(
            ("The end.", -1, "max_tokens: expected a positive number, got -1"),
            ("", 3, "text_input: expected 1 to 1024"),
        ),
        ("x" * 1020, 5, "text_input: expected 1 to 1024 tokens together with the 5 of max_tokens, got 1020"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            list(pieces(server, load, model, prompt, tokens))

    assert text(server, load, model, "x" * 1019, 5)


@pytest.mark.parametrize("model", ["simple", "iterative"])
def test_clients_of_openais_api_set_its_request_parameters(server: ServeProcess, load: ModuleType, model: str) -> None:
    expected = text(server, load, model, "The end.", 12)
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="unused", max_retries=0) as client:
        whole = client.completions.create(
            model=model, prompt="The end.", max_tokens=12, extra_body={"ignore_eos": True}
        )
        stream = client.completions.create(
            model=model, prompt="The end.", max_tokens=12, stream=True, extra_body={"ignore_eos": True}
        )
        chat = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=5,
            stream=True,
            extra_body={"ignore_eos": True},
        )

        assert whole.choices[0].text == expected
        assert "".join(chunk.choices[0].text for chunk in stream) == expected
        assert len([chunk for chunk in chat if chunk.choices[0].delta.content]) == 5
        with pytest.raises(openai.BadRequestError, match="text_input: expected 1 to 1024 tokens"):
            client.completions.create(model=model, prompt="x" * 1020, max_tokens=5)


@pytest.mark.parametrize("arrivals", ["--clients=4", "--rate=50"])
def test_the_load_script_measures_both_models(server: ServeProcess, arrivals: str) -> None:
    command = [sys.executable, str(EXAMPLE / "load.py"), f"--url=http://{server.http}", arrivals]
    ran = subprocess.run(
        [*command, "--requests=8", "--rounds=1"], capture_output=True, text=True, timeout=200, check=True
    )

    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines()]
    assert [row[0] for row in rows[2:]] == [
        *("simple, round 1", "iterative, round 1", "simple, median", "iterative, median")
    ]
    assert all(int(cell.replace(",", "")) > 0 for row in rows[2:] for cell in row[1:])
