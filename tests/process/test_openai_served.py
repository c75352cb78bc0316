"""OpenAI's API with the official client, against a real server: an engine model, and models that are none."""

import asyncio
import fcntl
import http.client
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import openai
import pytest
import tokenizers
import tritonclient.grpc as grpcclient
from tests.support.fork_server import run_command
from tests.support.language_models import write_language_models
from tests.support.process import SHAPES, ServeProcess, eventually
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

KEYS = "caller infer secret-of-the-caller\nreader read secret-of-the-reader\n"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_language_models(folder)
    return folder


@pytest.fixture(scope="module", params=SHAPES)
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with ServeProcess(repository, *request.param) as running:
        yield running


@pytest.fixture
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="unused", max_retries=0) as made:
        yield made


class Terminal:
    """A `charonia` command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._shown = ""

    def __enter__(self) -> Self:
        self._end, terminal = pty.openpty()
        command = [sys.executable, "-m", "charonia", *self._arguments]
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        self._process = subprocess.Popen(command, **streams, start_new_session=True, preexec_fn=_own_terminal)
        os.close(terminal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._end)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, text: str, seconds: float = 30) -> str:
        """Return what was shown up to a text, which has to appear in time."""
        end = time.monotonic() + seconds
        while text not in self._shown:
            left = end - time.monotonic()
            assert left > 0, self._shown
            assert select.select([self._end], [], [], left)[0], self._shown
            self._shown += os.read(self._end, 65_536).decode(errors="replace")
        before, found, self._shown = self._shown.partition(text)
        return before + found


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_models_are_those_that_have_routes(client: openai.OpenAI) -> None:
    listed = [model.id for model in client.models.list()]

    assert sorted(listed) == ["crowd", "crowd:poet", "embedding", "engine", "engine:poet", "plain", "steps", "whole"]
    assert client.models.retrieve("engine:poet").id == "engine:poet"
    assert client.models.retrieve("plain").owned_by == "charonia"


def test_an_engine_answers_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="engine:poet", messages=HELLO)

    assert answer.choices[0].message.content == "chat/completions poet"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10


def test_chunks_of_an_engine_pass_as_they_are(server: ServeProcess) -> None:
    connection = http.client.HTTPConnection(server.http)
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "engine", "messages": HELLO, "stream": 1}))
    refused = connection.getresponse()
    assert (refused.status, json.loads(refused.read())["error"]["param"]) == (400, "stream")

    body = json.dumps({"model": "engine", "messages": HELLO, "stream": True})
    connection.request("POST", "/v1/chat/completions", body)
    response = connection.getresponse()
    events = response.read().decode().split("\n\n")

    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["0 ", "1 ", "2 ", ""]
    assert events[0].startswith('data: {"id": "e-1", "object"')  # with the spaces of the engine
    connection.close()


def test_an_asynchronous_client_streams(server: ServeProcess) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"http://{server.http}/v1", api_key="unused") as client:
            stream = await client.chat.completions.create(model="engine", messages=HELLO, stream=True)
            return [chunk.choices[0].delta.content or "" async for chunk in stream]

    async def ask_many() -> list[list[str]]:
        return await asyncio.gather(*(ask() for _ in range(8)))

    assert asyncio.run(ask_many()) == [["0 ", "1 ", "2 ", ""]] * 8


def test_an_engine_refuses_with_the_field(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="engine", messages=user("refuse"), stream=stream)

        assert refused.value.param == "temperature"
        assert refused.value.type == "invalid_request_error"
        assert "expected 0 to 2" in refused.value.message


def test_after_a_storm_of_cancellations_nothing_is_open(client: openai.OpenAI) -> None:
    def open_in_engine() -> int:
        answer = client.chat.completions.create(model="crowd", messages=HELLO)
        assert answer.model_extra is not None
        return int(answer.model_extra["open"])

    for _ in range(3):
        streams = [client.chat.completions.create(model="crowd", messages=HELLO, stream=True) for _ in range(100)]
        for stream in streams:
            next(iter(stream))
        assert open_in_engine() == 100
        for stream in streams:
            stream.close()
        assert eventually(lambda: open_in_engine() == 0, 20)


def test_a_plain_language_model_chats(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *user("Grüße, 世界 🙂")]

    answer = client.chat.completions.create(model="plain", messages=messages)
    stream = client.chat.completions.create(
        model="plain", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    prompt = "system: Be brief.\n\nuser: Grüße, 世界 🙂\n\nassistant:"
    assert answer.choices[0].message.content == prompt
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(prompt))
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == prompt
    assert "🙂" in pieces
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(prompt)


def test_sampling_parameters_reach_the_model(client: openai.OpenAI) -> None:
    limited = client.completions.create(model="plain", prompt=["abcdef", "uvwxyz"], max_tokens=3, echo=True)
    seeded = client.completions.create(model="plain", prompt="abc", seed=5, n=3)

    assert [choice.text for choice in limited.choices] == ["abcdefabc", "uvwxyzuvw"]
    assert [choice.finish_reason for choice in limited.choices] == ["length", "length"]
    assert [choice.text for choice in seeded.choices] == ["seed 5", "seed 6", "seed 7"]


def test_a_model_that_is_not_decoupled_streams_its_only_response(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="whole", messages=HELLO, stream=True)

    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "<user>hello<assistant>"


def test_an_ensemble_chats_with_the_template_in_its_folder(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="steps", messages=HELLO)
    cut = client.chat.completions.create(model="steps", messages=HELLO, max_tokens=1)

    assert answer.choices[0].message.content == "[hello]"
    assert answer.usage is not None
    assert answer.usage.model_dump(include={"completion_tokens", "estimated"}) == {
        "completion_tokens": 2,
        "estimated": True,
    }
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("[hel", "length")


def test_a_request_loads_its_model(repository: Path) -> None:
    with (
        ServeProcess(repository, "--model-control-mode=auto") as server,
        openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="unused") as client,
    ):
        assert [model.id for model in client.models.list()] == []
        assert client.chat.completions.create(model="engine:poet", messages=HELLO).choices
        assert client.chat.completions.create(model="steps", messages=HELLO).choices
        assert {"engine", "steps"} <= {model.id for model in client.models.list()}


@pytest.mark.parametrize("model", ["plain", "whole", "steps"])
def test_models_that_chat_answer_responses(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.create(model=model, messages=HELLO).choices[0].message.content
    document = client.responses.create(model=model, input="hello")
    with client.responses.stream(model=model, input="hello") as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()

    assert document.output_text == streamed.output_text == chat
    assert (document.status, streamed.status, document.model) == ("completed", "completed", model)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert document.created_at > 0


def test_a_model_without_chats_answers_no_responses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"does not answer /v1/responses") as refused:
        client.responses.create(model="embedding", input="hello")

    assert (refused.value.param, refused.value.type) == ("model", "invalid_request_error")


def test_unknown_models_and_routes_and_models_without_capacity(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="none", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.list()
    with pytest.raises(openai.InternalServerError) as busy:
        client.chat.completions.create(model="plain", messages=user("fail"))

    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert busy.value.status_code == 503


def test_embeddings_of_a_model_that_takes_text(client: openai.OpenAI) -> None:
    texts = ["a", "bb", "ccc", "dddd", "eeeee"]

    as_base64 = client.embeddings.create(model="embedding", input=texts)
    as_floats = client.embeddings.create(model="embedding", input="four", encoding_format="float", dimensions=2)

    assert [each.embedding for each in as_base64.data] == [[len(text), 1, 2] for text in texts]
    assert as_floats.data[0].embedding == pytest.approx([4 / 17**0.5, 1 / 17**0.5])
    with pytest.raises(openai.BadRequestError, match="dimensions: expected at most 3"):
        client.embeddings.create(model="embedding", input="a", dimensions=9)


def test_keys_need_scopes(repository: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    with ServeProcess(repository, f"--api-keys={keys}") as server:

        def client(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=key, max_retries=0)

        with client("secret-of-the-caller") as caller, client("secret-of-the-reader") as reader:
            assert caller.chat.completions.create(model="engine", messages=HELLO).choices
            assert len(list(reader.models.list())) == 8
            with pytest.raises(openai.PermissionDeniedError, match="needs the scope 'infer'"):
                reader.chat.completions.create(model="engine", messages=HELLO)
            with pytest.raises(openai.PermissionDeniedError):
                caller.models.list()
        with client("another") as stranger, pytest.raises(openai.AuthenticationError) as refused:
            stranger.chat.completions.create(model="engine", messages=HELLO)
        assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_key_at_its_limit_is_refused_by_every_protocol(
    repository: Path, tmp_path: Path, shape: tuple[str, ...]
) -> None:
    keys = tmp_path / "keys"
    names = ("http", "grpc", "openai")
    limits = ("requests/min=1", "requests/min=1", "tokens/min=1")
    keys.write_text("".join(f"{n} infer secret-of-the-{n} {limit}\n" for n, limit in zip(names, limits, strict=True)))
    texts = infer_input(grpcclient, "text_input", np.array([b"hello"], object))
    with (
        ServeProcess(repository, f"--api-keys={keys}", *shape) as server,
        grpcclient.InferenceServerClient(server.grpc) as stub,
        openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="secret-of-the-openai", max_retries=0) as client,
    ):

        def generate() -> urllib.request.Request:
            headers = {"x-api-key": "secret-of-the-http"}
            address = f"http://{server.http}/v2/models/whole/generate"
            return urllib.request.Request(address, b'{"text_input": "hello"}', headers)

        with urllib.request.urlopen(generate()) as answered:
            assert answered.status == 200
        with pytest.raises(urllib.error.HTTPError, match="429: Too Many Requests") as over_http:
            urllib.request.urlopen(generate())
        over_http.value.close()
        grpc_key = {"x-api-key": "secret-of-the-grpc"}
        assert stub.infer("whole", [texts], headers=grpc_key)
        with pytest.raises(InferenceServerException, match="limit of 1 requests a minute") as over_grpc:
            stub.infer("whole", [texts], headers=grpc_key)
        assert client.chat.completions.create(model="plain", messages=HELLO).choices
        with pytest.raises(openai.RateLimitError, match="limit of 1 tokens a minute") as over_tokens:
            list(client.chat.completions.create(model="plain", messages=HELLO, stream=True))

        for headers in (over_http.value.headers, over_tokens.value.response.headers):
            assert int(headers["Retry-After"]) >= 1
        assert over_grpc.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        assert over_tokens.value.code == "rate_limit_exceeded"
        page = server.metrics_page()
        for name in names:
            assert f'charonia_key_requests_total{{key="{name}",result="ok"}} 1\n' in page
            assert f'charonia_key_requests_total{{key="{name}",result="refused"}} 1\n' in page


def test_the_routes_can_be_turned_off(repository: Path) -> None:
    with ServeProcess(repository, "--openai=false") as server:
        connection = http.client.HTTPConnection(server.http)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 404
        connection.close()


def test_the_chat_command_answers_a_pipe_and_says_what_is_wrong(server: ServeProcess) -> None:
    def chat(*arguments: str, text: str = "hello") -> subprocess.CompletedProcess[str]:
        return run_command("chat", *arguments, f"--url={server.http}", given=text)

    answered = chat("plain", "--system=Be brief.", "--max-tokens=30")
    unknown, refused, nothing = chat("none"), chat("steps", "--temperature=0.5"), chat("plain", text=" ")

    assert (answered.stdout, answered.returncode) == ("system: Be brief.\n\nuser: hello"[:30] + "\n", 0)
    assert (unknown.returncode, refused.returncode, nothing.returncode) == (1, 1, 1)
    assert "'none' does not exist" in unknown.stderr
    assert "temperature: model 'steps' has no input" in refused.stderr
    assert "expected a message on standard input" in nothing.stderr


def test_the_chat_command_takes_the_only_model(server: ServeProcess, repository: Path) -> None:
    def chat(address: str) -> subprocess.CompletedProcess[str]:
        return run_command("chat", f"--url={address}", given="hello")

    with ServeProcess(repository, "--model-control-mode=explicit", "--load-model=plain") as alone:
        only = chat(alone.http)
    several = chat(server.http)

    assert (only.stdout, only.returncode) == ("user: hello\n\nassistant:\n", 0)
    assert several.returncode == 1
    assert "MODEL: expected one of crowd, " in several.stderr


def test_the_chat_command_keeps_the_conversation_in_a_terminal(server: ServeProcess) -> None:
    with Terminal("chat", "plain", f"--url={server.http}") as terminal:
        terminal.wait_for("> ")
        terminal.type("one\n")
        first = terminal.wait_for("first after")
        terminal.type("two\n")
        second = terminal.wait_for("first after")
        terminal.type("/nonsense\n")
        terminal.wait_for("unknown command /nonsense")
        terminal.type("/reset\nthree\n")
        third = terminal.wait_for("first after")
        terminal.type("\x04")

    assert "user: one\r\n\r\nassistant:" in first
    assert "assistant: user: one\r\n\r\nassistant:\r\n\r\nuser: two" in second
    assert "\nuser: three\r\n\r\nassistant:" in third
    assert "tokens," in third


def test_control_c_stops_an_answer_and_not_the_program(server: ServeProcess, repository: Path) -> None:
    mark = repository / "engine" / "1" / "cancelled"
    mark.unlink(missing_ok=True)
    with Terminal("chat", "engine", f"--url={server.http}") as terminal:
        terminal.wait_for("> ")
        terminal.type("endless\n")
        terminal.wait_for("xxx")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        terminal.type("hello\n")
        terminal.wait_for("0 1 2 ")

    assert eventually(mark.exists, 10)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_that_the_tokenizer_counts_are_in_the_metrics(tmp_path: Path, shape: tuple[str, ...]) -> None:
    repository = tmp_path / "models"
    write_language_models(repository)
    for name in ("whole", "steps", "embedding"):
        _write_word_tokenizer(repository / name / "tokenizer.json")
    with (
        ServeProcess(repository, *shape) as server,
        openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="unused", max_retries=0) as client,
    ):
        answer = client.completions.create(model="whole", prompt="one two three", n=2)
        client.completions.create(model="steps", prompt="one two")
        client.embeddings.create(model="embedding", input=["one", "two three"])
        client.completions.create(model="plain", prompt="abc")

        def counted() -> dict[str, int]:
            lines = server.metrics_page().splitlines()
            return {
                line[: line.index(",")].removeprefix("nv_llm_"): int(float(line.split()[-1]))
                for line in lines
                if line.startswith(("nv_llm_prompt_tokens_total", "nv_llm_completion_tokens_total"))
            }

        def of(name: str, prompt: int, completion: int) -> dict[str, int]:
            kinds = {"prompt": prompt, "completion": completion}
            return {f'{kind}_tokens_total{{model="{name}"': count for kind, count in kinds.items()}

        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 6)
        expected = {**of("whole", 6, 6), **of("steps", 2, 2), **of("embedding", 3, 0), **of("plain", 3, 3)}
        assert eventually(lambda: expected.items() <= counted().items())


def _write_word_tokenizer(path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


def test_tokens_are_counted_and_logged(repository: Path, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    options = ("--front-ends=2", "--access-log=json", f"--access-log-file={log}")
    with ServeProcess(repository, *options) as server:
        with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="unused") as client:
            for _ in range(2):
                list(client.chat.completions.create(model="engine", messages=HELLO, stream=True))
            client.completions.create(model="plain", prompt="abc")
        page = server.metrics_page()

    engine = '{model="engine",version="1"}'
    assert f"nv_llm_prompt_tokens_total{engine} 14" in page
    assert f"nv_llm_completion_tokens_total{engine} 6" in page
    assert f"nv_llm_cached_tokens_total{engine} 4" in page
    assert f"nv_llm_time_to_first_token_seconds_count{engine} 2" in page
    assert f"nv_llm_inter_token_latency_seconds_count{engine} 6" in page
    assert f"gen_ai_server_time_per_output_token_seconds_count{engine} 2" in page
    assert 'nv_llm_completion_tokens_total{model="plain",version="1"} 3' in page
    assert 'model="numbers"' not in "".join(line for line in page.splitlines() if line.startswith("nv_llm"))
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(each["model"], each["prompt_tokens"], each["completion_tokens"]) for each in entries] == [
        *[("engine", 7, 3)] * 2,
        ("plain", 3, 3),
    ]
    assert ["first_token_ms" in each for each in entries] == [True, True, False]
