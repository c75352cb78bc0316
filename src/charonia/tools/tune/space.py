"""The search space: the dimensions of a variant, the values each can take, and combinations that cannot work. Pure.

The limits that a user sets are limits of the dimensions, not clipped afterwards, so no two points of the space are the
same configuration.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from charonia.core.errors import invalid
from charonia.tools.tune.api import (
    Dimension,
    LoadSpace,
    ModelChange,
    ModelFacts,
    SearchSpace,
    Setting,
    Variant,
)

Coordinate = tuple[int, ...]
"""One index into the values of each dimension."""

VARIANTS_MAX = 100_000
"""Most variants that a space may have: a larger product is a mistake in the ranges."""

SMALL_SPACE = 8
"""In spaces up to this size, each variant is first measured thoroughly, and the best are repeated less often."""


def doubling(minimum: float, maximum: float) -> tuple[float, ...]:
    """Return the minimum, which is above 0, the powers of two above it, and the maximum."""
    first, last = math.floor(math.log2(minimum)) + 1, math.ceil(math.log2(maximum)) - 1
    values = [minimum, *(2.0**exponent for exponent in range(first, last + 1))]
    return (*values, maximum) if maximum > minimum else (minimum,)


def powers_of_two(minimum: int, maximum: int) -> tuple[int, ...]:
    """Return `doubling` of whole numbers."""
    return tuple(int(value) for value in doubling(minimum, maximum))


def automatic_dimensions(
    facts: ModelFacts,
    *,
    instance_counts: Sequence[int] = (1, 2, 3, 4, 5),
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    core_count: int = 1,
) -> tuple[Dimension, ...]:
    """Return the dimensions to try of a model without values from the user.

    Args:
        instance_counts: Counts to try, in order.
        batch_sizes: Largest batches to try, in order.
        core_count: Cores of the server: threads of an instance are powers of two up to it.
    """
    dimensions = []
    if facts.instances_tunable:
        dimensions.append(Dimension(facts.name, Setting.INSTANCE_COUNT, tuple(instance_counts)))
    if facts.threads_tunable and core_count > 1:
        dimensions.append(Dimension(facts.name, Setting.THREAD_COUNT, powers_of_two(1, core_count)))
    if facts.batching_tunable and facts.max_batch_size > 0:
        dimensions.append(Dimension(facts.name, Setting.MAX_BATCH_SIZE, tuple(batch_sizes)))
    return tuple(dimensions)


def manual_dimensions(model: str, parameters: Mapping[str, Any]) -> tuple[Dimension, ...]:
    """Return the dimensions of `model_config_parameters`: their cartesian product is tried.

    A list sweeps a field, anything else sets it. A field that is a list itself needs one more level to be swept:
    `instance_group: [[{...}], [{...}]]`, while `instance_group: [{...}]` sets it. A field of parts (dynamic_batching)
    may sweep parts: `dynamic_batching: {max_queue_delay_microseconds: [100, 200]}` stands for two values.

    Args:
        parameters: Fields of config.pbtxt and their values, as YAML has them.

    Raises:
        ServingError: INVALID_ARGUMENT for an empty list and for a batch size that is not a whole number.
    """
    dimensions = []
    for name, given in parameters.items():
        values = _alternatives(name, given, name in _LIST_FIELDS)
        if not values:
            raise invalid(f"model '{model}': model_config_parameters.{name}: expected at least one value, got none")
        if name == Setting.MAX_BATCH_SIZE:
            if not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values):
                raise invalid(f"model '{model}': {name}: expected whole numbers, got {values}")
            dimensions.append(Dimension(model, name, tuple(dict.fromkeys(values))))
        else:
            texts = (json.dumps(value, sort_keys=True) for value in values)
            dimensions.append(Dimension(model, name, tuple(dict.fromkeys(texts))))
    # The batch size is the innermost loop, because it ends early.
    return tuple(sorted(dimensions, key=lambda dimension: dimension.setting == Setting.MAX_BATCH_SIZE))


_LIST_FIELDS = {
    "input",
    "output",
    "batch_input",
    "batch_output",
    "instance_group",
    "model_warmup",
    "preferred_batch_size",
    "gpus",
    "secondary_devices",
    "profile",
}


def _alternatives(name: str, given: Any, is_list: bool) -> list[Any]:
    """Return the values that a field takes in turn."""
    if isinstance(given, Mapping):
        parts = {key: _alternatives(key, value, key in _LIST_FIELDS) for key, value in given.items()}
        return [dict(zip(parts, chosen, strict=True)) for chosen in itertools.product(*parts.values())]
    if not isinstance(given, list | tuple):
        return [given]
    if not is_list:
        return [each for value in given for each in _alternatives(name, value, False)]
    if given and all(isinstance(value, list | tuple) for value in given):
        return [each for value in given for each in _elements(name, value)]
    return _elements(name, given)


def _elements(name: str, given: Sequence[Any]) -> list[Any]:
    """Return the values of a list field: every combination of what its elements take in turn."""
    return [list(chosen) for chosen in itertools.product(*(_alternatives(name, value, False) for value in given))]


class Grid:
    """The variants of a space by coordinate."""

    def __init__(self, space: SearchSpace) -> None:
        """Check the space.

        Raises:
            ServingError: INVALID_ARGUMENT for too many variants.
        """
        self.space = space
        self.shape = tuple(len(dimension.values) for dimension in space.dimensions)
        if math.prod(self.shape) > VARIANTS_MAX:
            raise invalid(
                f"expected at most {VARIANTS_MAX} variants, got {math.prod(self.shape)}", hint="narrow the ranges"
            )

    @property
    def is_small(self) -> bool:
        return math.prod(self.shape) <= SMALL_SPACE

    def coordinates(self) -> Iterator[Coordinate]:
        """Yield all coordinates, the last dimension changing fastest. Without any dimension there is none."""
        if self.shape:
            yield from itertools.product(*(range(size) for size in self.shape))

    def variant(self, coordinate: Coordinate) -> Variant:
        """Return the variant at a coordinate."""
        changes = {model.name: ModelChange(model.name) for model in self.space.models}
        chosen: dict[str, dict[str, Any]] = {name: {} for name in changes}
        fields: dict[str, list[tuple[str, str]]] = {name: [] for name in changes}
        for dimension, index in zip(self.space.dimensions, coordinate, strict=True):
            value = dimension.values[index]
            if dimension.setting in _SETTINGS:
                chosen[dimension.model][dimension.setting] = value
            else:
                fields[dimension.model].append((dimension.setting, str(value)))
        return Variant(
            tuple(ModelChange(name, **chosen[name], fields=tuple(fields[name])) for name in changes),
        )

    def neighbours(self, coordinate: Coordinate) -> list[Coordinate]:
        """Return the coordinates that differ from one by the next value of one dimension."""
        return sorted(
            (*coordinate[:axis], other, *coordinate[axis + 1 :])
            for axis, index in enumerate(coordinate)
            for other in (index - 1, index + 1)
            if 0 <= other < self.shape[axis]
        )

    def misfit(self, variant: Variant) -> str:
        """Return why a variant is not worth trying (more threads than cores), "" if it is."""
        cores = self.space.core_count
        for change in variant.changes:
            threads, count = change.thread_count or 1, instance_count(self._facts(change.model), change)
            if cores and threads > 1 and threads * count > cores:
                return f"{change.model}: {count} instances x {threads} threads are more than {cores} cores"
        return ""

    def _facts(self, model: str) -> ModelFacts:
        return next(facts for facts in self.space.models if facts.name == model)


_SETTINGS = frozenset(setting.value for setting in Setting)


def instance_count(facts: ModelFacts, change: ModelChange) -> int:
    """Return how many instances a model has in a variant."""
    if change.instance_count is not None:
        return change.instance_count
    for name, text in change.fields:
        if name == "instance_group":
            groups = json.loads(text)
            return sum(int(group.get("count", 1)) for group in groups) or 1
    return facts.instance_count


def max_batch_size(facts: ModelFacts, change: ModelChange) -> int:
    """Return the largest batch of a model in a variant, 0 without batching."""
    return facts.max_batch_size if change.max_batch_size is None else change.max_batch_size


def batch_slots(space: SearchSpace, variant: Variant, model: str) -> int:
    """Return how many items fit into all instances together.

    Of a model made of others it is the largest number among them: that stage has to be kept busy.
    """
    facts = {each.name: each for each in space.models}
    composing = [name for name, each in facts.items() if not each.is_profiled]
    stages = [name for name in (model, *composing) if facts[name].instances_tunable] or [model]
    return max(
        max(1, max_batch_size(facts[name], variant.change(name))) * instance_count(facts[name], variant.change(name))
        for name in stages
    )


def load_values(load: LoadSpace) -> tuple[float, ...]:
    """Return the loads of a sweep: the user's values, or powers of two within the bounds."""
    return load.values or doubling(float(load.minimum), float(load.maximum))
