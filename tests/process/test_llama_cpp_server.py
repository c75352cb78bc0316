"""A server with language models in GGUF files, as its clients see it: SmolLM2 in llama.cpp, with one thread."""

import contextlib
import http.client
import json
import queue
import signal
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import openai
import psutil
import pydantic
import pytest
import tritonclient.grpc as grpc
from prometheus_client.parser import text_string_to_metric_families
from tests.support import smollm2
from tests.support.process import ServeProcess, eventually, started_by
from tests.support.stock_clients import infer_input

pytestmark = smollm2.needed

SLOTS = 3
TOOLS_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\nYou may call these functions:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ENDLESS = {"max_tokens": 3000, "ignore_eos": True}
FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    repository = tmp_path_factory.mktemp("gguf")
    file = smollm2.gguf()
    assert file is not None
    with file.open("rb") as opened:
        beginning = opened.read(4 << 20)
    few = {"n_threads": 1, "n_parallel": SLOTS, "kv_unified": True, "n_ctx": 4096, "n_batch": 64, "cache_ram_mib": 0}
    place(repository / "smol", file, few)
    place(repository / "embeds", file, {"n_threads": 1, "embedding": True, "pooling_type": "mean", "n_ctx": 256})
    place(repository / "calls", file, {"n_threads": 1, "n_parallel": 1, "n_ctx": 1024, "chat_template": TOOLS_TEMPLATE})
    place(repository / "truncated", beginning, {})
    place(repository / "no_gguf", b"version https://git-lfs.github.com/spec/v1\n", {})
    place(repository / "misspelt", file, {"n_contxt": 1, "n_batch": 0})
    with ServeProcess(repository, "--exit-on-error=false") as running:
        yield running


def place(folder: Path, content: Path | bytes, parameters: Mapping[str, object]) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    if isinstance(content, bytes):
        (version / "model.gguf").write_bytes(content)
    else:
        (version / "model.gguf").symlink_to(content)
    (version / "model.json").write_text(json.dumps(parameters))


def post(server: ServeProcess, body: object, model: str = "smol") -> dict[str, Any]:
    document: dict[str, Any] = server.ask(f"/v2/models/{model}/generate", body)
    return document


def refused(server: ServeProcess, body: object, model: str = "smol") -> str:
    with pytest.raises(HTTPError) as caught:
        post(server, body, model)
    assert caught.value.code == 400
    return str(json.load(caught.value)["error"])


class Stream:
    """The events of `generate_stream`."""

    def __init__(self, server: ServeProcess, body: object) -> None:
        self._connection = http.client.HTTPConnection(server.http, timeout=200)
        self._connection.request("POST", "/v2/models/smol/generate_stream", json.dumps(body))

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        with contextlib.closing(self):
            for line in self._connection.getresponse():
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def close(self) -> None:
        self._connection.close()


def workers(server: ServeProcess) -> list[psutil.Process]:
    return [p for p in started_by(server.process.pid) if any(m.path.endswith(".gguf") for m in p.memory_maps())]


def test_a_prompt_is_continued_and_its_tokens_are_counted(server: ServeProcess) -> None:
    body = {
        "text_input": FRANCE,
        "sampling_parameters": {"max_tokens": 3, "temperature": 0, "logprobs": 2},
        "exclude_input_in_output": True,
        **{f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "logprobs")},
        "return_cumulative_logprob": True,
    }
    answer = post(server, body)
    assert answer["text_output"].startswith(" Paris")
    assert (answer["finish_reason"], answer["num_input_tokens"], answer["num_output_tokens"]) == ("length", 5, 3)
    assert (answer["prompt_tokens"], answer["completion_tokens"]) == (5, 3)
    tokens = json.loads(answer["logprobs"])
    assert [len(token) for token in tokens] == [2, 2, 2]
    best = [max(each["logprob"] for each in token.values()) for token in tokens]
    assert answer["cumulative_logprob"] == pytest.approx(sum(best), rel=1e-5)


