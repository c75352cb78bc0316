"""Samples from a configuration, and instances that run them before anybody else."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal
from charonia.core.request import InferRequest
from charonia.server.backends.api import BatchSink, Execution, Outputs, Placement
from charonia.server.execution.executor import AsyncExecutor, BlockingExecutor
from charonia.server.lifecycle.loader import WarmupSample, samples, warm
from charonia.server.lifecycle.repository.data_files import read_warmup_files
from charonia.server.lifecycle.repository.scan import ModelFolder


def config(inputs: str, *, max_batch_size: int = 4, batch_size: int = 1, count: int = 0) -> ModelConfig:
    return parse(
        f'name: "m" max_batch_size: {max_batch_size} '
        f'model_warmup {{ name: "s" batch_size: {batch_size} count: {count} {inputs} }}'
    )


def given(datatype: str, dims: str, source: str, name: str = "IN") -> str:
    return f'inputs {{ key: "{name}" value {{ data_type: TYPE_{datatype} dims: {dims} {source} }} }}'


def array(datatype: str, dims: str, source: str, content: bytes = b"") -> "np.ndarray":
    (sample,) = samples(config(given(datatype, dims, source), max_batch_size=0), "1", {"f": content})
    return sample.requests[0].inputs["IN"].array


def test_a_sample_is_a_batch_of_requests_with_one_element_each() -> None:
    text = given("FP32", "[2, 3]", "zero_data: true") + given("INT64", "[1]", "zero_data: true", "OTHER")

    (sample,) = samples(config(text, batch_size=3, count=2), "7", {})

    assert (sample.name, sample.path, sample.count, len(sample.requests)) == ("s", "model_warmup[0]", 2, 3)
    assert {n: t.array.shape for n, t in sample.requests[0].inputs.items()} == {"IN": (1, 2, 3), "OTHER": (1, 1)}
    assert (sample.requests[0].model_name, sample.requests[0].model_version) == ("m", "7")


def test_a_sample_of_batch_size_0_is_skipped_and_no_count_means_once() -> None:
    text = given("FP32", "[1]", "zero_data: true")

    assert samples(config(text, batch_size=0), "1", {}) == []
    assert samples(config(text), "1", {})[0].count == 1


@pytest.mark.parametrize("datatype", [d for d in DataType if d is not DataType.BYTES])
def test_every_datatype_can_be_zero_and_random(datatype: DataType) -> None:
    name = datatype.config.removeprefix("TYPE_")

    zero, some = array(name, "[100]", "zero_data: true"), array(name, "[100]", "random_data: true")

    assert zero.dtype == some.dtype == datatype.numpy
    assert not zero.any()
    assert len(set(some.tolist())) > 1
    assert np.array_equal(some, array(name, "[100]", "random_data: true"))
    if datatype.numpy.kind == "f":
        assert some.min() >= 0
        assert some.max() <= 1


def test_strings_are_empty() -> None:
    assert array("STRING", "[2]", "zero_data: true").tolist() == [b"", b""]
    assert array("STRING", "[2]", "random_data: true").tolist() == [b"", b""]


def test_a_file_holds_elements_and_what_is_beyond_them_is_ignored() -> None:
    content = struct.pack("<5f", 1, 2, 3, 4, 5)

    assert array("FP32", "[2, 2]", 'input_data_file: "f"', content).tolist() == [[1, 2], [3, 4]]


def test_a_file_holds_strings_after_their_lengths() -> None:
    content = struct.pack("<I", 2) + b"ab" + struct.pack("<I", 0)

    assert array("STRING", "[2]", 'input_data_file: "f"', content).tolist() == [b"ab", b""]


@pytest.mark.parametrize(
    ("datatype", "content", "message"),
    [
        ("FP32", b"123", "expected 8 bytes for dims [2], got 3"),
        ("STRING", struct.pack("<I", 0), "expected 2 strings for dims [2], got 1"),
        ("STRING", b"\x01", "expected the length of a string"),
        ("STRING", struct.pack("<I", 9) + b"a", "expected 9 bytes of a string"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_with_the_path(datatype: str, content: bytes, message: str) -> None:
    with pytest.raises(ServingError) as caught:
        array(datatype, "[2]", 'input_data_file: "f"', content)

    assert caught.value.message.startswith("model_warmup[0].inputs[IN].input_data_file: 'f': ")
    assert message in caught.value.message


def test_files_are_read_from_the_folder_of_warm_up_data_and_from_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "f").write_bytes(b"data")
    (tmp_path / "secret").write_bytes(b"no")
    folder = ModelFolder(name="m", repository=tmp_path, actual_path=tmp_path, fingerprint="")

    def read(name: str, batch_size: int = 1) -> dict[str, bytes]:
        text = given("FP32", "[1]", f'input_data_file: "{name}"')
        return read_warmup_files(folder, config(text, batch_size=batch_size))

    assert read("f") == {"f": b"data"}
    assert read("absent", batch_size=0) == {}
    for name in ("../secret", "/etc/passwd", "absent", ""):
        with pytest.raises(ServingError, match=r"^model_warmup\[0\]\.inputs\[IN\]\.input_data_file: "):
            read(name)


class Instance:
    def __init__(self, error: Exception | None = None) -> None:
        self.batches: list[int] = []
        self.error = error

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        self.batches.append(len(requests))
        if self.error is not None:
            raise self.error
        return Execution([Outputs([])] * len(requests), 0, 0)

    def close(self) -> None:
        pass


class Elsewhere:
    """An asynchronous instance that answers as the test says."""

    def __init__(
        self, *, error: ServingError | None = None, is_decoupled: bool = False, is_silent: bool = False
    ) -> None:
        self.error = error
        self.is_decoupled = is_decoupled
        self.is_silent = is_silent
        self.kept: Sequence[Sequence[InferRequest]] = ()
        self.ran = 0

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        asyncio.get_running_loop().call_soon(self._run, len(requests), sink)

    def _run(self, count: int, sink: BatchSink) -> None:
        self.ran += 1
        assert not sink.is_cancelled(0)
        assert sink.frame().model == "m"
        if self.is_decoupled:
            sink.respond(0, Outputs([]), False)
            sink.finish(0, 0, leaves_open=True)
            for index in range(count):
                sink.respond(index, self.error, True)
            return
        if not self.is_silent:
            for index in range(count):
                sink.respond(index, self.error or Outputs([]), True)
        sink.finish(0, 0)

    def cancel(self, sink: BatchSink, index: int) -> None:
        pass

    def when_lost(self, lost: Callable[[], None]) -> None:
        pass

    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        self.kept = batches

    async def aclose(self) -> None:
        pass


def placement(name: str = "m_0_0") -> Placement:
    return Placement(name, InstanceKind.KIND_CPU)


def two_samples() -> list[WarmupSample]:
    request = InferRequest("m", {})
    return [
        WarmupSample("one", "model_warmup[0]", (request,), 2),
        WarmupSample("two", "model_warmup[1]", (request,) * 3, 1),
    ]


def warmed(*instances: Instance | Elsewhere, samples: Sequence[WarmupSample] | None = None) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        executors: list[BlockingExecutor | AsyncExecutor] = [
            BlockingExecutor(i, placement(), loop) if isinstance(i, Instance) else AsyncExecutor(i, placement())
            for i in instances
        ]
        try:
            await warm(ModelConfig(name="m"), "1", executors, two_samples() if samples is None else samples)
        finally:
            for executor in executors:
                await executor.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_every_instance_runs_every_sample_as_often_as_it_says() -> None:
    here, there = Instance(), Elsewhere()

    warmed(here, there)

    assert here.batches == [1, 1, 3]
    assert there.ran == 3
    assert [len(batch) for batch in there.kept] == [1, 1, 3]


def test_a_decoupled_model_is_warm_after_the_last_response_of_each_request() -> None:
    instance = Elsewhere(is_decoupled=True)

    warmed(instance)

    assert instance.ran == 3


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        (Instance(ValueError("bad")), "ValueError: bad"),
        (Elsewhere(error=internal("the model is broken")), "the model is broken"),
        (Elsewhere(error=internal("at the end"), is_decoupled=True), "at the end"),
        (Elsewhere(is_silent=True), "no response"),
    ],
)
def test_a_sample_that_fails_fails_the_load_and_says_which(instance: Instance | Elsewhere, message: str) -> None:
    with pytest.raises(ServingError) as caught:
        warmed(Instance(), instance)

    assert caught.value.code is Code.INTERNAL
    assert caught.value.message.startswith("model_warmup[0]: failed to run warmup sample 'one' on instance 'm_0_0': ")
    assert message in caught.value.message


def test_a_model_without_samples_runs_nothing() -> None:
    here, there = Instance(), Elsewhere()

    warmed(here, there, samples=[])

    assert here.batches == []
    assert (there.ran, there.kept) == (0, ())
