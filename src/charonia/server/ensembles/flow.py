"""The data flow of one ensemble request: which step runs when, and when there is a response. Pure.

Values are opaque, and the caller runs the steps. A `Plan` is shared by all requests with the same inputs and
requested outputs; a `DataFlow` is the state of one request. Rules:

1. A step runs when all tensors that it reads are there. Steps that no requested output needs never run.
2. A response of a decoupled step opens a *branch*: the steps that follow from that response. A step inside a branch
   also reads the tensors of the enclosing branches, up to the request itself.
3. A branch gives one response, when all requested outputs are there. Responses are sent in the order in which their
   branches were opened.
4. With a limit, at most that many branches of one step are open concurrently in one request. Later responses of the
   step are held back, in order, and open their branches as earlier ones close. A branch never depends on a later one,
   so this cannot deadlock.
5. A tensor may be absent: an optional input that was not given, or an output that a model left out. Its
   readers do without: a step runs with the present tensors, and its model refuses the request if it needs more; a
   response has the present outputs.

`EnsembleGraph` is made once for an ensemble, and a `Plan` once for each combination of given inputs and requested
outputs.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from charonia.core.errors import ServingError, invalid

Origin = tuple[int, ...]
"""The decoupled steps on which a tensor depends, outermost first."""

SINK: Final = -1
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

    def plan(self, inputs: Collection[str], wanted: Sequence[str]) -> Plan:
        """Return the plan for a request.

        Raises:
            ServingError: INVALID_ARG: an output cannot be computed from these inputs, or not together with the others.
        """
        absent = set(self.inputs) - set(inputs)
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


V = TypeVar("V")

HELD_RESPONSES_MAX = 16_384
"""Most responses of one decoupled step that are held back within one request."""


class StartStep(NamedTuple):
    """Run this step with the tensors of this branch."""

    step: int
    branch: "Branch[Any]"


class Respond(NamedTuple):
    """All requested outputs of this branch are there or absent."""

    branch: "Branch[Any]"


class Overflow(NamedTuple):
    """More than `HELD_RESPONSES_MAX` responses of `step` would be held back. The flow is over."""

    step: int


class Finish(NamedTuple):
    """Every step is done and every response is sent."""


Command = StartStep | Respond | Overflow | Finish


class _Absent:
    """The value of an absent tensor."""


_ABSENT: Final = _Absent()


class Branch(Generic[V]):
    """The tensors of a request, or of a branch of it.

    A branch refers to the enclosing ones but not the reverse, so it is freed without the garbage collector.
    """

    __slots__ = ("answered", "around", "awaited", "level", "open", "step", "values", "waits")

    def __init__(self, level: Level, step: int | None, around: "tuple[Branch[V], ...]") -> None:
        self.level = level
        self.step = step
        self.around = around  # outermost first
        self.values: dict[str, V | _Absent] = {}
        self.waits = dict(level.waits)
        self.open = level.open
        self.awaited: dict[str, list[tuple[Branch[V], int]]] | None = None  # waiting steps in inner branches, by tensor
        self.answered = False


class DataFlow(Generic[V]):
    """The state of one request. Every method returns the next commands, in order.

    Args:
        branches_max: Most concurrently open branches of one step, 0 for no limit.
    """

    __slots__ = (
        "_branches_max", "_commands", "_due", "_held",
        "_is_over", "_line", "_plan", "_root",
    )  # fmt: skip

    def __init__(self, plan: Plan, branches_max: int = 0) -> None:
        self._plan = plan
        self._branches_max = branches_max
        self._root: Branch[V] = Branch(plan.levels[None], None, ())
        self._commands: list[Command] = []
        self._line: deque[Branch[V]] = deque()  # open branches that will respond, in order
        self._held: dict[int, _PendingBranches[V]] = {}
        self._due: deque[tuple[Branch[V], int, Mapping[str, V]]] = deque()  # held responses whose turn has come
        self._is_over = False

    def start(self, values: Mapping[str, V]) -> list[Command]:
        """Start with the inputs of the request."""
        root = self._root
        root.open += 1  # it must not close before everything has started
        for step in root.level.ready:
            self._ready(root, step)
        for tensor in self._plan.inputs:
            self._settle(root, tensor, values[tensor])
        self._closed_one(root)
        return self._taken()

    def respond(self, branch: Branch[V], step: int, values: Mapping[str, V] | None, final: bool) -> list[Command]:
        """Take in a response to a step that was to be run.

        Args:
            branch: The branch in which it ran.
            values: Written tensors by name; None if the step ends without another response.
            final: Whether no more responses follow. A step that is not decoupled has one response, which is final.
        """
        if self._is_over:
            return []
        if not self._plan.graph.steps[step].is_decoupled:
            self._write(branch, step, values or {})
            self._closed_one(branch)
        else:
            if values is not None:
                self._arrived(branch, step, values)
            if final:
                self._closed_one(branch)
        return self._taken()

    def read(self, branch: Branch[V], tensor: str) -> V | None:
        """Return a tensor as a branch sees it, None where it is absent."""
        depth = self._plan.depth_of[tensor]
        around = branch.around
        value = (around[depth] if depth < len(around) else branch).values[tensor]
        return None if isinstance(value, _Absent) else value

    def _taken(self) -> list[Command]:
        while self._due and not self._is_over:
            self._open(*self._due.popleft())
        commands = self._commands
        self._commands = []
        return commands

    def _write(self, branch: Branch[V], step: int, values: Mapping[str, V]) -> None:
        for tensor in self._plan.gives[step]:
            self._settle(branch, tensor, values.get(tensor, _ABSENT))

    def _arrived(self, around: Branch[V], step: int, values: Mapping[str, V]) -> None:
        """A decoupled step has responded."""
        around.open += 1
        if self._branches_max:
            held = self._held.setdefault(step, _PendingBranches())
            if held.open >= self._branches_max:
                if len(held.waiting) >= HELD_RESPONSES_MAX:
                    self._end(Overflow(step))
                else:
                    held.waiting.append((around, values))
                return
            held.open += 1
        self._open(around, step, values)

    def _open(self, around: Branch[V], step: int, values: Mapping[str, V]) -> None:
        level = self._plan.levels[step]
        branch: Branch[V] = Branch(level, step, (*around.around, around))
        branch.open += 1  # it must not close before everything has started
        if self._plan.sink == step:
            self._line.append(branch)
        for depth, tensor, reader in level.outer:
            outer = branch.around[depth]
            if tensor in outer.values:
                self._count(branch, reader)  # never the last tensor that it waits for: one is of this branch
            else:
                if outer.awaited is None:
                    outer.awaited = {}
                outer.awaited.setdefault(tensor, []).append((branch, reader))
        self._write(branch, step, values)
        self._closed_one(branch)

    def _settle(self, branch: Branch[V], tensor: str, value: V | _Absent) -> None:
        branch.values[tensor] = value
        for step in branch.level.readers.get(tensor, ()):
            self._count(branch, step)
        if branch.awaited:
            for inner, step in branch.awaited.pop(tensor, ()):
                self._count(inner, step)

    def _count(self, branch: Branch[V], step: int) -> None:
        """A step waits for one tensor fewer."""
        left = branch.waits[step] = branch.waits[step] - 1
        if not left:
            self._ready(branch, step)

    def _ready(self, branch: Branch[V], step: int) -> None:
        """Every tensor that a step reads is settled."""
        if self._is_over:
            return
        if step != SINK:
            self._commands.append(StartStep(step, branch))
        elif branch.step is None:
            self._commands.append(Respond(branch))
            self._closed_one(branch)
        else:
            branch.answered = True
            self._release()

    def _release(self) -> None:
        while self._line and self._line[0].answered:
            branch = self._line.popleft()
            self._commands.append(Respond(branch))
            self._closed_one(branch)

    def _closed_one(self, branch: Branch[V]) -> None:
        """A step of a branch, its response or an inner branch is done."""
        branch.open -= 1
        while not branch.open and not self._is_over:
            step = branch.step
            if step is None:
                self._end(Finish())
                return
            branch = branch.around[-1]
            held = self._held.get(step)
            if held is not None:
                held.open -= 1
                if held.waiting:
                    held.open += 1
                    around, values = held.waiting.popleft()
                    self._due.append((around, step, values))
            branch.open -= 1

    def _end(self, command: Command) -> None:
        self._is_over = True
        self._commands.append(command)


class _PendingBranches(Generic[V]):
    """Branches of one decoupled step.

    Attributes:
        open: How many are open.
        waiting: Responses that are held back, each with the branch in which it came.
    """

    __slots__ = ("open", "waiting")

    def __init__(self) -> None:
        self.open = 0
        self.waiting: deque[tuple[Branch[V], Mapping[str, V]]] = deque()
