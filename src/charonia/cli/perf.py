"""`charonia perf`: send load to a model of any KServe v2 server, and report latency and throughput.

Results go to stdout, everything else to stderr. `charonia perf --help` lists the exit status.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from charonia.cli import perf_values as read
from charonia.cli.command_line import (
    HELP_NAMES,
    NEVER,
    CommandLine,
    Option,
    ParsedOptions,
    carry_out,
    complain,
    flag,
    joined,
    refused,
)
from charonia.cli.values import HEADER_HELP, boolean, choice, filled, header, integer, number, seconds, with_key, word
from charonia.core.errors import ServingError, unavailable
from charonia.tools.perf.api import Distribution, LoadPlan, MeasurementMode, RunSettings
from charonia.tools.perf.options import RANGES, CallStyle, PerfOptions, TargetOptions, WireProtocol, run_settings
from charonia.tools.report.summary import failures
from charonia.tools.results.conditions import Condition
from charonia.tools.results.records import LoadMode, PerfRun, Verdict

_WAYS = (LoadMode.CONCURRENCY, LoadMode.PERIODIC, LoadMode.REQUEST_RATE, LoadMode.INTERVALS)


class ExitStatus(IntEnum):
    """Exit status."""

    MEASURED = 0
    FAILED_REQUESTS = 1
    UNSTABLE = 2
    NO_REQUESTS = 3
    """No request was answered, or a condition of `--fail-if` is true."""
    OVERLOADED = 4
    REFUSED = 99
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Parsed:
    """The parsed command line.

    Attributes:
        named: The options given on the command line, as text by name.
    """

    options: PerfOptions
    named: dict[str, str]
    command: str = ""
    notes: tuple[str, ...] = ()

    def settings(self, config: Mapping[str, Any]) -> RunSettings:
        """Return the settings of the run for a model with this configuration."""
        return run_settings(self.options, config, described(self.named), self.command)


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["compare"]:
        return compare(arguments[1:])
    if not HELP_NAMES.isdisjoint(arguments):
        print(LINE.help())
        return ExitStatus.MEASURED
    if "--version" in arguments:
        from charonia.version import __version__

        print(f"charonia perf {__version__}")
        return ExitStatus.MEASURED
    try:
        parsed = parse(arguments)
    except ServingError as error:
        complain("error", error)
        print("`charonia perf --help` lists the options.", file=sys.stderr)
        return ExitStatus.REFUSED
    for note in parsed.notes:
        print(f"note: {note}", file=sys.stderr)
    # Imported late, because the help and invalid arguments do not need it.
    from charonia.cli.perf_run import measure, served
    from charonia.tools.perf.data.recording import with_model

    try:
        with served(parsed.options) as options:
            options = with_model(options)
            parsed = replace(parsed, options=options)
            measured = measure(options, parsed.settings)
    except ServingError as error:
        complain("error", error)
        return ExitStatus.REFUSED
    failed = failures(parsed.options.report.fail_if, measured)
    for sentence in failed:
        print(f"failed: {sentence}", file=sys.stderr)
    status = status_of(measured)
    return ExitStatus.NO_REQUESTS if failed and status is not ExitStatus.INTERRUPTED else status


def parse(arguments: Sequence[str]) -> Parsed:
    """Parse the arguments."""
    parsed = LINE.split(arguments)
    _with_new_names(parsed)
    updates = LINE.read(parsed)
    ways = [RANGES[mode] for mode in _WAYS if RANGES[mode] in parsed.values]
    if len(ways) > 1:
        parsed.problems.append(f"{' and '.join(ways)}: expected one way to send requests, got {len(ways)}")
        updates = {field: value for field, value in updates.items() if not field.startswith("load.")}
    _warn_without_effect(parsed)
    if "--async" in parsed.values and "--sync" in parsed.values:
        parsed.problems.append("--sync and --async: expected one of them, got both")
    options = LINE.filled({"target.model": "", **updates}, parsed)
    parsed.check()
    options = replace(options, target=replace(options.target, headers=with_key(options.target.headers)))
    shown = parsed.values | _without_secrets(parsed.values)
    words = [word for name, texts in shown.items() for text in texts for word in ([name, text] if text else [name])]
    command = shlex.join(["charonia", "perf", *words])
    return Parsed(options, {name: ",".join(texts) for name, texts in shown.items()}, command, tuple(parsed.notes))


def described(named: Mapping[str, str]) -> dict[str, str]:
    """Return the effective options as text by name without dashes: the given ones, and the defaults of the others."""
    defaults = {option.name: text for option in LINE.options() if (text := LINE.default_text(option))}
    return {name.removeprefix("--"): text for name, text in (defaults | dict(named)).items()}


def status_of(run: PerfRun) -> ExitStatus:
    """Return the exit status of a run: that of its worst level."""
    verdicts = {level.verdict for level in run.levels}
    if Verdict.INTERRUPTED in verdicts:
        return ExitStatus.INTERRUPTED
    if not any(level.request_count for level in run.levels):
        return ExitStatus.NO_REQUESTS
    if Verdict.SERVER_LOST in verdicts or any(level.error_count for level in run.levels):
        return ExitStatus.FAILED_REQUESTS
    if Verdict.OVERLOADED in verdicts:
        return ExitStatus.OVERLOADED
    is_settled = verdicts.isdisjoint((Verdict.UNSTABLE, Verdict.DISTURBED))
    return ExitStatus.MEASURED if is_settled else ExitStatus.UNSTABLE


def _with_new_names(options: ParsedOptions) -> None:
    """Replace perf_analyzer's old option names with the new ones, with a note for each."""
    old = {option.name: options.values.pop(option.name) for option in OLD_NAMES if option.name in options.values}
    options.notes += [f"{option.name} is an old name: {option.help}" for option in OLD_NAMES if option.name in old]
    sources = old.get("--data-directory", []) + (["zero"] if "-z" in old else [])
    if sources:
        options.values["--input-data"] = options.values.get("--input-data", []) + sources
    levels = sorted(old.keys() & {"-t", "-c", "-d"})
    if not levels:
        return
    if "--concurrency-range" in options.values:
        options.problems.append(f"--concurrency-range: expected none of its old names, got {' '.join(levels)}")
        return
    if "-c" in old and "-d" not in old:
        options.problems.append("-c: expected -d with it, got none (hint: --concurrency-range START:END)")
    start = old.get("-t", ["1"])[-1]
    end = old.get("-c", ["0"])[-1]
    options.values["--concurrency-range"] = [f"{start}:{end}" if "-d" in old else start]


