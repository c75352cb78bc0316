"""What the engines of language models have in common, with an engine in a worker process that does as it is told."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.process import until

from charonia.config.backends import BackendRecord, Package
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, ModelFiles, Outputs, Placement, Result
from charonia.server.backends.language.backend import LanguageBackend
from charonia.server.backends.workers.instance import PythonInstance
from charonia.server.backends.workers.model import PythonModel
from charonia.server.machine.private_folder import PREFIX
from charonia.testing.backend_suite import StreamSink

ENGINE = """
import asyncio

from ...language.worker.text_stream import CHAT
from .words import PIECE


class Engine:
    def __init__(self, setup):
        self.setup = setup
        self.died = ""

    async def start(self):
        if self.setup.options.get("start") == "die":
            self.setup.die("there is no such model")
        self.released = asyncio.Event()

    def problem(self):
        return self.died

    async def stop(self):
        print("stopped", flush=True)

    async def answer(self, request):
        await getattr(self, request.text.split()[0])(request)

    async def count(self, request):
        for number in range(int(request.text.split()[1])):
            request.send({"text_output": PIECE.format(number)})
            await asyncio.sleep(0)
        request.send({"text_output": "", "num_output_tokens": [1, 2]}, {"completion_tokens": 5}, final=True)

    async def show(self, request):
        shown = [request.id, request.route, request.stream, request.excludes_input, sorted(request.returns)]
        request.send({"text_output": repr([*shown, request.sampling, request.images])}, final=True)

    async def hang(self, request):
        request.send({"text_output": "begun"})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("aborted", request.id, flush=True)
            raise

    async def gather(self, request):
        await self.released.wait()
        request.send({"text_output": "together"}, final=True)

    async def release(self, request):
        self.released.set()

    async def die(self, request):
        request.send({"text_output": "begun"})
        self.died = "its heart stopped"
        await asyncio.Event().wait()

    async def refuse(self, request):
        raise self.setup.error("not today", self.setup.pb_utils.TritonError.UNAVAILABLE)

    async def stumble(self, request):
        raise LookupError("a fault of the engine")

    async def setup_says(self, request):
        s = self.setup
        assert s.routes == {CHAT, "completions"}
        request.send({"text_output": [s.model_name, str(s.threads), s.version_dir, s.folder]}, final=True)
