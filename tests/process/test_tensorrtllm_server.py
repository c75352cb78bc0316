"""A server with a repository of Triton's LLM-API backend, as its clients see it, over a stand-in for TensorRT-LLM."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tests.support import pretended_tensorrt_llm
from tests.support.engine_requests import pretended_environment
from tests.support.process import ServeProcess, eventually

CONFIG = """
name: "tensorrt_llm"
backend: "tensorrtllm"
instance_group [ { count: 1 kind: KIND_CPU } ]
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "image_url" data_type: TYPE_STRING dims: [ -1 ] optional: true },
  { name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "sampling_param_temperature" data_type: TYPE_FP32 dims: [ 1 ] optional: true },
  { name: "sampling_param_top_k" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "sampling_param_max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true },
  { name: "sampling_param_stop" data_type: TYPE_STRING dims: [ -1 ] optional: true },
  { name: "return_finish_reason" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "stop" data_type: TYPE_BOOL dims: [ 1 ] optional: true },
  { name: "lora_id" data_type: TYPE_UINT64 dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "stop_reason" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "kv_cache_hit_rate" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "arrival_time_ns" data_type: TYPE_INT64 dims: [ 1 ] }
]
"""
PARAMETER = 'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{}" }} }}\n'
ARGUMENTS = "model: m\nbackend: pytorch\ntriton_config:\n  max_batch_size: 0\n  decoupled: False\n"


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A server whose models run in an environment of their own, in which the stand-in is TensorRT-LLM."""
    folder = tmp_path_factory.mktemp("tensorrtllm")
    environment = pretended_environment(folder, "tensorrt_llm", pretended_tensorrt_llm.INIT)
    parameter = PARAMETER.format(environment)
    repository = folder / "repository"
    for name, config, arguments in (
        ("tensorrt_llm", CONFIG + parameter, ARGUMENTS),
        ("misspelt", parameter, f"{ARGUMENTS}max_num_tokenz: 3\n"),
        ("missing", "", ARGUMENTS),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.yaml").write_text(arguments)
        if config:
            (repository / name / "config.pbtxt").write_text(config)
    with ServeProcess(repository, "--exit-on-error=false") as server:
        yield server


def post(server: ServeProcess, path: str, body: object) -> Any:
    """Return the response, to be closed."""
    return urlopen(Request(f"http://{server.http}/{path}", json.dumps(body).encode()), timeout=100)


def generate(server: ServeProcess, body: object) -> dict[str, Any]:
    with post(server, "v2/models/tensorrt_llm/generate", body) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def events(response: Any) -> list[Any]:
    with response:
        return [line[6:].strip() for line in response if line.startswith(b"data: ")]


def refused(server: ServeProcess, path: str, body: object) -> tuple[int, str]:
    with pytest.raises(HTTPError) as caught:
        post(server, path, body)
    error = json.load(caught.value)["error"]
    return caught.value.code, error["message"] if isinstance(error, dict) else error


def test_a_request_of_tritons_clients_is_answered(pretended: ServeProcess) -> None:
    body = {"text_input": "one two", "sampling_param_max_tokens": 3, "return_finish_reason": True}
    answer = generate(pretended, body)
    assert (answer["text_output"], answer["finish_reason"]) == (" one two one", "length")
    assert "kv_cache_hit_rate" not in answer


def test_openais_chat_is_streamed(pretended: ServeProcess) -> None:
    messages = [{"role": "user", "content": "one two"}]
    body = {"model": "tensorrt_llm", "messages": messages, "stream": True, "max_tokens": 2}
    *chunks, last = events(post(pretended, "v1/chat/completions", body))
    assert "".join(json.loads(chunk)["choices"][0]["delta"]["content"] for chunk in chunks) == " one two"
    assert last == b"[DONE]"
    status, message = refused(pretended, "v1/chat/completions", {**body, "temperature": -1})
    assert (status, message) == (400, "temperature: expected a number of at least 0, got -1")


def test_models_that_are_wrong_fail_to_load_with_the_reason(pretended: ServeProcess) -> None:
    assert "extra inputs are not permitted: ['max_num_tokenz']" in pretended.log
    assert "model 'missing' needs the package 'tensorrt_llm', which is not installed" in pretended.log
    assert "nvcr.io/nvidia/tensorrt-llm/release" in pretended.log


def test_when_the_engine_dies_another_one_is_started(pretended: ServeProcess) -> None:
    status, message = refused(pretended, "v2/models/tensorrt_llm/generate", {"text_input": "die"})
    assert status == 503
    assert "the engine of the model has failed" in message
    assert eventually(lambda: _answers(pretended))


def _answers(server: ServeProcess) -> bool:
    try:
        return bool(generate(server, {"text_input": "one", "sampling_param_max_tokens": 1})["text_output"] == " one")
    except HTTPError:
        return False
