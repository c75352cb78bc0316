"""Completes configurations from SavedModels and Keras files, and loads them into workers.

Source of the parameters: the documentation of Triton's TensorFlow backend.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import orjson

from charonia.config.complete import Signature, SignatureTensor, check_signature
from charonia.config.forms import GRAPH_LINES
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.problems import Problem, check_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.dtypes import BY_NAME
from charonia.core.errors import invalid, unsupported
from charonia.server.backends.api import BackendSettings, ModelFiles, Placement
from charonia.server.backends.array_backend import ArrayBackend, named_path, no_file
from charonia.server.backends.parameters import Param, Params, declared_by, parameter
from charonia.server.backends.workers.model import EXECUTE_SECONDS, START_SECONDS, PythonModel
from charonia.server.backends.workers.process import Environment, ask_worker
from charonia.server.backends.workers.services import ServerServices
from charonia.server.backends.workers.template import WorkerTemplate

GRAPH_TAG = "TF_GRAPH_TAG"
SIGNATURE = "TF_SIGNATURE_DEF"
INTRA = "TF_NUM_INTRA_THREADS"
INTER = "TF_NUM_INTER_THREADS"
INIT_OPS = "TF_INIT_OPS_FILE"
SESSION_THREADS = "TF_USE_PER_SESSION_THREADS"
SESSION_SHARE = "MAX_SESSION_SHARE_COUNT"

SOFT_PLACEMENT = "allow-soft-placement"
VERSION = "version"

GPU_MEMORY = ("gpu-memory-fraction", "allow-gpu-memory-growth")
"""Settings that have no effect: models run on the CPU."""

GRAPH = "model.graphdef"
"""Default name of a frozen graph."""

CALLER = -1
"""Number of threads across operators for which a session runs them one after the other, in the thread that calls."""


@dataclass(frozen=True, slots=True)
class TensorFlowPlan:
    """The parameters of a model.

    Attributes:
        inter_threads: Threads across operators, or `CALLER`.
        soft_placement: Whether an operator runs on another device where its own is not there.
    """

    # fmt: off
    tag: str = parameter(GRAPH_TAG, "tag of the graph; of several graphs that have it, the one with the fewest other "
                         "tags counts", str, "", "`serve`")
    signature: str = parameter(SIGNATURE, "name of the signature", str, "", "`serving_default`, or the only one")
    intra_threads: int = parameter(INTRA, "threads within an operator, for each instance", int, 0, "the thread budget",
                                   ge=0)
    inter_threads: int = parameter(INTER, "threads across operators, for each instance; 0: none, they run one after "
                                   "the other", int, 0, "0", ge=0)
    init_ops_file: str = parameter(INIT_OPS, 'file in the folder of the version or the model: `{"init_ops": ["name of '
                                   'an operation"]}`, run after the model is loaded', str, "")
    soft_placement: bool = parameter(SOFT_PLACEMENT, kind=bool, default=True, is_setting_only=True)
    # fmt: on


PARAMETERS = Params(
    "tensorflow",
    *declared_by(TensorFlowPlan),
    Param(SESSION_THREADS, "accepted: each session has its own threads in any case", bool),
    Param(SESSION_SHARE, "no effect, with a line in the log: instances are processes, and share no session", int, ge=1),
    Param(VERSION, kind={"2": 2}, default=2, is_setting_only=True),
    others=(START_SECONDS, EXECUTE_SECONDS),
)


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[TensorFlowPlan, list[Problem]]:
    values = PARAMETERS.values(config, settings)
    plan = values.into(TensorFlowPlan, inter_threads=values[INTER] or CALLER)
    return plan, [*values.problems, *_unsupported(config)]


def _unsupported(config: ModelConfig) -> Iterator[Problem]:
    optimization = config.optimization
    if optimization is not None and optimization.execution_accelerators is not None:
        yield Problem(
            "optimization.execution_accelerators",
            "TensorFlow models run on the CPU, without an accelerator: remove it, or serve the ONNX model that "
            "`charonia convert` makes",
        )
    if optimization is not None and optimization.graph is not None and optimization.graph.level > 0:
        yield Problem("optimization.graph.level", "expected 0: XLA is not available for TensorFlow models")
    if config.model_operations is not None and config.model_operations.op_library_filename:
        yield Problem(
            "model_operations.op_library_filename",
            "libraries of operators are not available for TensorFlow models: serve it as a Python model that calls "
            "tf.load_op_library",
        )


def remarks(config: ModelConfig, settings: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each parameter that is unknown, and for each that has no effect."""
    start = f"model '{config.name}'"
    yield from PARAMETERS.remarks(config)
    if config.parameters.get(SESSION_SHARE, "1") != "1":
        yield f"{start}: {SESSION_SHARE} has no effect: each instance has a process of its own"
    for key in GPU_MEMORY:
        if key in settings:
            yield f"{start}: --backend-config tensorflow,{key} has no effect: TensorFlow models run on the CPU"


