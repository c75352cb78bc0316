"""A forest's file is read and tried in a process of its own, before the server reads it.

The libraries trust what they read. Where bytes of a file are damaged, they may read beyond their memory, abort, or
loop: then a process dies that has nothing to lose. It is forked from one that has imported the libraries, so that it
costs milliseconds.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import treelite

from charonia.core.errors import Code, ServingError, invalid
from charonia.server.backends.fil.forest import read_forest, reason_of
from charonia.server.backends.fil.options import TREELITE, ForestPlan
from charonia.server.backends.fil.predictors import LIBRARIES, Rows, TreelitePredictor, library_of
from charonia.server.backends.fil.trial import sample_rows
from charonia.server.backends.python.describe import ask_worker
from charonia.server.backends.python.environment import Environment
from charonia.server.backends.python.template import WorkerTemplate

NUMERICAL, CATEGORICAL = 1, 2
"""Types of nodes that test a value."""

OPERATORS = range(1, 6)
"""Comparisons of a node."""

_NODE_FIELDS = (
    *("category_list_begin", "category_list_end", "category_list_right_child", "cleft", "cmp", "cright"),
    *("default_left", "leaf_value", "leaf_vector_begin", "leaf_vector_end", "node_type", "split_index", "threshold"),
)


def structure_problem(model: treelite.Model) -> str:
    """Return the first thing that is wrong with a forest, "" for a sound one. treelite itself looks at none of it."""
    header: Any = model.get_header_accessor()
    targets = int(header.get_field("num_target")[0])
    classes, shape = header.get_field("num_class"), header.get_field("leaf_vector_shape")
    if model.num_feature < 1 or targets < 1 or len(classes) != targets or classes.min() < 1:
        return f"it has {model.num_feature} features, {targets} targets, and classes {classes[:8].tolist()}"
    widest = int(classes.max())
    if len(header.get_field("base_scores")) != targets * widest:
        return "its base scores are not one for each target and class"
    if len(shape) != 2 or shape[0] not in (1, targets) or shape[1] not in (1, widest):
        return f"its leaves have the shape {shape[:8].tolist()}"
    for name, count in (("target_id", targets), ("class_id", widest)):
        numbers = header.get_field(name)
        if len(numbers) != model.num_tree or ((numbers < -1) | (numbers >= count)).any():
            return f"its trees have a {name} that is missing or out of range"
    for number in range(model.num_tree):
        tree = model.get_tree_accessor(number)
        for problem in _tree_problems(tree, model.num_feature, int(shape[0]) * int(shape[1])):
            return f"tree {number}: {problem}"
    return ""


def _tree_problems(tree: Any, features: int, leaf_size: int) -> Iterator[str]:
    field = {name: tree.get_field(name) for name in _NODE_FIELDS}
    left, right, kind = field["cleft"], field["cright"], field["node_type"]
    nodes = len(left)
    if not nodes or any(len(values) != nodes for values in field.values()):
        yield "its fields do not have one value for each node"
        return
    inner = left != -1
    children = np.concatenate([left[inner], right[inner]])
    if ((children < 1) | (children >= nodes)).any():
        yield "a child is no node of the tree"
    elif np.bincount(children).max(initial=0) > 1:  # so there is no cycle: the root is nobody's child
        yield "a node has two parents"
    index = field["split_index"][inner]
    if ((index < 0) | (index >= features)).any():
        yield "a test is of a feature that a row does not have"
    tests = kind[inner]
    if not np.isin(tests, (NUMERICAL, CATEGORICAL)).all():
        yield "a node is of a type that does not exist"
    if not np.isin(field["cmp"][inner][tests == NUMERICAL], OPERATORS).all():
        yield "a comparison does not exist"
    for name, where in (("category_list", inner & (kind == CATEGORICAL)), ("leaf_vector", ~inner)):
        begin, end = field[f"{name}_begin"][where], field[f"{name}_end"][where]
        if ((begin > end) | (end > len(tree.get_field(name)))).any():
            yield f"a {name} is out of range"
        if name == "leaf_vector" and not np.isin(end - begin, (0, leaf_size)).all():
            yield "a leaf has another size than the others"


PROBE_S_MAX = 60.0
PROBE_S_PER_MIB = 1.0
"""Time limit of a probe, and what is added to it for the size of the file."""

PROBE_BYTES_MAX = 2 * 2**30
PROBE_BYTES_PER_BYTE = 32
"""Limit of the memory of a probe, and what is added to it for each byte of the file."""

PROBE_ROWS = 512
"""Made-up rows that are run, besides the extreme ones."""

NO_MEMORY = "bad_alloc"
"""In the errors of libraries that get no memory."""

DAMAGED = "the file is damaged: export it again"

_log = logging.getLogger(__name__)

_SCRIPT = Path(__file__).parent / "worker" / "model.py"


@dataclass(frozen=True, slots=True)
class Probe:
    """What is tried.

    Attributes:
        model: The model's name, for errors.
        path: The file.
        model_type: Its format.
        plan: How it is read.
        explains: Whether Shapley values are computed.
    """

    model: str
    path: Path
    model_type: str
    plan: ForestPlan
    explains: bool

    @property
    def library(self) -> str:
        """The library that reads the file besides treelite, "" for none."""
        library = LIBRARIES.get(self.model_type, "")
        is_wanted = library and (self.explains or self.plan.predictor != TREELITE)
        return library if is_wanted and find_spec(library) is not None else ""

    def run(self) -> None:
        """Do what a load does with the file.

        Raises:
            ServingError: The file cannot be served.
            MemoryError: There is not enough memory for it.
        """
        try:
            forest = read_forest(self.path, self.model_type, self.plan, self.model)
            if problem := structure_problem(forest.model):
                raise invalid(f"{self.unreadable}: {problem}", hint=DAMAGED)
            rows = _rows(forest.features)
            TreelitePredictor(forest).scores(rows)
        except (ServingError, MemoryError):
            raise
        except Exception as error:  # what is damaged decides what fails
            raise invalid(f"{self.unreadable}: {reason_of(error)}", hint=DAMAGED) from error
        if not self.library:
            return
        try:
            library = library_of(self.path, self.model_type, forest)
            library.scores(rows)
            if self.explains:
                library.contributions(rows[:1])
        except MemoryError:
            raise
        except Exception as error:  # the load decides whether it can do without the library
            if NO_MEMORY in str(error):
                raise MemoryError from error

    @property
    def unreadable(self) -> str:
        return f"model '{self.model}': '{self.path.name}' cannot be read as {self.model_type}"


class Prober:
    """Tries files. Use it on the event loop's thread."""

    def __init__(self) -> None:
        self._templates: dict[str, WorkerTemplate | None] = {}
        self._passed: dict[Path, tuple[object, ...]] = {}

    async def check(self, probe: Probe, *, keeps: bool) -> None:
        """Return when a file has passed.

        Args:
            probe: What to try.
            keeps: Whether the next call, which is the load of the same file, takes the result of this one.

        Raises:
            ServingError: It cannot be read, or the process that tried it died, or took too long or too much memory.
        """
        status = await asyncio.to_thread(probe.path.stat)
        key = (probe, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if self._passed.pop(probe.path, None) != key:
            refused = await self._ask(probe, status.st_size)
            if refused:
                raise ServingError(Code(refused["code"]), refused["message"], hint=refused["hint"])
        if keeps:
            self._passed[probe.path] = key

    async def aclose(self) -> None:
        for template in self._templates.values():
            if template is not None:
                await template.aclose()

    async def _ask(self, probe: Probe, size: int) -> Mapping[str, str]:
        """Return the error of a file, empty for none."""
        question = {
            **asdict(probe),
            "path": str(probe.path),
            "memory_bytes": PROBE_BYTES_MAX + PROBE_BYTES_PER_BYTE * size,
        }
        template = await self._acquire(probe.library)
        try:
            answer = await ask_worker(
                f"{probe.model} (probe)",
                Environment(template=template),
                ("complete", str(_SCRIPT), "", "", orjson.dumps(question).decode()),
                failed=probe.unreadable,
                lost=f"{probe.unreadable}: what reads it crashes",
                late=f"{probe.unreadable}: it was not read",
                limit_s=ceil(PROBE_S_MAX + PROBE_S_PER_MIB * size / 2**20),
            )
        except ServingError as error:
            raise ServingError(error.code, error.message, hint=DAMAGED) from None
        finally:
            if template is not None:
                template.release()
        refused: Mapping[str, str] = orjson.loads(answer)
        return refused

    async def _acquire(self, library: str) -> WorkerTemplate | None:
        """Return what has imported treelite and a library, None where a process imports them itself."""
        template = self._template(library)
        if template is None:
            return None
        try:
            await template.acquire()
        except ServingError as error:  # such as a library that starts threads when it is imported
            _log.warning("forests take longer to load: %s", error)
            self._templates[library] = None
            await template.aclose()
            return None
        return template

    def _template(self, library: str) -> WorkerTemplate | None:
        if library not in self._templates:
            name = f"treelite and {library}" if library else "treelite"
            modules = [__name__, *([library] if library else [])]
            self._templates[library] = WorkerTemplate(name, modules, {}) if WorkerTemplate.is_possible() else None
        return self._templates[library]


def _rows(features: int) -> Rows:
    """Return rows that reach much of any tree: those of the trial, and extreme values in all features."""
    extreme = np.array([np.nan, 0, -1, np.inf, -np.inf, np.finfo(np.float32).max, -(2**33), 2**33], np.float32)
    return np.concatenate([sample_rows(features)[:PROBE_ROWS], np.repeat(extreme[:, None], features, axis=1)])
