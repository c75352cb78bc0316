"""Completes the configurations of forests, and loads them."""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from charonia.config.complete import Signature, SignatureTensor, check_signature, rows_batch_size
from charonia.config.model import ModelConfig
from charonia.config.parameters import JSON_SCHEMA
from charonia.config.problems import Problem, raise_problems
from charonia.core.dtypes import DataType
from charonia.core.errors import unsupported
from charonia.core.statistics import MemoryUsage
from charonia.install_hint import extra_hint
from charonia.server.backends.api import BackendSettings, ModelFiles, Placement
from charonia.server.backends.array_backend import ArrayBackend
from charonia.server.backends.boosters import lightgbm_columns, xgboost_columns
from charonia.server.backends.fil.forest import Forest, forest_file, read_forest, reason_of
from charonia.server.backends.fil.instance import CONTRIBUTIONS, INPUT, SCORES, FilInstance, OpenForest
from charonia.server.backends.fil.options import LIBRARY, PARAMETERS, TREELITE, ForestPlan, read_plan, remarks
from charonia.server.backends.fil.predictors import LIBRARIES, Library, Predictor, Rows, TreelitePredictor, library_of
from charonia.server.backends.fil.probe import Probe, Prober
from charonia.server.backends.fil.trial import choose, difference, sample_rows
from charonia.server.machine.memory import release_freed_memory

_log = logging.getLogger(__name__)


class FilModel:
    """A loaded version. Its instances share the forest, which the first one opens.

    Args:
        path: The forest's file.
        model_type: Its format.
        config: The complete configuration.
        plan: What its parameters say.
    """

    def __init__(self, path: Path, model_type: str, config: ModelConfig, plan: ForestPlan) -> None:
        self._path = path
        self._type = model_type
        self._config = config
        self._plan = plan
        self._opening: asyncio.Task[OpenForest] | None = None
        self._memory: list[MemoryUsage] = []

    async def create_instance(self, placement: Placement) -> FilInstance:
        """Make one more instance.

        Raises:
            ServingError: The forest cannot be loaded, or contradicts the configuration.
        """
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self._open))
        forest = await asyncio.shield(self._opening)
        threads = self._plan.threads or placement.threads
        return FilInstance(forest, self._config, self._plan, threads, placement.cores)

    def memory(self) -> list[MemoryUsage]:
        """Return the size of the file, once it has been read."""
        return list(self._memory)

    async def aclose(self) -> None:
        """Release the forest, and return its memory to the system."""
        self._opening = None
        await asyncio.to_thread(release_freed_memory)

    def _open(self) -> OpenForest:
        config, plan = self._config, self._plan
        forest = read_forest(self._path, self._type, plan, config.name)
        problems = [*_class_problems(forest, plan), *check_signature(config, _signature(forest, config, plan))]
        if problems:
            raise_problems(config.name, problems)
        explains = _explains(config)
        rows = sample_rows(forest.features)
        library = self._library(forest, rows[:1], must=explains or plan.predictor == LIBRARY)
        choice = choose(self._candidates(forest, library, rows[:64]), rows, config.max_batch_size)
        _log.info("model '%s': %s", config.name, choice)
        if explains and library is not None:
            library.contributions(rows[:1])
        release_freed_memory()
        self._memory = [MemoryUsage("CPU", 0, self._path.stat().st_size)]
        return OpenForest(choice, library if explains else None)

    def _library(self, forest: Forest, rows: Rows, *, must: bool) -> Library | None:
        """Load the library's own model, where there is one, and run rows; with `must`, its lack is an error."""
        name = self._config.name
        if not must and self._plan.predictor == TREELITE:
            return None
        if self._type not in LIBRARIES:
            if must:
                raise unsupported(
                    f"model '{name}': only treelite can run a forest of model_type {self._type}, and it computes no "
                    "Shapley values",
                    hint=f"serve the file of XGBoost or LightGBM itself, or leave out {CONTRIBUTIONS} and predictor",
                )
            return None
        try:
            library = library_of(self._path, self._type, forest)
            library.scores(rows)
        except Exception as error:  # the libraries' errors have no common base class
            is_missing = isinstance(error, ModuleNotFoundError)
            if must:
                message = f"model '{name}': {LIBRARIES[self._type]} cannot run '{self._path.name}': {reason_of(error)}"
                raise unsupported(message, hint=extra_hint("fil") if is_missing else "") from error
            _log.warning(
                "model '%s': treelite alone, as %s cannot run it: %s", name, LIBRARIES[self._type], reason_of(error)
            )
            return None
        return library

    def _candidates(self, forest: Forest, library: Library | None, rows: Rows) -> list[Predictor]:
        """Return the predictors that may run the model; where they disagree, only the library is right."""
        treelite = TreelitePredictor(forest)
        if library is None or self._plan.predictor == TREELITE:
            return [treelite]
        if self._plan.predictor == LIBRARY:
            return [library]
        apart = difference(treelite, library, rows)
        if apart > 1:
            sentence = "model '%s': %s alone, as treelite's scores differ by %.3g times the tolerance"
            _log.warning(sentence, self._config.name, library.name, apart)
            return [library]
        return [treelite, library]


