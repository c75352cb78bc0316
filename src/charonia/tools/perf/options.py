"""The options of `charonia perf`, the rules between them, and the run that they describe.

Values and defaults are as in perf_analyzer; the help of an option in `cli/perf.py` says what its field means. Most
options are a field of the load generator's settings (`tools.perf.api`). `PerfOptions` rejects contradictions before any
request is sent, with a line for each problem. Rules that depend on the model (batch size, shapes, decoupled) are
checked once the model is known.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from charonia.core.errors import invalid
from charonia.tools.perf.api import (
    LoadPlan,
    MeasuredTarget,
    MeasurePlan,
    RunSettings,
    SequencePlan,
    ServerPlan,
    SharedMemory,
)
from charonia.tools.perf.language.plan import LanguageEndpoint, LanguagePlan, PromptPlan
from charonia.tools.results.conditions import Condition
from charonia.tools.results.records import LoadMode
from charonia.wire.endpoint import parse_url
from charonia.wire.transport import TlsOptions, WireOptions

GENERATED = ("random", "zero")
"""Sources of input data that are not files."""

METRICS_PORT = 8002
METRICS_PATH = "/metrics"

RANGES = {
    LoadMode.CONCURRENCY: "--concurrency-range",
    LoadMode.PERIODIC: "--periodic-concurrency-range",
    LoadMode.REQUEST_RATE: "--request-rate-range",
    LoadMode.INTERVALS: "--request-intervals",
}
"""The option of each mode."""


class WireProtocol(Enum):
    """The protocol of the requests."""

    HTTP = "http"
    GRPC = "grpc"


class CallStyle(Enum):
    """Whether calls are synchronous. It only changes the printed settings: load is always asynchronous."""

    SYNC = "sync"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The model, its server, and the requests to it."""

    model: str = ""
    serve: str = ""
    version: str = ""
    protocol: WireProtocol = WireProtocol.HTTP
    url: str = ""
    streaming: bool = False
    batch_size: int = 1
    headers: tuple[tuple[str, str], ...] = ()
    parameters: tuple[tuple[str, bool | int | str], ...] = ()
    json_inputs: bool = False
    json_outputs: bool = False
    compression: str = ""
    shared_memory: SharedMemory = SharedMemory.NONE
    output_bytes: int = 102_400
    timeout_s: float = 0.0
    http_tls: TlsOptions = field(default_factory=TlsOptions)
    grpc_tls: TlsOptions = field(default_factory=TlsOptions)
    grpc_uses_tls: bool = False

    @property
    def address(self) -> str:
        """The given URL, or the protocol's default port on this machine."""
        return self.url or ("localhost:8001" if self.protocol is WireProtocol.GRPC else "localhost:8000")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The input data of the requests; `replay` is a request log, a file or a folder, "" for none."""

    sources: tuple[str, ...] = ("random",)
    replay: str = ""
    replay_speed: float = 1.0
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    string_length: int = 128
    string_data: str = ""
    ranges: tuple[tuple[str, float, float], ...] = ()
    validation_tolerance: float = 0.0

    @property
    def is_from_files(self) -> bool:
        """Whether no data is generated."""
        return not any(source in GENERATED for source in self.sources)


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The output."""

    csv: Path | None = None
    verbose_csv: bool = False
    profile_export: Path | None = None
    json: Path | None = None
    html: Path | None = None
    markdown: Path | None = None
    verbosity: int = 0
    quiet: bool = False
    progress: bool = True
    call_style: CallStyle | None = None
    fail_if: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class PerfOptions:
    """All options of a run.

    Raises:
        ServingError: INVALID_ARG with a line for every violated rule.
    """

    target: TargetOptions = field(default_factory=TargetOptions)
    load: LoadPlan = field(default_factory=LoadPlan)
    measure: MeasurePlan = field(default_factory=MeasurePlan)
    sequences: SequencePlan = field(default_factory=lambda: SequencePlan(length_from_data=True))
    data: DataOptions = DataOptions()
    server: ServerPlan = field(default_factory=ServerPlan)
    collect_metrics: bool = False
    report: ReportOptions = ReportOptions()
    is_language: bool = False
    language: LanguagePlan = field(default_factory=LanguagePlan)
    prompts: PromptPlan = field(default_factory=PromptPlan)

    def __post_init__(self) -> None:
        rules = (_target_problems, _load_problems, _data_problems, language_problems, _report_problems)
        problems = [problem for rule in rules for problem in rule(self)]
        if problems:
            raise invalid("\n".join(problems))


