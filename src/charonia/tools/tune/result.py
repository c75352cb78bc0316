"""The result of a run of `charonia tune`: frozen records and their JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from charonia.tools.results.json_form import DocumentForm
from charonia.tools.results.records import Gpu, Machine, ServerInfo
from charonia.tools.tune.api import Goal, Skipped, TrialRecord, Variant
from charonia.tools.tune.decision import Conclusion, Decision


@dataclass(frozen=True, slots=True)
class ModelConfigRecord:
    """The configuration of one model in a variant.

    Attributes:
        name: Name of the configuration, and of its folder: `add_sub_config_0`.
        text: Its config.pbtxt, without the model's name.
        diff: What differs from the model's own one, as a unified diff; "" for nothing.
        instance_group: Its instances: `2:CPU`.
        is_profiled: Whether load is sent to the model; False for one that composes another.
        queue_delay_us: Longest time that requests wait for others of their batch, None without dynamic batching.
    """

    model: str
    name: str
    text: str
    diff: str
    instance_group: str
    max_batch_size: int
    is_profiled: bool = True
    parameters: dict[str, str] = field(default_factory=dict)
    queue_delay_us: int | None = None

    @property
    def short_name(self) -> str:
        """The name without the model's: `config_0`."""
        return self.name.removeprefix(f"{self.model}_")


@dataclass(frozen=True, slots=True)
class VariantRecord:
    """A variant that was tried.

    Attributes:
        name: Names of its configurations of the profiled models, with commas between them.
    """

    variant: Variant
    name: str
    configs: tuple[ModelConfigRecord, ...]

    @property
    def short_name(self) -> str:
        """The name without the model's, where one model is profiled: `config_0`."""
        profiled = [config for config in self.configs if config.is_profiled]
        return profiled[0].short_name if len(profiled) == 1 else self.name

    @property
    def tuned(self) -> tuple[ModelConfigRecord, ...]:
        """The configurations whose settings were searched: of composing models where there are any."""
        return tuple(config for config in self.configs if not config.is_profiled) or self.configs

    def is_named(self, names: Sequence[str]) -> bool:
        """Return whether one of the names, short or in full, is its name."""
        return self.name in names or self.short_name in names


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """Models that were tuned together: usually one, with the models that it is composed of.

    Attributes:
        notes: Decisions of the search, and other remarks; one sentence each.
    """

    goal: Goal
    decision: Decision
    variants: tuple[VariantRecord, ...]
    trials: tuple[TrialRecord, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    duration_s: float = 0.0
    is_complete: bool = True

    @property
    def models(self) -> tuple[str, ...]:
        """The profiled models."""
        return tuple(model.model for model in self.goal.models)

    @property
    def extent(self) -> str:
        """How much was measured, in words."""
        measured, tried = sum(trial.measured is not None for trial in self.trials), len(self.variants)
        return f"{measured} measurement{'s' * (measured != 1)} of {tried} configuration{'s' * (tried != 1)}"

    @property
    def disturbance(self) -> str:
        """In how many measurements other programs or the hypervisor took cores, in a sentence; "" for none."""
        loads = [
            next((level.machine_load for level in trial.levels.values() if level.machine_load is not None), None)
            for trial in self.trials
        ]
        known = [load for load in loads if load is not None]
        disturbed = [load for load in known if load.disturbance]
        if not disturbed:
            return ""
        taken = sum(load.other_cores + load.stolen_cores for load in disturbed) / len(disturbed)
        return (
            f"During {len(disturbed)} of {len(known)} measurements, other programs or the hypervisor took "
            f"{taken:.1f} of {disturbed[0].core_count} cores: tune again when the machine is quiet."
        )

    def variant(self, variant: Variant) -> VariantRecord | None:
        return next((each for each in self.variants if each.variant.key == variant.key), None)


@dataclass(frozen=True, slots=True)
class TuneRun:
    """A whole run.

    Attributes:
        problem: What ended it early, "" for nothing.
        command: The command line, "" where a program started the run.
        is_offline: Whether the models are for batches of work rather than for people who wait: the page first shows
            throughput by the size of a request.
    """

    tool: str
    began_at: str
    duration_s: float
    machine: Machine
    server: ServerInfo
    is_remote: bool
    options: dict[str, str]
    seed: int
    groups: tuple[GroupRecord, ...]
    idle_gpus: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()
    is_interrupted: bool = False
    problem: str = ""
    command: str = ""
    is_offline: bool = False


RUN = DocumentForm(TuneRun, "charonia tune", "charonia-tune")
to_json, from_json = RUN.write, RUN.read


def exit_status(run: TuneRun) -> int:
    """Return the exit status of the program: the worst of its groups."""
    if run.is_interrupted:
        return 130
    if run.problem:
        return 1
    return max(map(_status, run.groups), default=3)


def _status(group: GroupRecord) -> int:
    match group.decision.conclusion:
        case Conclusion.NOTHING_MEASURED:
            return 3
        case Conclusion.CONSTRAINTS_NOT_MET:
            return 2
        case Conclusion.NO_OTHER if any(trial.failed is not None for trial in group.trials):
            return 3  # each change failed
        case _:
            return 0
