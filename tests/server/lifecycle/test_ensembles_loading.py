"""Ensembles follow the models of their steps through loads, reloads and unloads."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.support.closing import InLoop, close_later
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import until
from tests.support.recorded import RecordedScheduler

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.metadata import ModelState, ServerMetadata
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.backends.registry import installed_backends
from charonia.server.engine import ModelEngine
from charonia.server.facade import Services
from charonia.server.front_ends.engine_changes import EngineChanges
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.lifecycle import Lifecycle, LifecycleOptions
from charonia.server.model_options import ControlMode

READY, UNAVAILABLE = ModelState.READY, ModelState.UNAVAILABLE


class Harness:
    """An engine over one repository folder, or over several that are namespaces."""

    def __init__(self, repository: Path, mode: ControlMode = ControlMode.EXPLICIT, *more: Path) -> None:
        self.backends = Backends(installed_backends(), observed=RecordedScheduler)
        options = LifecycleOptions((repository, *more), mode, cores=2, has_namespaces=bool(more))
        self.lifecycle = Lifecycle(options, self.backends)
        self.engine = ModelEngine(self.lifecycle, ServerMetadata("test", "0", ()))
        close_later(self.close)

    async def infer(
        self, model: str = "e", name: str = "IN", *, outputs: tuple[RequestedOutput, ...] = ()
    ) -> InferResponse:
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

        def reply(outcome: object, final: bool) -> None:
            if isinstance(outcome, InferResponse):
                future.set_result(outcome)
            else:
                future.set_exception(outcome if isinstance(outcome, ServingError) else AssertionError(outcome))

        tensor = Tensor(name, DataType.FP32, np.arange(4, dtype="<f4"))
        self.engine.infer(InferRequest(model, {name: tensor}, outputs=outputs), reply)
        return await asyncio.wait_for(future, 10)

    def states(self) -> dict[str, ModelState | None]:
        return {entry.name: entry.state for entry in self.engine.index()}

    def reason(self, model: str = "e") -> str:
        return next(entry.reason for entry in self.engine.index() if entry.name == model)

    async def settle(self) -> None:
        await until(lambda: ModelState.UNLOADING not in self.states().values())

    async def close(self) -> None:
        await self.lifecycle.drain()
        await self.backends.aclose()


def step(
    model: str, given: str, wanted: str, *, version: int = -1, keys: tuple[str, str] = ("INPUT0", "OUTPUT0")
) -> str:
    return (
        f'step {{ model_name: "{model}" model_version: {version} input_map {{ key: "{keys[0]}" value: "{given}" }} '
        f'output_map {{ key: "{keys[1]}" value: "{wanted}" }} }} '
    )


NESTED = ("IN", "OUT")


def write_identity(
    repository: Path, name: str, *, dims: tuple[int, ...] = (4,), more: str = "", version: int = 1
) -> None:
    config = identity_pbtxt(dims=dims, max_batch_size=0, more=more)
    write_model(repository, name, "", config=config, version=version)


def write_ensemble(repository: Path, *steps: str, name: str = "e", output: str = "") -> None:
    tensor = "data_type: TYPE_FP32 dims: [ 4 ]"
    config = (
        f'platform: "ensemble" input {{ name: "IN" {tensor} }} output {{ name: "OUT" {tensor} {output} }} '
        f"ensemble_scheduling {{ {' '.join(steps)} }}"
    )
    write_model(repository, name, "", config=config)


def write_chain(repository: Path) -> None:
    write_identity(repository, "a")
    write_identity(repository, "b")
    write_ensemble(repository, step("a", "IN", "mid"), step("b", "mid", "OUT"))


@pytest.fixture
def harness(tmp_path: Path) -> InLoop:
    return InLoop(lambda: Harness(tmp_path))


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_at_start_ensembles_wait_for_their_models_whatever_they_are_called(
    tmp_path: Path, mode: ControlMode
) -> None:
    write_identity(tmp_path, "z", more='parameters { key: "creation_delay_sec" value { string_value: "0.05" } }')
    write_ensemble(tmp_path, step("middle", "IN", "OUT", keys=NESTED), name="a")
    write_ensemble(tmp_path, step("z", "IN", "OUT"), name="middle")
    harness = Harness(tmp_path, mode)

    assert await harness.lifecycle.load_at_start(()) == []

    assert set(harness.states().values()) == {READY}
    response = await harness.infer("a")
    assert response.outputs[0].array.tolist() == [0, 1, 2, 3]
    assert [s.name for s in await harness.engine.model_statistics()] == ["a", "middle", "z"]
    assert {s.success.count for s in await harness.engine.model_statistics()} == {1}
    assert harness.engine.model_metadata("a").platform == "ensemble"


async def test_an_explicit_load_brings_the_models_along_and_an_unload_leaves_those_that_were_asked_for(
    tmp_path: Path, harness: Harness
) -> None:
    write_chain(tmp_path)
    await harness.engine.load_model("b")

    await harness.engine.load_model("e")
    assert set(harness.states().values()) == {READY}
    await harness.engine.unload_model("e", unload_dependents=True)
    await harness.settle()

    assert harness.states() == {"a": UNAVAILABLE, "b": READY, "e": UNAVAILABLE}
    assert harness.reason() == harness.reason("a") == "unloaded"


async def test_models_stay_without_unload_dependents_and_while_another_ensemble_needs_them(
    tmp_path: Path, harness: Harness
) -> None:
    write_chain(tmp_path)
    write_ensemble(tmp_path, step("a", "IN", "OUT"), name="f")
    write_ensemble(tmp_path, step("e", "IN", "OUT", keys=NESTED), name="outer")
    assert await harness.lifecycle.load_at_start(("outer", "f")) == []

    await harness.engine.unload_model("f")
    await harness.settle()
    assert harness.states() == {"a": READY, "b": READY, "e": READY, "f": UNAVAILABLE, "outer": READY}
    await harness.engine.load_model("f")
    await harness.engine.unload_model("outer", unload_dependents=True)
    await harness.settle()
    assert harness.states() == {
        "a": READY,
        "b": UNAVAILABLE,
        "e": UNAVAILABLE,
        "f": READY,
        "outer": UNAVAILABLE,
    }


async def test_models_that_stay_without_their_ensemble_are_kept_for_an_engine_that_follows(tmp_path: Path) -> None:
    (private := tmp_path / "private").mkdir()
    repository = tmp_path / "models"
    write_chain(repository)

    before = Harness(repository)
    kept = EngineChanges(private)
    await kept.take_over(before.engine, Services(), has_ended=True)
    await before.engine.load_model("b")
    await before.engine.load_model("e")
    await before.engine.unload_model("e")
    await before.settle()
    following = Harness(repository)
    await EngineChanges(private).take_over(following.engine, Services(), has_ended=True)

    assert before.states()["a"] is before.states()["b"] is READY
    assert {name: state for name, state in following.states().items() if state is READY} == {"a": READY, "b": READY}
    for harness in (before, following):
        await harness.close()


async def test_models_of_an_ensemble_stay_until_its_last_requests_are_answered(
    tmp_path: Path, harness: Harness
) -> None:
    slow = 'parameters { key: "execute_delay_ms" value { string_value: "100" } }'
    write_chain(tmp_path)
    write_identity(tmp_path, "a", more=slow)
    await harness.engine.load_model("e")

    request = asyncio.ensure_future(harness.infer())
    await asyncio.sleep(0)
    await harness.engine.unload_model("e", unload_dependents=True)

    assert (await request).outputs[0].array.tolist() == [0, 1, 2, 3]
    await until(lambda: harness.states() == {"a": UNAVAILABLE, "b": UNAVAILABLE, "e": UNAVAILABLE})


async def test_an_ensemble_goes_with_a_model_of_its_steps_and_comes_back_with_it(
    tmp_path: Path, harness: Harness
) -> None:
    write_chain(tmp_path)
    write_ensemble(tmp_path, step("e", "IN", "OUT", keys=NESTED), name="outer")
    await harness.engine.load_model("outer")

    await harness.engine.unload_model("b")
    await harness.settle()
    assert harness.states() == {"a": READY, "b": UNAVAILABLE, "e": UNAVAILABLE, "outer": UNAVAILABLE}
    assert "ensemble 'e' depends on 'b' which has no loaded version." in harness.reason()
    assert "ensemble 'outer' depends on 'e' which has no loaded version. Model 'e' loading failed with error: " in (
        harness.reason("outer")
    )
    with pytest.raises(ServingError, match="'outer' has no available versions"):
        await harness.infer("outer")

    await harness.engine.load_model("b")
    assert set(harness.states().values()) == {READY}
    assert len((await harness.infer("outer")).outputs) == 1


async def test_an_ensemble_that_was_unloaded_does_not_come_back_by_itself(tmp_path: Path, harness: Harness) -> None:
    write_chain(tmp_path)
    await harness.engine.load_model("e")
    await harness.engine.unload_model("e")

    await harness.engine.load_model("b")
    await harness.settle()

    assert harness.states() == {"a": READY, "b": READY, "e": UNAVAILABLE}


async def test_an_ensemble_is_looked_at_again_when_a_model_is_reloaded(tmp_path: Path, harness: Harness) -> None:
    write_chain(tmp_path)
    await harness.engine.load_model("e")
    await harness.infer()

    await harness.engine.load_model("b")
    (counted,) = await harness.engine.model_statistics("e")
    assert counted.success.count == 1
    await harness.infer()
    (counted,) = await harness.engine.model_statistics("e")
    assert counted.success.count == 2

    write_identity(tmp_path, "b", dims=(5,))
    await harness.engine.load_model("b")
    assert harness.states()["e"] is UNAVAILABLE
    assert "ensemble tensor mid: inconsistent shape: [4] is inferred from model a while [5]" in harness.reason()

    write_identity(tmp_path, "b")
    await harness.engine.load_model("b")
    assert harness.states()["e"] is READY
    await harness.infer()


async def test_missing_models_and_versions_are_all_named(tmp_path: Path, harness: Harness) -> None:
    write_chain(tmp_path)
    write_model(tmp_path, "broken", "", config="max_batch_size: banana")
    write_ensemble(
        tmp_path,
        *(step("ghost", "IN", "x"), step("spirit", "x", "y"), step("broken", "y", "z")),
        step("a", "z", "OUT", version=3),
    )

    with pytest.raises(ServingError, match="load failed for model 'e'") as raised:
        await harness.engine.load_model("e")

    assert raised.value.code is Code.INVALID_ARG
    text = str(raised.value)
    assert "ensemble e contains models that are not available or ambiguous: ghost, spirit" in text
    assert "ensemble 'e' depends on 'broken' which has no loaded version. Model 'broken' loading failed with" in text
    assert "step[3].model_version: ensemble 'e' depends on 'a' whose required version 3 is not loaded." in text
    assert harness.states()["e"] is UNAVAILABLE
    assert "ghost" not in harness.states()


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.EXPLICIT])
async def test_what_is_wrong_with_a_model_is_one_error_however_many_ensembles_need_it(
    tmp_path: Path, mode: ControlMode, caplog: pytest.LogCaptureFixture
) -> None:
    write_chain(tmp_path)
    write_model(tmp_path, "b", "", config="max_batch_size: banana")
    write_ensemble(tmp_path, step("e", "IN", "OUT", keys=NESTED), name="outer")
    harness = Harness(tmp_path, mode)

    (failure,) = await harness.lifecycle.load_at_start(("outer",))

    assert failure.count("banana") == 1
    assert "'b'" in failure
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert [error.count("banana") for error in errors] == [1]
    assert sorted(record.message for record in caplog.records if record.levelname == "WARNING") == [
        "'e' cannot be loaded without 'b'",
        "'outer' cannot be loaded without 'b'",
    ]
    with pytest.raises(ServingError, match=r"Model 'b' loading failed with error: .*banana"):
        await harness.infer("outer")


async def test_a_fault_in_the_configuration_of_an_ensemble_is_an_error_though_a_model_is_missing_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harness: Harness
) -> None:
    write_chain(tmp_path)
    write_model(tmp_path, "b", "", config="max_batch_size: banana")
    await harness.lifecycle.load_at_start(("e",))
    write_model(tmp_path, "e", "", config="max_batch_size: cherry")

    with pytest.raises(ServingError, match="cherry"):
        await harness.engine.load_model("e")

    assert [r.levelname for r in caplog.records if "cherry" in r.message] == ["ERROR"]


async def test_an_ensemble_with_a_fault_of_its_own_has_an_error_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_chain(tmp_path)
    write_identity(tmp_path, "b", dims=(5,))
    write_ensemble(tmp_path, step("e", "IN", "OUT", keys=NESTED), name="outer")
    harness = Harness(tmp_path, ControlMode.NONE)

    (failure,) = await harness.lifecycle.load_at_start(())

    assert "load failed for model 'e': " in failure
    assert [r.levelname for r in caplog.records if "inconsistent shape" in r.message] == ["ERROR"]
    assert "'outer' cannot be loaded without 'e'" in caplog.text


async def test_what_only_the_whole_graph_tells_is_named(tmp_path: Path, harness: Harness) -> None:
    decoupled = "model_transaction_policy { decoupled: true }"
    write_identity(tmp_path, "a", more=decoupled)
    pair = (
        'backend: "identity" input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } '
        'input { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } '
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } '
        'output { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } '
    )
    write_model(tmp_path, "pair", "", config=pair)
    inputs = 'input_map {{ key: "INPUT0" value: "{}" }} input_map {{ key: "INPUT1" value: "{}" }} '
    outputs = 'output_map {{ key: "OUTPUT0" value: "{}" }}'
    both = f'step {{ model_name: "pair" model_version: -1 {inputs.format("x", "y")} {outputs.format("OUT")} }}'
    circle = step("a", "p", "q") + step("a", "q", "p")
    write_ensemble(tmp_path, step("a", "IN", "x"), step("a", "IN", "y"), both, circle)

    with pytest.raises(ServingError) as raised:
        await harness.engine.load_model("e")

    text = str(raised.value)
    assert "step[2].input_map: in ensemble e, step pair receives inputs originated from different decoupled" in text
    assert "step[3].input_map: in ensemble e, step a can never run" in text
    assert "step[4].input_map: in ensemble e, step a can never run" in text


@pytest.mark.parametrize(
    ("steps", "fits"),
    [
        (step("a", "IN", "OUT") + step("b", "IN", "OUT1"), False),
        (step("a", "IN", "OUT") + step("a", "IN", "OUT1"), False),
        (step("a", "IN", "OUT") + step("b", "OUT", "OUT1"), True),
        (step("a", "IN", "OUT") + step("c", "IN", "OUT1"), True),
        (step("a", "IN", "x") + step("c", "x", "OUT") + step("c", "x", "OUT1"), True),
    ],
)
async def test_outputs_of_unrelated_decoupled_steps_are_refused(
    tmp_path: Path, steps: str, fits: bool, harness: Harness
) -> None:
    for name in "ab":
        write_identity(tmp_path, name, more="model_transaction_policy { decoupled: true }")
    write_identity(tmp_path, "c")
    write_ensemble(tmp_path, steps, output='} output { name: "OUT1" data_type: TYPE_FP32 dims: [ 4 ]')

    if fits:
        await harness.engine.load_model("e")
    else:
        with pytest.raises(ServingError, match="outputs OUT, OUT1 originate from different decoupled models"):
            await harness.engine.load_model("e")


async def test_an_ensemble_whose_load_failed_answers_once_its_model_does(tmp_path: Path) -> None:
    write_chain(tmp_path)
    write_model(tmp_path, "b", "", config="max_batch_size: banana")
    harness = Harness(tmp_path, ControlMode.POLL)
    assert len(await harness.lifecycle.load_at_start(())) == 1

    write_identity(tmp_path, "b")
    while harness.states()["e"] is not READY:
        await harness.lifecycle.poll()

    await harness.infer()


async def test_polling_follows_models_that_go_and_come_back(tmp_path: Path) -> None:
    write_chain(tmp_path)
    harness = Harness(tmp_path, ControlMode.POLL)
    await harness.lifecycle.load_at_start(())

    (tmp_path / "b").rename(tmp_path / ".b")
    while harness.states()["e"] is READY:
        await harness.lifecycle.poll()
    assert "depends on 'b'" in harness.reason()
    (tmp_path / ".b").rename(tmp_path / "b")
    while harness.states()["e"] is not READY:
        await harness.lifecycle.poll()

    await harness.infer()


async def test_with_namespaces_a_step_follows_its_model_from_one_repository_to_another(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_ensemble(one, step("a", "IN", "OUT"))
    write_identity(one, "a")
    write_identity(two, "a")
    harness = Harness(one, ControlMode.POLL, two)
    assert await harness.lifecycle.load_at_start(()) == []

    async def until_it_means(repository: Path) -> None:
        while True:
            await harness.infer()  # in between, too
            scheduling = harness.engine.model_config("e").ensemble_scheduling
            assert scheduling is not None
            if scheduling.step[0].model_namespace == str(repository):
                break
            await harness.lifecycle.poll()

    await until_it_means(one)
    (one / "a").rename(tmp_path / "a")
    await until_it_means(two)
    await harness.lifecycle.table.retired()
    assert harness.lifecycle.table.models.keys() == {f"{one}/e", f"{two}/a"}
    (tmp_path / "a").rename(one / "a")
    await until_it_means(one)

    (one / "a").rename(two / "other")
    (two / "a").rename(tmp_path / "a")
    while harness.states()["e"] is READY:
        await harness.lifecycle.poll()
    assert "depends on 'a'" in harness.reason()
    (tmp_path / "a").rename(two / "a")
    while harness.states()["e"] is not READY:
        await harness.lifecycle.poll()
    await until_it_means(two)


async def test_with_namespaces_a_load_request_finds_that_a_model_has_moved(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_ensemble(one, step("a", "IN", "OUT"))
    write_identity(one, "a")
    write_identity(two, "a")
    harness = Harness(one, ControlMode.EXPLICIT, two)
    assert await harness.lifecycle.load_at_start(("e",)) == []

    (one / "a").rename(tmp_path / "a")
    await harness.engine.load_model("e")

    scheduling = harness.engine.model_config("e").ensemble_scheduling
    assert scheduling is not None
    assert scheduling.step[0].model_namespace == str(two)


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.EXPLICIT])
async def test_ensembles_that_contain_each_other_are_refused(tmp_path: Path, mode: ControlMode) -> None:
    for name, inner in (("e", "f"), ("f", "g"), ("g", "e")):
        write_ensemble(tmp_path, step(inner, "IN", "OUT", keys=NESTED), name=name)
    harness = Harness(tmp_path, mode)

    failures = await harness.lifecycle.load_at_start(() if mode is ControlMode.NONE else ("e",))

    assert "circular dependency between ensembles: " in " ".join(failures)
    assert set(harness.states().values()) == {UNAVAILABLE}
    if mode is ControlMode.EXPLICIT:
        write_identity(tmp_path, "a")
        write_ensemble(tmp_path, step("a", "IN", "OUT"), name="g")
        await harness.engine.load_model("g")
        assert set(harness.states().values()) == {READY}
        await harness.infer()


async def test_a_reload_that_fails_leaves_the_ensemble_as_it_was(tmp_path: Path, harness: Harness) -> None:
    write_chain(tmp_path)
    await harness.engine.load_model("e")
    for steps in (step("ghost", "IN", "OUT"), step("e", "IN", "OUT", keys=NESTED)):
        write_ensemble(tmp_path, steps)
        with pytest.raises(ServingError):
            await harness.engine.load_model("e")
        assert len((await harness.infer()).outputs) == 1

    await harness.engine.load_model("a")
    assert harness.states() == {"a": READY, "b": READY, "e": READY}
    write_identity(tmp_path, "e")
    await harness.engine.load_model("e")
    await harness.engine.unload_model("a")
    await harness.settle()
    assert harness.states()["e"] is READY


async def test_a_model_that_two_loads_need_is_loaded_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harness: Harness
) -> None:
    write_chain(tmp_path)
    write_ensemble(tmp_path, step("a", "IN", "OUT"), name="f")

    with caplog.at_level("INFO"):
        await asyncio.gather(*(harness.engine.load_model(name) for name in ("a", "e", "f")))

    assert [record.message for record in caplog.records].count("loading: a:1") == 1
    assert set(harness.states().values()) == {READY}


async def test_an_unload_of_a_step_waits_for_the_load_of_its_ensemble(tmp_path: Path, harness: Harness) -> None:
    write_chain(tmp_path)

    load = asyncio.ensure_future(harness.engine.load_model("e"))
    while harness.states().get("a") is not ModelState.LOADING:
        await asyncio.sleep(0)
    await harness.engine.unload_model("a")

    await load
    await harness.settle()
    assert harness.states() == {"a": UNAVAILABLE, "b": READY, "e": UNAVAILABLE}


async def test_labels_are_those_of_the_model_that_writes_the_output(tmp_path: Path, harness: Harness) -> None:
    write_identity(tmp_path, "a")
    config = tmp_path / "a" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "OUTPUT0"', 'name: "OUTPUT0" label_filename: "labels.txt"'))
    (tmp_path / "a" / "labels.txt").write_text("zero\none\ntwo\nthree\n")
    write_ensemble(tmp_path, step("a", "IN", "OUT"), name="f")
    write_ensemble(tmp_path, step("f", "IN", "OUT", keys=NESTED))
    write_ensemble(tmp_path, step("f", "IN", "OUT", keys=NESTED), name="own", output='label_filename: "own.txt"')
    (tmp_path / "own" / "own.txt").write_text("a\nb\nc\nd\n")
    await harness.lifecycle.load_at_start(("*",))
    top = (RequestedOutput("OUT", 1),)

    assert (await harness.infer(outputs=top)).outputs[0].array.tolist() == [b"3.000000:3:three"]
    assert (await harness.infer("own", outputs=top)).outputs[0].array.tolist() == [b"3.000000:3:d"]
    (tmp_path / "a" / "labels.txt").write_text("null\neins\nzwei\ndrei\n")
    await harness.engine.load_model("a")
    assert (await harness.infer(outputs=top)).outputs[0].array.tolist() == [b"3.000000:3:drei"]


async def test_an_ensemble_without_a_version_folder_says_what_to_make(tmp_path: Path, harness: Harness) -> None:
    write_chain(tmp_path)
    (tmp_path / "e" / "1").rmdir()

    with pytest.raises(ServingError, match=r"at least one version must be available.*make an empty one, e/1"):
        await harness.engine.load_model("e")


async def test_a_missing_version_does_not_hide_what_is_wrong_in_the_configuration(
    tmp_path: Path, harness: Harness
) -> None:
    write_ensemble(tmp_path, name="e")
    write_model(tmp_path, "m", "", config=identity_pbtxt(dims=(-7,), max_batch_size=-1))
    write_model(tmp_path, "n", "", config='input { name: "X" data_type: TYPE_FP32 dims: [ -7 ] }')
    write_model(tmp_path, "t", "", config=identity_pbtxt(dims=(-7,)))
    for name in "emnt":
        (tmp_path / name / "1").rmdir()
    texts = {}
    for name in "emnt":
        with pytest.raises(ServingError, match="at least one version must be available") as raised:
            await harness.engine.load_model(name)
        texts[name] = str(raised.value)

    assert "must specify 'step' for ensemble 'e'" in texts["e"]
    assert "  input[0].dims[0]: " in texts["m"]
    assert "'max_batch_size' must be non-negative value for m, got -1" in texts["m"]
    assert "  input[0].dims[0]: " in texts["n"]
    assert "backend" not in texts["n"]
    # Only what depends on a version's files is no reason why the folder itself cannot be used.
    polled = {name for name in texts if texts[name].startswith(f"failed to load '{name}', failed to poll from model")}
    assert polled == {"e", "m", "n"}


async def test_a_metric_family_that_is_not_there_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harness: Harness
) -> None:
    control = 'metric_control { metric_identifier { family: "nv_none" } histogram_options { buckets: 1 } }'
    write_identity(tmp_path, "a", more=f"model_metrics {{ {control} }}")

    await harness.engine.load_model("a")

    assert harness.states()["a"] is READY
    assert "model 'a': metric_control of 'nv_none' is ignored; known are nv_inference_first" in caplog.text


async def test_a_step_that_was_unloaded_in_between_is_named(tmp_path: Path, harness: Harness) -> None:
    slow = 'parameters { key: "execute_delay_ms" value { string_value: "50" } }'
    write_chain(tmp_path)
    write_identity(tmp_path, "a", more=slow)
    await harness.engine.load_model("e")

    request = asyncio.ensure_future(harness.infer())
    await asyncio.sleep(0)
    await harness.engine.unload_model("b")

    with pytest.raises(ServingError, match=r"^in ensemble 'e', Request for unknown model: 'b' has no avail"):
        await request


async def test_what_is_in_flight_at_shutdown_still_has_its_models(tmp_path: Path, harness: Harness) -> None:
    slow = 'parameters { key: "execute_delay_ms" value { string_value: "50" } }'
    write_chain(tmp_path)
    write_identity(tmp_path, "a", more=slow)
    await harness.engine.load_model("e")
    request = asyncio.ensure_future(harness.infer())
    await asyncio.sleep(0)

    harness.engine.begin_exit()
    await harness.lifecycle.drain()

    assert len((await request).outputs) == 1
    with pytest.raises(ServingError):
        await harness.infer("a", "INPUT0")
