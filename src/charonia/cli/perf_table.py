"""Every option of `charonia perf`, a line each: the one place to add one.

Names, short forms and defaults are perf_analyzer's; the few that are ours say so by `is_ours`. The default of an option
is that of its field in `PerfOptions`, so nothing here repeats it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.cli import perf_values as read
from charonia.cli.values import boolean, choice, filled, integer
from charonia.tools.perf.api import Distribution, MeasurementMode
from charonia.tools.perf.options import (
    CallStyle,
    CertificateFormat,
    Compression,
    TensorFormat,
    WireProtocol,
)


def last(values: Sequence[Any]) -> Any:
    """Of an option given more than once, the last counts."""
    return values[-1]


def joined(values: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Put the tuples of all occurrences behind each other."""
    return tuple(item for value in values for item in value)


def constant(value: object) -> Callable[[str], object]:
    """Return what an option without an argument means."""
    return lambda _: value


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: Long name with its dashes.
        short: Short name with its dash, "" for none.
        fields: Paths of the fields of `PerfOptions` that it sets, separated by blanks; with more than one, the value is
            a tuple of as many. "" for none.
        read: From an argument's text to a value; raises ValueError.
        metavar: What the argument is, "" for an option without one.
        help: One sentence without a full stop.
        collect: From the values of all occurrences to that of the field.
        default: Default as text where it is not the field's.
        is_ours: Whether perf_analyzer does not have the long name.
    """

    name: str
    short: str
    fields: str
    read: Callable[[str], object]
    metavar: str
    help: str
    collect: Callable[[Sequence[Any]], object] = last
    default: str | None = None
    is_ours: bool = False


def _flag(name: str, short: str, fields: str, value: object, help: str, *, is_ours: bool = False) -> Option:
    return Option(name, short, fields, constant(value), "", help, default="", is_ours=is_ours)


TARGET = (
    Option("--model", "-m", "target.model", filled, "NAME", "Model to measure", default="", is_ours=True),
    Option("--model-version", "-x", "target.version", filled, "VERSION", "Its version", default="newest", is_ours=True),
    Option(
        *("--url", "-u", "target.url", filled, "HOST:PORT", "Server, https://HOST:PORT for HTTPS"),
        default="localhost:8000, localhost:8001 for grpc",
        is_ours=True,
    ),
    Option("--protocol", "-i", "target.protocol", choice(WireProtocol), "http|grpc", "Protocol", is_ours=True),
    Option("--batch-size", "-b", "target.batch_size", integer(1), "N", "Items in a request", is_ours=True),
    _flag("--streaming", "", "target.streaming", True, "Send through a bidirectional stream; needs -i grpc"),
    Option(
        *("--header", "-H", "target.headers", read.header, "NAME:VALUE", "Header of every request; repeatable"),
        tuple,
        is_ours=True,
    ),
    Option(
        *("--request-parameter", "", "target.parameters", read.parameter, "NAME:VALUE:TYPE"),
        "Parameter of every request, TYPE is bool, int or string; repeatable",
        tuple,
    ),
    Option(
        *("--request-timeout", "", "target.request_timeout_ns", read.duration("s"), "TIME"),
        "Time after which a request has failed, e.g. 500ms or 2 for seconds",
        default="none",
        is_ours=True,
    ),
    Option("--service-kind", "", "", read.service_kind, "triton", "Kind of server: of the KServe v2 protocol"),
)

LOAD = (
    Option(
        *("--concurrency-range", "", "load.concurrency", read.concurrency_range, "START[:END[:STEP]]"),
        "Requests kept in flight, level by level; an END of 0 goes on to --latency-threshold",
        default="1",
    ),
    Option(
        *("--request-rate-range", "", "load.rate", read.rate_range, "START[:END[:STEP]]"),
        "Requests/s sent whatever the answers do, level by level; an END of 0 goes on to --latency-threshold",
        default="",
    ),
    Option(
        *("--request-distribution", "", "load.distribution", choice(Distribution), "constant|poisson"),
        "Gaps between the requests of a rate",
    ),
    Option(
        *("--request-intervals", "", "load.intervals_us", read.intervals, "FILE"),
        "Gaps between requests from a file, one integer of microseconds a line, repeated",
        default="",
    ),
    Option(
        *("--periodic-concurrency-range", "", "load.periodic", read.periodic_range, "START:END[:STEP]"),
        "Start with START requests and add STEP more until END were sent; needs --streaming and --profile-export-file",
        default="",
    ),
    Option(
        *("--request-period", "", "load.request_period", integer(1), "N"),
        "Responses of each request after which --periodic-concurrency-range adds more",
    ),
    _flag(
        "--async", "-a", "load.call_style", CallStyle.ASYNC, "Send without waiting for answers, as is always done here"
    ),
    _flag("--sync", "", "load.call_style", CallStyle.SYNC, "Accepted: one request at a time is --concurrency-range 1"),
    Option(
        *("--seed", "", "load.seed", integer(0), "N", "Seed of arrivals, sequence lengths and generated data"),
        is_ours=True,
    ),
    Option(
        *("--processes", "", "load.processes", integer(0, 256), "N", "Processes that send, 0 for as many as help"),
        is_ours=True,
    ),
    Option("--max-threads", "", "", integer(1), "N", "Without effect: an event loop sends, not threads"),
)

MEASUREMENT = (
    Option(
        *("--measurement-mode", "", "measurement.mode", choice(MeasurementMode)),
        "time_windows|count_windows|adaptive",
        "Compare windows of a time or of a number of requests, or measure until confidence intervals are tight",
    ),
    Option(
        *("--measurement-interval", "-p", "measurement.interval_ms", integer(1), "MS"),
        "Length of a window; a fifth is added",
    ),
    Option(
        *("--measurement-request-count", "", "measurement.window_request_count", integer(1), "N"),
        "Requests in a window of count_windows, at least",
    ),
    Option(
        *("--stability-percentage", "-s", "measurement.stability_percent", read.number(0), "PERCENT"),
        "Spread of the last three windows that counts as stable",
    ),
    Option(
        *("--percentile", "", "measurement.percentile", read.percentile, "P"),
        "Latency to stabilise and report: a percentile such as 95 or 99.9",
        default="-1, the mean",
    ),
    Option(
        *("--max-trials", "-r", "measurement.trials_max", integer(1), "N"),
        "Windows after which a level ends without being stable",
    ),
    Option(
        *("--warmup-request-count", "", "measurement.warmup_request_count", integer(0), "N"),
        "Requests sent before a level that do not count",
    ),
    Option(
        *("--request-count", "", "measurement.request_count", integer(0), "N"),
        "Send exactly so many requests in place of windows, 0 for windows",
    ),
    Option(
        *("--latency-threshold", "-l", "measurement.latency_threshold_ms", integer(0), "MS"),
        "Latency at which a range ends, 0 for none",
    ),
    _flag("--binary-search", "", "measurement.binary_search", True, "Halve the range in place of stepping through it"),
    Option(
        *("--goodput", "", "measurement.goodput_latency_ns", read.objective, "latency:TIME"),
        "Also count the requests that were answered within TIME, e.g. latency:50ms",
        default="",
        is_ours=True,
    ),
)

DATA = (
    Option(
        *("--input-data", "", "data.sources", read.data_source, "random|zero|FOLDER|FILE"),
        "What the requests hold: generated, a folder with a file an input, or a JSON file; JSON files are repeatable",
        tuple,
    ),
    Option(
        *("--shape", "", "data.shapes", read.shape, "NAME:D1,D2,..."),
        "Shape of an input with variable dimensions, without the batch dimension; repeatable",
        tuple,
    ),
    Option("--string-length", "", "data.string_length", integer(1, 2**24), "N", "Characters of generated strings"),
    Option("--string-data", "", "data.string_data", str, "TEXT", "Every generated string, beats --string-length"),
    Option(
        *("--input-range", "", "data.ranges", read.value_range, "NAME:LOW:HIGH"),
        "Range of an input's generated values; repeatable",
        tuple,
        is_ours=True,
    ),
    Option(
        *("--validation-tolerance", "", "data.validation_tolerance", read.number(0), "X"),
        "Deviation, absolute and relative, of floating-point outputs from validation data that passes",
        is_ours=True,
    ),
    Option(
        *("--input-tensor-format", "", "target.input_format", choice(TensorFormat), "binary|json"),
        "How inputs travel over HTTP",
    ),
    Option(
        *("--output-tensor-format", "", "target.output_format", choice(TensorFormat), "binary|json"),
        "How outputs travel over HTTP",
    ),
    Option(
        *("--shared-memory", "", "target.shared_memory", read.shared_memory, "none|system"),
        "Where the tensors are: in the messages, or in shared memory with a server on this machine",
    ),
    Option(
        *("--output-shared-memory-size", "", "target.output_region_bytes", integer(1), "BYTES"),
        "Shared memory of an output whose size is not known",
    ),
)

SEQUENCES = (
    Option(
        *("--num-of-sequences", "", "sequences.concurrent", integer(1), "N"),
        "Sequences at a time when requests are sent by a rate or intervals",
    ),
    Option(
        *("--sequence-length", "", "sequences.length sequences.is_length_given"),
        *(lambda text: (integer(1)(text), True), "N", "Requests of a sequence"),
        default="20, or that of the data",
    ),
    Option(
        *("--sequence-length-variation", "", "sequences.length_variation_percent", read.number(0, 100), "PERCENT"),
        "How far lengths deviate from that",
    ),
    Option(
        *("--sequence-id-range", "", "sequences.id_start sequences.id_end", read.id_range, "START[:END]"),
        "Correlation ids, without END",
        default="1 and up",
    ),
    _flag("--serial-sequences", "", "sequences.serial", True, "A sequence waits for each answer before it goes on"),
)

SERVER = (
    Option(
        *("--bls-composing-models", "", "server.composing_models", read.composing_models, "NAME[:VERSION],..."),
        "Models that a Python model calls, to report their statistics too",
        joined,
    ),
    _flag("--collect-metrics", "", "server.collect_metrics", True, "Also read the server's metrics page"),
    Option(
        *("--metrics-url", "", "server.metrics_url", filled, "URL", "Metrics page"),
        default="port 8002 of the server's host",
    ),
    Option(
        *("--metrics-interval", "", "server.metrics_interval_ms", integer(1), "MS"), "Time between two readings of it"
    ),
    Option(
        *("--trace-level", "", "server.trace_levels", read.trace_level, "OFF|TIMESTAMPS|TENSORS"),
        "Have the server trace this of requests; repeatable",
        tuple,
        default="the server's",
    ),
    Option(
        *("--trace-rate", "", "server.trace_rate", integer(0), "N", "Have the server trace one of N requests"),
        default="the server's",
    ),
    Option(
        *("--trace-count", "", "server.trace_count", integer(-1), "N"),
        "Have the server make N traces in all, -1 for no end",
        default="the server's",
    ),
    Option(
        *("--log-frequency", "", "server.log_frequency", integer(0), "N"),
        "Have the server put N traces into a file, 0 for all",
        default="the server's",
    ),
)

TLS = (
    _flag("--ssl-grpc-use-ssl", "", "target.grpc_tls.enabled", True, "Speak gRPC over TLS"),
    Option(
        *("--ssl-grpc-root-certifications-file", "", "target.grpc_tls.root", read.present_file, "PEM"),
        "Certificates that vouch for the server",
        default="the system's",
    ),
    Option(
        *("--ssl-grpc-private-key-file", "", "target.grpc_tls.key", read.present_file, "PEM"),
        "The client's own private key",
    ),
    Option(
        *("--ssl-grpc-certificate-chain-file", "", "target.grpc_tls.certificate", read.present_file, "PEM"),
        "The client's own certificate",
    ),
    Option(
        *("--ssl-https-verify-peer", "", "target.http_tls.verify_peer", boolean, "0|1"),
        "Demand that the server's certificate is vouched for",
        default="1",
    ),
    Option(
        *("--ssl-https-verify-host", "", "target.http_tls.verify_host", lambda text: integer(0, 2)(text) > 0, "0|1|2"),
        "Demand that it is for the host asked for",
        default="2",
    ),
    Option(
        *("--ssl-https-ca-certificates-file", "", "target.http_tls.root", read.present_file, "PEM"),
        "Certificates that vouch for the server",
        default="the system's",
    ),
    Option(
        *("--ssl-https-client-certificate-file", "", "target.http_tls.certificate", read.present_file, "FILE"),
        "The client's own certificate",
    ),
    Option(
        *("--ssl-https-client-certificate-type", "", "target.http_tls.certificate_format", choice(CertificateFormat)),
        "PEM|DER",
        "Format of that file",
    ),
    Option(
        *("--ssl-https-private-key-file", "", "target.http_tls.key", read.present_file, "FILE"),
        "The client's own private key",
    ),
    Option(
        *("--ssl-https-private-key-type", "", "target.http_tls.key_format", choice(CertificateFormat)),
        "PEM|DER",
        "Format of that file",
    ),
    Option(
        *("--grpc-compression-algorithm", "", "target.compression", choice(Compression), "none|gzip|deflate"),
        "Compression of gRPC messages",
    ),
)

REPORT = (
    Option("--csv", "-f", "report.csv", read.output_file, "FILE", "Write a CSV file, a row a level", is_ours=True),
    _flag("--verbose-csv", "", "report.verbose_csv", True, "With more columns"),
    Option(
        *("--profile-export-file", "", "report.profile_export", read.new_file, "FILE"),
        "Write a JSON file with every request; must not exist yet",
    ),
    Option(
        *("--json", "", "report.json", read.output_file, "FILE", "Write the whole result as JSON, - for stdout"),
        is_ours=True,
    ),
    Option("--html", "", "report.html", read.output_file, "FILE", "Write a page with plots", is_ours=True),
    Option(
        *("--verbose", "-v", "report.verbosity", constant(1), "", "A line a window and more detail; twice for more"),
        *(sum, ""),
        is_ours=True,
    ),
    _flag("--quiet", "", "report.quiet", True, "Print nothing but errors and warnings", is_ours=True),
    _flag("--no-progress", "", "report.progress", False, "Do not show progress on a terminal", is_ours=True),
)

GROUPS: dict[str, tuple[Option, ...]] = {
    "Server and model": TARGET,
    "Load": LOAD,
    "Measurement": MEASUREMENT,
    "Data": DATA,
    "Sequences": SEQUENCES,
    "Reports": REPORT,
    "Statistics and metrics of the server": SERVER,
    "TLS and compression": TLS,
}
"""Options by the heading they stand under."""

OPTIONS: tuple[Option, ...] = tuple(option for group in GROUPS.values() for option in group)
"""All of them."""
