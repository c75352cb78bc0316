"""The `sklearn` backend. It refuses files that are not trusted before it imports scikit-learn, which takes a second."""

import asyncio
import shlex
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from charonia.config.complete import Signature, rows_batch_size
from charonia.config.model import ModelConfig
from charonia.config.parameters import TRY_EXAMPLE
from charonia.server.backends.api import BackendSettings, LoadedModel, ModelFiles
from charonia.server.backends.array_backend import ArrayBackend
from charonia.server.backends.sklearn.options import PARAMETERS, TRUSTED, TRUSTED_TYPES, EstimatorPlan, read_plan
from charonia.server.backends.sklearn.trust import Trust, check_trust


class SklearnBackend(ArrayBackend[EstimatorPlan, LoadedModel]):
    """The `sklearn` backend.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """

    name = "sklearn"
    parameters = PARAMETERS
    read_plan = staticmethod(read_plan)

    def __init__(self) -> None:
        if find_spec("sklearn") is None:
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    def batch_size(self, settings: BackendSettings) -> int:
        return rows_batch_size(settings.default_max_batch_size)

    async def inspect(
        self, files: ModelFiles, config: ModelConfig, plan: EstimatorPlan
    ) -> tuple[Signature, Sequence[str]]:
        estimators, path, trust = await asyncio.to_thread(self._readable, files, config, plan)
        return await asyncio.to_thread(estimators.inspect_estimator, path, config, plan, trust)

    async def open(
        self, files: ModelFiles, config: ModelConfig, plan: EstimatorPlan, settings: BackendSettings
    ) -> LoadedModel:
        estimators, path, trust = await asyncio.to_thread(self._readable, files, config, plan)
        model: LoadedModel = await estimators.open_estimator(path, config, plan, trust)
        return model

    def _readable(self, files: ModelFiles, config: ModelConfig, plan: EstimatorPlan) -> tuple[Any, Path, Trust]:
        """Return the module of estimators for a file that may be read, the file, and what it may do."""
        path = self.path(files, config)
        trust = _trust(config, plan, path)
        check_trust(path, trust)
        return import_module("charonia.server.backends.sklearn.estimator"), path, trust


def _trust(config: ModelConfig, plan: EstimatorPlan, path: Path) -> Trust:
    """Return what a file may do, with hints that fit a repository, or a file that is served alone."""
    if TRY_EXAMPLE in config.parameters:
        pickles = types = f"charonia serve --trust {shlex.quote(str(path.resolve()))}"
    else:
        pickles = f'parameters {{ key: "{TRUSTED}" value {{ string_value: "true" }} }} in config.pbtxt'
        types = pickles.replace(TRUSTED, TRUSTED_TYPES).replace('"true"', '"{types}"')
    condition = "if you made the file or trust who did: "
    return Trust(plan.is_trusted, plan.types, condition + pickles, condition + types)
