"""Completes configurations from SavedModels and Keras files, and loads them into workers."""

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import orjson

from charonia.config.complete import merge_signature
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.problems import raise_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.errors import invalid, unsupported
from charonia.core.request import CallFrame
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.python.backend import PythonModel
from charonia.server.backends.python.describe import ask_worker
from charonia.server.backends.python.environment import Environment
from charonia.server.backends.python.services import ServerServices
from charonia.server.backends.python.template import WorkerTemplate
from charonia.server.backends.tensorflow.options import INIT_OPS, TensorFlowPlan, graph_problem, read_plan, remarks
from charonia.server.backends.tensorflow.signature import SavedSignature, read_signature, signature_problems
from charonia.server.metrics.custom import CustomMetrics

DEFAULT_FOLDER = "model.savedmodel"
KERAS = ".keras"

_SCRIPT = Path(__file__).parent / "worker" / "model.py"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DescribedModel:
    """A model on the disk, as it is served.

    Attributes:
        signature: What it takes and gives.
        folder: The SavedModel that was made of a Keras file, None for one that was given.
    """

    signature: SavedSignature
    folder: tempfile.TemporaryDirectory[str] | None = None

    def close(self) -> None:
        if self.folder is not None:
            self.folder.cleanup()


class TensorFlowBackend:
    """The `tensorflow` backend."""

    name = "tensorflow"

    def __init__(self, template: WorkerTemplate | None = None) -> None:
        """Make the backend, without an import of TensorFlow.

        Args:
            template: What workers are forked from; None for one of its own, where the system has what it needs.

        Raises:
            ModuleNotFoundError: TensorFlow is not installed.
        """
        if find_spec("tensorflow") is None:
            raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
        if template is None and WorkerTemplate.is_possible():
            quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
            template = WorkerTemplate("TensorFlow", ["tensorflow"], quiet)
        self._template = template
        self._environment = Environment(template=template)
        self._described: dict[tuple[object, ...], DescribedModel] = {}

    def uses_gpus(self) -> bool:
        """Return False: models run on the CPU."""
        return False

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        """Fill in inputs, outputs and batching from the signature, unless inputs and outputs are given.

        Raises:
            ServingError: The model cannot be read, or contradicts the configuration.
        """
        path = _model_path(files, config)
        if config.input and config.output:
            return Completion(config)
        plan = _plan(config, settings)
        source = await self._describe(path, config, plan, keeps=True)
        saved = source.signature
        merged, notes = merge_signature(
            config,
            saved.for_config(config),
            default_max_batch_size=settings.default_max_batch_size,
            model_name=config.name,
        )
        return Completion(merged, (*notes, f"signature: '{saved.name}' of the graph with the tags {list(saved.tags)}"))

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> "TensorFlowModel":
        """Load a version; each of its instances opens a session in a worker.

        Raises:
            ServingError: A setting is wrong or not supported, or the model cannot be read, or contradicts the
                configuration.
        """
        path = _model_path(files, config)
        plan = _plan(config, settings)
        if any(group.kind is InstanceKind.KIND_GPU for group in config.instance_group):
            raise unsupported(
                f"model '{config.name}': instances of TensorFlow models run on the CPU, KIND_GPU is not available",
                hint=f"use KIND_CPU, or the ONNX model that `charonia convert {path.name}` makes",
            )
        init_ops = _init_ops(files, config, plan)
        for sentence in remarks(config, settings.values):
            _log.warning(sentence)
        source = await self._describe(path, config, plan, keeps=False)
        seen = seen_by_model(config)
        try:
            problems = list(signature_problems(seen, source.signature))
            if problems:
                raise_problems(config.name, problems)
            if self._template is not None:
                await self._template.acquire()
        except BaseException:
            source.close()
            raise
        metrics = settings.metrics if settings.metrics is not None else CustomMetrics()
        frame = CallFrame(config.name, str(files.version))
        return TensorFlowModel(
            files,
            seen,
            self._environment,
            ServerServices(frame, settings.models, metrics, settings.busy_poll),
            _session(seen, plan, source.signature, init_ops),
            source,
            self._template,
        )

    async def aclose(self) -> None:
        """End the process that has imported TensorFlow."""
        for source in self._described.values():
            source.close()
        self._described.clear()
        if self._template is not None:
            await self._template.aclose()

    async def _describe(self, path: Path, config: ModelConfig, plan: TensorFlowPlan, *, keeps: bool) -> DescribedModel:
        """Return what a model is, which a worker tells; it also makes a SavedModel of a Keras file.

        Args:
            path: The model.
            config: Its configuration.
            plan: Which graph and signature of it.
            keeps: Whether the answer is kept for the next call, which is the load of the same model.
        """
        key = (path, *await asyncio.to_thread(_state, path), plan.tag, plan.signature)
        source = self._described.pop(key, None)
        if source is None:
            is_keras = path.suffix == KERAS
            folder = tempfile.TemporaryDirectory(prefix="charonia-keras-") if is_keras else None
            question = {
                "path": str(path),
                "keras_to": folder.name if folder is not None else "",
                "tag": plan.tag,
                "signature": plan.signature,
            }
            try:
                source = DescribedModel(read_signature(config.name, await self._ask(config.name, question)), folder)
            except BaseException:
                if folder is not None:
                    folder.cleanup()
                raise
        if keeps:
            for other in [other for other in self._described if other[0] == path]:
                self._described.pop(other).close()
            self._described[key] = source
        return source

    async def _ask(self, name: str, question: Mapping[str, str]) -> Mapping[str, object]:
        if self._template is not None:
            await self._template.acquire()
        try:
            answer = await ask_worker(
                f"{name} (signature)",
                self._environment,
                ("complete", str(_SCRIPT), "", "", orjson.dumps(question).decode()),
                failed=f"model '{name}'",
                lost=f"model '{name}' cannot be read",
                late=f"reading model '{name}' did not finish",
            )
        finally:
            if self._template is not None:
                self._template.release()
        described: Mapping[str, object] = orjson.loads(answer)
        return described


