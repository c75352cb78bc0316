"""The dependencies of ensembles on models, and the check that the loaded models of an ensemble fit together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem, check_problems
from charonia.server.ensembles.configuration import STEP_PATH, composition_problems, scheduling_of
from charonia.server.ensembles.plan import EnsemblePlan, Labels, key_of
from charonia.server.lifecycle.loader import LoadedVersion

Find = Callable[[str, int], LoadedVersion | None]
"""Returns a version of a model that answers; version 0 means the highest. None where there is none."""
Failure = Callable[[str], str | None]
"""Returns why a model is not loaded, "" where nothing is known; None where there is no such model."""


@dataclass(frozen=True, slots=True)
class Composition:
    """An ensemble as configured, kept to be checked again when a model of its steps changes.

    Attributes:
        config: Its configuration.
        versions: Versions that it is served as.
        labels: Class labels from its own files, by output.
    """

    config: ModelConfig
    versions: tuple[int, ...]
    labels: Labels

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key_of(step) for step in scheduling_of(self.config).step))


def plan_of(composition: Composition, find: Find, failure: Failure) -> EnsemblePlan:
    """Return the plan of an ensemble over the models of its steps that answer now.

    Raises:
        ServingError: INVALID_ARG with everything that does not fit.
    """
    config = composition.config
    steps = scheduling_of(config).step
    found = [find(key_of(step), max(0, step.model_version)) for step in steps]
    problems = _missing(config, found, find, failure)
    problems += composition_problems(config, [None if version is None else version.runner.config for version in found])
    loaded = [version for version in found if version is not None]
    if len(loaded) < len(found):
        check_problems(config.name, problems)
    labels: dict[str, tuple[str, ...]] = {}
    for step, version in zip(steps, loaded, strict=True):
        labels |= {tensor: version.labels[key] for key, tensor in step.output_map.items() if key in version.labels}
    plan = EnsemblePlan(config, [version.runner.config for version in loaded], {**labels, **composition.labels})
    for index in sorted(plan.graph.origins.conflicts):
        message = f"step {steps[index].model_name} receives inputs originated from different decoupled models"
        problems.append(Problem(f"{STEP_PATH}[{index}].input_map", f"in ensemble {config.name}, {message}"))
    outputs = [output.name for output in config.output]
    if plan.graph.unrelated(outputs):
        message = f"outputs {', '.join(outputs)} originate from different decoupled models: no response could have all"
        problems.append(Problem("output", f"in ensemble {config.name}, {message}"))
    for index in plan.graph.cyclic:
        message = f"step {steps[index].model_name} can never run: its inputs depend on its own outputs"
        problems.append(Problem(f"{STEP_PATH}[{index}].input_map", f"in ensemble {config.name}, {message}"))
    check_problems(config.name, problems)
    return plan


def cycle(name: str, compositions: Mapping[str, Composition]) -> tuple[str, ...]:
    """Return the cycle through which ensemble `name` contains itself, from `name` to `name`; empty without one."""
    paths: list[tuple[str, ...]] = [(name,)]
    seen: set[str] = set()
    while paths:
        path = paths.pop()
        composition = compositions.get(path[-1])
        for model in composition.models if composition is not None else ():
            if model == name:
                return (*path, name)
            if model not in seen:
                seen.add(model)
                paths.append((*path, model))
    return ()


def dependents(name: str, compositions: Mapping[str, Composition]) -> list[str]:
    """Return the ensembles that contain a model, directly or indirectly, in the order of their dependencies."""
    reached = {name}
    while True:
        more = {e for e, c in compositions.items() if e not in reached and not reached.isdisjoint(c.models)}
        if not more:
            break
        reached |= more
    ordered: list[str] = []
    left = sorted(reached - {name})
    while left:
        # Ensembles that contain each other have no order; they are not served either.
        ready = [e for e in left if not any(m in left for m in compositions[e].models)] or left
        ordered += ready
        left = [e for e in left if e not in ready]
    return ordered


def _missing(config: ModelConfig, found: list[LoadedVersion | None], find: Find, failure_of: Failure) -> list[Problem]:
    name = config.name
    problems = []
    unknown = []
    for index, (step, version) in enumerate(zip(scheduling_of(config).step, found, strict=True)):
        if version is not None:
            continue
        model = step.model_name
        failure = failure_of(key_of(step))
        if failure is None:
            unknown.append(model)
            continue
        if find(key_of(step), 0) is not None:
            message = (
                f"ensemble '{name}' depends on '{model}' whose required version {step.model_version} is not loaded."
            )
            problems.append(Problem(f"{STEP_PATH}[{index}].model_version", message))
            continue
        message = f"ensemble '{name}' depends on '{model}' which has no loaded version."
        if failure:
            message += f" Model '{model}' loading failed with error: {failure}"
        problems.append(Problem(f"{STEP_PATH}[{index}].model_name", message))
    if unknown:
        names = ", ".join(dict.fromkeys(unknown))
        message = f"ensemble {name} contains models that are not available or ambiguous: {names}"
        problems.insert(0, Problem(STEP_PATH, message))
    return problems
