"""The TensorFlow backend: workers that are forked from one process, which has imported TensorFlow for all tests."""

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tests.support import tensorflow_models
from tests.support.backends import request_of as request
from tests.support.process import eventually
from tests.support.standing_template import StandingTemplate

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.tensor import Array
from charonia.server.backends.api import BackendSettings, ModelFiles, Outputs
from charonia.server.backends.tensorflow.backend import TensorFlowBackend
from charonia.server.backends.workers.model import PythonModel
from charonia.testing.backend_suite import PLACEMENT, BackendCase, BackendSuite, arrays, run_batch

pytestmark = [
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow"),
]

ROOTS = ModelConfig(
    name="roots",
    backend="tensorflow",
    max_batch_size=8,
    input=(ModelInput("X", DataType.FP32, dims=(4,)),),
    output=(ModelOutput("ROOT", DataType.FP32, (4,)), ModelOutput("TEXT", DataType.BYTES, (2,))),
    instance_group=(InstanceGroup("roots_0", InstanceKind.KIND_CPU, count=1),),
)


@pytest.fixture(scope="module")
def models(pytestconfig: pytest.Config) -> Path:
    return tensorflow_models.models(pytestconfig)


@pytest.fixture(scope="module")
def template() -> Iterator[StandingTemplate]:
    template = StandingTemplate(["tensorflow"], {"TF_CPP_MIN_LOG_LEVEL": "2"})
    yield template
    template.end()


class Bench:
    """A backend, and a folder for models that are copied from those that were made."""

    def __init__(self, template: StandingTemplate, models: Path, folder: Path) -> None:
        self.backend = TensorFlowBackend(template)
        self._models = models
        self._folder = folder

    def files(self, name: str) -> ModelFiles:
        source = self._models / name
        version = tensorflow_models.place(source, self._folder / source.stem)
        return ModelFiles(version.parent, 1, version)

    @asynccontextmanager
    async def loaded(
        self, model: str | ModelFiles, config: ModelConfig | None = None, **settings: str
    ) -> AsyncIterator[tuple[PythonModel, Callable[[InferRequest], Awaitable[dict[str, Array]]]]]:
        """Complete and load a model with one instance; yield it, and what runs one request."""
        given = BackendSettings(settings)
        files = self.files(model) if isinstance(model, str) else model
        config = config or ModelConfig(name="m", backend="tensorflow")
        try:
            completed = (await self.backend.complete(files, config, given)).config
            loaded = await self.backend.load(files, completed, given)
            try:
                instance = await loaded.create_instance(PLACEMENT)

                async def run(request: InferRequest) -> dict[str, Array]:
                    (result,) = (await run_batch(instance, [request])).results
                    if isinstance(result, ServingError):
                        raise result
                    return arrays(result)

                yield loaded, run
                await instance.aclose()
            finally:
                await loaded.aclose()
        finally:
            await self.backend.aclose()

    async def answer(
        self, model: str | ModelFiles, given: InferRequest, config: ModelConfig | None = None, **settings: str
    ) -> dict[str, Array]:
        async with self.loaded(model, config, **settings) as (_, run):
            return await run(given)

    async def refusal(self, model: str | ModelFiles, config: ModelConfig | None = None) -> ServingError:
        with pytest.raises(ServingError) as caught:
            await self.answer(model, request(), config)
        return caught.value


@pytest.fixture
def bench(template: StandingTemplate, models: Path, tmp_path: Path) -> Bench:
    return Bench(template, models, tmp_path)


def of_four(seed: int, size: int) -> InferRequest:
    return request(X=np.random.default_rng(seed).random((size, 4), np.float32))


class TestConformance(BackendSuite):
    @pytest.fixture
    def backend_case(self, bench: Bench) -> BackendCase:
        bad = request(X=np.full((1, 4), -1, np.float32))
        return BackendCase(lambda: bench.backend, bench.files("roots"), ROOTS, of_four, lambda: bad)


def tensors(config: ModelConfig) -> dict[str, tuple[DataType | None, tuple[int, ...]]]:
    of_inputs = {each.name: (each.data_type, each.dims) for each in config.input}
    return of_inputs | {each.name: (each.data_type, each.dims) for each in config.output}


