"""What is read from the responses of language models, and when each piece is taken to have come."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.tensor import Tensor
from charonia.schema.pool import message_class
from charonia.tools.perf.language.plan import LanguageEndpoint
from charonia.tools.perf.language.replies import UNKNOWN, Reply, events, read_reply
from charonia.tools.perf.samples import ReceivedResponse
from charonia.wire.tensors import encode_tensor


def arrivals(body: bytes, cuts: list[int], times: list[int]) -> bytes:
    """The arrivals of a body that is cut at these places; the last part ends with it."""
    sizes = [*sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return np.array(list(zip(times, sizes, strict=False)), np.int64).tobytes()


def stream(*documents: dict[str, Any] | str, end: str = "\n\n") -> bytes:
    texts = (item if isinstance(item, str) else json.dumps(item) for item in documents)
    return "".join(f"data: {text}{end}" for text in texts).encode()


def reply(body: bytes, endpoint: LanguageEndpoint = LanguageEndpoint.CHAT) -> Reply:
    return read_reply(endpoint, ReceivedResponse(arrivals(body, [], [7]), body))


def delta(**members: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": members}]}


@given(
    texts=st.lists(st.text(max_size=8), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
    end=st.sampled_from(["\n\n", "\r\n\r\n"]),
)
def test_an_event_has_the_time_of_the_part_that_ends_it(texts: list[str], cuts: list[int], end: str) -> None:
    datas = [json.dumps(text).encode() for text in texts]
    body = b"".join(b"data: " + data + end.encode() for data in datas)
    times = list(range(100, 100 + len(cuts) + 1))
    packed = arrivals(body, cuts, times)

    found = list(events(body, np.frombuffer(packed, np.int64).reshape(-1, 2)))

    sizes = np.frombuffer(packed, np.int64).reshape(-1, 2)
    ends = np.cumsum([len(data) + 6 + len(end) for data in datas])
    expected = [next(int(at) for at, size in sizes if size >= last) for last in ends]
    assert found == list(zip(datas, expected, strict=True))


def test_comments_other_fields_and_a_missing_last_line_are_understood() -> None:
    body = b': hello\n\nevent: message\ndata: {"a":\ndata: 1}\nid: 3\n\ndata:{"a": 2}'

    found = [data for data, _ in events(body, np.array([[5, len(body)]], np.int64))]

    assert found == [b'{"a":\n1}', b'{"a": 2}']


def test_a_chat_has_pieces_where_there_is_content() -> None:
    role, hello, there = delta(role="assistant", content=""), delta(content="Hello"), delta(content=" there")
    used = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    body = stream(role, hello, there, used, "[DONE]")
    ends = np.cumsum([len(stream(item)) for item in (role, hello, there, used, "[DONE]")]).tolist()
    packed = np.array(list(zip((10, 20, 30, 40, 50), ends, strict=True)), np.int64).tobytes()

    found = read_reply(LanguageEndpoint.CHAT, ReceivedResponse(packed, body))

    assert found.times_ns.tolist() == [20, 30]
    assert (found.content, found.prompt_tokens, found.completion_tokens) == ("Hello there", 5, 2)
    assert found.is_stream


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_counts_as_content_and_is_told_apart(name: str) -> None:
    found = reply(stream(delta(**{name: "Hm"}), delta(content="Yes")))

    assert (found.reasoning, found.content, len(found.times_ns)) == ("Hm", "Yes", 2)


def test_a_call_of_a_tool_is_content() -> None:
    call = {"index": 0, "function": {"name": "add", "arguments": '{"a": 1}'}}

    found = reply(stream(delta(tool_calls=[call])))

    assert found.content == 'add{"a": 1}'


def test_a_whole_chat_is_no_stream() -> None:
    document = {"choices": [{"message": {"content": "Hello"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}

    found = reply(json.dumps(document).encode())

    assert (found.is_stream, found.content, found.times_ns.tolist()) == (False, "Hello", [7])


def test_completions_have_their_text_in_the_choice() -> None:
    found = reply(stream({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}), LanguageEndpoint.COMPLETIONS)

    assert found.content == "ab"


def test_embeddings_are_content_without_text() -> None:
    document = {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 4}}

    found = reply(json.dumps(document).encode(), LanguageEndpoint.EMBEDDINGS)

    assert (found.content, found.times_ns.tolist(), found.prompt_tokens) == ("", [7], 4)


def test_generate_counts_the_tokens_of_each_piece() -> None:
    body = stream(
        {"text_output": "a", "num_input_tokens": 3, "num_output_tokens": 1},
        {"text_output": "b c", "num_input_tokens": 3, "num_output_tokens": 2},
    )

    found = reply(body, LanguageEndpoint.GENERATE)

    assert (found.content, found.prompt_tokens, found.completion_tokens) == ("ab c", 3, 3)


def test_inference_over_http_has_the_text_in_an_output() -> None:
    outputs = [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["a"]}]

    found = reply(stream({"outputs": outputs}), LanguageEndpoint.INFER)

    assert (found.content, found.prompt_tokens, found.completion_tokens) == ("a", UNKNOWN, UNKNOWN)


def test_inference_over_grpc_has_a_message_for_each_piece() -> None:
    messages = []
    for word in (b"a", b" b"):
        message: Any = message_class("inference.ModelStreamInferResponse")()
        message.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        tensor = Tensor("text_output", DataType.BYTES, np.array([word], object))
        message.infer_response.raw_output_contents.append(bytes(encode_tensor(tensor)))
        messages.append(message.SerializeToString())
    ends = np.cumsum([len(message) for message in messages]).tolist()
    packed = np.array(list(zip((3, 9), ends, strict=True)), np.int64).tobytes()

    found = read_reply(LanguageEndpoint.INFER, ReceivedResponse(packed, b"".join(messages)), is_grpc=True)

    assert (found.content, found.times_ns.tolist()) == ("a b", [3, 9])


@pytest.mark.parametrize("error", [{"message": "the engine has stopped"}, "the engine has stopped"])
def test_an_error_within_a_stream_is_found(error: object) -> None:
    found = reply(stream(delta(content="a"), {"error": error}))

    assert found.error == "the engine has stopped"


@pytest.mark.parametrize("data", ["no JSON", "[1]", '{"choices": [1]}', '{"choices": [{"delta": 5}]}'])
def test_what_does_not_follow_the_api_is_a_value_error(data: str) -> None:
    with pytest.raises(ValueError, match=r"expected JSON|JSON object|unexpected response"):
        reply(stream(data))
