"""The options of `charonia tune` as frozen records, with Model Analyzer's defaults, and checks across them."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from charonia.core.errors import invalid
from charonia.tools.perf.options import WireProtocol
from charonia.tools.tune.api import Constraint, Objective, SearchMode

BATCH_SIZE_MAX = 128
CONCURRENCY_MAX = 1024
REQUEST_RATE_MAX = 8192
INSTANCE_COUNT_MAX = 5


class LaunchMode(StrEnum):
    """How the server is provided."""

    LOCAL = "local"
    DOCKER = "docker"
    REMOTE = "remote"
    C_API = "c_api"


class TuneFor(StrEnum):
    """The use of the model: the word behind `-m` before the subcommand. It decides the first figures of a report."""

    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The server.

    Attributes:
        mode: Its origin.
        repository: The model repository; needed unless the server is a remote one.
        http_endpoint: HTTP address of a remote server.
        grpc_endpoint: Its gRPC address.
        metrics_url: Its metrics page.
        server_path: Program to start in place of `charonia serve`, "" for none.
        server_log: File for the server's log.
        server_flags: More flags of a local server.
        server_environment: More environment of a local server.
        retries: Most attempts to reach a remote server.
        reload_disabled: Whether a remote server's models stay unchanged: only loads are searched.
    """

    mode: LaunchMode = LaunchMode.LOCAL
    repository: Path | None = None
    http_endpoint: str = "localhost:8000"
    grpc_endpoint: str = "localhost:8001"
    metrics_url: str = "http://localhost:8002/metrics"
    server_path: str = ""
    server_log: Path | None = None
    server_flags: tuple[tuple[str, str], ...] = ()
    server_environment: tuple[tuple[str, str], ...] = ()
    retries: int = 50
    reload_disabled: bool = False


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The search.

    Attributes:
        mode: Which search.
        disabled: Whether to measure only listed configurations.
        concurrency_min: Least concurrency.
        concurrency_max: Largest concurrency.
        rate_min: Least request rate.
        rate_max: Largest request rate.
        instances_min: Least instances.
        instances_max: Most instances.
        batch_size_min: Least `max_batch_size`.
        batch_size_max: Largest `max_batch_size`.
        by_rate: Whether request rates are searched in place of concurrencies.
        binary_steps_max: Most steps of the search for the limit of a constraint.
        stops_early: Whether manual sweeps end at the plateau too.
        formula: Whether concurrency is 2 x batch size x instances.
        share_min: Least part of the space that `optuna` tries, in %.
        share_max: Largest part of it, in %.
        trials_min: Least variants of `optuna`, 0 for `share_min`.
        trials_max: Most variants of `optuna`, 0 for `share_max`.
        patience: Variants without a better one, after which `optuna` ends.
        together: Whether all models get load at the same time.
        time_budget_s: Most time for measuring, 0 for no limit.
        seed: Of everything that is drawn at random.
    """

    mode: SearchMode = SearchMode.RACE
    disabled: bool = False
    concurrency_min: int = 1
    concurrency_max: int = CONCURRENCY_MAX
    rate_min: int = 16
    rate_max: int = REQUEST_RATE_MAX
    instances_min: int = 1
    instances_max: int = INSTANCE_COUNT_MAX
    batch_size_min: int = 1
    batch_size_max: int = BATCH_SIZE_MAX
    by_rate: bool = False
    binary_steps_max: int = 5
    stops_early: bool = False
    formula: bool = False
    share_min: int = 5
    share_max: int = 10
    trials_min: int = 0
    trials_max: int = 0
    patience: int = 10
    together: bool = False
    time_budget_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """How one load is measured.

    Attributes:
        protocol: What requests are sent over.
        batch_sizes: Items of a request.
        concurrency: Exactly these concurrencies; empty for a search.
        request_rate: Exactly these request rates; empty for a search.
        time_s: Longest time of a measurement.
        metrics_interval_s: Interval between readings of the metrics page.
        perf_flags: Options of `charonia perf` by name without dashes.
        shapes: Shapes of inputs with variable dimensions, as `NAME:D1,D2`; of models that have such an input.
    """

    protocol: WireProtocol = WireProtocol.GRPC
    batch_sizes: tuple[int, ...] = (1,)
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    time_s: float = 0.8
    metrics_interval_s: float = 1.0
    perf_flags: tuple[tuple[str, str], ...] = ()
    shapes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """The output files.

    Attributes:
        repository: Folder for the variants.
        override: Whether variants that are there already are replaced.
        export: Folder that the folder `results` is made in.
        inference_file: Name of the table of measurements.
        gpu_file: Name of the table of GPUs.
        server_file: Name of the table of the idle server.
        inference_fields: Columns of the table of measurements, () for the known ones.
        gpu_fields: Columns of the table of GPUs, () for the known ones.
        server_fields: Columns of the table of the idle server, () for the known ones.
        configs_per_model: Variants of a model in the summary.
        top_configs: Variants of all models together in the summary, 0 for none.
        json: File for everything, "-" for stdout, None for the usual place.
        html: File for the report, None for the usual place.
        summaries: Whether there is a summary and a report.
        quiet: Whether stdout stays empty.
        verbose: Whether tables are printed.
    """

    repository: Path = Path("output_model_repository")
    override: bool = False
    journal_folder: Path = Path("checkpoints")
    export: Path = Path()
    inference_file: str = "metrics-model-inference.csv"
    gpu_file: str = "metrics-model-gpu.csv"
    server_file: str = "metrics-server-only.csv"
    inference_fields: tuple[str, ...] = ()
    gpu_fields: tuple[str, ...] = ()
    server_fields: tuple[str, ...] = ()
    configs_per_model: int = 3
    top_configs: int = 0
    json: Path | None = None
    html: Path | None = None
    summaries: bool = True
    quiet: bool = False
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The request for one model; None and empty: as for all.

    Attributes:
        concurrency: Exactly these concurrencies.
        request_rate: Exactly these request rates.
        batch_sizes: Items of a request.
        config_parameters: Fields of config.pbtxt and the values to try, as YAML has them, in JSON text by field.
        objectives: Metrics to maximize or minimize.
        constraints: Limits to keep.
        weight: How much the model counts beside the others.
        cpu_only: Whether its instances are on the CPU.
        perf_flags: Options of `charonia perf` by name without dashes.
        without_effect: Settings that were given and mean nothing here.
    """

    name: str
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    config_parameters: tuple[tuple[str, str], ...] = ()
    objectives: tuple[Objective, ...] = ()
    constraints: tuple[Constraint, ...] | None = None
    weight: float = 1.0
    cpu_only: bool = False
    perf_flags: tuple[tuple[str, str], ...] = ()
    without_effect: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelsSettings:
    """Which models.

    Attributes:
        profile: The models that get load, in order.
        composing: Models that a model of `profile` calls (BLS), or individual settings for models of an ensemble.
        cpu_only_composing: Composing models whose instances are on the CPU.
    """

    profile: tuple[ModelRequest, ...] = ()
    composing: tuple[ModelRequest, ...] = ()
    cpu_only_composing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GoalSettings:
    """The goal for models without their own.

    Attributes:
        objectives: Metrics to maximize or minimize.
        constraints: Limits to keep.
        latency_budget_ms: Largest p99 latency, 0 for none.
        min_throughput: Least throughput, 0 for none.
        tune_for: The use of the models.
    """

    objectives: tuple[Objective, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    latency_budget_ms: int = 0
    min_throughput: int = 0
    tune_for: TuneFor = TuneFor.ONLINE


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """All of it.

    Raises:
        ServingError: INVALID_ARG with a line for every rule that is broken.
    """

    models: ModelsSettings = ModelsSettings()
    launch: LaunchOptions = LaunchOptions()
    search: SearchSettings = SearchSettings()
    measure: MeasureSettings = MeasureSettings()
    goal: GoalSettings = GoalSettings()
    output: OutputSettings = OutputSettings()
    config_file: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        problems = [*_model_problems(self), *_range_problems(self.search), *_load_problems(self)]
        if problems:
            raise invalid("\n".join(problems))


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """A tuning request.

    Attributes:
        named: The given options, as text by name.
        notes: Remarks, one sentence each.
    """

    options: TuneOptions
    named: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _model_problems(options: TuneOptions) -> list[str]:
    problems = []
    names = [model.name for model in options.models.profile]
    if not names:
        problems.append("--profile-models: expected the names of models, got none")
    problems += [f"--profile-models: '{name}' is there twice" for name in sorted(set(names)) if names.count(name) > 1]
    if options.launch.mode is LaunchMode.C_API:
        problems.append(
            "--triton-launch-mode: expected local, remote or docker, got c_api: models are measured over the network "
            "(hint: local starts a server and stops it at the end)"
        )
    elif options.launch.mode is not LaunchMode.REMOTE and options.launch.repository is None:
        problems.append("--model-repository: expected a folder, got none (hint: only launch mode remote needs none)")
    return problems


def _range_problems(search: SearchSettings) -> list[str]:
    bounds = (
        ("concurrency", search.concurrency_min, search.concurrency_max),
        ("request-rate", search.rate_min, search.rate_max),
        ("instance-count", search.instances_min, search.instances_max),
        ("model-batch-size", search.batch_size_min, search.batch_size_max),
    )
    return [
        f"--run-config-search-max-{name}: expected at least the minimum, {low}, got {high}"
        for name, low, high in bounds
        if high < low
    ]


def _load_problems(options: TuneOptions) -> list[str]:
    problems = []
    if options.measure.concurrency and options.measure.request_rate:
        problems.append("--concurrency and --request-rate: expected one of them, got both")
    problems += [
        f"profile_models.{model.name}.parameters: expected concurrency or request_rate, got both"
        for model in options.models.profile
        if model.concurrency and model.request_rate
    ]
    if options.search.together:
        for name in ("concurrency", "request_rate", "batch_sizes"):
            lists = {model.name: getattr(model, name) for model in options.models.profile if getattr(model, name)}
            if len(set(lists.values())) > 1:
                shown = ", ".join(f"{list(values)} for '{model}'" for model, values in lists.items())
                problems.append(
                    f"profile_models: models that are measured at the same time get the same load: expected one list "
                    f"of {name}, got {shown} (hint: without run_config_profile_models_concurrently_enable, each model "
                    "is measured alone under its own)"
                )
    return problems
