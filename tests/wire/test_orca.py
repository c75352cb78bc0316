import json
from base64 import b64decode

import pytest

from charonia.schema.pool import message_class
from charonia.wire.grpc_status import RpcError
from charonia.wire.orca import (
    INTERVAL_S,
    INTERVAL_S_MIN,
    decode_load_request,
    encode_load,
    load_document,
    load_header,
    load_header_line,
    load_trailers,
)

LOAD = {
    "application_utilization": 0.5,
    "rps_fractional": 12.5,
    "eps": 0.0,
    "queue_depth": 3.0,
    "kv_cache_utilization": 1 / 3,
}


def test_text_has_a_field_for_each_metric() -> None:
    expected = (
        b"application_utilization=0.500000, rps_fractional=12.500000, eps=0, "
        b"named_metrics.queue_depth=3, named_metrics.kv_cache_utilization=0.333333"
    )
    assert load_header(LOAD, b"text") == b"TEXT " + expected


def test_json_has_the_named_metrics_apart() -> None:
    header = load_header(LOAD, b"json")
    assert header is not None
    assert header.startswith(b"JSON ")
    assert json.loads(header[5:]) == {
        "application_utilization": 0.5,
        "rps_fractional": 12.5,
        "eps": 0.0,
        "named_metrics": {"queue_depth": 3, "kv_cache_utilization": 1 / 3},
    }
    assert load_document({"queue_depth": 1.0}) == {"named_metrics": {"queue_depth": 1}}


def test_a_binary_report_is_the_message() -> None:
    header = load_header(LOAD, b"BIN")
    assert header is not None
    report = message_class("xds.data.orca.v3.OrcaLoadReport").FromString(b64decode(header.removeprefix(b"BIN ")))
    assert (report.application_utilization, report.rps_fractional, report.eps) == (0.5, 12.5, 0.0)  # type: ignore[attr-defined]
    assert dict(report.named_metrics) == {"queue_depth": 3.0, "kv_cache_utilization": 1 / 3}  # type: ignore[attr-defined]
    [(name, value)] = load_trailers(LOAD, b"bin")
    assert name == b"endpoint-load-metrics-bin"
    assert b64decode(value + b"==") == encode_load(LOAD)


def test_the_format_is_read_in_any_case_and_an_unknown_one_gets_nothing() -> None:
    assert load_header_line(LOAD, b" Json ") == b"endpoint-load-metrics: %b\r\n" % (load_header(LOAD, b"json") or b"")
    assert load_header_line(LOAD, b"xml") == b""
    assert load_trailers(LOAD, b"xml") == ()
    assert load_trailers(LOAD, b"text") == ((b"endpoint-load-metrics", load_header(LOAD, b"text")),)


@pytest.mark.parametrize(
    ("seconds", "nanos", "expected"),
    [(0, 0, INTERVAL_S), (0, 1, INTERVAL_S_MIN), (2, 500_000_000, 2.5), (-3, 0, INTERVAL_S)],
)
def test_the_interval_of_reports_has_a_default_and_a_least(seconds: int, nanos: int, expected: float) -> None:
    request = message_class("xds.service.orca.v3.OrcaLoadReportRequest")()
    request.report_interval.seconds, request.report_interval.nanos = seconds, nanos  # type: ignore[attr-defined]

    assert decode_load_request(request.SerializeToString()) == expected


def test_bytes_that_are_no_request_are_refused() -> None:
    with pytest.raises(RpcError):
        decode_load_request(b"\xff\xff")