def target(options: PerfOptions) -> MeasuredTarget:
    """Return the model to measure and how to reach it."""
    target_options = options.target
    is_grpc = target_options.protocol is WireProtocol.GRPC
    return MeasuredTarget(
        url=_url(target_options),
        model=target_options.model,
        version=target_options.version,
        transport=WireOptions(
            headers=target_options.headers,
            tls=target_options.grpc_tls if is_grpc else target_options.http_tls,
            request_compression=target_options.compression if is_grpc else "",
            timeout_s=target_options.timeout_s,
        ),
        streaming=target_options.streaming or (options.is_language and is_grpc),
        json_inputs=not is_grpc and target_options.json_inputs,
        json_outputs=not is_grpc and target_options.json_outputs,
        shared_memory=target_options.shared_memory,
        output_bytes=target_options.output_bytes,
    )


def run_settings(
    options: PerfOptions, config: Mapping[str, Any], named: Mapping[str, str], command: str
) -> RunSettings:
    """Return the settings of a run.

    Args:
        config: The model's configuration as JSON, {} if the server does not provide it.
        named: The effective options as text by name, for the record of the run.

    Raises:
        ServingError: INVALID_ARG if the options do not fit the model.
    """
    if is_decoupled(config) and not options.target.streaming and not options.is_language:
        raise invalid(
            f"model '{options.target.model}' is decoupled: expected --streaming and -i grpc, got "
            f"-i {options.target.protocol.value}",
        )
    has_own_lengths = options.sequences.length_from_data and options.data.is_from_files
    return RunSettings(
        target=target(options),
        load=options.load,
        measure=options.measure,
        sequences=replace(options.sequences, length_from_data=has_own_lengths) if is_sequence(config) else None,
        language=options.language if options.is_language else None,
        server=replace(options.server, metrics_url=_metrics_url(options) if options.collect_metrics else ""),
        keep_requests=options.report.profile_export is not None,
        tolerance=options.data.validation_tolerance,
        options=named,
        command=command,
    )


def replayed(settings: RunSettings, gaps_ns: tuple[int, ...]) -> RunSettings:
    """Return the settings of a run that sends each request one time, after its gap."""
    processes = min(settings.load.process_count_max, len(gaps_ns))  # each sends at least one
    load = replace(settings.load, mode=LoadMode.INTERVALS, intervals_ns=gaps_ns, process_count_max=processes)
    return replace(settings, load=load, measure=replace(settings.measure, request_count=len(gaps_ns)))


def is_sequence(config: Mapping[str, Any]) -> bool:
    return "sequence_batching" in config


def is_decoupled(config: Mapping[str, Any]) -> bool:
    """Whether a request to a model may have any number of responses."""
    return bool((config.get("model_transaction_policy") or {}).get("decoupled", False))


def _url(given: TargetOptions) -> str:
    scheme, _, rest = given.address.rpartition("://")
    if given.protocol is WireProtocol.GRPC:
        return f"{'grpcs' if given.grpc_uses_tls or scheme in ('https', 'grpcs') else 'grpc'}://{rest}"
    if scheme not in ("", "http", "https"):
        raise invalid(f"-u: expected HOST:PORT, http:// or https:// with -i http, got '{given.url}'")
    return f"{scheme or 'http'}://{rest}"


def _metrics_url(options: PerfOptions) -> str:
    url = options.server.metrics_url
    if not url:
        host = parse_url(_url(options.target)).host
        return f"http://{f'[{host}]' if ':' in host else host}:{METRICS_PORT}{METRICS_PATH}"
    return url if "://" in url else f"http://{url}"


def _target_problems(options: PerfOptions) -> Iterator[str]:
    target = options.target
    if not (target.model or target.serve or options.data.replay):
        yield "-m: expected the name of a model, got none (hint: charonia perf -m NAME -u HOST:PORT)"
    if target.serve and target.url:
        yield f"--url: expected none, as '{target.serve}' is served for the measurement"
    if target.streaming and target.protocol is not WireProtocol.GRPC:
        yield "--streaming: expected -i grpc with it, got -i http"
    if target.streaming and options.report.call_style is CallStyle.SYNC:
        yield "--streaming: expected --async with it, got --sync (hint: leave --sync out)"
    if target.shared_memory is not SharedMemory.NONE and (target.json_inputs or target.json_outputs):
        yield "--shared-memory: expected binary tensors with it, got a tensor format of json"
    for kind, tls in (("https", target.http_tls), ("grpc", target.grpc_tls)):
        if bool(tls.certificate_file) != bool(tls.key_file):
            yield f"--ssl-{kind}-...: expected a client certificate and its key, got one of them"


