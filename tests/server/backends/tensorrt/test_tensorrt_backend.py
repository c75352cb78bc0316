"""Plans on a stand-in for TensorRT and a GPU: what is completed, computed and refused, and what memory it takes."""

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.backends import ask, request_of, version_of
from tests.support.pretended_tensorrt import PROGRAMS, Program, StreamingCuda, plan_bytes, pretended

from charonia.config.kinds import InstanceKind
from charonia.config.model import (
    Cuda,
    GraphLowerBound,
    GraphShape,
    GraphSpec,
    InstanceGroup,
    ModelConfig,
    ModelInput,
    ModelOutput,
    Optimization,
)
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Array
from charonia.server.backends.api import BackendSettings, Placement
from charonia.server.backends.tensorrt.backend import PlanInstance, TensorRtBackend, TensorRtModel
from charonia.server.metrics.devices import MemoryAccount, PinnedMemory
from charonia.testing.backend_suite import BackendCase, BackendSuite, arrays

FP32, INT64 = DataType.FP32, DataType.INT64
CONFIG = ModelConfig(
    name="m",
    max_batch_size=8,
    input=(ModelInput("x", FP32, dims=(4,)),),
    output=(ModelOutput("y", FP32, dims=(4,)),),
)
WIDE = {"x": ("INPUT", "FLOAT", (-1, -1)), "y": ("OUTPUT", "FLOAT", (-1, -1))}
TWO_PROFILES = [{"x": ((1, 1), (1, 4), (4, 8))}, {"x": ((1, 8), (4, 8), (16, 32))}]
VALUES = {
    "x": ("INPUT", "FLOAT", (-1, 4)),
    "size": ("INPUT", "INT64", (2,), "shape"),
    "y": ("OUTPUT", "FLOAT", (-1, -1)),
    "n": ("OUTPUT", "INT64", (2,), "shape"),
}
VALUES_PROFILE = [{"x": ((1, 4), (2, 4), (4, 4)), "size": ((1, 1), (2, 2), (4, 6))}]
POSITIVE = {"x": ("INPUT", "FLOAT", (-1,)), "y": ("OUTPUT", "FLOAT", (-1,))}
GRAPHS = Optimization(cuda=Cuda(graphs=True))
LAUNCHED = replace(CONFIG, optimization=GRAPHS)
TENSORS = 2 * 256
"""What inputs and outputs take in a block."""


@pytest.fixture
def cuda(tmp_path: Path) -> Iterator[StreamingCuda]:
    folder = tmp_path / "gpu"
    folder.mkdir()
    with pretended(folder) as found:
        yield found


class Bench:
    """A model's folder and a backend."""

    def __init__(self, tmp_path: Path, plan: bytes, name: str = "model.plan", **settings: str) -> None:
        self.files = version_of(tmp_path / "m", **{name: plan})
        self.settings = BackendSettings(settings, pinned=PinnedMemory())
        self.backend = TensorRtBackend()

    def complete(self, config: ModelConfig | None = None) -> ModelConfig:
        config = config if config is not None else ModelConfig(name="m")
        return asyncio.run(self.backend.complete(self.files, config, self.settings)).config

    def instance(self, config: ModelConfig = CONFIG, name: str = "m_0", device: int = 0) -> PlanInstance:
        async def make() -> PlanInstance:
            model = await self.backend.load(self.files, config, self.settings)
            return await model.create_instance(Placement(name, InstanceKind.KIND_GPU, device))

        return asyncio.run(make())

    def refusal(self, config: ModelConfig = CONFIG) -> ServingError:
        with pytest.raises(ServingError) as refused:
            self.instance(config)
        return refused.value


def rows(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype="<f4").reshape(shape)


def answers(instance: PlanInstance, *requests: InferRequest) -> list[dict[str, Array]]:
    return [arrays(result) for result in instance.execute(requests).results]