def test_an_answer_begins_with_its_prompt_unless_it_is_streamed(server: ServeProcess) -> None:
    sampling = {"max_tokens": 4, "temperature": 0}
    whole = post(server, {"text_input": FRANCE, "sampling_parameters": sampling})["text_output"]
    events = list(Stream(server, {"text_input": FRANCE, "stream": True, "sampling_parameters": sampling}))
    assert FRANCE + "".join(event["text_output"] for event in events) == whole
    assert len(events) == 5  # one for each token, and the last with the counts
    assert [event.get("completion_tokens") for event in events] == [None, None, None, None, 4]


def test_the_same_seed_gives_the_same_text_and_stops_where_it_should(server: ServeProcess) -> None:
    body = {"text_input": "1, 2, 3,", "sampling_parameters": {"max_tokens": 24, "seed": 5, "stop": ["\n", "6"]}}
    first, second = post(server, body), post(server, body)
    assert first["text_output"] == second["text_output"]
    greedy = {**body["sampling_parameters"], "temperature": 0}  # type: ignore[dict-item]
    answer = post(server, {**body, "sampling_parameters": greedy, "return_finish_reason": True})
    assert answer["text_output"].startswith("1, 2, 3, 4, 5")
    assert "6" not in answer["text_output"]
    assert answer["finish_reason"] == "stop"


def test_pieces_end_where_characters_do(server: ServeProcess) -> None:
    text = "naïve 😀 日本語 🧑\u200d🚀"  # most of these are several tokens each
    sampling = {"max_tokens": 60, "grammar": f'root ::= "{text}"'}
    events = list(Stream(server, {"text_input": "x", "stream": True, "sampling_parameters": sampling}))
    assert "".join(event["text_output"] for event in events) == text
    assert any(event["text_output"] == "😀" for event in events)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"temperatur": 1}, "temperatur: there is no such parameter; did you mean 'temperature'?"),
        ({"grammar": "root ::= 5"}, "failed to parse grammar"),
    ],
)
def test_a_bad_sampling_parameter_is_named(server: ServeProcess, sampling: dict[str, object], named: str) -> None:
    assert named in refused(server, {"text_input": "x", "sampling_parameters": sampling})


def test_what_is_no_request_is_refused(server: ServeProcess) -> None:
    assert "expected a JSON object" in refused(server, {"text_input": "x", "sampling_parameters": "[1]"})
    assert "exclude_input_in_output" in refused(
        server, {"text_input": "x", "stream": True, "exclude_input_in_output": False}
    )


def test_a_prompt_that_is_too_long_is_refused_at_once(server: ServeProcess) -> None:
    assert "maximum context length is 4096 tokens, the request has 5001" in refused(server, {"text_input": "a " * 5000})


def test_more_requests_than_slots_are_answered(server: ServeProcess) -> None:
    body = {"text_input": FRANCE, "sampling_parameters": {"max_tokens": 4, "temperature": 0}}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: post(server, body), range(12)))
    assert [answer["completion_tokens"] for answer in answers] == [4] * 12


def test_requests_in_slots_advance_together(server: ServeProcess) -> None:
    body = {"text_input": "Once", "stream": True, "sampling_parameters": ENDLESS}
    streams = [iter(Stream(server, body)) for _ in range(SLOTS)]
    for events in streams:  # none of them ends meanwhile
        assert all("completion_tokens" not in next(events) for _ in range(3))
    for events in streams:
        events.close()


def test_a_stream_over_grpc_ends_with_its_last_response(server: ServeProcess) -> None:
    inputs = [
        infer_input(grpc, "text_input", np.array([FRANCE.encode()], object)),
        infer_input(grpc, "stream", np.array([True])),
        infer_input(grpc, "sampling_parameters", np.array([b'{"max_tokens": 3, "temperature": 0}'], object)),
    ]
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    texts = []
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        client.async_stream_infer("smol", inputs, enable_empty_final_response=True)
        is_final = False
        while not is_final:
            result, error = results.get(timeout=200)
            assert error is None
            response = result.get_response()
            is_final = response.parameters["triton_final_response"].bool_param
            texts += [text.decode() for text in result.as_numpy("text_output")]
        client.stop_stream()
    assert "".join(texts).startswith(" Paris")
    assert response.parameters["completion_tokens"].int64_param == 3