def _load_problems(options: PerfOptions) -> Iterator[str]:
    load, name, count = options.load, RANGES[options.load.mode], options.measure.request_count
    has_limit, has_end = options.measure.latency_limit_ns > 0, math.isfinite(load.end)
    if not has_end and not has_limit:
        yield f"{name}: expected --latency-threshold with a range without end, got none"
    if load.end < load.start:
        yield f"{name}: expected an end of at least {load.start:g}, got {load.end:g}"
    if load.binary_search and not has_limit:
        yield "--binary-search: expected --latency-threshold with it, got none"
    is_range = load.start < load.end and has_end and load.mode in (LoadMode.CONCURRENCY, LoadMode.REQUEST_RATE)
    if load.binary_search and not is_range:
        yield (
            "--binary-search: expected --concurrency-range or --request-rate-range with start and end, "
            f"got {load.start:g}:{load.end if has_end else 0:g}"
        )
    if load.mode is LoadMode.PERIODIC:
        if (load.end - load.start) % load.step:
            yield f"{name}: expected a step that divides the range, got {load.start:g}:{load.end:g}:{load.step:g}"
        if not options.target.streaming or options.report.profile_export is None:
            yield f"{name}: expected --streaming and --profile-export-file with it"
    if count and load.start != load.end:
        yield "--request-count: expected a single level with it, got a range"
    elif count and count < load.start:
        yield f"--request-count: expected at least the level, {load.start:g}, got {count}"
    highest = max(load.start, load.end) if has_end else load.start
    needed, available = options.sequences.concurrent if load.mode.is_rate else highest, options.sequences.id_count
    if available < needed:
        yield f"--sequence-id-range: expected at least {needed:g} ids, one for each sequence at a time, got {available}"


def _is_single(options: PerfOptions) -> bool:
    """Whether no option sets a load."""
    load = options.load
    return load.mode is LoadMode.CONCURRENCY and load.end == 1 and not options.measure.request_count


def _data_problems(options: PerfOptions) -> Iterator[str]:
    data = options.data
    if data.replay:
        generated = DataOptions(replay=data.replay, replay_speed=data.replay_speed)
        rules = {
            "--replay: expected no other input data with it": data == generated,
            "--replay: expected neither another load nor --request-count with it": _is_single(options),
            "--replay: expected no -b with it: requests are sent as they were": options.target.batch_size == 1,
            "--replay: expected --prompts in its place with --llm": not options.is_language,
        }
        yield from (rule for rule, holds in rules.items() if not holds)
        return
    if data.replay_speed != 1:
        yield "--replay-speed: expected --replay with it, got none"
    others = [source for source in data.sources if source in GENERATED or Path(source).suffix.lower() != ".json"]
    if len(data.sources) > 1 and others:
        yield f"--input-data: expected JSON files where there is more than one, got {others[0]}"


def language_problems(options: PerfOptions) -> Iterator[str]:
    """Yield the violated rules of the options of language models."""
    if not options.is_language:
        conditions = [condition.text for condition in options.report.fail_if if condition.is_of_language]
        fields = {
            "--endpoint, --tokenizer, --no-stream": options.language != LanguagePlan(),
            "--prompts and other options of prompts": options.prompts != PromptPlan(),
            "--goodput of tokens": any(each.figure != "latency" for each in options.measure.objectives),
            f"--fail-if '{''.join(conditions[:1])}'": bool(conditions),
        }
        yield from (f"{name}: expected --llm with it, got none" for name, is_given in fields.items() if is_given)
        return
    target, prompts = options.target, options.prompts
    is_grpc = target.protocol is WireProtocol.GRPC
    is_replayed_alone = not prompts.is_replay or _is_single(options)
    rules = {
        "-b: expected 1 with --llm: a request has one prompt": target.batch_size == 1,
        "--input-data: expected --prompts in its place with --llm": options.data == DataOptions(),
        "--shared-memory: expected none with --llm": target.shared_memory is SharedMemory.NONE,
        "--endpoint: expected infer with -i grpc": not is_grpc or options.language.endpoint is LanguageEndpoint.INFER,
        "--fixed-schedule: expected --prompts with it": not prompts.is_replay or bool(prompts.file),
        "--fixed-schedule: expected neither a range nor --request-count with it": is_replayed_alone,
        "--periodic-concurrency-range: expected another range with --llm": options.load.mode is not LoadMode.PERIODIC,
        "--prompts: expected no options of generated prompts with it": not prompts.file or not prompts.is_generated,
    }
    yield from (rule for rule, holds in rules.items() if not holds)


def _report_problems(options: PerfOptions) -> Iterator[str]:
    server, report, default = options.server, options.report, ServerPlan()
    if not options.collect_metrics and server.metrics_url:
        yield "--metrics-url: expected --collect-metrics with it, got none"
    if not options.collect_metrics and server.metrics_interval_ms != default.metrics_interval_ms:
        yield "--metrics-interval: expected --collect-metrics with it, got none"
    seen: dict[Path, str] = {}
    for name, path in (
        ("-f", report.csv),
        ("--profile-export-file", report.profile_export),
        ("--json", report.json),
        ("--html", report.html),
        ("--markdown", report.markdown),
    ):
        if path is not None and path in seen:
            yield f"{name}: expected a separate file, got that of {seen[path]}, {path}"
        if path is not None:
            seen[path] = name