async def test_a_configuration_is_completed_from_the_signature(bench: Bench) -> None:
    config = (await bench.backend.complete(bench.files("roots"), ModelConfig(name="m"), BackendSettings())).config
    await bench.backend.aclose()

    assert config.max_batch_size == 4
    assert config.dynamic_batching is not None
    assert tensors(config) == {
        "X": (DataType.FP32, (4,)),
        "ROOT": (DataType.FP32, (4,)),
        "SUM": (DataType.FP32, (1,)),
        "TEXT": (DataType.BYTES, (2,)),
    }
    (total,) = (output for output in config.output if output.name == "SUM")
    assert total.reshape is not None


async def test_a_tensor_without_a_rank_needs_dims(bench: Bench) -> None:
    files = bench.files("unranked")
    half = ModelConfig(name="m", max_batch_size=2, input=(ModelInput("X", DataType.FP32, dims=(-1, 2)),))
    whole = replace(half, output=(ModelOutput("Y", DataType.FP32, (-1, 2)),))

    error = await bench.refusal(files, half)

    assert error.message == "model 'm': output 'Y' has no rank in the model: its shape must be configured"
    assert error.hint == 'config.pbtxt: output [ { name: "Y" data_type: TYPE_FP32 dims: [ ... ] } ]'
    x = np.ones((1, 3, 2), np.float32)
    assert (await bench.answer(files, request(X=x), whole))["Y"].tolist() == (x * 2).tolist()


async def test_strings_of_any_bytes_go_in_and_out(bench: Bench) -> None:
    given = np.array([[b"a", b"\xff\x00", b""]], object)

    result = await bench.answer("texts", request(S=given))

    assert result["TWICE"].tolist() == [[b"aa", b"\xff\x00\xff\x00", b""]]


async def test_a_model_that_does_not_batch_takes_scalars_and_runs_loops(bench: Bench) -> None:
    result = await bench.answer("repeated", request(X=np.ones(4, np.float32), N=np.array([3], np.int32)))

    assert result["Y"].tolist() == [8, 8, 8, 8]


async def test_what_a_model_keeps_is_not_changed_by_the_next_request(bench: Bench) -> None:
    async with bench.loaded("kept") as (_, run):
        for number in (1, 2, 3, 4):
            assert (await run(request(X=np.full(64, number, np.float32))))["BEFORE"][0] == number - 1


async def test_only_outputs_that_are_asked_for_are_computed(bench: Bench) -> None:
    given = InferRequest("m", of_four(1, 1).inputs, outputs=(RequestedOutput("TEXT"),))

    assert (await bench.answer("roots", given)).keys() == {"TEXT"}


@pytest.mark.parametrize("name", ["double", "triple"])
async def test_a_parameter_chooses_the_signature(bench: Bench, name: str) -> None:
    config = ModelConfig(name="m", parameters={"TF_SIGNATURE_DEF": name})

    result = await bench.answer("two", request(X=np.ones((1, 4), np.float32)), config)

    assert result["Y"].tolist() == [[{"double": 2.0, "triple": 3.0}[name]] * 4]


async def test_a_signature_that_is_not_there_is_refused_with_those_that_are(bench: Bench) -> None:
    error = await bench.refusal("two")

    assert error.code is Code.INVALID_ARG
    assert error.message == "model 'm': the model has no signature 'serving_default'; its signatures are double, triple"
    assert error.hint == "the parameter TF_SIGNATURE_DEF says which"


