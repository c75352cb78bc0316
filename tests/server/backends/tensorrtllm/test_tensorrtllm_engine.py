"""The engine of the tensorrtllm backend over a stand-in: what requests get, what is refused, what is aborted."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import pretended_tensorrt_llm
from tests.support.engine_requests import (
    EngineRequest,
    RefusedError,
    answered_by,
    openai,
    pretended,
    refused_by,
    started_by,
)
from tests.support.pretended_tensorrt_llm import LLM, GuidedDecodingParams
from tests.support.process import until

from charonia.server.backends.language.worker.text_stream import CHAT, COMPLETIONS
from charonia.server.backends.python.worker.errors import TritonError
from charonia.server.backends.tensorrtllm.backend import TensorRtLlmBackend
from charonia.server.backends.tensorrtllm.worker.engine import Engine

MESSAGES = [{"role": "user", "content": "one two three"}]


@pytest.fixture(autouse=True)
def tensorrt_llm() -> Iterator[None]:
    with pretended(pretended_tensorrt_llm.modules()):
        yield


async def until_one_runs(engine: Engine) -> None:
    await until(lambda: any(engine._running.values()))


@asynccontextmanager
async def started(config: dict[str, Any] | None = None, number: int = 0, **options: Any) -> AsyncIterator[Engine]:
    async with started_by(
        Engine,
        config=config or {},
        routes=TensorRtLlmBackend.routes,
        options={"arguments": {"model": "m"}, "gpus": [], **options},
        device_id=5,
        number=number,
        pb_utils=SimpleNamespace(TritonError=TritonError),
    ) as engine:
        yield engine
    assert LLM.latest.is_shut_down


answered = partial(answered_by, started)
refused = partial(refused_by, started)


def test_a_prompt_is_answered_without_the_prompt_as_in_triton() -> None:
    asked = answered(EngineRequest("one two", sampling={"sampling_param_max_tokens": 3}))
    assert asked.responses == [{"text_output": [b" one two one"]}]
    assert asked.usage == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0}
    asked = answered(EngineRequest("one two", excludes_input=False, sampling={"max_tokens": "1"}))
    assert asked.responses == [{"text_output": [b"one two one"]}]


def test_a_stream_has_a_response_for_each_token_and_the_outputs_that_are_wanted() -> None:
    wanted = frozenset(("finish_reason", "stop_reason", "num_output_tokens", "num_input_tokens", "logprobs"))
    asked = answered(
        EngineRequest("one two", stream=True, excludes_input=True, returns=wanted, sampling={"max_tokens": 2})
    )
    assert [response["text_output"] for response in asked.responses] == [[b" one"], [b" two"]]
    assert [response["finish_reason"] for response in asked.responses] == [[b"None"], [b"length"]]
    last = asked.responses[1]
    assert (last["num_output_tokens"], last["num_input_tokens"], last["stop_reason"]) == ([1], [2], [b"None"])
    assert json.loads(last["logprobs"][0])[1] == {"1": {"logprob": -0.5, "rank": 1}}


def test_what_was_measured_is_in_outputs_of_tritons_names() -> None:
    asked = answered(EngineRequest("one", sampling={"sampling_param_return_perf_metrics": True, "max_tokens": 1}))
    found = {name: value.tolist() for name, value in asked.responses[0].items() if name != "text_output"}
    assert found == {
        "kv_cache_reused_block": [1],
        "kv_cache_missed_block": [2],
        "kv_cache_alloc_new_blocks": [3],
        "kv_cache_alloc_total_blocks": [4],
        "kv_cache_hit_rate": [0.25],
        "arrival_time_ns": [1_000_000_000],
        "first_scheduled_time_ns": [2_000_000_000],
        "first_token_time_ns": [3_000_000_000],
        "last_token_time_ns": [4_000_000_000],
        "acceptance_rate": [0.5],
        "total_accepted_draft_tokens": [6],
        "total_draft_tokens": [12],
    }


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": "hot"}, 'temperature: expected a number of at least 0, got "hot"'),
        ({"sampling_param_temperature": -1.0}, "temperature: expected a number of at least 0, got -1.0"),
        ({"top_p": 1.5}, "top_p: expected a number above 0 and up to 1, got 1.5"),
        ({"max_tokens": 0}, "max_tokens: expected a whole number of at least 1, got 0"),
        ({"seed": True}, "seed: expected a whole number from 0 to 18446744073709551615, got true"),
        ({"stop": [""]}, "stop: expected a string or an array of strings, none of them empty"),
        ({"max_tokenz": 1}, "max_tokenz: there is no such parameter; did you mean 'max_tokens'?"),
        ({"n": 2, "best_of": 1}, "best_of (1) cannot be less than n (2)"),
        ({"guided_decoding": {"shape": 1}}, "guided_decoding: "),
        ({"lora_name": "x"}, "lora_name: the tensorrtllm backend does not support it"),
    ],
)
def test_a_wrong_sampling_parameter_is_named(sampling: dict[str, Any], message: str) -> None:
    error = refused(EngineRequest("one", sampling=sampling))
    assert str(error).startswith(message)
    assert error.code == TritonError.INVALID_ARG


def test_a_temperature_of_0_takes_the_most_likely_token() -> None:
    answered(EngineRequest("one", sampling={"temperature": 0, "top_p": 0.5, "seed": None, "stop": ["a", "b"]}))
    params = LLM.latest.requests[0][1]
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (None, None, 1, ["a", "b"])


def test_a_chat_is_streamed_in_chunks() -> None:
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    chunks = (asked := answered(openai(CHAT, body))).chunks()
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:3]] == [
        {"role": "assistant", "content": ""},
        {"content": " one"},
        {"content": " two"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:3]] == [None, None, "length"]
    assert chunks[3]["usage"] == {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    assert asked.usage == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}
    assert LLM.latest.requests[0][0] == [0, 1, 2]


def test_a_chat_is_answered_with_a_document() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    body = {"messages": parts, "max_completion_tokens": 1, "n": 2, "user": "me", "tools": None, "logprobs": False}
    (found,) = answered(openai(CHAT, body)).chunks()
    assert [choice["message"]["content"] for choice in found["choices"]] == [" one", " one"]
    assert (found["object"], found["model"], found["usage"]["total_tokens"]) == ("chat.completion", "lm", 4)


def test_completions_take_a_text_and_sample_as_openai_says() -> None:
    (found,) = answered(openai(COMPLETIONS, {"prompt": ["one two"]})).chunks()
    assert len(found["choices"][0]["text"].split()) == 16
    prompt, params = LLM.latest.requests[0]
    assert (prompt, params.temperature, params.top_p) == ("one two", 1.0, 1.0)
    asked = answered(openai(COMPLETIONS, {"prompt": "one", "stream": True, "max_tokens": 2, "temperature": 0}))
    assert [chunk["choices"][0]["text"] for chunk in asked.chunks()] == [" one", " one"]


def test_a_response_format_guides_the_engine() -> None:
    schema = {"type": "object"}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answered(openai(CHAT, {"messages": MESSAGES, "response_format": format_}))
    assert LLM.latest.requests[0][1].guided_decoding == GuidedDecodingParams(json=schema)
    answered(openai(CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}))
    assert LLM.latest.requests[0][1].guided_decoding == GuidedDecodingParams(json_object=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"temperature": "hot"}, "temperature: expected a number"),
        ({"max_tokens": 0}, "max_tokens: expected a whole number"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]: expected a part of type text",
        ),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages: the chat template refuses them: there is no"),
        ({"tools": [{}]}, "tools: the tensorrtllm backend does not support it"),
        ({"logprobs": True}, "logprobs: the tensorrtllm backend does not support it"),
        ({"temprature": 1}, "temprature: the tensorrtllm backend has no such parameter; did you mean 'temperature'?"),
        ({"n": 2, "stream": True}, "n: expected 1 with `stream`"),
        ({"stream_options": 1}, "stream_options: expected an object"),
        ({"response_format": {"type": "xml"}}, "response_format: expected an object of type text"),
    ],
)
def test_a_wrong_member_is_named(more: dict[str, Any], message: str) -> None:
    error = refused(openai(CHAT, {"messages": MESSAGES, **more}))
    assert str(error).startswith(message)
    assert error.code == TritonError.INVALID_ARG


@pytest.mark.parametrize(
    "asked",
    [
        EngineRequest("one", stream=True, excludes_input=True, sampling={"max_tokens": 1000}),
        openai(CHAT, {"messages": MESSAGES, "stream": True, "max_tokens": 1000}),
        openai(CHAT, {"messages": MESSAGES, "max_tokens": 1000}),
    ],
    ids=["generate", "chat", "document"],
)
async def test_a_caller_that_leaves_aborts_the_request_at_once(asked: EngineRequest) -> None:
    async with started() as engine:
        task = asyncio.create_task(engine.answer(asked))
        await until_one_runs(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(LLM.latest.aborted) == 1
        assert engine._running == {}


async def test_a_request_is_cancelled_by_its_id_as_in_triton() -> None:
    async with started() as engine:
        first = EngineRequest("one", id="a", stream=True, excludes_input=True, sampling={"max_tokens": 1000})
        running = asyncio.create_task(engine.answer(first))
        await until_one_runs(engine)
        with pytest.raises(RefusedError) as caught:
            await engine.answer(EngineRequest("", id="a", sampling={"stop": True}))
        assert caught.value.code == TritonError.CANCELLED
        await running
        assert len(LLM.latest.aborted) == 1
        assert first.is_over
        with pytest.raises(RefusedError, match="stop: expected the id"):
            await engine.answer(EngineRequest("", sampling={"stop": True}))


async def test_the_end_of_the_engine_fails_open_requests_and_is_seen() -> None:
    async with started() as engine:
        assert engine.problem() == ""
        first = EngineRequest("one", stream=True, excludes_input=True, sampling={"max_tokens": 1000})
        running = asyncio.create_task(engine.answer(first))
        await until_one_runs(engine)
        with pytest.raises(RefusedError, match="the engine of the model has failed") as caught:
            await engine.answer(EngineRequest("die"))
        assert caught.value.code == TritonError.UNAVAILABLE
        assert "the executor is gone" in engine.problem()
        with pytest.raises(RefusedError, match="the executor is gone"):
            await running


async def test_arguments_reach_the_engine() -> None:
    async with started(arguments={"model": "m", "backend": "pytorch", "max_num_tokens": 99}):
        assert LLM.latest.arguments == {"backend": "pytorch", "max_num_tokens": 99}
    with pytest.raises(ValueError, match="max_tokenz"):
        async with started(arguments={"model": "m", "max_tokenz": 99}):
            pass


@pytest.mark.parametrize(
    ("config", "gpus", "number", "visible"),
    [
        ({"instance_group": [{"kind": "KIND_GPU"}]}, [], 0, "5"),
        ({"instance_group": [{"kind": "KIND_CPU"}]}, ["0,1", "2,3"], 1, "2,3"),
    ],
)
async def test_an_instance_sees_its_gpus(config: dict[str, Any], gpus: list[str], number: int, visible: str) -> None:
    async with started(config, number, gpus=gpus):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["TRTLLM_VISIBLE_DEVICES"] == visible
        assert LLM.latest.arguments.get("gpus_per_node") == (2 if gpus else None)
