"""Traces: trees that end when nothing holds them, events in order, and headers that continue a trace."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.scripted import TraceIds

from charonia.core.dtypes import DataType
from charonia.core.tensor import Tensor
from charonia.core.trace import (
    CHILDREN_MAX,
    COMPUTE_END,
    EVENTS_MAX,
    INFER_RESPONSE_COMPLETE,
    REQUEST_END,
    REQUEST_START,
    TENSOR_QUEUE_INPUT,
    RemoteParent,
    TraceLevel,
    TraceTree,
    ordered,
    parse_traceparent,
)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"


def tree(
    done: list[TraceTree] | None = None, level: TraceLevel = TraceLevel.TIMESTAMPS, spans: bool = False
) -> TraceTree:
    return TraceTree(level, TraceIds(0x100 if spans else 0), (done if done is not None else []).append)


def test_a_tree_is_over_when_its_last_holder_lets_go() -> None:
    done: list[TraceTree] = []
    made = tree(done)
    made.hold()
    made.release()
    assert done == []

    made.release()

    assert done == [made]


def test_children_have_numbers_of_their_own_and_name_their_parent() -> None:
    root = tree().root
    child = root.child()
    assert child is not None
    grandchild = child.child()
    assert grandchild is not None

    assert [(trace.id, trace.parent_id) for trace in root.tree.traces] == [(1, 0), (2, 1), (3, 2)]


def test_a_request_has_no_more_children_than_the_limit() -> None:
    root = tree().root

    children = [root.child() for _ in range(CHILDREN_MAX + 1)]

    assert None not in children[:-1]
    assert children[-1] is None


def test_events_and_tensors_beyond_the_limit_are_left_out() -> None:
    made = tree(level=TraceLevel.TIMESTAMPS | TraceLevel.TENSORS)
    for at_ns in range(EVENTS_MAX + 5):
        made.mark("HTTP_SEND_START", at_ns)
        made.root.mark(INFER_RESPONSE_COMPLETE, at_ns)
        made.root.show(TENSOR_QUEUE_INPUT, [Tensor("IN", DataType.FP32, np.zeros(2, np.float32))])

    assert len(made.front) == len(made.root.events) == len(made.root.tensors) == EVENTS_MAX


def test_events_at_the_same_time_are_in_the_order_in_which_they_come_about() -> None:
    events = [(REQUEST_END, 5), (INFER_RESPONSE_COMPLETE, 5), (COMPUTE_END, 5), (REQUEST_START, 1)]

    assert [name for name, _ in ordered(events)] == [REQUEST_START, COMPUTE_END, INFER_RESPONSE_COMPLETE, REQUEST_END]


@pytest.mark.parametrize(("level", "shown"), [(TraceLevel.TIMESTAMPS, 0), (TraceLevel.TENSORS, 1)])
def test_tensors_are_kept_only_where_they_are_asked_for(level: TraceLevel, shown: int) -> None:
    root = tree(level=level).root

    root.show(TENSOR_QUEUE_INPUT, [Tensor("IN", DataType.FP32, np.zeros(2, np.float32))])

    assert len(root.tensors) == shown


def test_the_context_of_a_span_is_what_the_next_program_goes_on_with() -> None:
    remote = parse_traceparent(f"00-{TRACE_ID}-{SPAN_ID}-00", "vendor=1")
    root = TraceTree(TraceLevel.TIMESTAMPS, TraceIds(0x100), lambda tree: None, remote).root

    context = json.loads(root.context)

    assert context == {"traceparent": f"00-{TRACE_ID}-{root.span_id:016x}-01", "tracestate": "vendor=1"}


def test_without_spans_the_context_is_only_our_own_number() -> None:
    assert json.loads(tree().root.context) == {"charonia_trace_id": "1"}


def test_without_a_sender_a_tree_begins_a_trace_of_its_own() -> None:
    made = tree(spans=True)

    assert made.trace_id.bit_length() > 64
    assert made.state == ""
    assert "tracestate" not in made.root.context


def test_a_header_of_the_first_version_names_trace_and_span() -> None:
    parent = parse_traceparent(f" 00-{TRACE_ID}-{SPAN_ID}-01 ")

    assert parent is not None
    assert (parent.trace_id, parent.span_id, parent.state) == (int(TRACE_ID, 16), int(SPAN_ID, 16), "")


def test_a_header_of_a_later_version_may_be_longer() -> None:
    assert parse_traceparent(f"01-{TRACE_ID}-{SPAN_ID}-01-more") is not None


@pytest.mark.parametrize(
    "value",
    [
        "",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"01-{TRACE_ID}-{SPAN_ID}-01more",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00_{TRACE_ID}-{SPAN_ID}-01",
        f"0x-{TRACE_ID}-{SPAN_ID}-01",
    ],
)
def test_a_header_that_says_nothing_valid_is_ignored(value: str) -> None:
    assert parse_traceparent(value) is None


@pytest.mark.parametrize("state", ['a="b', "a=\\", "a=\n", "é", "a" * 600])
def test_a_state_that_could_break_a_text_is_left_out(state: str) -> None:
    parent = parse_traceparent(f"00-{TRACE_ID}-{SPAN_ID}-01", state)

    assert parent is not None
    assert parent.state == ""


@given(st.text(max_size=80))
def test_no_header_does_harm(value: str) -> None:
    parent = parse_traceparent(value, value)

    assert parent is None or isinstance(parent, RemoteParent)
