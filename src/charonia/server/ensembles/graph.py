"""The graph of an ensemble, and the part of it that runs for a request. Pure.

`EnsembleGraph` is made once for an ensemble, and a `Plan` once for each combination of given inputs and requested
outputs. `ensembles.flow` executes a plan.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from charonia.core.errors import ServingError, invalid

Origin = tuple[int, ...]
"""The decoupled steps on which a tensor depends, outermost first."""

SINK = -1
"""Number of the response among the steps."""


@dataclass(frozen=True, slots=True)
class FlowStep:
    """A step of the graph.

    Attributes:
        needs: Tensors that it requires.
        takes: Tensors that it reads if they are there (optional inputs).
        gives: Tensors that it writes.
        is_decoupled: Whether its model is decoupled.
    """

    needs: tuple[str, ...]
    gives: tuple[str, ...]
    takes: tuple[str, ...] = ()
    is_decoupled: bool = False


class Level:
    """The part of a plan that runs in each branch of one decoupled step, or in the request itself.

    Attributes:
        waits: Number of tensors that each step waits for.
        readers: Steps by tensor, for tensors that are written in this level.
        outer: Tensors of enclosing branches: (depth of their level, tensor, step that reads it).
        ready: Steps that wait for no tensor.
        open: Number of steps, including the response.
    """

    __slots__ = ("open", "outer", "readers", "ready", "waits")

    def __init__(self) -> None:
        self.waits: dict[int, int] = {}
        self.readers: dict[str, list[int]] = {}
        self.outer: list[tuple[int, str, int]] = []
        self.ready: list[int] = []
        self.open = 0

    def add(self, step: int, tensors: Iterable[str], depth: int, depth_of: Mapping[str, int]) -> None:
        """Add a step that reads these tensors."""
        self.open += 1
        count = 0
        for tensor in set(tensors):
            count += 1
            if depth_of[tensor] == depth:
                self.readers.setdefault(tensor, []).append(step)
            else:
                self.outer.append((depth_of[tensor], tensor, step))
        self.waits[step] = count
        if not count:
            self.ready.append(step)


class Origins:
    """The decoupled steps on which steps and tensors depend.

    Attributes:
        of_step: Decoupled steps by step.
        of_tensor: Decoupled steps by tensor.
        conflicts: Steps that read tensors of unrelated decoupled steps.
    """

    def __init__(self, inputs: Iterable[str]) -> None:
        self.of_step: dict[int, Origin] = {}
        self.of_tensor: dict[str, Origin] = dict.fromkeys(inputs, ())
        self.conflicts: list[int] = []

    def add(self, index: int, step: FlowStep, reads: Iterable[str]) -> None:
        """Add a step after all steps from which it reads."""
        origin = _deepest([self.of_tensor[tensor] for tensor in reads])
        if origin is None:
            self.conflicts.append(index)
            origin = ()
        self.of_step[index] = origin
        self.of_tensor |= dict.fromkeys(step.gives, (*origin, index) if step.is_decoupled else origin)


class Plan:
    """The part of a graph that runs for requests with the same inputs and requested outputs.

    Attributes:
        steps: Steps that run, ascending.
        wanted: The requested outputs.
        inputs: Inputs of the ensemble that are read.
        reads: Tensors that each of the steps reads, except tensors that are absent from the start.
        gives: Tensors that each of the steps writes and that are read.
        depth_of: On how many decoupled steps each tensor depends.
        is_decoupled: Whether there may be any number of responses.
    """

    __slots__ = (
        "depth_of", "gives", "graph", "inputs", "is_decoupled", "levels",
        "reads", "sink", "steps", "wanted",
    )  # fmt: skip

    def __init__(self, graph: "EnsembleGraph", wanted: tuple[str, ...], reads: dict[int, tuple[str, ...]]) -> None:
        self.graph = graph
        self.wanted = wanted
        self.reads = reads
        self.steps = tuple(sorted(reads))
        read = {tensor for tensors in reads.values() for tensor in tensors} | set(wanted)
        self.inputs = tuple(name for name in graph.inputs if name in read)
        origins = Origins(self.inputs)
        for step in graph.order:
            if step in reads:
                origins.add(step, graph.steps[step], reads[step])
        self.gives = {step: tuple(t for t in graph.steps[step].gives if t in read) for step in self.steps}
        self.depth_of = {tensor: len(origins.of_tensor[tensor]) for tensor in read}
        origin = _deepest([origins.of_tensor[tensor] for tensor in wanted])
        if origin is None:
            raise invalid(
                f"outputs {_quoted(wanted)} cannot be in one response: they come from different decoupled models",
                hint="request one of them at a time",
            )
        self.sink = origin[-1] if origin else None
        self.is_decoupled = origin != ()
        self.levels: dict[int | None, Level] = {None: Level()}
        for step in self.steps:
            if graph.steps[step].is_decoupled:
                self.levels[step] = Level()
        for step in self.steps:
            inside = origins.of_step[step]
            self._level(inside).add(step, reads[step], len(inside), self.depth_of)
        self._level(origin).add(SINK, wanted, len(origin), self.depth_of)

    def _level(self, origin: Origin) -> Level:
        return self.levels[origin[-1] if origin else None]


class EnsembleGraph:
    """The steps of an ensemble and the tensors between them.

    Args:
        inputs: Inputs of the ensemble, in order.
        steps: Its steps. Every tensor is written once, inputs included.

    Attributes:
        order: The steps that can run, in topological order.
        origins: The decoupled steps on which they depend.
        cyclic: Steps that can never run: they are part of or depend on a cycle, or on a tensor that no step writes.
    """

    def __init__(self, inputs: Sequence[str], steps: Sequence[FlowStep]) -> None:
        self.inputs = tuple(inputs)
        self.steps = tuple(steps)
        self._writer = {tensor: index for index, step in enumerate(steps) for tensor in step.gives}
        self.order = self._ordered()
        self.origins = Origins(self.inputs)
        for index in self.order:
            self.origins.add(index, self.steps[index], (*self.steps[index].needs, *self.steps[index].takes))
        self.cyclic = tuple(sorted(set(range(len(steps))) - set(self.order)))

    def unrelated(self, outputs: Iterable[str]) -> bool:
        """Whether no response could have all of these outputs: they come from unrelated decoupled steps."""
        known = [self.origins.of_tensor[tensor] for tensor in outputs if tensor in self.origins.of_tensor]
        return _deepest(known) is None

    def plan(self, given: Collection[str], wanted: Sequence[str]) -> Plan:
        """Return the plan for a request.

        Args:
            given: Inputs of the request.
            wanted: Requested outputs.

        Raises:
            ServingError: INVALID_ARG: an output cannot be computed from these inputs, or not together with the others.
        """
        absent = set(self.inputs) - set(given)
        reads: dict[int, tuple[str, ...]] = {}
        for index in self.order:
            step = self.steps[index]
            if absent and not absent.isdisjoint(step.needs):
                absent.update(step.gives)
            else:
                reads[index] = tuple(t for t in dict.fromkeys((*step.needs, *step.takes)) if t not in absent)
        needed: dict[int, tuple[str, ...]] = {}
        todo = list(dict.fromkeys(wanted))
        seen = set(todo)
        while todo:
            tensor = todo.pop()
            if tensor in absent or tensor not in self.origins.of_tensor:
                raise self._unreachable(tensor, absent)
            writer = self._writer.get(tensor)
            if writer is None or writer in needed:
                continue
            needed[writer] = reads[writer]
            todo.extend(t for t in reads[writer] if t not in seen)
            seen.update(reads[writer])
        return Plan(self, tuple(dict.fromkeys(wanted)), needed)

    def _unreachable(self, tensor: str, absent: set[str]) -> ServingError:
        missing = [name for name in self.inputs if name in absent]
        if not missing:
            return invalid(f"output '{tensor}' is not written by any step")
        return invalid(
            f"output '{tensor}' cannot be computed without the input(s) {_quoted(missing)}",
            hint="give the optional inputs that it needs, or request other outputs",
        )

    def _ordered(self) -> list[int]:
        missing = [{*step.needs, *step.takes} for step in self.steps]
        readers: dict[str, list[int]] = {}
        for index, tensors in enumerate(missing):
            for tensor in tensors:
                readers.setdefault(tensor, []).append(index)
        order = [index for index, tensors in enumerate(missing) if not tensors]
        arriving = deque([*self.inputs, *(t for index in order for t in self.steps[index].gives)])
        while arriving:
            tensor = arriving.popleft()
            for index in readers.pop(tensor, ()):
                missing[index].discard(tensor)
                if not missing[index]:
                    order.append(index)
                    arriving.extend(self.steps[index].gives)
        return order


def _deepest(origins: Sequence[Origin]) -> Origin | None:
    """Return the longest of the origins, None unless all others are prefixes of it."""
    deepest = max(origins, key=len, default=())
    return deepest if all(deepest[: len(origin)] == origin for origin in origins) else None


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