def test_openai_requests_are_answered_in_the_clients_words(server: ServeProcess) -> None:
    asked = {"model": "mine", "messages": user("hi"), "max_tokens": 2, "temperature": 0}
    chat = {"text_input": json.dumps(asked), "parameters": {"openai": "chat/completions"}}
    answer = post(server, chat)
    document = json.loads(answer["text_output"])
    assert (document["model"], document["object"]) == ("mine", "chat.completion")
    assert document["usage"]["completion_tokens"] == answer["completion_tokens"] == 2
    assert document["usage"]["prompt_tokens"] == answer["prompt_tokens"]
    events = list(Stream(server, {**chat, "text_input": json.dumps({**asked, "stream": True})}))
    chunks = [json.loads(event["text_output"]) for event in events]
    assert {chunk["model"] for chunk in chunks} == {"mine"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert [event.get("completion_tokens") for event in events] == [None] * (len(events) - 1) + [2]
    shown = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    events = list(Stream(server, {**chat, "text_input": json.dumps(shown)}))
    assert json.loads(events[-1]["text_output"])["usage"]["completion_tokens"] == 2
    assert events[-1]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("route", "asked", "why"),
    [
        ("completions", {"prompt": "a " * 5000}, "maximum context length is 4096 tokens"),
        ("completions", [1], "expected a JSON object, got list"),
        ("embeddings", {"input": "x"}, "no route 'embeddings'"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
            "must begin with 'data:'",
        ),
    ],
)
def test_a_bad_openai_request_is_refused(server: ServeProcess, route: str, asked: object, why: str) -> None:
    assert why in refused(server, {"text_input": json.dumps(asked), "parameters": {"openai": route}})


@pytest.fixture
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="unused", max_retries=0) as made:
        yield made


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


class Moon(pydantic.BaseModel):
    name: Literal["Io", "Europa"]
    planet: Literal["Jupiter"]


def test_a_truncated_response_is_incomplete(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="smol", input="hi", max_output_tokens=2, stream=True))
    response = events[-1].response  # type: ignore[union-attr]

    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage is not None
    assert response.usage.output_tokens == 2


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(client: openai.OpenAI) -> None:
    for ask in (
        lambda: client.chat.completions.create(model="smol", messages=user("a " * 5000)),
        lambda: client.completions.create(model="smol", prompt="a " * 5000, stream=True),
        lambda: client.embeddings.create(model="embeds", input="a " * 500),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask()
        assert refused.value.code == "context_length_exceeded"


def test_completions_have_their_own_form(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smol", prompt=FRANCE, max_tokens=3, logprobs=2, temperature=0)
    chunks = list(
        client.completions.create(model="smol", prompt=FRANCE, max_tokens=3, logprobs=2, temperature=0, stream=True)
    )
    several = client.completions.create(model="smol", prompt=FRANCE, max_tokens=3, logprobs=2, temperature=0, n=2)

    assert answer.id.startswith("cmpl-")
    assert chunks[0].id.startswith("cmpl-")
    assert several.id.startswith("cmpl-")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or ()) == answer.choices[0].text
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for each in streamed if each is not None for token in each.tokens or ()] == logprobs.tokens
    assert [
        offset for each in streamed if each is not None for offset in each.text_offset or ()
    ] == logprobs.text_offset
    assert [choice.logprobs.tokens for choice in several.choices if choice.logprobs] == [logprobs.tokens] * 2


def test_tokens_of_a_text_and_the_context_are_told(server: ServeProcess) -> None:
    found = server.ask("/tokenize", {"model": "smol", "prompt": FRANCE, "return_token_strs": True})
    back = server.ask("/detokenize", {"model": "smol", "tokens": found["tokens"]})

    assert (found["count"], "".join(found["token_strs"])) == (len(found["tokens"]), FRANCE)
    assert found["max_model_len"] == server.ask("/v1/models/smol")["max_model_len"] == 4096
    assert server.ask("/v1/models/calls/")["max_model_len"] == 1024
    assert back["prompt"] == FRANCE
    with pytest.raises(HTTPError) as refused_:
        server.ask("/tokenize", {"model": "smol"})
    assert "prompt: expected a string" in refused_.value.read().decode()


