"""Exports traces to an OpenTelemetry collector over HTTP.

Each request of a client has a span `InferRequest`, which contains a span with the name of the model, which contains a
span `compute`. Requests of ensembles and models to other models are in the span of the calling model. Events are the
timestamps of trace files. The ids of spans were assigned when the request began, so that models could propagate them.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from charonia.core.errors import invalid, unsupported
from charonia.core.trace import (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    INFER_RESPONSE_COMPLETE,
    Trace,
    TraceTree,
    ordered,
)
from charonia.install_hint import extra_hint
from charonia.server.tracing.sampling import OtelOptions, Sampling

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

SERVICE_NAME = "triton-inference-server"
"""Default of `service.name`."""

BATCH_SIZE = 512
"""Default limit of spans in one export."""

FLUSH_S_MAX = 2.0
"""Time limit of the last export at shutdown, also with a collector that does not answer."""

_COMPUTE = frozenset({COMPUTE_START, COMPUTE_INPUT_END, COMPUTE_OUTPUT_START, COMPUTE_END})

Event = tuple[str, int]


class OtelExport:
    """A `Sink` that exports spans. The SDK's queue between this and the network drops spans when it is full.

    Args:
        options: The collector, and the sizes of queue and exports.

    Raises:
        ServingError: UNSUPPORTED where the SDK is not installed, INVALID_ARG for inconsistent sizes.
    """

    def __init__(self, options: OtelOptions) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME as SERVICE_NAME_KEY
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise unsupported(
                f"--trace-config mode=opentelemetry needs the OpenTelemetry SDK: {error}",
                hint=extra_hint("otel"),
            ) from error
        # The command line takes precedence over OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME.
        named = Resource.create({})
        if str(named.attributes.get(SERVICE_NAME_KEY, "")).startswith("unknown_service"):
            named = named.merge(Resource({SERVICE_NAME_KEY: SERVICE_NAME}))
        self._resource = named.merge(Resource(dict(options.resource)))
        self._exporter = OTLPSpanExporter(endpoint=options.url if "://" in options.url else f"http://{options.url}")
        batch_size = options.batch_size
        if batch_size is None and options.queue_size is not None:
            batch_size = min(options.queue_size, BATCH_SIZE)
        try:
            self._processor = BatchSpanProcessor(
                self._exporter,
                max_queue_size=options.queue_size,
                schedule_delay_millis=options.delay_ms,
                max_export_batch_size=batch_size,
            )
        except ValueError as error:  # settings of the environment are inconsistent
            raise invalid(f"--trace-config opentelemetry, OTEL_BSP_*: {error}") from error

    def write(self, sampling: Sampling, tree: TraceTree, is_complete: bool) -> None:
        offset_ns = time.time_ns() - time.monotonic_ns()
        for span in _Spans(tree, self._resource, offset_ns).make():
            self._processor.on_end(span)

    def retire(self, sampling: Sampling) -> None:
        """Do nothing: spans leave by themselves."""

    def flush(self) -> None:
        """Do nothing: spans leave by themselves."""

    def close(self) -> None:
        """Send the remaining spans, for at most `FLUSH_S_MAX`."""
        # At shutdown the SDK would log once more that the collector cannot be reached.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        # In a thread, because a collector that is silent holds the export until its own time limit.
        last = threading.Thread(target=self._processor.shutdown, name="last-export", daemon=True)
        last.start()
        last.join(FLUSH_S_MAX)
        if last.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call] # ends its waits between attempts


class _Spans:
    """Makes the spans of a tree."""

    def __init__(self, tree: TraceTree, resource: object, offset_ns: int) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import TraceState

        self._tree = tree
        self._resource = resource
        self._offset_ns = offset_ns
        self._scope = InstrumentationScope("charonia")
        self._state = TraceState.from_header([tree.state]) if tree.state else None
        self._numbers = {trace.id: trace.span_id for trace in tree.traces}

    def make(self) -> "list[ReadableSpan]":
        tree = self._tree
        if not tree.front:
            return []
        parent = self._context(tree.remote.span_id, is_remote=True) if tree.remote is not None else None
        complete = [event for trace in tree.traces for event in trace.events if event[0] == INFER_RESPONSE_COMPLETE]
        spans = [self._span("InferRequest", tree.span_id, parent, [*tree.front, *complete], {})]
        for trace in tree.traces:
            if trace.events:
                spans += self._of_request(trace)
        return spans

    def _context(self, number: int, *, is_remote: bool = False) -> "SpanContext":
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(self._tree.trace_id, number, is_remote, TraceFlags(TraceFlags.SAMPLED), self._state)

    def _of_request(self, trace: Trace) -> "list[ReadableSpan]":
        above = self._context(self._numbers.get(trace.parent_id, self._tree.span_id))
        attributes: dict[str, str | int] = {
            "triton.model_name": trace.model_name,
            "triton.model_version": int(trace.model_version),
            "triton.trace_id": trace.id,
            "triton.trace_parent_id": trace.parent_id,
        }
        if trace.request_id:
            attributes["triton.request_id"] = trace.request_id
        if trace.usage is not None:
            attributes["gen_ai.request.model"] = trace.model_name
            attributes["gen_ai.usage.input_tokens"] = trace.usage.prompt
            attributes["gen_ai.usage.output_tokens"] = trace.usage.completion
        outer = [event for event in trace.events if event[0] not in {*_COMPUTE, INFER_RESPONSE_COMPLETE}]
        inner = [event for event in trace.events if event[0] in _COMPUTE]
        spans = [self._span(trace.model_name, trace.span_id, above, outer, attributes)]
        if inner:
            number = trace.compute_span_id
            spans.append(self._span("compute", number, self._context(trace.span_id), inner, {}))
        return spans

    def _span(
        self,
        name: str,
        number: int,
        parent: "SpanContext | None",
        events: list[Event],
        attributes: Mapping[str, str | int],
    ) -> "ReadableSpan":
        from opentelemetry.sdk.trace import Event as SpanEvent
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind

        timed = [(event, at_ns + self._offset_ns) for event, at_ns in ordered(events)]
        return ReadableSpan(
            name,
            context=self._context(number),
            parent=parent,
            resource=self._resource,  # type: ignore[arg-type]
            attributes=attributes,
            events=[SpanEvent(event, timestamp=at_ns) for event, at_ns in timed],
            kind=SpanKind.SERVER,
            start_time=timed[0][1],
            end_time=timed[-1][1],
            instrumentation_scope=self._scope,
        )
