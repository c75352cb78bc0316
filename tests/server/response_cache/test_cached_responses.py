"""The LRU map, the encoding of a response, and the circuit breaker."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.request import ParameterValue
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.response_cache.api import ENTRY_OVERHEAD_BYTES, STRING_OVERHEAD_BYTES, CachedResponse, CacheKey
from charonia.server.response_cache.memory import LruEntries
from charonia.server.response_cache.redis import FAILURES_MAX, PAUSE_S, PAUSE_S_MAX, CircuitBreaker, decode, encode


def key(name: str, namespace: str = "s") -> CacheKey:
    return CacheKey(namespace.encode(), name.encode())


def strings(*values: bytes) -> Tensor:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return Tensor("S", DataType.BYTES, array)


def cached(*tensors: Tensor, parameters: dict[str, ParameterValue] | None = None) -> CachedResponse:
    return CachedResponse.of(InferResponse("m", "2", "the id", list(tensors), parameters))


def test_the_entry_that_was_used_longest_ago_makes_room() -> None:
    entries: LruEntries[str] = LruEntries(30)
    for name in "abc":
        entries.put(key(name), name, 10)
    entries.get(key("a"))

    assert entries.put(key("d"), "d", 10)

    assert [entries.get(key(name)) for name in "abcd"] == ["a", None, "c", "d"]
    assert (len(entries), entries.byte_size, entries.evictions) == (3, 30, 1)


def test_an_entry_that_is_too_large_is_not_kept_and_costs_nobody_a_place() -> None:
    entries: LruEntries[str] = LruEntries(30)
    entries.put(key("a"), "a", 10)

    assert not entries.put(key("b"), "b", 31)

    assert (entries.get(key("a")), len(entries), entries.evictions) == ("a", 1, 0)


def test_an_entry_takes_the_place_of_an_earlier_one() -> None:
    entries: LruEntries[str] = LruEntries(30)
    entries.put(key("a"), "old", 20)

    entries.put(key("a"), "new", 25)

    assert (entries.get(key("a")), entries.byte_size, entries.evictions) == ("new", 25, 0)


def test_a_namespace_is_forgotten_and_others_stay() -> None:
    entries: LruEntries[str] = LruEntries(100)
    for name in "ab":
        entries.put(key(name, "old"), name, 10)
    entries.put(key("a", "new"), "c", 10)

    entries.evict_namespace(b"old")
    entries.evict_namespace(b"unknown")

    assert (entries.get(key("a", "old")), entries.get(key("a", "new"))) == (None, "c")
    assert (len(entries), entries.byte_size) == (1, 10)


ACTIONS = st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["s", "t"]), st.integers(-2, 40)), max_size=60)


@settings(max_examples=150)
@given(ACTIONS)
def test_the_bytes_are_never_more_than_allowed_and_always_those_of_the_entries(
    actions: list[tuple[str, str, int]],
) -> None:
    entries: LruEntries[int] = LruEntries(50)
    expected: dict[CacheKey, int] = {}  # the last used one last
    for name, namespace, size in actions:
        where = key(name, namespace)
        if size == -2:
            entries.evict_namespace(namespace.encode())
            expected = {k: v for k, v in expected.items() if k.namespace != namespace.encode()}
        elif size == -1:
            value = entries.get(where)
            assert value == expected.get(where)
            if value is not None:
                expected[where] = expected.pop(where)
        else:
            expected.pop(where, None)
            assert entries.put(where, size, size)
            while sum(expected.values()) + size > 50:
                del expected[next(iter(expected))]
            expected[where] = size
        assert (entries.byte_size, len(entries)) == (sum(expected.values()), len(expected))
    assert {k: entries.get(k) for k in expected} == expected


def test_a_cached_response_is_a_read_only_copy() -> None:
    array = np.arange(4, dtype="<f4")
    one = cached(Tensor("OUT", DataType.FP32, array), parameters={"p": 1})
    array[0] = 99

    response = one.response("another id")

    assert response.outputs[0].array.tolist() == [0, 1, 2, 3]
    assert (response.id, response.model_name, response.model_version, response.parameters) == (
        *("another id", "m", "2"),
        {"p": 1},
    )
    with pytest.raises(ValueError, match="read-only"):
        response.outputs[0].array[0] = 1
    response.parameters["p"] = 2
    response.outputs.clear()
    assert one.response("").parameters == {"p": 1}
    assert len(one.response("").outputs) == 1


def test_the_size_of_a_response_is_that_of_its_tensors_and_its_records() -> None:
    assert cached(Tensor("OUT", DataType.FP32, np.zeros(4, "<f4"))).byte_size == ENTRY_OVERHEAD_BYTES + 16
    assert cached(strings(b"abc", b"")).byte_size == ENTRY_OVERHEAD_BYTES + 3 + 2 * STRING_OVERHEAD_BYTES


ARRAYS = st.sampled_from([d for d in DataType if d is not DataType.BYTES]).flatmap(
    lambda datatype: st.lists(st.integers(0, 3), max_size=3).map(
        lambda shape: Tensor("T", datatype, np.ones(shape, datatype.numpy))
    )
)
STRINGS = st.lists(st.binary(max_size=4), max_size=4).map(lambda values: strings(*values))
PARAMETERS = st.dictionaries(
    st.text(max_size=4),
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    max_size=3,
)


@settings(max_examples=100)
@given(st.lists(ARRAYS | STRINGS, max_size=3), PARAMETERS)
def test_a_response_comes_back_as_it_was(tensors: list[Tensor], parameters: dict[str, ParameterValue]) -> None:
    before = cached(*tensors, parameters=parameters)
    data = encode(before)
    assert data is not None

    after = decode(data)

    assert (after.model_name, after.model_version, after.parameters) == ("m", "2", parameters)
    assert [type(value) for value in after.parameters.values()] == [type(value) for value in parameters.values()]
    for one, other in zip(before.outputs, after.outputs, strict=True):
        assert (one.name, one.datatype, one.array.dtype, one.array.shape) == (
            *(other.name, other.datatype),
            *(other.array.dtype, other.array.shape),
        )
        assert one.array.tolist() == other.array.tolist()
        assert not other.array.flags.writeable


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**64])
def test_a_response_whose_parameter_would_not_come_back_is_not_encoded(value: float) -> None:
    assert encode(cached(parameters={"p": value})) is None


GOOD = encode(cached(Tensor("OUT", DataType.FP32, np.zeros(4, "<f4")), strings(b"abc")))


@settings(max_examples=200)
@given(st.binary(max_size=60) | st.integers(0, 200).map(lambda n: (GOOD or b"")[:n]))
def test_malformed_bytes_are_refused(data: bytes) -> None:
    if data == GOOD:
        return
    with pytest.raises(ValueError):  # noqa: PT011 - any sentence
        decode(data)


def test_bytes_whose_head_and_body_disagree_are_refused() -> None:
    assert GOOD is not None
    for one, other in ((b"[4]", b"[5]"), (b"[4]", b"[3]"), (b"[1]", b"[0]"), (b"FP32", b"FP64"), (b"FP32", b"FP99")):
        with pytest.raises(ValueError):  # noqa: PT011 - any sentence
            decode(GOOD.replace(one, other))
    with pytest.raises(ValueError, match="expected"):
        decode(GOOD + b"x")
    with pytest.raises(ValueError):  # noqa: PT011 - any sentence
        decode(GOOD.replace((3).to_bytes(4, "little"), (2).to_bytes(4, "little")))
    with pytest.raises(ValueError, match="wrong magic number"):
        decode(b"CRC0" + GOOD[4:])


def test_the_circuit_breaker_opens_after_failures_in_a_row_and_backs_off() -> None:
    breaker = CircuitBreaker()
    assert not breaker.is_up
    breaker.connected()

    assert [breaker.failed() for _ in range(FAILURES_MAX - 1)] == [False] * (FAILURES_MAX - 1)
    breaker.succeeded()
    assert [breaker.failed() for _ in range(FAILURES_MAX)] == [False] * (FAILURES_MAX - 1) + [True]
    assert not breaker.is_up
    assert not breaker.failed()  # those that were under way

    assert [breaker.pause_s() for _ in range(7)] == [PAUSE_S, 2, 4, 8, 16, PAUSE_S_MAX, PAUSE_S_MAX]
    breaker.connected()
    assert breaker.is_up
    assert breaker.pause_s() == PAUSE_S