def _warn_without_effect(options: ParsedOptions) -> None:
    names = options.values
    if any(name.startswith("--ssl-grpc-") for name in names) and "--ssl-grpc-use-ssl" not in names:
        options.notes.append("--ssl-grpc-... has no effect without --ssl-grpc-use-ssl")
    is_https = any(text.startswith("https://") for text in names.get("--url", []))
    if any(name.startswith("--ssl-https-") for name in names) and not is_https:
        options.notes.append("--ssl-https-... has no effect without a URL such as -u https://HOST:PORT")
    if "--request-distribution" in names and "--request-rate-range" not in names:
        options.notes.append("--request-distribution has no effect without --request-rate-range")
    if "--verbose-csv" in names and "--csv" not in names:
        options.notes.append("--verbose-csv has no effect without -f")


def _without_secrets(values: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return headers without their values, to keep tokens and passwords out of reports."""
    headers = values.get("--header", [])
    return {"--header": [f"{text.partition(':')[0]}:***" for text in headers]} if headers else {}


_NO_THREADS = "an event loop sends, not threads"
_IS_JSON = word({"binary": False, "json": True})
_COMPRESSION = word({"none": "", "gzip": "gzip", "deflate": "deflate"})
_IS_DER = word({"PEM": False, "DER": True})


def _processes(text: str) -> int:
    return integer(0, 256)(text) or LoadPlan().process_count_max


# fmt: off
TARGET = (
    Option("--model -m", "target.model", filled, "NAME", "Model to measure", default="", rank=1),
    Option("--serve PATH", "target.serve", str, "PATH",
           "File, or repository of the model, to serve while it is measured", default="a running server"),
    Option("--model-version -x", "target.version", filled, "VERSION", "Model version", default="newest", rank=1),
    Option("--url -u", "target.url", filled, "HOST:PORT", "Server, https://HOST:PORT for HTTPS",
           default="localhost:8000, localhost:8001 for grpc", rank=1),
    Option("--protocol -i", "target.protocol", choice(WireProtocol), "http|grpc", "Protocol", rank=1),
    Option("--batch-size -b", "target.batch_size", integer(1), "N", "Items in a request", rank=1),
    flag("--streaming", "target.streaming", True, "Send through a bidirectional stream; needs -i grpc"),
    Option("--header -H", "target.headers", header, "NAME:VALUE|@FILE", HEADER_HELP, tuple, rank=1),
    Option("--request-parameter", "target.parameters", read.parameter, "NAME:VALUE:TYPE",
           "Parameter of every request, TYPE is bool, int or string; repeatable", tuple),
    Option("--request-timeout", "target.timeout_s", seconds, "TIME",
           "Timeout of a request, e.g. 500ms, or 2 for seconds", default="none", rank=1),
    Option("--service-kind", "", read.service_kind, "triton|openai",
           "Kind of server: of the KServe v2 protocol, or openai, the same as --llm", default="triton"),
)

LANGUAGE = (
    flag("--llm", "is_language", True, "Measure a language model: times to tokens, tokens per second", rank=1),
    Option("--endpoint", "language.endpoint", read.endpoint, "API",
           "OpenAI's chat, completions or embeddings; Triton's generate; infer of the KServe v2 protocol"),
    Option("--tokenizer", "language.tokenizer", read.present_place, "FILE|FOLDER",
           "tokenizer.json that counts tokens and makes prompts of exact length; without one, the server's counts",
           default="none", rank=1),
    flag("--no-stream", "language.streaming", False, "Ask for whole responses instead of streams", rank=1),
    Option("--prompts", "prompts.file", read.present_file, "FILE",
           "JSON lines with prompts, messages, sessions or a trace, instead of generated prompts", rank=1),
    flag("--fixed-schedule", "prompts.is_replay", True, "Send the requests at the timestamps of --prompts"),
    Option("--prompt-count", "prompts.count", integer(1, 1_000_000), "N", "Generated prompts, or sessions", rank=1),
    Option("--input-tokens", "prompts.input_tokens", read.length(1), "MEAN[:STDDEV]", "Tokens of a generated prompt",
           default="550", rank=1),
    Option("--output-tokens", "prompts.output_tokens", read.length(1), "MEAN[:STDDEV]",
           "Most tokens of a response (max_tokens)", default="the server's", rank=1),
    flag("--ignore-eos", "prompts.ignore_eos", True, "Generate up to --output-tokens (ignore_eos)", rank=1),
    Option("--prefixes", "", read.prefixes, "COUNT:TOKENS",
           "Prefixes that generated prompts share, before their own tokens", default="none", rank=1),
    Option("--turns", "prompts.turns", read.length(1), "MEAN[:STDDEV]", "Turns of a generated session", default="1",
           rank=1),
    Option("--turn-delay", "prompts.turn_delay_ms", read.length(0), "MS[:STDDEV]",
           "Time between a response and the next turn of its session", default="0", rank=1),
)

LOAD = (
    Option("--concurrency-range", "", read.concurrency_range, "START[:END[:STEP]]",
           "Requests kept in flight, level by level; an END of 0 continues to --latency-threshold", default="1"),
    Option("--request-rate-range", "", read.rate_range, "START[:END[:STEP]]",
           "Requests/s sent independently of responses, level by level; an END of 0 continues to --latency-threshold",
           default=""),
    Option("--request-distribution", "load.distribution", choice(Distribution), "constant|poisson",
           "Distribution of the gaps between requests of --request-rate-range"),
    Option("--request-intervals", "", read.intervals, "FILE",
           "Gaps between requests from a file, one integer of microseconds a line, repeated", default=""),
    Option(
        "--periodic-concurrency-range", "", read.periodic_range, "START:END[:STEP]",
        "Start with START requests and add STEP more until END are sent; needs --streaming and --profile-export-file",
        default=""
    ),
    Option("--request-period", "load.request_period", integer(1), "N",
           "Responses of each request after which --periodic-concurrency-range adds more"),
    flag("--async -a", "report.call_style", CallStyle.ASYNC, "Accepted: requests are always sent asynchronously"),
    flag("--sync", "report.call_style", CallStyle.SYNC, "Accepted: one request at a time is --concurrency-range 1"),
    Option("--seed", "load.seed", integer(0), "N", "Seed of arrivals, sequence lengths and generated data", rank=1),
    Option("--processes", "load.process_count_max", _processes, "N", "Worker processes that send load, 0 for automatic",
           default="0", rank=1),
    Option("--max-threads", "", integer(1), "N", f"Without effect: {_NO_THREADS}", unsupported=_NO_THREADS),
)

MEASUREMENT = (
    Option("--measurement-mode", "measure.mode", choice(MeasurementMode), "time_windows|count_windows|adaptive",
           "Compare windows of a time or of a number of requests, or measure until confidence intervals are tight"),
    Option("--measurement-interval -p", "measure.interval_ms", integer(1), "MS",
           "Length of a window; actual windows are a fifth longer"),
    Option("--measurement-request-count", "measure.window_request_count", integer(1), "N",
           "Minimum of requests in a window of count_windows"),
    Option("--stability-percentage -s", "measure.stability", read.share(0), "PERCENT",
           "Largest difference among the last three windows of a stable level", default="10"),
    Option("--percentile", "measure.percentile", read.percentile, "P",
           "Latency to stabilise and report: a percentile such as 95 or 99.9", default="-1, the mean"),
    Option("--max-trials -r", "measure.trials_max", integer(1), "N",
           "Limit of windows, after which a level ends as unstable"),
    Option("--warmup-request-count", "measure.warmup_request_count", integer(0), "N",
           "Requests sent before a level that are not measured"),
    Option("--request-count", "measure.request_count", integer(0), "N",
           "Send exactly this number of requests instead of windows, 0 for windows"),
    Option("--latency-threshold -l", "measure.latency_limit_ns", lambda text: integer(0)(text) * 1_000_000, "MS",
           "Latency at which a range ends, 0 for none", default="0"),
    flag("--binary-search", "load.binary_search", True, "Binary search of the range instead of steps"),
    Option("--goodput", "measure.objectives", read.objectives, "FIGURE:LIMIT",
           "Also count the requests that meet limits: latency:50ms; with --llm also ttft:200ms, itl:30ms", joined,
           default="", rank=1),
)

DATA = (
    Option("--input-data", "data.sources", read.data_source, "random|zero|FOLDER|FILE",
           "Input data: generated, a folder with a file per input, or a JSON file; JSON files are repeatable", tuple),
    Option("--replay", "data.replay", read.present_place, "FILE|FOLDER",
           "Send the requests of a request log of `charonia serve --request-log` again, at their times", default="none",
           rank=1),
    Option("--replay-speed", "data.replay_speed", number(0, above=True), "FACTOR",
           "Factor by which the requests of --replay follow each other faster", rank=1),
    Option("--shape", "data.shapes", read.shape, "NAME:D1,D2,...",
           "Shape of an input with variable dimensions, without the batch dimension; repeatable", tuple),
    Option("--string-length", "data.string_length", integer(1, 2**24), "N", "Characters of generated strings"),
    Option("--string-data", "data.string_data", str, "TEXT",
           "Text of all generated strings, overrides --string-length"),
    Option("--input-range", "data.ranges", read.value_range, "NAME:LOW:HIGH",
           "Range of an input's generated values; repeatable", tuple, rank=1),
    Option("--validation-tolerance", "data.validation_tolerance", number(0), "X",
           "Absolute and relative tolerance of floating-point outputs compared with validation data", rank=1),
    Option("--input-tensor-format", "target.json_inputs", _IS_JSON, "binary|json",
           "Encoding of inputs over HTTP", default="binary"),
    Option("--output-tensor-format", "target.json_outputs", _IS_JSON, "binary|json",
           "Encoding of outputs over HTTP", default="binary"),
    Option("--shared-memory", "target.shared_memory", read.shared_memory, "none|system",
           "Location of tensors: in the requests, or in shared memory with a server on this machine"),
    Option("--output-shared-memory-size", "target.output_bytes", integer(1), "BYTES",
           "Shared memory of an output of unknown size"),
)

SEQUENCES = (
    Option("--num-of-sequences", "sequences.concurrent", integer(1), "N",
           "Concurrent sequences with a request rate or intervals"),
    Option("--sequence-length", "", read.sequence_length, "N", "Requests in a sequence",
           default="20, or that of the data"),
    Option("--sequence-length-variation", "sequences.variation", read.share(0, 100), "PERCENT",
           "Variation of the length of sequences", default="20"),
    Option("--sequence-id-range", "", read.id_range, "START[:END]", "Correlation ids, END excluded",
           default="1 and up"),
    flag("--serial-sequences", "sequences.serial", True, "Requests of a sequence never overlap"),
)

SERVER = (
    Option("--bls-composing-models", "server.composing", read.composing_models, "NAME[:VERSION],...",
           "Models called by a Python model, whose statistics are reported too", joined),
    flag("--collect-metrics", "collect_metrics", True, "Also read the server's metrics page"),
    Option("--metrics-url", "server.metrics_url", filled, "URL", "Metrics page",
           default="port 8002 of the server's host"),
    Option("--metrics-interval", "server.metrics_interval_ms", integer(1), "MS",
           "Time between two readings of the metrics page"),
    Option("--trace-level", "server.trace", read.trace_level, "OFF|TIMESTAMPS|TENSORS",
           "Trace level to set on the server; repeatable", read.trace_levels, default="the server's"),
    Option("--trace-rate", "server.trace", read.traced("trace_rate", 0), "N",
           "Trace rate to set on the server: one of N requests", default="the server's"),
    Option("--trace-count", "server.trace", read.traced("trace_count", -1), "N",
           "Trace count to set on the server, -1 for no limit", default="the server's"),
    Option("--log-frequency", "server.trace", read.traced("log_frequency", 0), "N",
           "Log frequency to set on the server: traces per file, 0 for all", default="the server's"),
)

TLS = (
    flag("--ssl-grpc-use-ssl", "target.grpc_uses_tls", True, "Use gRPC over TLS"),
    Option("--ssl-grpc-root-certifications-file", "target.grpc_tls.ca_file", read.present_file, "PEM",
           "Certificates to trust", default="the system's"),
    Option("--ssl-grpc-private-key-file", "target.grpc_tls.key_file", read.present_file, "PEM",
           "Private key of the client"),
    Option("--ssl-grpc-certificate-chain-file", "target.grpc_tls.certificate_file", read.present_file, "PEM",
           "Certificate of the client"),
    Option("--ssl-https-verify-peer", "target.http_tls.verify_peer", boolean, "0|1", "Verify the server's certificate",
           default="1"),
    Option("--ssl-https-verify-host", "target.http_tls.verify_host", lambda text: integer(0, 2)(text) > 0, "0|1|2",
           "Verify that the certificate matches the host", default="2"),
    Option("--ssl-https-ca-certificates-file", "target.http_tls.ca_file", read.present_file, "PEM",
           "Certificates to trust", default="the system's"),
    Option("--ssl-https-client-certificate-file", "target.http_tls.certificate_file", read.present_file, "FILE",
           "Certificate of the client"),
    Option("--ssl-https-client-certificate-type", "target.http_tls.certificate_is_der", _IS_DER, "PEM|DER",
           "Format of that file", default="PEM"),
    Option("--ssl-https-private-key-file", "target.http_tls.key_file", read.present_file, "FILE",
           "Private key of the client"),
    Option("--ssl-https-private-key-type", "target.http_tls.key_is_der", _IS_DER, "PEM|DER", "Format of that file",
           default="PEM"),
    Option("--grpc-compression-algorithm", "target.compression", _COMPRESSION, "none|gzip|deflate",
           "Compression of gRPC messages", default="none"),
)

REPORT = (
    Option("--csv -f", "report.csv", read.output_file, "FILE", "Write a CSV file with a row per level", rank=1),
    flag("--verbose-csv", "report.verbose_csv", True, "Add columns to the CSV file"),
    Option("--profile-export-file", "report.profile_export", read.new_file, "FILE",
           "Write a JSON file with every request; must not exist yet"),
    Option("--json", "report.json", read.output_file, "FILE", "Write the whole result as JSON, - for stdout", rank=1),
    Option("--html", "report.html", read.output_file, "FILE", "Write a page with plots", rank=1),
    Option("--markdown", "report.markdown", read.output_file, "FILE", "Write a table in Markdown", rank=1),
    Option("--fail-if", "report.fail_if", Condition.parse, "CONDITION",
           "End with status 3 if a level has, e.g., 'p99 > 20ms', 'throughput < 500' or 'errors > 0.1%'; repeatable",
           tuple, rank=1),
    flag(
        "--verbose -v", "report.verbosity", 1, "Print a line per window and more detail; repeat for more", sum, rank=1
    ),
    flag("--quiet", "report.quiet", True, "Print only errors and warnings", rank=1),
    flag("--no-progress", "report.progress", False, "Do not show progress on a terminal", rank=1),
)
# fmt: on

_RANGE = "use --concurrency-range"
OLD_NAMES = (
    Option("-t", "", str, "N", _RANGE),
    Option("-c", "", str, "N", _RANGE),
    flag("-d", "", True, _RANGE),
    flag("-z", "", True, "use --input-data zero"),
    Option("--data-directory", "", str, "FOLDER", "use --input-data"),
)
"""Old names of perf_analyzer, with the new ones."""

_IN_PROCESS = "the server is measured over the network only (hint: charonia serve MODELS, then charonia perf -m NAME)"
_OTHER_SERVICE = "only servers of the KServe v2 protocol are measured"

REFUSED = (
    *refused(_IN_PROCESS, "--triton-server-directory", "--model-repository"),
    *refused("MPI is not offered (hint: --processes sends from several processes)", "--enable-mpi", metavar=""),
    *refused(_OTHER_SERVICE, "--model-signature-name", "--grpc-method"),
    # In perf_analyzer's documentation but not in its parser, so prefixes must not match it.
    Option("--proto", "", str, "FILE", "", unsupported=_OTHER_SERVICE, is_refused=True, rank=NEVER),
    *refused("sessions in flight are the concurrency (hint: --concurrency-range)", "--session-concurrency"),
)
"""Options of perf_analyzer that are refused, with the reason."""

LINE = CommandLine(
    command="charonia perf",
    intro="""\
usage: charonia perf -m MODEL [OPTIONS]
       charonia perf compare A.json B.json

Measure a model on a server of the KServe v2 protocol: Charonia, Triton, others.

  charonia perf -m NAME                                   one request at a time
  charonia perf -m NAME --concurrency-range 1:8 -f r.csv  1 to 8 at a time
  charonia perf -m NAME --request-rate-range 200          200 a second
  charonia perf -m NAME --measurement-mode adaptive       as short as it can be
  charonia perf -m NAME --llm --concurrency-range 8       a language model
""",
    groups={
        "Server and model": TARGET,
        "Language models": LANGUAGE,
        "Load": LOAD,
        "Measurement": MEASUREMENT,
        "Data": DATA,
        "Sequences": SEQUENCES,
        "Reports": REPORT,
        "Statistics and metrics of the server": SERVER,
        "TLS and compression": TLS,
    },
    record=PerfOptions(TargetOptions(model="NAME")),
    unlisted={
        "Old names, understood with a note": OLD_NAMES,
        "Options of perf_analyzer that are refused": REFUSED,
    },
    epilog="""\
Exit status:
   0  measured, and every level is stable
   1  measured, but requests failed or the server was lost
   2  measured, but a level is not stable
   3  no request was answered, or a condition of --fail-if is true
   4  measured, but the server did not keep up with the offered rate
  99  wrong options or data, unknown model, server not reachable
 130  interrupted; the results up to then are reported
""",
    abbreviates=True,
    hint="one file, or a model with -m",
)


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The runs to compare, and what counts as a change."""

    before: Path = Path()
    after: Path = Path()
    json: bool = False
    html: Path | None = None
    markdown: Path | None = None
    confidence: float = 95.0
    threshold: float = 2.0
    any_model: bool = False


# fmt: off
COMPARE = CommandLine(
    command="charonia perf compare",
    intro="""\
usage: charonia perf compare [OPTIONS] BEFORE AFTER

Compare two runs level by level: significant changes, and noise.
""",
    groups={
        "Options": (
            Option("BEFORE", "before", Path, "BEFORE", "File that `charonia perf --json` wrote", default=""),
            Option("AFTER", "after", Path, "AFTER", "File of a later compare", default=""),
            flag("--json", "json", True, "Print JSON instead of a table"),
            Option("--html", "html", Path, "FILE", "Also write a page: the changes, and both runs with plots",
                   default=""),
            Option("--markdown", "markdown", Path, "FILE", "Also write the changes as Markdown", default=""),
            Option("--confidence -c", "confidence", number(50, 99.99), "PERCENT",
                   "Probability that all intervals hold"),
            Option("--threshold -t", "threshold", number(0, 1000), "PERCENT", "Smallest change that counts"),
            flag("--any-model", "any_model", True, "Also compare runs of models with different names"),
        )
    },
    record=CompareOptions(),
    epilog="Exit status: 0 no figure got worse, 1 a figure got worse, 2 misuse or files that cannot be compared.",
)
# fmt: on


def compare(arguments: Sequence[str]) -> int:
    return carry_out(COMPARE, arguments, _compared, failed=2)


def _compared(options: CompareOptions) -> int:
    # Imported late, because `--help` does not need numpy.
    from charonia.tools.report.compare import Criteria, Outcome, compare
    from charonia.tools.report.comparison import as_json, as_text
    from charonia.tools.report.markdown import render_comparison
    from charonia.tools.report.run_files import read_run, write_whole

    before, after = (read_run(path) for path in (options.before, options.after))
    criteria = Criteria(options.confidence / 100, options.threshold / 100)
    found = compare(before, after, criteria, any_model=options.any_model)
    show = as_json if options.json else as_text
    names = (str(options.before), str(options.after))
    files: dict[Path, bytes] = {}
    if options.html is not None:
        from charonia.tools.report.comparison import comparison_page

        files[options.html] = comparison_page(found, (before, after), names)
    if options.markdown is not None:
        files[options.markdown] = render_comparison(found, names).encode()
    for path, content in files.items():
        try:
            write_whole(path, content)
        except OSError as error:
            raise unavailable(f"{path}: cannot be written: {error.strerror}") from None
    print(show(found, names))
    return 1 if found.outcome in (Outcome.WORSE, Outcome.MIXED) else 0
