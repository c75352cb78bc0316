"""Export to a collector: spans that lie in each other, with numbers that were given before."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.faulty_network import SILENT, SLOW, FaultyNetwork, Link, broken
from tests.support.process import eventually
from tests.support.scripted import TraceIds

from charonia.core.errors import Code, ServingError
from charonia.core.statistics import TokenUsage
from charonia.core.trace import (
    COMPUTE_END,
    COMPUTE_START,
    INFER_RESPONSE_COMPLETE,
    QUEUE_START,
    REQUEST_END,
    REQUEST_START,
    RemoteParent,
    TraceLevel,
    TraceTree,
)
from charonia.install_hint import extra_hint
from charonia.server.tracing import otel
from charonia.server.tracing.otel import OtelExport
from charonia.server.tracing.sampling import OtelOptions, Sampling
from charonia.wire.trace_settings import TraceSettings

SAMPLING = Sampling(TraceSettings(TraceLevel.TIMESTAMPS), allows_remote=True)


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A place that takes OTLP over HTTP: its URL, and the exports that came."""
    exports: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            exports.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", exports
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def traced(remote: RemoteParent | None = None) -> TraceTree:
    tree = TraceTree(TraceLevel.TIMESTAMPS, TraceIds(0x1000), lambda tree: None, remote)
    tree.mark("HTTP_RECV_START", 1_000)
    tree.mark("HTTP_SEND_END", 9_000)
    child = tree.root.child()
    assert child is not None
    for trace, name in ((tree.root, "top"), (child, "step")):
        trace.model_name, trace.model_version, trace.request_id = name, "3", "r"
        for event, at_ns in ((REQUEST_START, 2_000), (QUEUE_START, 2_000), (REQUEST_END, 8_000)):
            trace.mark(event, at_ns)
    tree.root.mark(INFER_RESPONSE_COMPLETE, 7_500)
    child.mark(COMPUTE_START, 3_000)
    child.mark(COMPUTE_END, 7_000)
    return tree


def exported(tree: TraceTree, **options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The spans by name, and the attributes of the server."""
    with collector() as (url, exports):
        sink = OtelExport(OtelOptions(url=url.removeprefix("http://"), **options))
        sink.write(SAMPLING, tree, False)
        sink.flush()
        sink.retire(SAMPLING)
        sink.close()
    (resource,) = [each for export in exports for each in export.resource_spans]
    attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
    return {span.name: span for scope in resource.scope_spans for span in scope.spans}, attributes


def test_spans_lie_in_each_other_with_the_timestamps_as_their_events() -> None:
    tree = traced()

    spans, resource = exported(tree)

    assert set(spans) == {"InferRequest", "top", "step", "compute"}
    assert spans["InferRequest"].parent_span_id == b""
    assert spans["top"].parent_span_id == spans["InferRequest"].span_id
    assert spans["step"].parent_span_id == spans["top"].span_id == tree.root.span_id.to_bytes(8, "big")
    assert spans["compute"].parent_span_id == spans["step"].span_id
    assert [event.name for event in spans["compute"].events] == [COMPUTE_START, COMPUTE_END]
    assert [event.name for event in spans["top"].events] == [REQUEST_START, QUEUE_START, REQUEST_END]
    assert [event.name for event in spans["InferRequest"].events][1] == INFER_RESPONSE_COMPLETE
    lengths = {name: span.end_time_unix_nano - span.start_time_unix_nano for name, span in spans.items()}
    assert lengths == {"InferRequest": 8_000, "top": 6_000, "step": 6_000, "compute": 4_000}
    assert resource["service.name"] == "triton-inference-server"


def test_spans_of_models_say_which() -> None:
    spans, _ = exported(traced())

    attributes = {a.key: a.value.string_value or a.value.int_value for a in spans["step"].attributes}
    assert attributes == {
        "triton.model_name": "step",
        "triton.model_version": 3,
        "triton.trace_id": 2,
        "triton.trace_parent_id": 1,
        "triton.request_id": "r",
    }


def test_spans_of_language_models_have_their_tokens() -> None:
    tree = traced()
    tree.root.usage = TokenUsage(20, 3)

    spans, _ = exported(tree)

    attributes = {a.key: a.value.string_value or a.value.int_value for a in spans["top"].attributes}
    assert attributes["gen_ai.request.model"] == "top"
    assert attributes["gen_ai.usage.input_tokens"] == 20
    assert attributes["gen_ai.usage.output_tokens"] == 3


def test_a_sender_is_the_parent_of_everything() -> None:
    spans, _ = exported(traced(RemoteParent(0xABC, 0xDEF, "vendor=1")))

    assert {int.from_bytes(span.trace_id, "big") for span in spans.values()} == {0xABC}
    assert int.from_bytes(spans["InferRequest"].parent_span_id, "big") == 0xDEF
    assert spans["InferRequest"].trace_state == "vendor=1"


def test_attributes_of_the_server_are_the_users() -> None:
    _, resource = exported(traced(), resource=(("service.name", "ours"), ("zone", "a")))

    assert (resource["service.name"], resource["zone"]) == ("ours", "a")


def test_a_service_name_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-outside")

    _, resource = exported(traced())

    assert resource["service.name"] == "from-outside"


def test_a_request_that_never_reached_a_model_is_a_span_alone() -> None:
    tree = TraceTree(TraceLevel.TIMESTAMPS, TraceIds(0x1000), lambda tree: None)
    tree.mark("HTTP_RECV_START", 1_000)

    spans, _ = exported(tree)

    assert set(spans) == {"InferRequest"}


def test_without_the_sdk_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)

    with pytest.raises(ServingError) as caught:
        OtelExport(OtelOptions())

    assert caught.value.code is Code.UNSUPPORTED
    assert caught.value.hint == extra_hint("otel")


def test_numbers_of_the_environment_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "5")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "6")

    with pytest.raises(ServingError, match="OTEL_BSP_"):
        OtelExport(OtelOptions())


@pytest.mark.parametrize("link", SLOW.values(), ids=SLOW)
def test_a_slow_network_to_the_collector_costs_time_only(link: Link) -> None:
    with collector() as (url, exports), FaultyNetwork(urlsplit(url).port or 0, link, link) as network:
        sink = OtelExport(OtelOptions(url=f"http://127.0.0.1:{network.port}/v1/traces", delay_ms=1))
        sink.write(SAMPLING, traced(), False)
        assert eventually(lambda: bool(exports))
        sink.close()


@pytest.mark.parametrize("link", [*broken(300).values(), SILENT, None], ids=["cut", "stalled", "silent", "refused"])
def test_a_broken_connection_to_the_collector_costs_the_spans_and_does_not_hold_the_end(
    monkeypatch: pytest.MonkeyPatch, link: Link | None
) -> None:
    monkeypatch.setattr(otel, "FLUSH_S_MAX", 0.2)
    with collector() as (url, exports), FaultyNetwork(urlsplit(url).port or 0, to_server=link or SILENT) as network:
        sink = OtelExport(OtelOptions(url=f"http://127.0.0.1:{network.port if link else 9}/v1/traces", queue_size=4))
        for _ in range(10):  # more than the queue holds
            sink.write(SAMPLING, traced(), False)

        sink.close()

        waiting = [thread for thread in threading.enumerate() if thread.name == "last-export"]
    for thread in waiting:
        thread.join()
    assert exports == []
    assert waiting or link is None or link.is_cut  # it has not waited for the collector
