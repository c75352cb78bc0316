"""The engine of the vllm backend over a stand-in for vLLM: what requests get, what is refused, what is aborted."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import pretended_vllm
from tests.support.engine_requests import (
    EngineRequest,
    RefusedError,
    answered_by,
    openai,
    pretended,
    refused_by,
    started_by,
)
from tests.support.pretended_vllm import AsyncLLM, EngineDeadError, VLLMValidationError
from tests.support.process import until

from charonia.server.backends.language.worker.text_stream import CHAT, COMPLETIONS, ChunkWriter
from charonia.server.backends.vllm.backend import ROUTES
from charonia.server.backends.vllm.worker.application import (
    INTERNAL,
    INVALID_ARG,
    UNAVAILABLE,
    failure_of,
    failure_of_document,
)
from charonia.server.backends.vllm.worker.engine import SHUTDOWN_S, Engine, engine_cores
from charonia.server.backends.vllm.worker.streams import is_plain

MESSAGES = [{"role": "user", "content": "one two three"}]
OPTIONS: dict[str, Any] = {
    "arguments": {"model": "m"},
    "of_parameters": [],
    "variables": {},
    "loras": {},
    "gpus": "",
    "metrics": False,
}


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with pretended(pretended_vllm.modules()):
        yield


@asynccontextmanager
async def started(pb_utils: Any = None, **options: Any) -> AsyncIterator[Engine]:
    options = {**OPTIONS, **options}
    async with started_by(
        Engine, config={}, routes=ROUTES, options=options, threads=2, device_id=0, pb_utils=pb_utils
    ) as engine:
        yield engine
    assert AsyncLLM.latest.is_shut_down
    assert AsyncLLM.latest.shutdown_s == SHUTDOWN_S


answered = partial(answered_by, started)
refused = partial(refused_by, started)


def test_a_prompt_is_answered_with_one_response_that_begins_with_it() -> None:
    asked = answered(EngineRequest("one two", sampling={"max_tokens": "3"}))
    assert asked.responses == [{"text_output": [b"one two one two one"]}]
    assert asked.usage == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 2}


def test_a_stream_has_a_response_for_each_token_and_the_outputs_that_are_wanted() -> None:
    wanted = frozenset(("finish_reason", "num_output_tokens", "num_input_tokens", "logprobs", "cumulative_logprob"))
    sampling = {"max_tokens": 2, "logprobs": 0}
    asked = answered(EngineRequest("one two", stream=True, excludes_input=True, returns=wanted, sampling=sampling))
    assert [response["text_output"] for response in asked.responses] == [[b" one"], [b" two"]]
    assert [response["finish_reason"] for response in asked.responses] == [[b"None"], [b"length"]]
    last = asked.responses[1]
    assert (last["num_output_tokens"], last["num_input_tokens"], last["cumulative_logprob"]) == ([1], [2], [-1.0])
    assert json.loads(last["logprobs"][0]) == [{"1": {"logprob": -0.5, "rank": 1, "decoded_token": " two"}}]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": "hot"}, "temperature: Expected `float`, got `str`"),
        ({"temperature": -1}, "temperature: temperature must be non-negative, got -1.0."),
        ({"max_tokenz": 1}, "max_tokenz: vLLM has no such sampling parameter; did you mean 'max_tokens'?"),
        ({"output_kind": 1}, "output_kind: vLLM has no such sampling parameter"),
        ({"guided_decoding": {"shape": 1}}, "structured_outputs: "),
        ({"lora_name": "x"}, "lora_name: the model has no LoRA adapters (hint: enable_lora in model.json)"),
    ],
)
def test_a_wrong_sampling_parameter_is_named(sampling: dict[str, Any], message: str) -> None:
    error = refused(EngineRequest("one", sampling=sampling))
    assert str(error).startswith(message)
    assert error.code == INVALID_ARG


@pytest.mark.parametrize("given", ["{", "[]", "{}", {"input": "x"}, '{"input": "x", "pooling_params": 1}'])
def test_a_wrong_request_for_an_embedding_is_named(given: object) -> None:
    error = refused(EngineRequest("", sampling={"embedding_request": given}))
    assert str(error).startswith("embedding_request: expected a JSON object with `input`")
    assert error.code == INVALID_ARG


def test_an_adapter_is_chosen_by_its_name() -> None:
    asked = EngineRequest("one", sampling={"lora_name": "sql"})
    answered(asked, loras={"sql": "weights"})
    assert AsyncLLM.latest.requests[0][1]["lora_request"].name == "lm:sql"
    error = refused(EngineRequest("one", sampling={"lora_name": "x"}), loras={"sql": "weights"})
    assert str(error) == "lora_name: expected one of sql, got 'x'"


def test_a_plain_chat_is_streamed_in_chunks_of_its_own() -> None:
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    chunks = (asked := answered(openai(CHAT, body))).chunks()
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:3]] == [
        {"role": "assistant", "content": ""},
        {"content": " one"},
        {"content": " two"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:3]] == [None, None, "length"]
    assert chunks[3]["usage"] == {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    assert {(chunk["object"], chunk["model"], chunk["id"]) for chunk in chunks} == {
        ("chat.completion.chunk", "lm", "chatcmpl-0")
    }
    assert asked.usage == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 2}


async def test_plain_text_is_taken_before_vllm_makes_outputs_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []
    monkeypatch.setattr(pretended_vllm.Queue, "put", lambda self, output: put.append(output))
    asked = openai(COMPLETIONS, {"prompt": "one two", "stream": True, "max_tokens": 3})

    async with started() as engine:
        task = asyncio.create_task(engine.answer(asked))
        await asyncio.sleep(0)
        await until(lambda: asked.responses)
        (state,) = AsyncLLM.latest.output_processor.request_states.values()
        assert state.make_request_output([], None, None, None) is None
        await task
    assert [chunk["choices"][0]["text"] for chunk in asked.chunks() if chunk["choices"][0]["text"]] == [
        " one",
        " two",
        " one",
    ]
    assert put == []


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": True},
        {"tools": []},
        {"n": 2},
        {"stream": False},
        {"stream_options": {"continuous_usage_stats": True}},
    ],
)
def test_what_is_more_than_plain_text_is_left_to_vllm(more: dict[str, Any]) -> None:
    assert is_plain(CHAT, {"messages": MESSAGES, "stream": True})
    assert not is_plain(CHAT, {"messages": MESSAGES, "stream": True, **more})


def test_vllms_application_answers_with_a_document() -> None:
    asked = answered(openai(CHAT, {"messages": MESSAGES}))
    assert asked.chunks()[0]["asked"]["model"] == "lm"
    assert asked.usage == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}


def test_events_of_vllms_application_pass_as_they_are() -> None:
    asked = answered(openai(CHAT, {"messages": MESSAGES, "stream": True, "logprobs": True}))
    assert [response["text_output"] for response in asked.responses] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']
    assert asked.usage == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}
    named = answered(openai("responses", {"input": "x", "stream": True}))
    assert named.responses[0]["text_output"] == b'event: response.created\ndata: {"n":0}'


@pytest.mark.parametrize("stream", [True, False])
def test_what_vllm_refuses_is_refused_with_the_member_it_names(stream: bool) -> None:
    error = refused(openai(CHAT, {"messages": MESSAGES, "stream": stream, "max_tokens": 0}))
    assert (str(error), error.code) == ("max_tokens: is wrong", INVALID_ARG)
    long = refused(openai(COMPLETIONS, {"prompt": "word " * 100, "stream": stream}))
    assert (str(long), long.code) == ("prompt: the prompt is too long", INVALID_ARG)


@pytest.mark.parametrize(
    "asked",
    [
        EngineRequest("one", stream=True, excludes_input=True, sampling={"max_tokens": 1000}),
        openai(CHAT, {"messages": MESSAGES, "stream": True, "max_tokens": 1000}),
    ],
    ids=["generate", "chat"],
)
async def test_a_caller_that_leaves_aborts_the_request_at_once(asked: EngineRequest) -> None:
    async with started() as engine:
        task = asyncio.create_task(engine.answer(asked))
        await until(lambda: len(asked.responses) >= 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(AsyncLLM.latest.aborted) == 1
        count = len(asked.responses)
        await asyncio.sleep(0.02)
        assert len(asked.responses) == count


async def test_the_end_of_the_engine_fails_open_requests_and_later_ones() -> None:
    async with started() as engine:
        assert engine.problem() == ""
        first = EngineRequest("one", stream=True, excludes_input=True, sampling={"max_tokens": 1000})
        running = asyncio.create_task(engine.answer(first))
        for asked in (EngineRequest("die"), EngineRequest("one"), openai(CHAT, {"messages": MESSAGES, "stream": True})):
            with pytest.raises(RefusedError) as caught:
                await engine.answer(asked)
            assert caught.value.code == UNAVAILABLE
        with pytest.raises(RefusedError, match="the engine of the model has ended"):
            await running
        assert "has ended" in engine.problem()


async def test_an_argument_that_vllm_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"no argument 'max_modle_len'; did you mean 'max_model_len'\?"):
        async with started(arguments={"model": "m", "max_modle_len": 3}):
            pass


async def test_arguments_of_vllms_server_stand_beside_those_of_its_engine() -> None:
    async with started(arguments={"model": "m", "tool_call_parser": "hermes"}) as engine:
        assert engine._app_state.args.tool_call_parser == "hermes"
        assert AsyncLLM.latest.arguments.served_model_name == ["lm"]


async def test_parameters_of_the_model_reach_the_engine_and_an_unknown_one_is_warned_of() -> None:
    warnings: list[str] = []
    async with started(
        pb_utils=SimpleNamespace(Logger=SimpleNamespace(log_warn=warnings.append)),
        arguments={"model": "m", "max_num_seqs": 16, "max_num_sequences": 3},
        of_parameters=["max_num_seqs", "max_num_sequences"],
        variables={"VLLM_CPU_KVCACHE_SPACE": "2"},
    ):
        arguments = AsyncLLM.latest.arguments
        assert (arguments.model, arguments.max_num_seqs) == ("m", 16)
        assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "2"

    expected = (
        "parameter 'max_num_sequences': vLLM has no such argument, it has no effect; did you mean 'max_num_seqs'?"
    )
    assert warnings == [expected]


@pytest.mark.parametrize(
    ("cores", "threads", "bind", "number"),
    [
        ([0, 1], 2, "0", "1"),
        ([4, 5, 6, 7], 4, "4,5,6", "1"),
        ([0], 1, "0", "1"),
        ([0, 1, 2, 3], 2, "nobind", "2"),
        ([], 2, "nobind", "1"),
    ],
)
def test_the_engine_leaves_a_core_to_the_serving(cores: list[int], threads: int, bind: str, number: str) -> None:
    found = engine_cores(cores, threads)
    assert found == {"VLLM_CPU_OMP_THREADS_BIND": bind, "OMP_NUM_THREADS": number}


@pytest.mark.parametrize("text", ['"quotes" and \\', "line\nbreak\t", "ünïcödé 漢字 🐚", "\x00\x1f", "half \ud83d"])
def test_chunks_hold_any_text(text: str) -> None:
    writer = ChunkWriter(CHAT, "id", 1, "m")
    shown = text.encode("utf-8", "replace").decode()
    assert json.loads(writer.text(text))["choices"][0]["delta"]["content"] == shown
    choice = json.loads(writer.last(text, "stop", "</s>"))["choices"][0]
    assert (choice["delta"]["content"], choice["finish_reason"], choice["stop_reason"]) == (shown, "stop", "</s>")


def test_exceptions_of_vllm_have_codes() -> None:
    assert failure_of(EngineDeadError())[1] == UNAVAILABLE
    assert failure_of(pretended_vllm.QueueOverflowError("full")) == ("full", UNAVAILABLE)
    assert failure_of(VLLMValidationError("is wrong", parameter="seed")) == ("seed: is wrong", INVALID_ARG)
    repeated = {"error": {"message": "n is wrong. (parameter=n, value=0)", "param": "n"}}
    assert failure_of_document(400, repeated) == ("n: n is wrong.", INVALID_ARG)
    assert failure_of_document(503, None) == ("vLLM answered with status 503", UNAVAILABLE)
    assert failure_of(RuntimeError("oh")) == ("RuntimeError: oh", INTERNAL)