class FilBackend(ArrayBackend[ForestPlan, FilModel]):
    """The `fil` backend. A file is tried in another process before this one reads it."""

    name = "fil"
    parameters = PARAMETERS
    read_plan = staticmethod(read_plan)
    gpu_hint = "use KIND_CPU, or KIND_AUTO, which is the CPU for this backend"

    def __init__(self) -> None:
        self._prober = Prober()

    def batch_size(self, settings: BackendSettings) -> int:
        return rows_batch_size(settings.default_max_batch_size)

    def remarks(self, config: ModelConfig, plan: ForestPlan) -> Iterator[str]:
        return remarks(config)

    async def inspect(
        self, files: ModelFiles, config: ModelConfig, plan: ForestPlan
    ) -> tuple[Signature, Sequence[str]]:
        """Return the input and the scores of the forest."""
        path, model_type = forest_file(files, config, plan)
        await self._prober.check(Probe(config.name, path, model_type, plan, _explains(config)), keeps=True)
        forest = await asyncio.to_thread(read_forest, path, model_type, plan, config.name)
        signature = _signature(forest, config, plan)
        schemas = await asyncio.to_thread(_schemas, path, model_type, forest.features)
        parameters = {JSON_SCHEMA: json.dumps({"inputs": schemas, "outputs": {}})} if schemas else {}
        return replace(signature, outputs=signature.outputs[:1], parameters=parameters), ()

    async def open(self, files: ModelFiles, config: ModelConfig, plan: ForestPlan) -> FilModel:
        """Load a version; its first instance opens the forest."""
        path, model_type = forest_file(files, config, plan)
        await self._prober.check(Probe(config.name, path, model_type, plan, _explains(config)), keeps=False)
        return FilModel(path, model_type, config, plan)

    async def aclose(self) -> None:
        await self._prober.aclose()


def _explains(config: ModelConfig) -> bool:
    return any(tensor.name == CONTRIBUTIONS for tensor in config.output)


def _schemas(path: Path, model_type: str, count: int) -> dict[str, object]:
    """Return the JSON schema of the input, by its name, if the file has names of columns."""
    if model_type == "lightgbm":
        columns = lightgbm_columns(path.read_bytes())
    elif model_type in ("xgboost_json", "xgboost_ubj"):
        columns = xgboost_columns(path.read_bytes())
    else:
        return {}
    if len(columns.names) != count:
        return {}
    items = []
    for index, name in enumerate(columns.names):
        categories = columns.categories.get(index)
        item: dict[str, object] = {"title": name, "type": ["number", "boolean", "null"]}
        if categories:
            kind = "string" if isinstance(categories[0], str) else "number"
            item |= {"type": [kind, "null"], "enum": [*categories, None]}
        items.append(item)
    return {INPUT: {"type": "array", "prefixItems": items}}


def _class_problems(forest: Forest, plan: ForestPlan) -> Iterator[Problem]:
    if plan.is_classifier and forest.targets > 1:
        message = f"the forest has {forest.targets} targets, of which no class is made; leave it out for their scores"
        yield Problem("parameters['is_classifier']", message)


def _signature(forest: Forest, config: ModelConfig, plan: ForestPlan) -> Signature:
    """Return the forest's tensors; where dims can be written in several ways, those of the configuration."""
    given = {o.name: o.reshape.shape if o.reshape else o.dims for o in config.output}
    lead = 0 if config.max_batch_size > 0 else 1

    def output(name: str, *ways: tuple[int, ...]) -> SignatureTensor:
        dims = given.get(name, ())[lead:]
        return SignatureTensor(name, DataType.FP32, (-1, *(dims if dims in ways else ways[0])))

    scores, values = forest.scores, forest.features + 1
    binary = ((2,),) if scores == 1 and plan.is_classifier and plan.has_probabilities else ()
    width = scores if plan.has_probabilities or not plan.is_classifier else 1
    parts = ((values,), (1, values)) if scores == 1 else ((scores, values), (scores * values,))
    return Signature(
        (SignatureTensor(INPUT, DataType.FP32, (-1, forest.features)),),
        (output(SCORES, (width,), *binary), output(CONTRIBUTIONS, *parts)),
    )