def works(instance: PlanInstance, batch: int) -> bool:
    x = rows(batch, 4)
    return np.array_equal(ask(instance, x=x)["y"], 2 * x + 1)


def wide(**more: Any) -> ModelConfig:
    return replace(
        CONFIG,
        max_batch_size=16,
        input=(ModelInput("x", FP32, dims=(-1,)),),
        output=(ModelOutput("y", FP32, dims=(-1,)),),
        **more,
    )


class TestCompletion:
    def test_tensors_and_the_largest_batch_come_from_the_plan(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        config = Bench(tmp_path, plan_bytes()).complete()

        assert (config.max_batch_size, config.input, config.output) == (8, CONFIG.input, CONFIG.output)
        assert config.dynamic_batching is not None

    def test_a_larger_batch_than_the_plan_takes_is_refused(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        bench = Bench(tmp_path, plan_bytes())

        with pytest.raises(ServingError, match="specified max-batch 9 but TensorRT engine only supports max-batch 8"):
            bench.complete(ModelConfig(name="m", max_batch_size=9))
        assert "takes batches of up to 8" in str(bench.refusal(replace(CONFIG, max_batch_size=9)))

    def test_values_that_are_shapes_are_marked_and_lack_the_batch(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        config = Bench(tmp_path, plan_bytes("fill", tensors=VALUES, profiles=VALUES_PROFILE)).complete()

        assert config.max_batch_size == 4
        assert config.input == (
            ModelInput("x", FP32, dims=(4,)),
            ModelInput("size", INT64, dims=(1,), is_shape_tensor=True),
        )
        assert [(o.name, o.dims, o.is_shape_tensor) for o in config.output] == [("y", (-1,), False), ("n", (1,), True)]


class TestRuns:
    def test_the_profile_that_fits_best_is_used(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        bench = Bench(tmp_path, plan_bytes(tensors=WIDE, profiles=TWO_PROFILES))
        instance = bench.instance(wide(instance_group=(InstanceGroup("m", profile=("1", "0")),)))

        for shape, profile in (((1, 1), 0), ((4, 8), 1), ((3, 7), 0), ((1, 5), 0), ((2, 8), 1), ((16, 32), 1)):
            assert answers(instance, request_of(x=rows(*shape)))[0]["y"].tolist() == (2 * rows(*shape) + 1).tolist()
            assert cuda.profiles[-1] == profile

    def test_shapes_that_no_profile_takes_fail_alone_with_the_ranges(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        bench = Bench(tmp_path, plan_bytes(tensors=WIDE, profiles=TWO_PROFILES))
        instance = bench.instance(replace(wide(), max_batch_size=4))

        with pytest.raises(ServingError, match=r"no optimization profile .* x \[1, 9\].* x \[1, 1\] to \[4, 8\]") as no:
            instance.execute([request_of(x=rows(1, 9))])
        assert (no.value.code, no.value.hint) == (
            Code.INVALID_ARG,
            "`profile` of the instance group selects others",
        )
        assert answers(instance, request_of(x=rows(1, 8)))[0]["y"].shape == (1, 8)

    def test_values_that_are_shapes_are_one_for_the_batch(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        bench = Bench(tmp_path, plan_bytes("fill", tensors=VALUES, profiles=VALUES_PROFILE))
        instance = bench.instance(bench.complete())
        three, two = np.array([[3]]), np.array([[2]])

        first, second = answers(instance, request_of(x=rows(1, 4), size=three), request_of(x=rows(1, 4), size=three))
        assert first["y"].tolist() == second["y"].tolist() == [[6.0] * 3]
        assert first["n"].tolist() == [[3]]

        first, second = answers(instance, request_of(x=rows(1, 4), size=three), request_of(x=rows(1, 4), size=two))
        assert (first["y"].shape, second["y"].shape) == ((1, 3), (1, 2))
        with pytest.raises(ServingError, match=r"no optimization profile .* size \[1, 7\]"):
            instance.execute([request_of(x=rows(1, 4), size=np.array([[7]]))])

    def test_an_output_whose_shape_depends_on_data_has_the_shape_of_the_run(
        self, cuda: StreamingCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        bench = Bench(tmp_path, plan_bytes("positive", tensors=POSITIVE, profiles=[{"x": ((1,), (4,), (9,))}]))
        config = ModelConfig(
            name="m",
            input=(ModelInput("x", FP32, dims=(-1,)),),
            output=(ModelOutput("y", FP32, dims=(-1,)),),
            optimization=GRAPHS,
        )
        instance = bench.instance(config)

        for values in ([1.0, -1.0, 3.0], [-1.0], [2.0]):
            positive = [value for value in values if value > 0]
            assert answers(instance, request_of(x=np.array(values, "<f4")))[0]["y"].tolist() == positive
        assert "no CUDA graphs are captured" in caplog.text

    def test_a_gpu_that_fails_is_an_error_of_the_request(
        self, cuda: StreamingCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        instance = Bench(tmp_path, plan_bytes()).instance()
        monkeypatch.setattr(StreamingCuda, "_cuStreamSynchronize", lambda *_: 719)

        with pytest.raises(ServingError, match="the GPU failed: cuStreamSynchronize failed with CUDA error 719"):
            instance.execute([request_of(x=rows(1, 4))])

    async def test_memory_is_that_of_each_plan_on_a_gpu_and_of_each_instance(
        self, cuda: StreamingCuda, tmp_path: Path
    ) -> None:
        bench = Bench(tmp_path, plan_bytes())

        model = await bench.backend.load(bench.files, CONFIG, bench.settings)
        made = [await model.create_instance(Placement(f"m_{n}", InstanceKind.KIND_GPU)) for n in range(2)]
        found = {usage.instance: usage.byte_size for usage in model.memory()}
        assert found == {"": len(plan_bytes()), "m_0": made[0].bytes, "m_1": made[1].bytes}
        assert made[0].bytes == 1024 + TENSORS  # activations, and 8 rows of 4 floats twice, aligned


class TestGraphs:
    def test_batches_of_usual_sizes_are_launched_as_graphs(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        instance = Bench(tmp_path, plan_bytes()).instance(LAUNCHED)

        for batch, launches in ((1, 1), (3, 2), (8, 3), (5, 3), (8, 4)):
            assert works(instance, batch)
            assert cuda.launches == launches

    def test_a_graph_with_a_lower_bound_serves_what_is_smaller(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        bench = Bench(tmp_path, plan_bytes(tensors=WIDE, profiles=TWO_PROFILES))
        low = GraphLowerBound(2, {"x": GraphShape((4,))})
        spec = GraphSpec(4, {"x": GraphShape((8,))}, low)
        config = replace(wide(), max_batch_size=4, optimization=Optimization(cuda=Cuda(True, graph_spec=(spec,))))
        instance = bench.instance(config)

        found = answers(instance, request_of(x=rows(3, 8)))[0]["y"]
        assert (found.tolist(), cuda.launches) == ((2 * rows(3, 8) + 1).tolist(), 1)
        filled = answers(instance, request_of(x=rows(2, 4)))[0]["y"]
        assert (filled.shape, filled[:, :4].tolist(), cuda.launches) == ((2, 8), (2 * rows(2, 4) + 1).tolist(), 2)
        assert filled[:, 4:].tolist() == [[1.0] * 4] * 2  # of zeros
        answers(instance, request_of(x=rows(1, 8)))
        assert cuda.launches == 2


class Server:
    """Several models with the pools of one server."""

    def __init__(self, tmp_path: Path, **settings: str) -> None:
        self.folder = tmp_path
        self.settings = BackendSettings({key.replace("_", "-"): value for key, value in settings.items()})
        self.backend = TensorRtBackend()
        self.models: dict[str, TensorRtModel] = {}

    def load(self, name: str, config: ModelConfig = CONFIG, instances: int = 1, **plan: Any) -> list[PlanInstance]:
        files = version_of(self.folder / name, model_plan=plan_bytes(**plan))

        async def make() -> list[PlanInstance]:
            model = await self.backend.load(files, config, self.settings)
            self.models[name] = model
            places = (Placement(f"m_{number}", InstanceKind.KIND_GPU) for number in range(instances))
            return [await model.create_instance(place) for place in places]

        return asyncio.run(make())

    def unload(self, name: str, *instances: PlanInstance) -> None:
        for instance in instances:
            instance.close()
        asyncio.run(self.models.pop(name).aclose())

    @property
    def account(self) -> MemoryAccount:
        return self.settings.gpu_pools[0]


def meanwhile(monkeypatch: pytest.MonkeyPatch, other: PlanInstance, errors: list[ServingError]) -> None:
    """While a plan of the program `outer` runs, another instance is to run, too."""

    def compute(inputs: Any) -> dict[str, Array]:
        try:
            assert works(other, 2)
        except ServingError as error:
            errors.append(error)
        return {"y": 2 * inputs["x"] + 1}

    monkeypatch.setitem(PROGRAMS, "outer", Program(compute, lambda shapes, _: {"y": shapes["x"]}))


class TestMemory:
    """One pool for all plans of a GPU."""

    def test_one_allocation_and_one_address_serve_a_thousand_batches(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        server = Server(tmp_path)
        (instance,) = server.load("m", memory=[1 << 20])

        assert all(works(instance, 1 + number % 8) for number in range(1000))

        assert (cuda.allocations, len(cuda.given)) == (1, 1)
        assert (server.account.used_bytes, server.account.idle_bytes) == (0, cuda.device_bytes())
        assert (1 << 20) + TENSORS <= cuda.device_bytes() <= ((1 << 20) + TENSORS) * 9 // 8

    def test_unloading_gives_the_memory_back(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        server = Server(tmp_path)
        graphs, plain = server.load("graphs", LAUNCHED), server.load("plain", instances=2)
        assert all(works(instance, 3) for instance in (*graphs, *plain))

        server.unload("plain", *plain)
        assert (server.account.idle_bytes, server.account.used_bytes) == (0, cuda.device_bytes())
        assert works(graphs[0], 3)
        server.unload("graphs", *graphs)
        assert (server.account.used_bytes, server.account.idle_bytes, cuda.left()) == (0, 0, 0)

    def test_a_batch_without_memory_is_unavailable_and_says_what_it_needs(
        self, cuda: StreamingCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server, errors = Server(tmp_path, memory_pool_byte_size="3000000"), list[ServingError]()
        (inner,) = server.load("inner", memory=[1 << 20])
        meanwhile(monkeypatch, inner, errors)
        (outer,) = server.load("outer", program="outer", memory=[2 << 20])

        assert works(outer, 3)
        (error,) = errors
        free = 3000000 - cuda.device_bytes()
        assert (error.code, error.message) == (
            Code.UNAVAILABLE,
            f"GPU 0 has not enough memory: a batch needs {(1 << 20) + TENSORS} bytes, {free} are free",
        )
        assert "memory-pool-byte-size" in error.hint
        assert works(inner, 2)  # the idle block of the other model gives way
        assert cuda.device_bytes() < 2 << 20

    def test_a_graph_keeps_its_block(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        server = Server(tmp_path)
        (graphs,) = server.load("graphs", LAUNCHED)
        kept = server.account.used_bytes
        (other,) = server.load("other")

        assert kept == cuda.device_bytes() // 2 > 0
        for launches in (1, 2, 3):
            assert works(graphs, 3)
            assert works(graphs, 5)  # not by a graph, in the same block
            assert works(other, 3)
            assert (cuda.launches, server.account.used_bytes) == (launches, kept)
        assert (len(cuda.given), len(set(cuda.given))) == (2, 2)


class TestRefusals:
    @pytest.mark.parametrize(
        ("content", "reason", "hint"),
        [
            (b"", "cannot load", "the file is empty"),
            (b"version https://git-lfs.github.com/spec/v1\n", "cannot load", "Git LFS pointer"),
            (b"\x08\x09\x12\x07pytorch", "Magic tag does not match", "is the file a plan?"),
            (b"\x08\x09\x12\x07pytorch", "its header is not one of a plan, installed is", "is the file a plan?"),
            (plan_bytes()[:60], "Invalid size", "the file may be incomplete"),
            (b"\x09\0\0\0{'a': 1}  " + plan_bytes(), "Magic tag", "behind metadata of Ultralytics"),
            (plan_bytes(version="10.3.0.26"), "built with TensorRT 10.3.0.26, installed is 10.9.0.34", "one release"),
            (plan_bytes(capability="8.6"), "expecting compute 9.0 got compute 8.6", "one kind of GPU"),
            (plan_bytes(host_code=True), "host code", "version-compatible=true"),
            (plan_bytes(plugin="Mine"), "could not find plugin Mine", "plugins=PATH"),
            (plan_bytes(weights=1 << 40), "OutOfMemory", "not enough free memory for the weights"),
        ],
    )
    def test_a_file_that_cannot_be_loaded_says_why(
        self, cuda: StreamingCuda, tmp_path: Path, content: bytes, reason: str, hint: str
    ) -> None:
        refused = Bench(tmp_path, content).refusal()

        assert refused.code is Code.INVALID_ARG
        assert reason in refused.message
        assert hint in refused.hint

    @pytest.mark.parametrize(
        ("tensors", "reason"),
        [
            ({"x": ("INPUT", "FP8", (-1, 4)), "y": ("OUTPUT", "FLOAT", (-1, 4))}, "'x' of the plan is FP8"),
            ({"x": ("INPUT", "FLOAT", (-1, 4), "CHW32"), "y": ("OUTPUT", "FLOAT", (-1, 4))}, "is in the format Thirty"),
        ],
    )
    def test_tensors_that_cannot_be_served_are_named(
        self, cuda: StreamingCuda, tmp_path: Path, tensors: Mapping[str, Sequence[object]], reason: str
    ) -> None:
        refused = Bench(tmp_path, plan_bytes(tensors=tensors)).refusal()

        assert (refused.code, reason in str(refused)) == (Code.UNSUPPORTED, True)

    def test_without_the_package_the_command_that_installs_it_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        refused = Bench(tmp_path, plan_bytes()).refusal()

        assert "needs the package 'tensorrt', which is not installed" in refused.message
        assert "[tensorrt]" in refused.hint

    def test_a_package_that_is_too_old_is_refused(
        self, cuda: StreamingCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules["tensorrt"], "__version__", "8.6.1")

        assert "TensorRT 8.6.1 is installed, expected 10.3 or newer" in str(Bench(tmp_path, plan_bytes()).refusal())

    def test_the_file_for_the_capability_of_the_gpu_is_loaded(self, cuda: StreamingCuda, tmp_path: Path) -> None:
        bench = Bench(tmp_path, plan_bytes(), "h100.plan")
        config = replace(CONFIG, cc_model_filenames={"9.0": "h100.plan", "8.6": "a10.plan"})

        assert answers(bench.instance(config), request_of(x=rows(1, 4)))[0]["y"].shape == (1, 4)


class TestTensorRtConformance(BackendSuite):
    """The conformance suite, on the stand-in."""

    @pytest.fixture
    def backend_case(self, cuda: StreamingCuda, tmp_path: Path) -> BackendCase:
        def make(seed: int, batch: int) -> InferRequest:
            return request_of(x=np.random.default_rng(seed).random((batch, 4), "f4"))

        files = Bench(tmp_path, plan_bytes()).files
        return BackendCase(TensorRtBackend, files, CONFIG, make)