async def test_a_graph_with_other_tags_is_chosen_and_initialised_by_its_own_operations(bench: Bench) -> None:
    files = bench.files("old")
    (files.model_dir / "init.json").write_text('{"init_ops": ["set_five"]}')
    config = ModelConfig(name="m", parameters={"TF_GRAPH_TAG": "mine", "TF_INIT_OPS_FILE": "init.json"})

    assert (await bench.answer(files, request(X=np.ones((1, 4), np.float32)), config))["Y"].tolist() == [[5.0] * 4]
    without = ModelConfig(name="m", parameters={"TF_GRAPH_TAG": "mine"})
    assert (await bench.answer(files, request(X=np.ones((1, 4), np.float32)), without))["Y"].tolist() == [[0.0] * 4]
    error = await bench.refusal(files)
    assert error.message == "model 'm': no graph has the tag 'serve'; the tags of its graphs are cpu+mine"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "JSONDecodeError"),
        ('{"init_ops": "set_five"}', "init_ops is no list of strings"),
        ("{}", "KeyError: 'init_ops'"),
        ('{"init_ops": ["set_six"]}', "operation 'set_six' of TF_INIT_OPS_FILE failed"),
        (None, "no file 'init.json' in the folder of the version or the model"),
    ],
)
async def test_a_file_of_initial_operations_that_cannot_be_read_is_refused(
    bench: Bench, content: str | None, reason: str
) -> None:
    files = bench.files("old")
    if content is not None:
        (files.version_dir / "init.json").write_text(content)
    parameters = {"TF_GRAPH_TAG": "mine", "TF_INIT_OPS_FILE": "init.json"}

    assert reason in (await bench.refusal(files, ModelConfig(name="m", parameters=parameters))).message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sparse", "input 'X' is sparse, which requests cannot hold"),
        ("ragged", "output 'ROOT' is ragged, or another composite tensor, which requests cannot hold"),
        ("angles", "output 'Y' is complex64, a datatype that requests cannot have"),
        ("unknown", "the model needs the operator 'MyOwnSqrt', which TensorFlow"),
    ],
)
async def test_a_model_with_what_cannot_be_served_is_refused(bench: Bench, name: str, reason: str) -> None:
    assert reason in (await bench.refusal(name)).message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "saved_model.pb holds no graph"),
        (b"\x08\x07", "saved_model.pb holds no graph"),
        (b"not a model", "saved_model.pb cannot be read"),
        ("half", "saved_model.pb cannot be read"),
        (None, "holds no saved_model.pb, so it is no SavedModel"),
    ],
)
async def test_a_broken_graph_is_refused(bench: Bench, content: bytes | str | None, reason: str) -> None:
    files = bench.files("roots")
    path = files.version_dir / "model.savedmodel" / "saved_model.pb"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if isinstance(content, str) else content)

    error = await bench.refusal(files)

    assert error.code is Code.INVALID_ARG
    assert reason in error.message


async def test_broken_variables_are_an_error_of_the_load(bench: Bench) -> None:
    files = bench.files("kept")
    (data,) = (files.version_dir / "model.savedmodel" / "variables").glob("*.data*")
    data.write_bytes(b"")

    assert "the SavedModel cannot be loaded; are all files" in (await bench.refusal(files)).message


