"""Every option of `charonia tune`, a line each: the one place to add one.

An option is `--name-with-dashes` on the command line and `name_with_underscores` in YAML. Names, short forms and
defaults are Model Analyzer's; the few that are ours say so by `is_ours`. The default of an option is that of its field
in `TuneOptions`, so nothing here repeats it. What has no meaning here is accepted, and `note` says why it has none.
"""

from dataclasses import dataclass

from charonia.tools.tune import values as read
from charonia.tools.tune.api import SearchMode
from charonia.tools.tune.goals import constraints, objectives
from charonia.tools.tune.options import ClientProtocol, LaunchMode
from charonia.tools.tune.requests import composing_models, model_requests
from charonia.tools.tune.values import Read, choice, flag, integer, integers, names, number, numbers, pairs, path, text


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: As in YAML.
        field: Path of the field of `TuneOptions` that it sets, "" for none.
        read: From a text or a value of YAML to a value; raises ValueError.
        metavar: What the argument is, "" for one without.
        help: One sentence without a full stop.
        short: Short name with its dash, "" for none.
        on_command_line: Whether it is an option of the command line too.
        note: Why it has no meaning here, for those that are accepted without an effect.
        default: Default as text where it is not the field's.
        is_ours: Whether Model Analyzer does not have it.
    """

    name: str
    field: str
    read: Read
    metavar: str
    help: str
    short: str = ""
    on_command_line: bool = True
    note: str = ""
    default: str | None = None
    is_ours: bool = False

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")


def _switch(name: str, field: str, help: str, *, note: str = "") -> Option:
    return Option(name, field, flag, "", help, note=note, default="")


def _idle(name: str, read_value: Read, metavar: str, note: str, *, short: str = "", yaml_only: bool = False) -> Option:
    return Option(
        *(name, "", read_value, metavar, f"Without effect: {note}"), short, not yaml_only, note=note, default=""
    )


MODELS = (
    Option("model_repository", "launch.repository", path, "PATH", "Folder of models", "-m", default=""),
    Option(
        *("profile_models", "models.profile", model_requests, "NAME,..."),
        "Models to tune; in YAML with settings of their own",
        default="",
    ),
    Option(
        *("bls_composing_models", "models.composing", composing_models, "NAME,..."),
        "Models that a tuned model calls, tuned with it",
        default="",
    ),
    Option(
        *("ensemble_composing_models", "models.composing", composing_models, "NAME,..."),
        "Models of a tuned ensemble that have settings of their own; the others are found in its steps",
        default="",
    ),
    Option(
        *("cpu_only_composing_models", "models.cpu_only_composing", names, "NAME,..."),
        "Models of these whose instances are to be on the CPU",
        default="",
    ),
    Option(
        *("output_model_repository_path", "output.repository", path, "PATH"),
        "Folder for the variants, each ready to serve",
        default="./output_model_repository",
    ),
    _switch(
        *("override_output_model_repository", "output.override"),
        "Replace variants of an earlier run; anything else in the folder stays",
    ),
)

SERVER = (
    Option(
        *("triton_launch_mode", "launch.mode", choice(LaunchMode), "local|remote|docker"),
        "Start a server, or use one that runs in mode explicit; docker does the same as local",
    ),
    Option("triton_http_endpoint", "launch.http_endpoint", text, "HOST:PORT", "HTTP of a remote server"),
    Option("triton_grpc_endpoint", "launch.grpc_endpoint", text, "HOST:PORT", "gRPC of a remote server"),
    Option("triton_metrics_url", "launch.metrics_url", text, "URL", "Metrics page of a remote server"),
    Option(
        *("triton_server_path", "launch.server_path", text, "COMMAND"),
        "Server to start in place of this one, e.g. a tritonserver program",
        default="charonia serve",
    ),
    Option("triton_output_path", "launch.server_log", path, "FILE", "File for the server's log", default=""),
    Option(
        *("triton_server_flags", "launch.server_flags", pairs, "{NAME: VALUE}", "More flags of the server"),
        on_command_line=False,
        default="",
    ),
    Option(
        *("triton_server_environment", "launch.server_environment", pairs, "{NAME: VALUE}"),
        "More environment of the server",
        on_command_line=False,
        default="",
    ),
    Option(
        *("client_max_retries", "launch.retries", integer(1, 10_000), "N"),
        "Most attempts of a call while the server starts",
        "-r",
    ),
    _switch("reload_model_disable", "launch.reload_disabled", "Load no variants: search the load alone"),
)

SEARCH = (
    Option(
        *("run_config_search_mode", "search.mode", choice(SearchMode), "race|brute|quick|optuna"),
        "All briefly and the best again; all; uphill; by the library optuna",
        is_ours=False,
    ),
    Option(
        *("time_budget", "search.time_budget_s", read.duration, "TIME", "Most time for it, e.g. 90s or 5m"),
        default="",
        is_ours=True,
    ),
    Option("seed", "search.seed", integer(0), "N", "Of everything that is drawn at random", is_ours=True),
    _switch("run_config_search_disable", "search.disabled", "Measure only what is written down"),
    Option("run_config_search_min_concurrency", "search.concurrency_min", integer(1), "N", "Least concurrency"),
    Option("run_config_search_max_concurrency", "search.concurrency_max", integer(1), "N", "Largest concurrency"),
    Option("run_config_search_min_request_rate", "search.rate_min", integer(1), "N", "Least requests a second"),
    Option("run_config_search_max_request_rate", "search.rate_max", integer(1), "N", "Most requests a second"),
    Option("run_config_search_min_instance_count", "search.instances_min", integer(1), "N", "Least instances"),
    Option("run_config_search_max_instance_count", "search.instances_max", integer(1), "N", "Most instances"),
    Option("run_config_search_min_model_batch_size", "search.batch_size_min", integer(1), "N", "Least max_batch_size"),
    Option(
        *("run_config_search_max_model_batch_size", "search.batch_size_max", integer(1), "N", "Largest max_batch_size")
    ),
    Option(
        *("run_config_search_max_binary_search_steps", "search.binary_steps_max", integer(0), "N"),
        "Most steps between a load that keeps the constraints and one that does not",
    ),
    _switch("request_rate_search_enable", "search.by_rate", "Search request rates in place of concurrencies"),
    _switch("early_exit_enable", "search.stops_early", "End given loads, too, where throughput no longer grows"),
    _switch("use_concurrency_formula", "search.formula", "Concurrency is 2 x batch size x instances"),
    _switch(
        *("run_config_profile_models_concurrently_enable", "search.together"),
        "Tune all models together, with load on all of them",
    ),
    Option("min_percentage_of_search_space", "search.share_min", integer(1, 100), "N", "Least part for optuna, in %"),
    Option("max_percentage_of_search_space", "search.share_max", integer(1, 100), "N", "Largest part, in %"),
    Option("optuna_min_trials", "search.trials_min", integer(0), "N", "Least variants of optuna", default=""),
    Option("optuna_max_trials", "search.trials_max", integer(0), "N", "Most variants of optuna", default=""),
    Option(
        *("optuna_early_exit_threshold", "search.patience", integer(1), "N"),
        "Variants without a better one after which optuna ends",
    ),
)

LOAD = (
    Option("concurrency", "measure.concurrency", integers(1), "LIST", "Exactly these concurrencies", "-c", default=""),
    Option("request_rate", "measure.request_rate", numbers(0), "LIST", "Exactly these requests a second", default=""),
    Option("batch_sizes", "measure.batch_sizes", integers(1), "LIST", "Items of a request", "-b"),
    Option("client_protocol", "measure.protocol", choice(ClientProtocol), "http|grpc", "Protocol"),
    Option(
        *("measurement_time", "measure.time_s", number(0, above=True), "SECONDS"),
        "Longest time of one measurement; it ends sooner where that is enough",
        is_ours=True,
    ),
    Option(
        *("perf_analyzer_flags", "measure.perf_flags", pairs, "{NAME: VALUE}"),
        "Options of charonia perf by name, e.g. percentile, shape or input-data",
        on_command_line=False,
        default="",
    ),
    Option(
        *("monitoring_interval", "measure.metrics_interval_s", number(0, above=True), "SECONDS"),
        "Time between two looks at the metrics page",
        "-i",
    ),
)

GOAL = (
    Option("latency_budget", "goal.latency_budget_ms", integer(1), "MS", "Largest p99 latency", default=""),
    Option("min_throughput", "goal.min_throughput", integer(1), "N", "Least inferences a second", default=""),
    Option(
        *("objectives", "goal.objectives", objectives, "[METRIC] or {METRIC: WEIGHT}", "What to make large or small"),
        on_command_line=False,
        default="perf_throughput",
    ),
    Option(
        *("constraints", "goal.constraints", constraints, "{METRIC: {min or max: N}}", "Limits to keep"),
        on_command_line=False,
        default="",
    ),
)

OUTPUT = (
    Option("export_path", "output.export", path, "PATH", "Folder that `results` is made in", "-e", default="."),
    Option("json", "output.json", path, "FILE", "Everything as JSON, - for stdout", default="", is_ours=True),
    Option("html", "output.html", path, "FILE", "The report", default="", is_ours=True),
    Option("png", "output.png", path, "FOLDER", "Pictures of the plots; needs matplotlib", default="", is_ours=True),
    Option(
        *("checkpoint_directory", "output.journal_folder", path, "PATH"),
        "Folder of the journal; what is in it is not measured again",
        "-s",
        default="./checkpoints",
    ),
    Option("filename_model_inference", "output.inference_file", text, "NAME", "Table of measurements"),
    Option("filename_model_gpu", "output.gpu_file", text, "NAME", "Table of GPUs"),
    Option("filename_server_only", "output.server_file", text, "NAME", "Table of the idle server"),
    Option("inference_output_fields", "output.inference_fields", names, "LIST", "Columns of the first", default=""),
    Option("gpu_output_fields", "output.gpu_fields", names, "LIST", "Columns of the second", default=""),
    Option("server_output_fields", "output.server_fields", names, "LIST", "Columns of the third", default=""),
    Option("num_configs_per_model", "output.configs_per_model", integer(1), "N", "Variants of a model in the summary"),
    Option("num_top_model_configs", "output.top_configs", integer(0), "N", "Variants of all models together in it"),
    Option("skip_summary_reports", "output.summaries", lambda value: not flag(value), "", "No summary", default=""),
    Option("quiet", "output.quiet", flag, "", "Print nothing but errors", "-q", default=""),
    Option("verbose", "output.verbose", flag, "", "Print the tables too", "-v", default=""),
)

_PERF = "load is made in this process"
_ALWAYS = "the server's memory is always looked at where it runs on this machine"
_GPU = "the server's metrics page tells about its GPUs"
_DOCKER = "no container is needed: a server is started as a process"

WITHOUT_EFFECT = (
    _idle("duration_seconds", number(0), "SECONDS", "the idle server is looked at once", short="-d"),
    _idle("collect_cpu_metrics", flag, "", _ALWAYS),
    _idle("gpus", names, "LIST", _GPU),
    _idle("always_report_gpu_metrics", flag, "", _GPU),
    _idle("dcgm_disable", flag, "", "DCGM is not used"),
    _idle("skip_detailed_reports", flag, "", "each variant has its section in the one report"),
    _idle("perf_analyzer_path", text, "PATH", _PERF),
    _idle("perf_analyzer_timeout", number(0), "SECONDS", "a measurement is never longer than --measurement-time says"),
    _idle("perf_analyzer_cpu_util", number(0), "PERCENT", _PERF),
    _idle("perf_analyzer_max_auto_adjusts", integer(0), "N", "a measurement goes on until it is good enough"),
    _idle("perf_output", flag, "", _PERF),
    _idle("perf_output_path", text, "PATH", _PERF),
    _idle("triton_docker_image", text, "IMAGE", _DOCKER),
    _idle("triton_docker_mounts", names, "LIST", _DOCKER),
    _idle("triton_docker_shm_size", text, "SIZE", _DOCKER),
    _idle("triton_docker_labels", pairs, "{NAME: VALUE}", _DOCKER, yaml_only=True),
    _idle("triton_docker_args", pairs, "{NAME: VALUE}", _DOCKER, yaml_only=True),
    _idle("concurrency_sweep_disable", flag, "", "the best are always measured under further loads"),
    _idle("triton_install_path", text, "PATH", "it is for launch mode c_api"),
    _idle("plots", lambda value: value, "{...}", "the report has its own plots", yaml_only=True),
    _idle("model_type", text, "generic", "models are measured by requests, not by tokens"),
    _idle("genai_perf_flags", pairs, "{NAME: VALUE}", "models are measured by requests", yaml_only=True),
)

GROUPS = {
    "Models": MODELS,
    "Server": SERVER,
    "Search": SEARCH,
    "Load": LOAD,
    "Goal": GOAL,
    "Output": OUTPUT,
    "Accepted without an effect": WITHOUT_EFFECT,
}
OPTIONS = tuple(option for group in GROUPS.values() for option in group)
BY_NAME = {option.name: option for option in OPTIONS}