def graph_problem(config: ModelConfig) -> tuple[str, str]:
    """Return why a frozen graph is not served, and how to make a SavedModel of it; empty for any other model."""
    name = config.default_model_filename
    if config.platform != "tensorflow_graphdef" and not name.endswith(".graphdef"):
        return "", ""
    path = PurePosixPath(name or GRAPH)
    lines = GRAPH_LINES.replace("{path_text}", json.dumps(path.name)).replace("{name}", path.stem)
    return (
        "a frozen graph (tensorflow_graphdef) is not served, a SavedModel is",
        f"convert it in the version's folder, and remove platform from config.pbtxt:\n{lines}",
    )


@dataclass(frozen=True)
class DescribedModel:
    """A model on the disk, as a worker describes it.

    Attributes:
        answer: The `folder` of its SavedModel, the `tags` of the graph, the `signature` by name, and `inputs` and
            `outputs`: `name`, `dtype` as TensorFlow writes it, and `dims`, None where the model tells no rank.
        folder: The SavedModel that was made of a Keras file, None for one that was given.
    """

    answer: Mapping[str, Any]
    folder: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def of(cls, model: str, answer: Mapping[str, Any], folder: Any = None) -> "DescribedModel":
        """Return what a worker has described. Raises ServingError: INVALID_ARG, the model cannot be served."""
        if "refused" in answer:
            raise invalid(f"model '{model}': {answer['refused']}", hint=answer["hint"])
        return cls(answer, folder)

    def for_config(self, config: ModelConfig) -> Signature:
        """Return the signature for a configuration, which decides the shapes that the model leaves open.

        Raises:
            ServingError: A tensor has a datatype that requests cannot have, or no rank, and the configuration has not
                got it.
        """
        asked = {output.name for output in config.output}
        return Signature(
            tuple(_known(config, "input", tensor, config.input) for tensor in self.answer["inputs"]),
            tuple(
                _known(config, "output", tensor, config.output)
                for tensor in self.answer["outputs"]
                if not asked or tensor["name"] in asked
            ),
        )

    def close(self) -> None:
        if self.folder is not None:
            self.folder.cleanup()


def signature_problems(config: ModelConfig, saved: DescribedModel) -> Iterator[Problem]:
    """Yield each difference between a complete configuration and the model that matters."""
    signature = saved.for_config(config)
    names = {tensor["name"] for tensor in saved.answer["outputs"]}
    if not config.output:
        yield Problem("output", f"none is configured; the model provides {', '.join(sorted(names))}")
    for index, output in enumerate(config.output):
        if output.name not in names:
            message = f"unexpected inference output '{output.name}', allowed outputs are: {', '.join(sorted(names))}"
            yield Problem(f"output[{index}].name", message)
    yield from check_signature(replace(config, output=tuple(o for o in config.output if o.name in names)), signature)