"""


class FakeBackend(LanguageBackend):
    name = "fake"

    def __init__(self, folder: Path, options: Mapping[str, object]) -> None:
        self.engine = folder / "fake" / "worker" / "engine.py"  # type: ignore[misc] # of each test
        self.engine.parent.mkdir(parents=True)
        self.engine.write_text(ENGINE)
        (self.engine.parent / "words.py").write_text("PIECE = '{} '\n")
        self._options = options

    async def options(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Mapping[str, object]:
        return self._options


class Sink(StreamSink):
    """A sink of one request, which counts what comes after its caller has left, too."""

    def __init__(self) -> None:
        super().__init__(1)
        self.count = 0
        self.begun = asyncio.Event()

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        self.begun.set()
        self.count += result is not None
        super().respond(index, result, final)

    @property
    def results(self) -> list[Result]:
        return self.outputs[0]


class Bench:
    def __init__(self, model: PythonModel, instance: PythonInstance) -> None:
        self.model = model
        self.instance = instance

    def ask(self, text: str | bytes, **more: Any) -> Sink:
        sink = Sink()
        parameters = {key: more.pop(key) for key in ("openai", "temperature", "lora_name") if key in more}
        inputs = {"text_input": text if isinstance(text, bytes) else text.encode(), **more}
        tensors = {name: tensor(name, value) for name, value in inputs.items()}
        self.instance.start([InferRequest("m", tensors, id=str(text)[:20], parameters=parameters)], sink)  # type: ignore[arg-type]
        return sink

    async def answer(self, text: str | bytes, **more: Any) -> list[Result]:
        sink = self.ask(text, **more)
        await asyncio.wait_for(sink.ended, 60)
        return sink.results


def tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, bool):
        return Tensor(name, DataType.BOOL, np.array([value]))
    if isinstance(value, int):
        return Tensor(name, DataType.INT32, np.array([value], np.int32))
    return Tensor(name, DataType.BYTES, np.array([value], object))


@asynccontextmanager
async def running(folder: Path, **options: object) -> AsyncIterator[Bench]:
    (folder / "m" / "1").mkdir(parents=True)
    files, settings = ModelFiles(folder / "m", 1, folder / "m" / "1"), BackendSettings()
    backend = FakeBackend(folder, options)
    config = (await backend.complete(files, ModelConfig(name="m", backend="fake"), settings)).config
    model = await backend.load(files, config, settings)
    try:
        instance = await model.create_instance(Placement("m_0_0", InstanceKind.KIND_CPU, threads=3))
        assert isinstance(instance, PythonInstance)
        yield Bench(model, instance)
        await instance.aclose()
    finally:
        await model.aclose()


def text_of(results: list[Result]) -> str:
    found = []
    for result in results:
        assert isinstance(result, Outputs), result
        found += [each.decode() for tensor in result.tensors if tensor.name == "text_output" for each in tensor.array]
    return "".join(found)


def error_of(results: list[Result]) -> ServingError:
    assert isinstance(results[-1], ServingError)
    return results[-1]


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    await until(lambda: text in caplog.text)


async def test_an_engine_answers_in_pieces_and_says_how_many_tokens(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        results = await bench.answer("count 3")
        assert text_of(results) == "0 1 2 "
        last = results[-1]
        assert isinstance(last, Outputs)
        assert last.parameters == {"completion_tokens": 5}
        (numbers,) = [each for each in last.tensors if each.name == "num_output_tokens"]
        assert (numbers.datatype, numbers.array.tolist()) == (DataType.UINT32, [1, 2])


async def test_an_engine_knows_its_model_and_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = []

    async with running(tmp_path) as bench:
        (result,) = await bench.answer("setup_says")
        assert isinstance(result, Outputs)
        *known, folder = (each.decode() for each in result.tensors[0].array)
        assert known == ["m", "3", str(tmp_path / "m" / "1")]
        assert os.stat(folder).st_mode & 0o777 == 0o700
        assert Path(folder).name.startswith(PREFIX)  # the next server removes it, should this one be killed
        folders.append(folder)
    assert not os.path.exists(folders[0])


async def test_a_request_is_read_from_inputs_and_parameters(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        more = {"stream": True, "return_finish_reason": True, "return_logprobs": False}
        text = text_of(await bench.answer("show", sampling_parameters=b'{"top_p": 1}', temperature=2, seed=5, **more))
        assert text == repr(["show", "", True, True, ["finish_reason"], {"temperature": 2, "seed": 5, "top_p": 1}, []])
        text = text_of(await bench.answer("show", image=b"aGk=", openai="completions"))
        assert text == repr(["show", "completions", False, None, [], {}, ["aGk="]])


async def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        for named, asked in (
            ("'text_input': expected UTF-8", {"text": b"\xff"}),
            ("'sampling_parameters': expected a JSON object", {"text": "show", "sampling_parameters": b"{"}),
            ("'sampling_parameters': expected a JSON object, got list", {"text": "show", "sampling_parameters": b"[]"}),
            ("the model has no route 'audio'", {"text": "{}", "openai": "audio"}),
            ("'exclude_input_in_output'", {"text": "show", "stream": True, "exclude_input_in_output": False}),
        ):
            error = error_of(await bench.answer(**asked))
            assert (error.code, named in error.message) == (Code.INVALID_ARG, True), error


async def test_an_engines_errors_have_their_codes_and_its_faults_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as bench:
        error = error_of(await bench.answer("refuse"))
        assert (error.code, error.message) == (Code.UNAVAILABLE, "not today")
        error = error_of(await bench.answer("stumble"))
        assert error.code is Code.INTERNAL
        assert "LookupError: a fault of the engine" in error.message
        await logged(caplog, "Traceback")
        assert text_of(await bench.answer("count 1")) == "0 "


async def test_the_engine_is_told_at_once_of_a_caller_that_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async with running(tmp_path) as bench:
        stays, *leave = [bench.ask(f"hang {number}") for number in range(51)]
        for sink in (stays, *leave):
            await asyncio.wait_for(sink.begun.wait(), 60)
        for sink in leave:
            sink.cancel(bench.instance, 0)
        await logged(caplog, "aborted hang 50")
        assert caplog.text.count("aborted") == 50
        assert "aborted hang 0" not in caplog.text
        assert text_of(await bench.answer("count 1")) == "0 "
        assert [sink.count for sink in leave] == [1] * 50  # nothing comes after the caller has left


async def test_responses_of_one_turn_travel_together(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        messages = []
        responses = bench.instance._batches.responses

        def counted(message: Any, link: Any) -> None:
            messages.append(len(message.header[1]))
            responses(message, link)

        bench.instance._batches.responses = counted  # type: ignore[method-assign]
        waiting = [bench.ask("gather") for _ in range(100)]
        await bench.answer("count 1")
        messages.clear()
        await bench.answer("release")
        for sink in waiting:
            await asyncio.wait_for(sink.ended, 60)
        assert sum(messages) == 101
        assert len(messages) <= 3
        assert {text_of(sink.results) for sink in waiting} == {"together"}


@pytest.mark.parametrize(("how", "why"), [("die", "its heart stopped"), ("kill", "SIGKILL")])
async def test_a_dead_engine_fails_its_open_requests_and_another_one_is_started(
    tmp_path: Path, how: str, why: str
) -> None:
    async with running(tmp_path) as bench:
        hanging = bench.ask("hang")
        await asyncio.wait_for(hanging.begun.wait(), 60)
        before = bench.instance.pid
        if how == "kill":
            os.kill(before, signal.SIGKILL)
        else:
            assert why in error_of(await bench.answer("die")).message
        await asyncio.wait_for(hanging.ended, 60)
        assert why in error_of(hanging.results).message
        assert text_of(hanging.results[:1]) == "begun"
        assert text_of(await bench.answer("count 2")) == "0 1 "
        assert bench.instance.pid not in (0, before)
        (worker,) = bench.model.workers()
        assert (worker.restarts, worker.problem) == (1, "")


async def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="the engine has died: there is no such model"):
        async with running(tmp_path, start="die"):
            pytest.fail("it has started")


async def test_an_engine_is_stopped_with_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async with running(tmp_path) as bench:
        await bench.answer("count 1")
    assert "stopped" in caplog.text


async def test_a_package_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = BackendRecord(name="fake", packages=(Package("none", "no_such_package", "llama"),))
    monkeypatch.setattr("charonia.server.backends.language.backend.record_of", lambda name: record)
    with pytest.raises(ServingError, match="needs the package 'no_such_package'") as caught:
        async with running(tmp_path):
            pytest.fail("it has loaded")
    assert caught.value.code is Code.UNSUPPORTED
    assert "[llama]" in caught.value.hint


async def test_requests_are_refused_while_there_are_too_many(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        sinks = [bench.ask("gather") for _ in range(8192)]
        error = error_of(await bench.answer("count 1"))
        assert error.code is Code.UNAVAILABLE
        assert "8192 requests already" in error.message
        sinks[0].cancel(bench.instance, 0)
        async with asyncio.timeout(200):
            while await bench.answer("release"):  # refused until the other one has gone
                await asyncio.sleep(0.01)
            await sinks[-1].ended