def test_messages_pass_to_llama_cpp(server: ServeProcess) -> None:
    asked = {"model": "smol", "max_tokens": 3, "messages": user("hi")}
    whole = server.ask("/v1/messages", asked)
    assert whole["id"].startswith("msg_")
    with urlopen(
        Request(f"http://{server.http}/v1/messages", json.dumps({**asked, "stream": True}).encode())
    ) as stream:
        events = [event.partition("\ndata: ") for event in stream.read().decode().split("\n\n")[:-1]]

    assert (whole["type"], whole["model"], whole["usage"]["output_tokens"]) == ("message", "smol", 3)
    assert whole["content"][0]["type"] == "text"
    assert (events[0][0], events[-1][0]) == ("event: message_start", "event: message_stop")
    assert json.loads(events[0][2])["message"]["model"] == "smol"
    for member in ({"top_kk": 5}, {"thinking": {"type": "enabled", "budget_tokens": 5}}):
        with pytest.raises(HTTPError) as refused_:
            server.ask("/v1/messages", {**asked, **member})
        assert refused_.value.code == 400
        assert json.load(refused_.value)["error"]["param"] == next(iter(member))


def test_a_choice_is_followed(client: openai.OpenAI) -> None:
    for given in ({"guided_choice": ["Io", "Europa"]}, {"structured_outputs": {"choice": ["Io", "Europa"]}}):
        answer = client.chat.completions.create(model="smol", messages=user("A moon?"), extra_body=given)
        assert answer.choices[0].message.content in ("Io", "Europa")


def test_answers_follow_a_schema(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(model="smol", messages=user("A moon?"), response_format=Moon, max_tokens=60)
    response = client.responses.parse(model="smol", input="A moon?", text_format=Moon, max_output_tokens=60)

    assert chat.choices[0].message.parsed is not None
    assert response.output_parsed is not None
    with client.chat.completions.stream(
        model="smol", messages=user("A moon?"), response_format=Moon, max_tokens=60
    ) as chunks:
        assert chunks.get_final_completion().choices[0].message.parsed is not None
    with client.responses.stream(model="smol", input="A moon?", text_format=Moon, max_output_tokens=60) as events:
        seen = [event.type for event in events]
        assert events.get_final_response().output_parsed is not None
    assert seen[0] == "response.created"
    assert seen[-1] == "response.completed"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called_with_a_template_that_has_tools(client: openai.OpenAI, choice: Any) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    messages = []
    for city in ("Rome", "Oslo", "Bern"):
        called = {"name": "weather", "arguments": json.dumps({"city": city})}
        calls = [{"id": city, "type": "function", "function": called}]
        messages += [*user(f"Weather in {city}?"), {"role": "assistant", "content": None, "tool_calls": calls}]
    asked: dict[str, Any] = {"messages": [*messages, *user("Weather in Paris?")], "tools": tools, "max_tokens": 60}

    answer = client.chat.completions.create(model="calls", tool_choice=choice, temperature=0, **asked).choices[0]
    with client.chat.completions.stream(model="calls", tool_choice=choice, temperature=0, **asked) as stream:
        streamed = stream.get_final_completion().choices[0]

    for found in (answer, streamed):
        assert found.finish_reason == "tool_calls"
        assert found.message.tool_calls is not None
        assert json.loads(found.message.tool_calls[0].function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"n": SLOTS + 1}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_what_is_out_of_range_or_not_done_is_refused_by_name(
    client: openai.OpenAI, given: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="smol", messages=user("x"), stream=stream, **given)
        assert refused.value.param == param


def test_several_prompts_are_streamed_without_empty_events(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model="smol", prompt=["One, two,", "A, b,"], max_tokens=2, stream=True)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_the_usage_of_several_choices_is_that_of_all(server: ServeProcess, client: openai.OpenAI) -> None:
    alone = [
        client.completions.create(model="smol", prompt=prompt, max_tokens=2, extra_body={"ignore_eos": True}).usage
        for prompt in ("One, two, three,", FRANCE)
    ]
    prompt_tokens = sum(usage.prompt_tokens for usage in alone if usage is not None)
    before = tokens_counted(server)
    asked: dict[str, Any] = {"model": "smol", "prompt": ["One, two, three,", FRANCE], "max_tokens": 2, "n": 1}
    asked["extra_body"] = {"ignore_eos": True}
    answer = client.completions.create(**asked)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.text and choice.finish_reason == "length" for choice in answer.choices)
    *chunks, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.choices) == (prompt_tokens, 4, [])
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    chat = client.chat.completions.create(model="smol", messages=user("Hi"), max_tokens=1, n=2)
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 2
    assert [choice.message.role for choice in chat.choices] == ["assistant"] * 2
    after = tokens_counted(server)
    assert after[0] - before[0] == 2 * prompt_tokens + chat.usage.prompt_tokens
    assert after[1] - before[1] == 4 + 4 + 2


