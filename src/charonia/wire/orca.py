"""Load reports of ORCA: in a header or trailer of responses, as JSON, and as messages.

Source: "Open Request Cost Aggregation" (the messages of xds/data/orca/v3), its header formats, and Triton's header for
the cache of language models.
"""

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from charonia.schema.pool import message_class
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_messages import parsed
from charonia.wire.json_text import dump

FORMAT_HEADER = b"endpoint-load-metrics-format"
"""Header of a request, over gRPC metadata, that requests a report: text, json or bin."""

REPORT_HEADER = b"endpoint-load-metrics"
"""Header of the response with the report, over gRPC a trailer."""

UTILIZATION = "application_utilization"
REQUEST_RATE = "rps_fractional"
ERROR_RATE = "eps"

FIELDS = (UTILIZATION, REQUEST_RATE, ERROR_RATE)
"""The metrics that are fields of a report; the others are named metrics."""

QUEUE_DEPTH = "queue_depth"
IN_FLIGHT = "requests_in_flight"
INSTANCES = "instances"
BUSY = "instances_busy"
KV_CACHE = "kv_cache_utilization"
TOKENS_MAX = "max_token_capacity"

LOAD_METRICS = (*FIELDS, QUEUE_DEPTH, IN_FLIGHT, INSTANCES, BUSY, KV_CACHE, TOKENS_MAX)
"""The server's own metrics. Cache metrics need a model that reports them; rates begin with the second report."""

INTERVAL_S = 1.0
"""Default interval between two reports of a stream, in seconds."""

INTERVAL_S_MIN = 0.1
"""Shortest time between two reports of a stream, in seconds."""

Load = Mapping[str, float]
"""A report: values by the name of a metric."""


def load_document(load: Load) -> dict[str, object]:
    """Return a report as a JSON object."""
    named = {name: _number(value) for name, value in load.items() if name not in FIELDS}
    return {**{name: load[name] for name in FIELDS if name in load}, "named_metrics": named}


def load_header(load: Load, form: bytes) -> bytes | None:
    """Return the value of the header with a report.

    Args:
        load: The report.
        form: The requested format.

    Returns:
        The value; None for an empty report, and for a format that does not exist: no reason to refuse a request.
    """
    if not load:
        return None
    match form.strip().lower():
        case b"text":
            fields = (f"{_field(name)}={_text(value)}" for name, value in load.items())
            return f"TEXT {', '.join(fields)}".encode("ascii", "replace")
        case b"json":
            return b"JSON " + dump(load_document(load))
        case b"bin":
            return b"BIN " + b64encode(encode_load(load))
    return None


def load_header_line(load: Load, form: bytes) -> bytes:
    """Return the header of a response as a line, b"" for a format that does not exist."""
    value = load_header(load, form)
    return b"%b: %b\r\n" % (REPORT_HEADER, value) if value is not None else b""


def load_trailers(load: Load, form: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Return the trailer of a gRPC response; none for a format that does not exist. A binary one has its own name."""
    if form.strip().lower() == b"bin":
        return ((REPORT_HEADER + b"-bin", b64encode(encode_load(load)).rstrip(b"=")),)
    value = load_header(load, form)
    return ((REPORT_HEADER, value),) if value is not None else ()


def encode_load(load: Load) -> bytes:
    """Return an OrcaLoadReport."""
    message: Any = message_class("xds.data.orca.v3.OrcaLoadReport")()
    for name, value in load.items():
        if name in FIELDS:
            setattr(message, name, value)
        else:
            message.named_metrics[name] = value
    encoded: bytes = message.SerializeToString(deterministic=True)
    return encoded


def decode_load_request(data: Buffer) -> float:
    """Return the requested interval of an OrcaLoadReportRequest in seconds.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
    """
    interval = parsed("xds.service.orca.v3.OrcaLoadReportRequest", data).report_interval
    seconds = float(interval.seconds + interval.nanos / 1e9)
    return max(seconds, INTERVAL_S_MIN) if seconds > 0 else INTERVAL_S


def _field(name: str) -> str:
    return name if name in FIELDS else f"named_metrics.{name}"


def _number(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _text(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:.6f}"
