"""Runs one search: gets its trials, finds each in the journal or measures it, and tells the search the outcome."""

import difflib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError
from charonia.tools.results.records import LevelResult
from charonia.tools.tune.api import Failed, Outcome, Search, Skipped, Told, Trial, Variant
from charonia.tools.tune.decision import Decision, decide
from charonia.tools.tune.deployment import Deployment, ServerLostError
from charonia.tools.tune.journal import Entry, Journal, scope_of
from charonia.tools.tune.measure import InterruptedTrialError, Measurer, outcome_of
from charonia.tools.tune.output import OutputRepository
from charonia.tools.tune.problem import SearchProblem, percentiles
from charonia.tools.tune.progress import Event, Noted, Progress, SearchDone, TrialBegun, TrialDone
from charonia.tools.tune.result import GroupRecord, ModelConfigRecord, TrialRecord, VariantRecord
from charonia.tools.tune.search.start import make_search
from charonia.tools.tune.servers import MeasuredServer
from charonia.tools.tune.variants import (
    BaseModel,
    Names,
    apply_variant,
    effective_text,
    instance_group_text,
    serving_text,
)

RESTARTS_MAX = 3
"""How often a server that this tool started is restarted after a crash, in a whole run."""


@dataclass(slots=True)
class SearchContext:
    """The state that the searches of a run share.

    Attributes:
        deployment: Its models.
        journal: The measurements so far.
        output: The repository that variants are written to.
        progress: Called with each event.
        names: Names of configurations.
        restarts: How often the server was started again.
    """

    server: MeasuredServer
    deployment: Deployment
    journal: Journal
    output: OutputRepository
    progress: Progress
    names: Names = field(default_factory=Names)
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class SearchEnd:
    """How a search ended.

    Attributes:
        group: Its results.
        is_interrupted: Whether the user ended it.
        problem: What ended it early, "" for nothing.
    """

    group: GroupRecord
    is_interrupted: bool = False
    problem: str = ""