def _known(
    config: ModelConfig, kind: str, tensor: Mapping[str, Any], configured: Sequence[ModelInput | ModelOutput]
) -> SignatureTensor:
    name = tensor["name"]
    datatype = (
        BY_NAME.get(tensor["dtype"]) if tensor["dtype"] != "bfloat16" else None
    )  # which workers have no array for
    if datatype is None:
        raise unsupported(
            f"model '{config.name}': {kind} '{name}' is {tensor['dtype']}, a datatype that requests cannot have",
            hint="cast it in the model: export a signature with tf.cast, for example to float32",
        )
    shape = tensor["dims"]
    if shape is None:
        given = next((each for each in configured if each.name == name), None)
        if given is None:
            raise invalid(
                f"model '{config.name}': {kind} '{name}' has no rank in the model: its shape must be configured",
                hint=f'config.pbtxt: {kind} [ {{ name: "{name}" data_type: {datatype.config} dims: [ ... ] }} ]',
            )
        shape = (-1, *given.inner_dims) if config.max_batch_size > 0 else given.inner_dims
    return SignatureTensor(name, datatype, tuple(shape))


DEFAULT_FOLDER = "model.savedmodel"
KERAS = ".keras"

_SCRIPT = Path(__file__).parent / "worker" / "model.py"


class TensorFlowBackend(ArrayBackend[TensorFlowPlan, PythonModel]):
    """The `tensorflow` backend."""

    name = "tensorflow"
    parameters = PARAMETERS
    read_plan = staticmethod(read_plan)
    remarks = staticmethod(remarks)
    gpu_hint = "use KIND_CPU, or the ONNX model that `charonia convert` makes"

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

    def path(self, files: ModelFiles, config: ModelConfig) -> Path:
        problem, hint = graph_problem(config)
        if problem:
            raise unsupported(f"model '{config.name}': {problem}", hint=hint)
        path = named_path(files, config, DEFAULT_FOLDER)
        if not path.exists():
            raise no_file(files, config, path, "folder")
        return path

    async def inspect(
        self, files: ModelFiles, config: ModelConfig, plan: TensorFlowPlan
    ) -> tuple[Signature, Sequence[str]]:
        saved = await self._describe(self.path(files, config), config, plan, keeps=True)
        note = f"signature: '{saved.answer['signature']}' of the graph with the tags {saved.answer['tags']}"
        return saved.for_config(config), [note]

    async def open(
        self, files: ModelFiles, config: ModelConfig, plan: TensorFlowPlan, settings: BackendSettings
    ) -> PythonModel:
        path = self.path(files, config)
        init_ops = _init_ops(files, config, plan)
        source = await self._describe(path, config, plan, keeps=False)
        seen = seen_by_model(config)
        try:
            check_problems(config.name, signature_problems(seen, source))
            if self._template is not None:
                await self._template.acquire()
        except BaseException:
            source.close()
            raise
        session = _session(seen, plan, source.answer, init_ops)

        def arguments(placement: Placement) -> dict[str, str]:
            return {"tensorflow": orjson.dumps({"intra": placement.threads, **session}).decode()}

        async def closing() -> None:
            if self._template is not None:
                self._template.release()
            await asyncio.to_thread(source.close)

        server = ServerServices.of(config.name, files.version, settings)
        return PythonModel(files, seen, _SCRIPT, self._environment, server, arguments, closing=closing)

    async def aclose(self) -> None:
        """End the process that has imported TensorFlow."""
        for source in self._described.values():
            source.close()
        self._described.clear()
        if self._template is not None:
            await self._template.aclose()

    async def _describe(self, path: Path, config: ModelConfig, plan: TensorFlowPlan, *, keeps: bool) -> DescribedModel:
        """Return what a model is, which a worker tells; it also makes a SavedModel of a Keras file."""
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
                source = DescribedModel.of(config.name, await self._ask(config.name, question), folder)
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
    config: ModelConfig, plan: TensorFlowPlan, answer: Mapping[str, Any], init_ops: list[str]
) -> dict[str, object]:
    """Return what a worker needs to know of the session, besides its number of threads where the plan has none."""
    intra = {"intra": plan.intra_threads} if plan.intra_threads else {}
    return {
        **{key: answer[key] for key in ("folder", "tags", "signature")},
        "outputs": [output.name for output in config.output],
        "inter": plan.inter_threads,
        "soft_placement": plan.soft_placement,
        "init_ops": init_ops,
        **intra,
    }
