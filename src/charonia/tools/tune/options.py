"""The options of `charonia tune` as frozen records, with Model Analyzer's defaults, and checks across them.

The help of an option in `cli/tune.py` says what its field means.
"""

from collections.abc import Iterator
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

EXPORT = Path("charonia-tune")
"""Folder that everything is written to."""


class LaunchMode(StrEnum):
    """How the server is provided."""

    LOCAL = "local"
    DOCKER = "docker"
    REMOTE = "remote"
    C_API = "c_api"


class UseCase(StrEnum):
    """The use of the model: the word behind `-m` before the subcommand. It decides the first figures of a report."""

    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The server."""

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
    """The search."""

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

    together: bool = False
    time_budget_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """How one load is measured."""

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
    """The output files."""

    repository: Path = EXPORT / "models"
    override: bool = False
    journal_folder: Path = EXPORT / "checkpoints"
    export: Path = EXPORT
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
        config_parameters: Fields of config.pbtxt and the values to try, as YAML has them, in JSON text by field.
        perf_flags: Options of `charonia perf` by name without dashes.
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
    """Which models."""

    profile: tuple[ModelRequest, ...] = ()
    composing: tuple[ModelRequest, ...] = ()
    cpu_only_composing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GoalSettings:
    """The goal for models without their own."""

    objectives: tuple[Objective, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    latency_budget_ms: int = 0
    min_throughput: int = 0
    tune_for: UseCase = UseCase.ONLINE


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
        problems = [*_model_problems(self), *_load_problems(self)]
        if problems:
            raise invalid("\n".join(problems))


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """A tuning request.

    Attributes:
        named: The given options, as text by name.
    """

    options: TuneOptions
    named: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """The options of `charonia tune report` and `apply`; their help says what each means."""

    config_file: Path | None = None
    export: Path = EXPORT
    names: tuple[str, ...] = ()
    json: Path | None = None
    repository: Path | None = None
    html: Path | None = None
    quiet: bool = False
    verbose: bool = False


def _model_problems(options: TuneOptions) -> Iterator[str]:
    names = [model.name for model in options.models.profile]
    if not names and options.launch.mode is LaunchMode.REMOTE:
        yield "--profile-models: expected the names of models, got none"
    yield from (f"--profile-models: '{name}' is there twice" for name in sorted(set(names)) if names.count(name) > 1)
    if options.launch.mode is LaunchMode.C_API:
        yield (
            "--triton-launch-mode: expected local, remote or docker, got c_api: models are measured over the network "
            "(hint: local starts a server and stops it at the end)"
        )
    elif options.launch.mode is not LaunchMode.REMOTE and options.launch.repository is None:
        yield "--model-repository: expected a folder, got none (hint: only launch mode remote needs none)"


def _load_problems(options: TuneOptions) -> Iterator[str]:
    search = options.search
    bounds = (
        ("concurrency", search.concurrency_min, search.concurrency_max),
        ("request-rate", search.rate_min, search.rate_max),
        ("instance-count", search.instances_min, search.instances_max),
        ("model-batch-size", search.batch_size_min, search.batch_size_max),
    )
    for name, low, high in bounds:
        if high < low:
            yield f"--run-config-search-max-{name}: expected at least the minimum, {low}, got {high}"
    if options.measure.concurrency and options.measure.request_rate:
        yield "--concurrency and --request-rate: expected one of them, got both"
    if search.formula and search.by_rate:
        yield "--use-concurrency-formula: expected no --request-rate-search-enable with it, got both"
    for model in options.models.profile:
        if model.concurrency and model.request_rate:
            yield f"profile_models.{model.name}.parameters: expected concurrency or request_rate, got both"
    for name in ("concurrency", "request_rate", "batch_sizes") if search.together else ():
        lists = {model.name: getattr(model, name) for model in options.models.profile if getattr(model, name)}
        if len(set(lists.values())) > 1:
            shown = ", ".join(f"{list(values)} for '{model}'" for model, values in lists.items())
            yield (
                f"profile_models: models that are measured at the same time get the same load: expected one list "
                f"of {name}, got {shown} (hint: without run_config_profile_models_concurrently_enable, each model "
                "is measured alone under its own)"
            )