class TensorFlowModel(PythonModel):
    """A loaded version.

    Args:
        files: Folders of the version.
        config: The complete configuration, with the server's additional inputs and outputs.
        environment: Where its workers run.
        server: Services of the server.
        session: Options of its session.
        source: The model on the disk.
        template: What its workers are forked from, acquired for it; None where each imports TensorFlow itself.
    """

    def __init__(
        self,
        files: ModelFiles,
        config: ModelConfig,
        environment: Environment,
        server: ServerServices,
        session: Mapping[str, object],
        source: DescribedModel,
        template: WorkerTemplate | None,
    ) -> None:
        def arguments(placement: Placement) -> dict[str, str]:
            return {"tensorflow": orjson.dumps({"intra": placement.threads, **session}).decode()}

        super().__init__(files, config, _SCRIPT, environment, server, arguments)
        self._source = source
        self._template = template

    async def aclose(self) -> None:
        """Let the template go, and remove the SavedModel of a Keras file."""
        await super().aclose()
        if self._template is not None:
            self._template.release()
        await asyncio.to_thread(self._source.close)


def _plan(config: ModelConfig, settings: BackendSettings) -> TensorFlowPlan:
    plan, problems = read_plan(config, settings.values)
    if problems:
        raise_problems(config.name, problems)
    return plan


def _model_path(files: ModelFiles, config: ModelConfig) -> Path:
    name = config.default_model_filename or DEFAULT_FOLDER
    path = files.version_dir / name
    problem, hint = graph_problem(config)
    if problem:
        raise unsupported(f"model '{config.name}': {problem}", hint=hint)
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise invalid(f"default_model_filename: must stay within the version's folder, got '{name}'")
    if not path.exists():
        found = ", ".join(sorted(each.name for each in files.version_dir.glob("*"))[:10]) or "nothing"
        raise invalid(
            f"model '{config.name}' version {files.version} has no folder {name}",
            hint=f"the version's folder holds {found}; `default_model_filename` names another SavedModel or Keras file",
        )
    return path


def _state(path: Path) -> tuple[int, int]:
    """Return what changes when a model's file, or a SavedModel's graph, is written again."""
    inner = path / "saved_model.pb"
    status = (inner if inner.is_file() else path).stat()
    return status.st_mtime_ns, status.st_size


def _init_ops(files: ModelFiles, config: ModelConfig, plan: TensorFlowPlan) -> list[str]:
    """Return the names of the operations in TF_INIT_OPS_FILE."""
    name = plan.init_ops_file
    if not name:
        return []
    path = next((f / name for f in (files.version_dir, files.model_dir) if (f / name).is_file()), None)
    if path is None:
        raise invalid(f"model '{config.name}': {INIT_OPS}: no file '{name}' in the folder of the version or the model")
    try:
        names = json.loads(path.read_bytes())["init_ops"]
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise TypeError("init_ops is no list of strings")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise invalid(
            f"model '{config.name}': {INIT_OPS}: '{name}' cannot be read: {type(error).__name__}: {error}",
            hint='it has the form {"init_ops": ["name of an operation"]}',
        ) from None
    return names


def _session(
    config: ModelConfig, plan: TensorFlowPlan, signature: SavedSignature, init_ops: list[str]
) -> dict[str, object]:
    """Return what a worker needs to know of the session, besides its number of threads where the plan has none."""
    intra = {"intra": plan.intra_threads} if plan.intra_threads else {}
    return {
        "folder": signature.folder,
        "tags": signature.tags,
        "signature": signature.name,
        "outputs": [output.name for output in config.output],
        "inter": plan.inter_threads,
        "soft_placement": plan.soft_placement,
        "init_ops": init_ops,
        **intra,
    }