def tokens_counted(server: ServeProcess) -> tuple[float, float]:
    """Return the tokens of prompts and of answers, as the metrics page has them."""
    return server.metric("nv_llm_prompt_tokens_total", "smol"), server.metric("nv_llm_completion_tokens_total", "smol")


def test_openai_streams_that_are_closed_free_their_slots(client: openai.OpenAI) -> None:
    for _ in range(50):
        stream = client.completions.create(
            model="smol", prompt="Once", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    start = time.monotonic()
    answer = client.completions.create(model="smol", prompt=FRANCE, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert time.monotonic() - start < 10


def test_an_openai_stream_whose_worker_is_killed_ends_with_an_error_and_the_next_is_answered(
    server: ServeProcess, client: openai.OpenAI
) -> None:
    stream = client.completions.create(
        model="smol", prompt="Once", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    for process in workers(server):
        process.kill()
    with pytest.raises(openai.APIError, match="SIGKILL"):
        list(chunks)

    def answers() -> bool:
        with contextlib.suppress(openai.InternalServerError):
            return bool(client.completions.create(model="smol", prompt=FRANCE, max_tokens=1).choices)
        return False

    assert eventually(answers)


def test_embeddings_are_answered_in_both_ways(server: ServeProcess) -> None:
    asked = {"model": "embeds", "input": ["a cat", "a dog"]}
    answer = post(server, {"text_input": json.dumps(asked), "parameters": {"openai": "embeddings"}}, "embeds")
    vectors = [each["embedding"] for each in json.loads(answer["text_output"])["data"]]
    assert [len(vector) for vector in vectors] == [576, 576]
    assert answer["prompt_tokens"] > 0
    alone = json.loads(post(server, {"text_input": "a cat"}, "embeds")["text_output"])
    np.testing.assert_allclose(alone, vectors[0], atol=1e-3)
    assert "the model has no route 'completions'" in refused(
        server, {"text_input": '{"prompt": "x"}', "parameters": {"openai": "completions"}}, "embeds"
    )


def test_endpoint_pickers_find_the_metrics_of_their_protocol(server: ServeProcess) -> None:
    families = {family.name: family for family in text_string_to_metric_families(server.metrics_page())}

    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        family = families[f"vllm:{name}"]
        assert family.type == "gauge"  # as the model server protocol demands
        assert [each.value for each in family.samples if each.labels == {"model": "smol", "version": "1"}] == [0]


def test_the_configuration_says_what_the_model_takes_and_which_routes_it_answers(server: ServeProcess) -> None:
    configs = {}
    for model in ("smol", "embeds"):
        configs[model] = server.ask(f"/v2/models/{model}/config")
    assert configs["smol"]["backend"] == "llama_cpp"
    assert configs["smol"]["model_transaction_policy"] == {"decoupled": True}
    routes = {name: config["parameters"]["openai_routes"]["string_value"] for name, config in configs.items()}
    assert routes == {
        "smol": "chat/completions,completions,messages,tokenize,detokenize",
        "embeds": "embeddings,tokenize,detokenize",
    }


def test_a_broken_file_fails_alone_and_says_why(server: ServeProcess) -> None:
    reasons = {model["name"]: model.get("reason", "") for model in server.ask("/v2/repository/index", {})}
    assert "model is corrupted or incomplete" in reasons["truncated"]
    assert "is no GGUF file" in reasons["no_gguf"]
    assert "git lfs pull" in reasons["no_gguf"]
    assert "n_contxt: llama.cpp has no such parameter here; did you mean 'n_ctx'?" in reasons["misspelt"]
    assert "n_batch: expected a whole number of at least 1, got '0'" in reasons["misspelt"]
    assert reasons["smol"] == reasons["embeds"] == ""


def test_slots_of_callers_that_leave_in_mid_stream_are_free_again(server: ServeProcess) -> None:
    streams = [
        Stream(server, {"text_input": "Once", "stream": True, "sampling_parameters": ENDLESS}) for _ in range(50)
    ]
    for stream in streams:  # those behind the first ones get a slot only because these are cancelled
        with contextlib.closing(iter(stream)) as events:
            assert "text_output" in next(events)
    start = time.monotonic()
    answer = post(server, {"text_input": FRANCE, "sampling_parameters": {"max_tokens": 1}})
    assert answer["completion_tokens"] == 1
    assert time.monotonic() - start < 30
    with urlopen(f"http://{server.http}/v2/models/smol/ready") as ready:
        assert ready.status == 200


def test_a_caller_that_leaves_before_the_first_token_costs_no_more(server: ServeProcess) -> None:
    body = {"text_input": "word " * 3500, "stream": True, "sampling_parameters": ENDLESS}  # many seconds of prompt
    streams = [Stream(server, body) for _ in range(SLOTS + 1)]
    time.sleep(0.5)
    for stream in streams:
        stream.close()
    start = time.monotonic()
    assert post(server, {"text_input": FRANCE, "sampling_parameters": {"max_tokens": 1}})["completion_tokens"] == 1
    assert time.monotonic() - start < 30


def test_a_call_whose_deadline_is_over_leaves_its_slot(server: ServeProcess) -> None:
    texts = {"text_input": "Once", "sampling_parameters": json.dumps(ENDLESS)}
    given = [infer_input(grpc, name, np.array([text.encode()], object)) for name, text in texts.items()]
    errors: queue.SimpleQueue[Any] = queue.SimpleQueue()
    clients = [grpc.InferenceServerClient(server.grpc) for _ in range(SLOTS)]
    for client in clients:
        client.start_stream(lambda result, error: errors.put(error), stream_timeout=1.0)
        client.async_stream_infer("smol", given)
    for _ in clients:
        assert "Deadline" in str(errors.get(timeout=200))
    start = time.monotonic()
    assert post(server, {"text_input": FRANCE, "sampling_parameters": {"max_tokens": 1}})["completion_tokens"] == 1
    assert time.monotonic() - start < 15
    for client in clients:
        client.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_in_mid_stream_fails_its_streams_and_comes_back(
    server: ServeProcess, number: signal.Signals
) -> None:
    stream = Stream(server, {"text_input": "Once", "stream": True, "sampling_parameters": ENDLESS})
    events = iter(stream)
    assert "text_output" in next(events)
    assert eventually(lambda: len(workers(server)) == 3)
    before = workers(server)
    for process in before:
        process.send_signal(number)
    *_, last = events
    assert number.name in last["error"]
    assert "is not healthy" in last["error"]

    def answers() -> bool:
        try:
            body = {"text_input": FRANCE, "sampling_parameters": {"max_tokens": 1}}
            return bool(post(server, body)["completion_tokens"] == 1)
        except HTTPError:
            return False

    assert eventually(answers)
    assert {process.pid for process in workers(server)}.isdisjoint({process.pid for process in before})