async def test_a_frozen_graph_is_refused_with_lines_that_convert_it(bench: Bench, tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.graphdef").write_bytes(b"")
    files = ModelFiles(version.parent, 1, version)

    error = await bench.refusal(files, ModelConfig(name="m", default_model_filename="model.graphdef"))

    assert error.code is Code.UNSUPPORTED
    assert 'open("model.graphdef", "rb")' in error.hint
    assert '"model.savedmodel", {"INPUT": x}' in error.hint


async def test_a_configuration_that_contradicts_the_signature_is_refused(bench: Bench) -> None:
    files = bench.files("roots")
    wrong = replace(
        ROOTS,
        input=(ModelInput("X", DataType.FP64, dims=(5,)),),
        output=(ModelOutput("ROOT", DataType.FP32, (4,)), ModelOutput("SQUARE", DataType.FP32, (4,))),
    )

    message = (await bench.refusal(files, wrong)).message

    assert "configuration expects datatype TYPE_FP64 for input 'X', model provides TYPE_FP32" in message
    assert "the model expects shape [-1, 4] but the model configuration specifies shape [-1, 5]" in message
    assert "unexpected inference output 'SQUARE', allowed outputs are: ROOT, SUM, TEXT" in message


async def test_instances_on_gpus_are_refused(bench: Bench) -> None:
    on_gpu = replace(ROOTS, instance_group=(InstanceGroup("g", InstanceKind.KIND_GPU, count=1, gpus=(0,)),))

    error = await bench.refusal("roots", on_gpu)

    assert error.code is Code.UNSUPPORTED


async def test_a_batch_whose_rows_depend_on_one_another_runs_its_requests_alone(bench: Bench) -> None:
    async with bench.loaded("total") as (model, _):
        instance = await model.create_instance(replace(PLACEMENT, name="second"))
        ran = await run_batch(instance, [of_four(1, 1), of_four(2, 1)])
        await instance.aclose()
        assert all(isinstance(result, Outputs) for result in ran.results)


async def test_an_error_of_the_graph_is_one_of_the_request(bench: Bench) -> None:
    async with bench.loaded("roots") as (_, run):
        with pytest.raises(ServingError, match=r"^TensorFlow failed: assertion failed: \[a root of a neg") as caught:
            await run(request(X=np.full((1, 4), -1, np.float32)))
        assert caught.value.code is Code.INVALID_ARG
        await run(of_four(1, 1))


async def test_threads_are_the_share_of_the_instance_unless_a_parameter_says_another_number(bench: Bench) -> None:
    files = bench.files("roots")

    async def threads_of(**parameters: str) -> int:
        async with bench.loaded(files, ModelConfig(name="m", parameters=parameters)) as (model, run):
            await run(of_four(1, 1))
            (pid,) = (instance.pid for instance in model._instances)
            return len(os.listdir(f"/proc/{pid}/task"))

    alone = await threads_of()
    assert await threads_of(TF_NUM_INTRA_THREADS="5", TF_NUM_INTER_THREADS="3") >= alone + 4


async def test_a_worker_that_is_killed_is_replaced(bench: Bench) -> None:
    async with bench.loaded("roots") as (model, run):
        before = await run(of_four(1, 1))
        (instance,) = model._instances
        killed = instance.pid
        os.kill(killed, signal.SIGKILL)
        while instance.pid in (0, killed) or not await model.is_ready():
            await asyncio.sleep(0.01)
        assert (await run(of_four(1, 1)))["ROOT"].tolist() == before["ROOT"].tolist()
        (state,) = model.workers()
        assert state.restarts == 1
        assert state.problem == ""


async def test_a_worker_counts_its_share_only_of_the_memory_of_the_import(bench: Bench) -> None:
    async with bench.loaded("roots") as (model, _):
        (state,) = model.workers()
        (usage,) = model.memory()
        (pid,) = (instance.pid for instance in model._instances)
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert usage.byte_size > 0
        assert 0 < state.memory_bytes < 0.75 * resident


async def test_a_keras_file_is_served_and_what_was_made_of_it_is_removed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    files = bench.files("dense.keras")
    config = ModelConfig(name="m", default_model_filename="model.keras")

    result = await bench.answer(files, request(features=np.zeros((2, 8), np.float32)), config)

    assert result["output_0"].tolist() == [[0.0] * 4] * 2
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "model.keras is truncated, or no file of Keras 3"), (None, "Keras cannot load model.keras")],
)
async def test_a_broken_keras_file_is_refused(bench: Bench, tmp_path: Path, content: bytes | None, reason: str) -> None:
    files = bench.files("dense.keras")
    path = files.version_dir / "model.keras"
    if content is None:
        (tmp_path / "other").write_text("x")
        path.unlink()
        shutil.make_archive(str(path), "zip", tmp_path, "other")
        (files.version_dir / "model.keras.zip").rename(path)
    else:
        path.write_bytes(content)

    error = await bench.refusal(files, ModelConfig(name="m", default_model_filename="model.keras"))

    assert reason in error.message


async def test_parameters_without_effect_are_warned_of(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig(name="m", parameters={"TF_GRAPH_TAGS": "serve", "MAX_SESSION_SHARE_COUNT": "4"})

    with caplog.at_level(logging.WARNING):
        await bench.answer("roots", of_four(1, 1), config, **{"gpu-memory-fraction": "0.5"})

    assert "has no parameter 'TF_GRAPH_TAGS', it has no effect; did you mean 'TF_GRAPH_TAG'?" in caplog.text
    assert "MAX_SESSION_SHARE_COUNT has no effect: each instance has a process of its own" in caplog.text
    assert "gpu-memory-fraction has no effect" in caplog.text


async def test_the_workers_of_a_backend_end_with_it(bench: Bench) -> None:
    async with bench.loaded("roots") as (model, _):
        pid = model._instances[0].pid

    assert eventually(lambda: not Path(f"/proc/{pid}").exists())