class GroupSearch:
    """A search for models that are tuned together.

    Args:
        context: The state shared with other searches.
        problem: The search space, goal and limits.
        bases: Its models as they were found.
        scope: Digest of what its results depend on.
        measurer: Measures its trials.
        loads_variants: Whether variants are loaded at all.
    """

    def __init__(
        self,
        context: SearchContext,
        problem: SearchProblem,
        bases: Mapping[str, BaseModel],
        scope: str,
        measurer: Measurer,
        *,
        loads_variants: bool = True,
    ) -> None:
        self._context = context
        self._problem = problem
        self._bases = bases
        self._scope = scope
        self._measurer = measurer
        self._loads_variants = loads_variants
        self._percentiles = percentiles(problem.goal)
        self._variants: dict[str, VariantRecord] = {}
        self._trials: list[TrialRecord] = []
        self._history: list[Told] = []
        self._notes: list[str] = []
        self._loaded = ""
        self._resumed: dict[str, bool] = {}
        # A variant that spells out the default is the default, whenever it is measured.
        self._first_of = {effective_text(bases, Variant()): Variant()}
        self._duplicates: dict[str, Skipped] = {}

    def run(self) -> SearchEnd:
        """Run the search. The measurements are returned in any case.

        Raises:
            ServingError: There is nothing to search.
        """
        begin = time.monotonic()
        search = make_search(self._problem.space, self._problem.goal, self._problem.options)
        is_interrupted, problem = False, ""
        try:
            self._carry_out(search, begin)
        except (InterruptedTrialError, KeyboardInterrupt):
            is_interrupted = True
        except ServingError as error:
            # The server is gone, or a write failed: report the measurements so far.
            problem = str(error)
        decision = self._decide()
        skipped = (*search.skipped, *self._duplicates.values())
        self._tell(SearchDone(decision, skipped))
        group = GroupRecord(
            goal=self._problem.goal,
            decision=decision,
            variants=tuple(self._variants.values()),
            trials=tuple(self._trials),
            skipped=skipped,
            notes=(*search.notes, *self._notes),
            duration_s=time.monotonic() - begin,
            is_complete=not is_interrupted and not problem,
        )
        return SearchEnd(group, is_interrupted, problem)

    def _carry_out(self, search: Search, begin: float) -> None:
        budget = self._problem.options.time_budget_s
        while (trial := search.ask()) is not None:
            self._measurer.check()
            left = max(0.0, budget - (time.monotonic() - begin)) if budget else None
            told = self._as_first(trial)
            configs = self._configs(told.variant)
            is_copy = self._key(told, configs) in self._resumed
            if not is_copy:
                name = self._record(told.variant, configs).name if configs else str(told.variant)
                self._tell(TrialBegun(told, name, search.trials_left, left))
            record = self._outcome(told, configs)
            search.tell(record.outcome)
            if not is_copy:
                self._trials.append(record)
                self._history.append(Told(told, record.outcome))
                self._tell(TrialDone(told, record.outcome, self._decide().leader, record.is_resumed))

    def _decide(self) -> Decision:
        return decide(self._problem.goal, self._history, self._problem.options)

    def _as_first(self, trial: Trial) -> Trial:
        """Return a trial of the first variant with the same effect: reports leave the others out."""
        variant = trial.variant
        try:
            first = self._first_of.setdefault(effective_text(self._bases, variant), variant)
        except ServingError:  # it is not a configuration, which `_configs` reports
            first = variant
        if first.key != variant.key:
            self._duplicates.setdefault(variant.key, Skipped(variant, f"the same configuration as '{first}'"))
        return replace(trial, number=len(self._trials) + 1, variant=first)

    def _outcome(self, trial: Trial, configs: Mapping[str, ModelConfig]) -> TrialRecord:
        """Return a trial's record: from the journal, from a variant with the same effect, or measured now."""
        key = self._key(trial, configs)
        entry = self._context.journal.find(self._scope, key)
        if entry is None or (entry.failed is not None and not entry.failed.loading):
            entry = self._measured(trial, key, configs)
            self._context.journal.append(entry)
            self._resumed[key] = False
            return TrialRecord(trial, entry.measured, entry.failed, entry.levels)
        measured = entry.measured
        if key in self._resumed and measured is not None:
            # Another variant had the same effect and was measured: this one takes no time.
            measured = replace(measured, elapsed_s=0.0)
        is_resumed = self._resumed.setdefault(key, True)
        return TrialRecord(trial, measured, entry.failed, entry.levels, is_resumed)

    def _key(self, trial: Trial, configs: Mapping[str, ModelConfig]) -> str:
        """Return a text that is equal for equal measurements."""
        variant = effective_text(self._bases, trial.variant) if configs else trial.variant.key
        loads = [[load.model, load.mode.value, load.value, load.batch_size] for load in trial.loads]
        return scope_of({"variant": variant, "loads": loads, "repeat": trial.repeat, "effort": trial.effort})

    def _measured(self, trial: Trial, key: str, configs: Mapping[str, ModelConfig]) -> Entry:
        begin = time.monotonic()
        levels: dict[str, LevelResult] = {}
        outcome: Outcome
        if not configs:
            return self._entry(key, Failed("the configuration cannot be written", loading=True), {})
        is_loading = True
        try:
            is_fresh = self._load(trial.variant, configs)
            is_loading = False
            levels = self._measurer.measure(trial.loads, trial.effort, is_fresh=is_fresh)
            outcome = outcome_of(levels, self._percentiles, time.monotonic() - begin)
        except ServerLostError as error:
            self._loaded = ""
            self._bring_back(error)
            outcome = Failed(f"{error.message}", loading=True, elapsed_s=time.monotonic() - begin)
        except ServingError as error:
            self._loaded = ""
            self._measurer.close()
            outcome = Failed(str(error), loading=is_loading, elapsed_s=time.monotonic() - begin)
        return self._entry(key, outcome, levels)

    def _entry(self, key: str, outcome: Outcome, levels: dict[str, LevelResult]) -> Entry:
        if isinstance(outcome, Failed):
            return Entry(self._scope, key, failed=outcome)
        return Entry(self._scope, key, measured=outcome, levels=levels)

    def _load(self, variant: Variant, configs: Mapping[str, ModelConfig]) -> bool:
        """Load a variant, and return whether that was necessary."""
        wanted = effective_text(self._bases, variant)
        if self._loaded == wanted or not self._loads_variants:
            is_first, self._loaded = not self._loaded, wanted
            return is_first
        self._context.deployment.load(self._bases, configs)
        self._loaded = wanted
        return True

    def _bring_back(self, error: ServerLostError) -> None:
        """Restart a server that this tool started, so that the search continues with other variants.

        Raises:
            ServerLostError: It is a remote server, or it crashed too often.
        """
        self._measurer.close()
        if not self._context.server.is_ours or self._context.restarts == RESTARTS_MAX:
            raise error
        self._context.restarts += 1
        self._note(f"{error.message}; it is started again.")
        try:
            self._context.server.restart()
        except ServingError as failure:
            raise ServerLostError(failure.message) from None
        self._context.deployment.forget()

    def _configs(self, variant: Variant) -> dict[str, ModelConfig]:
        try:
            return apply_variant(self._bases, variant)
        except ServingError as error:
            self._note(f"'{variant}' is not a configuration: {error}.")
            return {}

    def _record(self, variant: Variant, configs: Mapping[str, ModelConfig]) -> VariantRecord:
        """Return the record of a variant; a new one is written to the output repository."""
        if variant.key in self._variants:
            return self._variants[variant.key]
        profiled = self._problem.space.profiled
        names = self._context.names.names(self._bases, configs, profiled)
        if self._loads_variants:
            for model, config in configs.items():
                self._context.output.write(model, names[model], config, names)
        records = [
            self._config_record(model, names[model], configs[model], is_profiled=model in profiled)
            for model in sorted(configs, key=lambda model: model not in profiled)
        ]
        made = VariantRecord(variant, ",".join(names[model] for model in profiled), tuple(records))
        self._variants[variant.key] = made
        return made

    def _config_record(self, model: str, name: str, config: ModelConfig, *, is_profiled: bool) -> ModelConfigRecord:
        base = self._bases[model]
        text = serving_text(config)
        shown = config if config.instance_group else replace(config, instance_group=base.complete.instance_group)
        batching = config.dynamic_batching or (base.complete.dynamic_batching if config == base.config else None)
        batch_size = base.complete.max_batch_size if config.max_batch_size == base.config.max_batch_size else None
        return ModelConfigRecord(
            model=model,
            name=name,
            text=text,
            diff=_diff(serving_text(base.config), text),
            instance_group=instance_group_text(base.complete if config == base.config else shown),
            max_batch_size=config.max_batch_size if batch_size is None else batch_size,
            is_profiled=is_profiled,
            parameters=dict(config.parameters),
            queue_delay_us=batching.max_queue_delay_microseconds if batching is not None else None,
        )

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._tell(Noted(text))

    def _tell(self, event: Event) -> None:
        self._context.progress(event)


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "default", "recommended", lineterm="", n=2)
    return "\n".join(lines)
