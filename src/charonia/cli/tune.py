"""`charonia tune`: find the configuration with which a model performs best within the user's limits.

Tables and summary go to stdout, progress to stderr. Exit status: see `charonia tune --help`.
"""

import shlex
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from charonia.cli.command_line import HELP_NAMES, CommandLine, Option, ParsedOptions, complain, joined, unknown
from charonia.cli.perf_values import shapes
from charonia.cli.tune_yaml import (
    SETTINGS_WITHOUT_EFFECT,
    composing_models,
    constraints,
    model_requests,
    objectives,
    read_yaml,
    variant_names,
)
from charonia.cli.values import (
    choice,
    fetched,
    filled,
    integer,
    integers,
    names,
    number,
    numbers,
    pairs,
    path,
    seconds,
    switch,
    word,
)
from charonia.core.errors import ServingError, invalid
from charonia.stores.location import is_store
from charonia.tools.perf.options import WireProtocol
from charonia.tools.tune.api import SearchMode
from charonia.tools.tune.options import (
    EXPORT,
    LaunchMode,
    LaunchOptions,
    ModelRequest,
    ModelsSettings,
    ReportRequest,
    TuneOptions,
    TuneRequest,
    UseCase,
)

MISUSE = 99


def run(arguments: Sequence[str]) -> int:
    if not arguments or HELP_NAMES & set(arguments):
        lines = {str(Subcommand.REPORT): REPORT, str(Subcommand.APPLY): APPLY}
        line = lines.get(arguments[0]) if arguments else None
        print((line or PROFILE).help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else MISUSE
    try:
        command, tune_for, rest = subcommand(arguments)
        if command is Subcommand.REPORT:
            report = parse_report(rest)
            # Imported late: it reads the client and the load generator, which `--help` does not need.
            from charonia.cli.tune_run import report_on

            return report_on(report)
        if command is Subcommand.APPLY:
            wanted = parse_report(rest, APPLY)
            from charonia.cli.tune_run import apply

            return apply(wanted)
        request = parse_profile(rest, tune_for)
        from charonia.cli.tune_run import profile_models

        return profile_models(request, shlex.join(["charonia", "tune", *arguments]))
    except ServingError as error:
        complain("charonia tune", error)
        return MISUSE


_SECRET = ("header", "H", "triton_server_environment")

Read = Callable[[Any], object]


class Subcommand(StrEnum):
    """A subcommand of `charonia tune`."""

    PROFILE = "profile"
    REPORT = "report"
    APPLY = "apply"


_AS_RACE = ("quick", "optuna")
"""Search modes of Model Analyzer for which `race` is searched."""


_search_mode = word({**{mode.value: mode for mode in SearchMode}, **dict.fromkeys(_AS_RACE, SearchMode.RACE)})


def _switch(names: str, field: str, help: str) -> Option:
    return Option(names, field, switch, "", help, default="")


def _idle(names: str, read: Read, metavar: str, reason: str, *, in_file_only: bool = False) -> Option:
    return Option(
        names, "", read, metavar, f"Without effect: {reason}",
        default="",
        unsupported=reason,
        in_file_only=in_file_only,
    )  # fmt: skip


CONFIG_FILE = Option("--config-file -f", "config_file", path, "FILE", "Options from a YAML file", default="")

# fmt: off
MODELS = (
    Option("--model-repository -m PATH", "launch.repository", fetched, "PATH",
           "Folder of models, its URI, or a file, as `charonia serve` takes it", default=""),
    Option("--profile-models", "models.profile", model_requests, "NAME,...",
           "Models to tune; in YAML with individual settings", default="the only one"),
    Option("--bls-composing-models", "models.composing", composing_models, "NAME,...",
           "Models that a tuned model calls, tuned with it", default=""),
    Option("--ensemble-composing-models", "models.composing", composing_models, "NAME,...",
           "Models of a tuned ensemble that need individual settings; the others are found in its steps", default=""),
    Option("--cpu-only-composing-models", "models.cpu_only_composing", names, "NAME,...",
           "Composing models whose instances run on the CPU", default=""),
    Option("--output-model-repository-path", "output.repository", path, "PATH",
           "Folder for the variants, each ready to serve", default="models in the folder of --export-path"),
    _switch("--override-output-model-repository", "output.override",
            "Replace variants of an earlier run; anything else in the folder stays"),
)

SERVER = (
    Option("--triton-launch-mode", "launch.mode", choice(LaunchMode), "local|remote|docker",
           "Start a server, or use one that runs in mode explicit; docker does the same as local"),
    Option("--triton-http-endpoint", "launch.http_endpoint", filled, "HOST:PORT", "HTTP of a remote server"),
    Option("--triton-grpc-endpoint", "launch.grpc_endpoint", filled, "HOST:PORT", "gRPC of a remote server"),
    Option("--triton-metrics-url", "launch.metrics_url", filled, "URL", "Metrics page of a remote server"),
    Option("--triton-server-path", "launch.server_path", filled, "COMMAND",
           "Server to start in place of this one, e.g. a tritonserver program", default="charonia serve"),
    Option("--triton-output-path", "launch.server_log", path, "FILE", "File for the server's log", default=""),
    Option("--triton-server-flags", "launch.server_flags", pairs, "{NAME: VALUE}", "More flags of the server",
           in_file_only=True, default=""),
    Option("--triton-server-environment", "launch.server_environment", pairs, "{NAME: VALUE}",
           "More environment of the server", in_file_only=True, default=""),
    Option("--client-max-retries -r", "launch.retries", integer(1, 10_000), "N",
           "Most attempts to reach a remote server while it starts, about one a second"),
    _switch("--reload-model-disable", "launch.reload_disabled", "Load no variants: search the load alone"),
)

SEARCH = (
    Option("--run-config-search-mode", "search.mode", _search_mode, "race|brute|quick|optuna",
           "Successive halving or brute force; quick and optuna do the same as race"),
    Option("--time-budget", "search.time_budget_s", seconds, "TIME", "Most time for it, e.g. 90s or 5m", default=""),
    Option("--seed", "search.seed", integer(0), "N", "Seed of random choices"),
    _switch("--run-config-search-disable", "search.disabled", "Measure only the configurations that the options list"),
    Option("--run-config-search-min-concurrency", "search.concurrency_min", integer(1), "N", "Least concurrency"),
    Option("--run-config-search-max-concurrency", "search.concurrency_max", integer(1), "N", "Largest concurrency"),
    Option("--run-config-search-min-request-rate", "search.rate_min", integer(1), "N", "Least requests a second"),
    Option("--run-config-search-max-request-rate", "search.rate_max", integer(1), "N", "Most requests a second"),
    Option("--run-config-search-min-instance-count", "search.instances_min", integer(1), "N", "Least instances"),
    Option("--run-config-search-max-instance-count", "search.instances_max", integer(1), "N", "Most instances"),
    Option("--run-config-search-min-model-batch-size", "search.batch_size_min", integer(1), "N",
           "Least max_batch_size"),
    Option("--run-config-search-max-model-batch-size", "search.batch_size_max", integer(1), "N",
           "Largest max_batch_size"),
    Option("--run-config-search-max-binary-search-steps", "search.binary_steps_max", integer(0), "N",
           "Most steps between a load that keeps the constraints and one that does not"),
    _switch("--request-rate-search-enable", "search.by_rate", "Search request rates in place of concurrencies"),
    _switch("--early-exit-enable", "search.stops_early", "End given loads, too, where throughput no longer grows"),
    _switch("--use-concurrency-formula", "search.formula", "Concurrency is 2 x batch size x instances"),
    _switch("--run-config-profile-models-concurrently-enable", "search.together",
            "Tune all models together, with load on all of them"),
)

LOAD = (
    Option("--concurrency -c", "measure.concurrency", integers(1), "LIST", "Exactly these concurrencies", default=""),
    Option("--request-rate", "measure.request_rate", numbers, "LIST", "Exactly these requests a second", default=""),
    Option("--batch-sizes -b", "measure.batch_sizes", integers(1), "LIST", "Items of a request"),
    Option("--client-protocol", "measure.protocol", choice(WireProtocol), "http|grpc", "Protocol"),
    Option("--measurement-time", "measure.time_s", number(0, above=True), "SECONDS",
           "Longest time of one measurement; it ends sooner where that is enough"),
    Option("--shape", "measure.shapes", shapes, "NAME:D1,D2,...",
           "Shape of an input with variable dimensions, without the batch dimension; repeatable", joined, default=""),
    Option("--perf-analyzer-flags", "measure.perf_flags", pairs, "{NAME: VALUE}",
           "Options of charonia perf by name, e.g. percentile, shape or input-data", in_file_only=True, default=""),
    Option("--monitoring-interval -i", "measure.metrics_interval_s", number(0, above=True), "SECONDS",
           "Interval between readings of the metrics page"),
)

GOAL = (
    Option("--latency-budget", "goal.latency_budget_ms", integer(1), "MS", "Largest p99 latency", default=""),
    Option("--min-throughput", "goal.min_throughput", integer(1), "N", "Least inferences a second", default=""),
    Option("--objectives", "goal.objectives", objectives, "[METRIC] or {METRIC: WEIGHT}",
           "What to maximise or minimise", in_file_only=True, default="perf_throughput"),
    Option("--constraints", "goal.constraints", constraints, "{METRIC: {min or max: N}}", "Limits to keep",
           in_file_only=True, default=""),
)

OUTPUT = (
    Option("--export-path -e", "output.export", path, "PATH", "Folder of `results`, `models` and `checkpoints`"),
    Option("--json", "output.json", path, "FILE", "Everything as JSON, - for stdout", default=""),
    Option("--html", "output.html", path, "FILE", "The report", default=""),
    Option("--checkpoint-directory -s", "output.journal_folder", path, "PATH",
           "Folder of the journal; recorded measurements are not repeated",
           default="checkpoints in the folder of --export-path"),
    Option("--filename-model-inference", "output.inference_file", filled, "NAME", "Table of measurements"),
    Option("--filename-model-gpu", "output.gpu_file", filled, "NAME", "Table of GPUs"),
    Option("--filename-server-only", "output.server_file", filled, "NAME", "Table of the idle server"),
    Option("--inference-output-fields", "output.inference_fields", names, "LIST", "Columns of the first", default=""),
    Option("--gpu-output-fields", "output.gpu_fields", names, "LIST", "Columns of the second", default=""),
    Option("--server-output-fields", "output.server_fields", names, "LIST", "Columns of the third", default=""),
    Option("--num-configs-per-model", "output.configs_per_model", integer(1), "N",
           "Variants of a model in the summary"),
    Option("--num-top-model-configs", "output.top_configs", integer(0), "N", "Variants of all models together in it"),
    Option("--skip-summary-reports", "output.summaries", lambda value: not switch(value), "", "No summary", default=""),
    Option("--quiet -q", "output.quiet", switch, "", "Print errors only", default=""),
    Option("--verbose -v", "output.verbose", switch, "", "Print the tables too", default=""),
)
# fmt: on

_PERF = "the load generator is built in"
_ALWAYS = "the memory of a server on this machine is always measured"
_GPU = "the metrics of GPUs are read from the server's metrics page"
_DOCKER = "the server is started as a process, without a container"
_OPTUNA = "race decides by its measurements how much of the space to measure"

WITHOUT_EFFECT = (
    _idle("--duration-seconds -d", number(0), "SECONDS", "the idle server is measured once"),
    _idle("--collect-cpu-metrics", switch, "", _ALWAYS),
    _idle("--gpus", names, "LIST", _GPU),
    _idle("--always-report-gpu-metrics", switch, "", _GPU),
    _idle("--dcgm-disable", switch, "", "DCGM is not used"),
    _idle("--skip-detailed-reports", switch, "", "each variant has its section in the one report"),
    _idle("--perf-analyzer-path", filled, "PATH", _PERF),
    _idle(
        "--perf-analyzer-timeout", number(0), "SECONDS", "a measurement is never longer than --measurement-time says"
    ),
    _idle("--perf-analyzer-cpu-util", number(0), "PERCENT", _PERF),
    _idle("--perf-analyzer-max-auto-adjusts", integer(0), "N", "a measurement continues until it is good enough"),
    _idle("--perf-output", switch, "", _PERF),
    _idle("--perf-output-path", filled, "PATH", _PERF),
    _idle("--triton-docker-image", filled, "IMAGE", _DOCKER),
    _idle("--triton-docker-mounts", names, "LIST", _DOCKER),
    _idle("--triton-docker-shm-size", filled, "SIZE", _DOCKER),
    _idle("--triton-docker-labels", pairs, "{NAME: VALUE}", _DOCKER, in_file_only=True),
    _idle("--triton-docker-args", pairs, "{NAME: VALUE}", _DOCKER, in_file_only=True),
    _idle("--concurrency-sweep-disable", switch, "", "the best are always measured under additional loads"),
    _idle("--triton-install-path", filled, "PATH", "it is for launch mode c_api"),
    _idle("--min-percentage-of-search-space", integer(1, 100), "N", _OPTUNA),
    _idle("--max-percentage-of-search-space", integer(1, 100), "N", _OPTUNA),
    _idle("--optuna-min-trials", integer(0), "N", _OPTUNA),
    _idle("--optuna-max-trials", integer(0), "N", _OPTUNA),
    _idle("--optuna-early-exit-threshold", integer(1), "N", _OPTUNA),
    _idle("--plots", str, "{...}", "the report has its own plots", in_file_only=True),
    _idle("--model-type", filled, "generic", "llm among perf_analyzer_flags measures tokens"),
    _idle("--genai-perf-flags", pairs, "{NAME: VALUE}", "models are measured by requests", in_file_only=True),
)

RESULT_OPTIONS = (
    Option("--export-path -e", "export", path, "PATH", "Folder that `results` is in"),
    Option("--json", "json", path, "FILE", "The result", default="the latest in the folders"),
)

APPLY_OPTIONS = (
    *RESULT_OPTIONS,
    Option("--model-configs -n NAME", "names", variant_names, "NAME,...", "Variants", default="the recommended ones"),
    Option("--model-repository -m", "repository", path, "PATH", "Folder of models", default="that of the run"),
    _switch("--quiet -q", "quiet", "Print errors only"),
)

REPORT_OPTIONS = (
    CONFIG_FILE,
    *RESULT_OPTIONS,
    Option("--report-model-configs -n", "names", variant_names, "NAME,...", "Variants to show; all of them without"),
    Option("--html", "html", path, "FILE", "The report", default=""),
    _switch("--quiet -q", "quiet", "Print errors only"),
    _switch("--verbose -v", "verbose", "Print the tables too"),
    _idle("--checkpoint-directory -s", path, "PATH", "the result has the content of the journal"),
    _idle("--output-formats -o", names, "LIST", "the report is one HTML file"),
    _idle("--always-report-gpu-metrics", switch, "", "the report has the metrics that the server exports"),
)

EXIT_CODES = """\
Exit status:
   0  there is a recommendation, which may be to change nothing
   1  the server was lost; the measurements up to then are kept
   2  no configuration keeps the constraints; the closest one is reported
   3  nothing could be measured: every configuration failed
  99  wrong options, unknown model, output not writable, server not reachable or
      not in mode explicit
 130  interrupted; the measurements are reported, the next run resumes
"""

PROFILE = CommandLine(
    command="charonia tune",
    intro="""\
usage: charonia tune [profile] [OPTIONS] [PATH]
       charonia tune report [OPTIONS]
       charonia tune apply [OPTIONS] [NAME]

Find the configuration of a model that gives the most within your limits.
PATH is a file or a repository, as `charonia serve` takes it.
`charonia tune report --help` explains how to report on an earlier run, and
`charonia tune apply --help` how to put what it found into the repository.

  charonia tune model.onnx
  charonia tune -m REPOSITORY --profile-models resnet
  charonia tune -m REPOSITORY --profile-models resnet --latency-budget 50
  charonia tune -f config.yaml
  charonia tune --triton-launch-mode remote --triton-http-endpoint HOST:PORT \\
    --profile-models resnet
""",
    groups={
        "File": (CONFIG_FILE,),
        "Models": MODELS,
        "Server": SERVER,
        "Search": SEARCH,
        "Load": LOAD,
        "Goal": GOAL,
        "Output": OUTPUT,
        "Accepted without an effect": WITHOUT_EFFECT,
    },
    record=TuneOptions(
        models=ModelsSettings(profile=(ModelRequest("NAME"),)), launch=LaunchOptions(repository=Path("PATH"))
    ),
    epilog=EXIT_CODES,
    abbreviates=True,
    hint="charonia tune --help lists the options",
)

REPORT = CommandLine(
    command="charonia tune report",
    intro="""\
usage: charonia tune report [OPTIONS]

Write the tables and the page of an earlier run again.
""",
    groups={"Options": REPORT_OPTIONS},
    record=ReportRequest(),
    epilog=EXIT_CODES,
    abbreviates=True,
    hint="charonia tune report --help lists the options",
)


APPLY = CommandLine(
    command="charonia tune apply",
    intro="""\
usage: charonia tune apply [OPTIONS] [NAME]

Write the recommended configurations of an earlier run into the model repository.
The configuration of before stays beside each, in config.pbtxt.before_tune.
""",
    groups={"Options": APPLY_OPTIONS},
    record=ReportRequest(),
    abbreviates=True,
    hint="charonia tune apply --help lists the options",
)


def subcommand(arguments: Sequence[str]) -> tuple[Subcommand, UseCase, list[str]]:
    """Return what to do, what for, and the other arguments."""
    rest = deque(arguments)
    tune_for = UseCase.ONLINE
    if len(rest) > 1 and rest[0] in ("-m", "--mode") and rest[1] in (*UseCase,):
        rest.popleft()
        tune_for = UseCase(rest.popleft())
    if not rest or rest[0].startswith("-"):
        return Subcommand.PROFILE, tune_for, list(rest)
    word = rest.popleft()
    if word == "analyze":
        word = "profile"
    if word not in (*Subcommand,):
        if not is_store(word) and not Path(word).exists():
            is_path = "/" in word or "." in word
            raise invalid(
                f"there is no file or folder '{word}'" if is_path else unknown("subcommand", word, list(Subcommand))
            )
        rest.appendleft(word)
        word = "profile"
    return Subcommand(word), tune_for, list(rest)


def parse_profile(arguments: Sequence[str], tune_for: UseCase = UseCase.ONLINE) -> TuneRequest:
    """Return the request of `profile` from its arguments and the file that they name."""
    parsed = _split(PROFILE, arguments)
    # The record with the defaults needs a model and a repository to be valid.
    updates = {"models.profile": (), "launch.repository": None, **PROFILE.read(parsed), "goal.tune_for": tune_for}
    if (count := len(parsed.values.get("--model-repository", ()))) > 1:
        parsed.problems.append(f"--model-repository: expected one path, got {count}")
    export = updates.get("output.export", EXPORT)
    updates = {"output.repository": export / "models", "output.journal_folder": export / "checkpoints", **updates}
    options = PROFILE.filled(updates, parsed)
    parsed.check()
    for request in (*options.models.profile, *options.models.composing):
        parsed.notes += [
            f"{name} of model '{request.name}' has no effect: {SETTINGS_WITHOUT_EFFECT[name]}"
            for name in request.without_effect
        ]
    modes = [str(mode).strip().lower() for mode in parsed.values.get("--run-config-search-mode", ())]
    parsed.notes += [f"search mode {mode}: race finds as good a configuration" for mode in modes if mode in _AS_RACE]
    if options.launch.mode is LaunchMode.DOCKER:
        parsed.notes.append(f"launch mode docker: {_DOCKER}")
        options = replace(options, launch=replace(options.launch, mode=LaunchMode.LOCAL))
    return TuneRequest(options, _named(parsed), tuple(parsed.notes))


def parse_report(arguments: Sequence[str], line: CommandLine[ReportRequest] = REPORT) -> ReportRequest:
    """Return the request of `report`, or of `apply`, from its arguments."""
    parsed = _split(line, arguments)
    request = line.filled(line.read(parsed), parsed)
    parsed.check()
    return request


def _split(line: CommandLine[Any], arguments: Sequence[str]) -> ParsedOptions:
    """Return the options of the arguments and of the file that they name; arguments take precedence."""
    parsed = line.split(arguments)
    parsed.check()
    files = parsed.values.get(CONFIG_FILE.name)
    if not files:
        return parsed
    by_key = {option.key: option for option in line.options() if option is not CONFIG_FILE}
    for key, value in read_yaml(path(files[-1])).items():
        option = by_key.get(key)
        if option is None:
            parsed.problems.append(f"{files[-1]}: {unknown('key', key, list(by_key))}")
        elif value is not None and option.name not in parsed.values:
            parsed.values[option.name] = [value]
            parsed.sources[option.name] = f"{files[-1]}: {key}"
    return parsed


def _named(options: ParsedOptions) -> dict[str, str]:
    """Return the given options, as text by name in YAML."""
    by_name = {option.name: option for option in PROFILE.options() if option is not CONFIG_FILE}
    values = {
        by_name[name].key: texts[-1] if by_name[name].metavar else texts[-1] or "true"
        for name, texts in options.values.items()
        if name in by_name
    }
    return {name: value if isinstance(value, str) else repr(value) for name, value in _without_secrets(values).items()}


def _without_secrets(values: Mapping[str, object]) -> dict[str, object]:
    """Mask the values of headers and environments, so that reports contain no tokens and passwords."""
    return {name: _masked(value) if name.lstrip("-") in _SECRET else _open(value) for name, value in values.items()}


def _open(value: object) -> object:
    if isinstance(value, Mapping):
        return _without_secrets({str(name): inner for name, inner in value.items()})
    return [_open(inner) for inner in value] if isinstance(value, list) else value


def _masked(value: object) -> object:
    if isinstance(value, Mapping):
        return dict.fromkeys(map(str, value), "***")
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    name, colon, _ = str(value).partition(":")
    return f"{name}:***" if colon else "***"
