"""Checks of the model parameters INSTANCES_MIN and INSTANCES_MAX. Pure."""

from collections.abc import Iterator

from charonia.config.backends import ENSEMBLE, record_of
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.parameters import INSTANCES_MAX, INSTANCES_MIN
from charonia.config.problems import Problem


def scaling_problems(config: ModelConfig, count_max: int) -> Iterator[Problem]:
    """Yield all problems of the two parameters of a normalised configuration.

    Args:
        config: The configuration.
        count_max: Limit of instances of a group.
    """
    given = {
        name: config.parameters[name].strip() for name in (INSTANCES_MIN, INSTANCES_MAX) if name in config.parameters
    }
    if not given:
        return
    if config.platform == ENSEMBLE:
        yield Problem(
            f"parameters[{next(iter(given))}]", "an ensemble has no instances; set it in the models of its steps"
        )
        return
    bad = [
        name for name, text in given.items() if not (text.isascii() and text.isdigit() and 1 <= int(text) <= count_max)
    ]
    for name in bad:
        yield Problem(
            f"parameters[{name}]", f"expected a number of instances from 1 to {count_max}, got '{given[name]}'"
        )
    if bad or not config.instance_group:
        return
    if INSTANCES_MAX not in given:
        yield Problem(
            f"parameters[{INSTANCES_MIN}]", f"needs {INSTANCES_MAX}; a fixed number is the count of instance_group"
        )
        return
    count, most = config.instance_group[0].count, int(given[INSTANCES_MAX])
    least = int(given.get(INSTANCES_MIN, count))
    if least > most:
        source = INSTANCES_MIN if INSTANCES_MIN in given else "the count of instance_group"
        yield Problem(f"parameters[{INSTANCES_MAX}]", f"must be at least {source}, which is {least}, got {most}")
    elif count != least:
        message = f"contradicts the count {count} of instance_group: leave that out, or set both to one number"
        yield Problem(f"parameters[{INSTANCES_MIN}]", f"{least} {message}")
    elif least < most and (reason := _obstacle(config)):
        yield Problem(f"parameters[{INSTANCES_MAX}]", f"the number of instances is fixed: {reason}")


def _obstacle(config: ModelConfig) -> str:
    """Return why the number of instances cannot change, "" where it can."""
    if config.sequence_batching is not None:
        return "a sequence is bound to its instance (sequence_batching)"
    if len(config.instance_group) > 1:
        return f"expected one instance_group, got {len(config.instance_group)}"
    group = config.instance_group[0]
    if group.kind is InstanceKind.KIND_GPU and len(group.gpus) > 1:
        return f"expected one GPU, got {len(group.gpus)}; gpus: [ {group.gpus[0]} ] chooses one"
    return record_of(config.backend).fixed_instances
