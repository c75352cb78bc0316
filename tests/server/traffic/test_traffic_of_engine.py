"""Requests without a version through an engine: split, kept on a version, copied; versions that come and go."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.lifecycle.test_lifecycle import CONFIG, Harness, write_model
from tests.support import models
from tests.support.closing import InLoop
from tests.support.process import until

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.metadata import ModelState
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.backends.api import ModelFiles
from charonia.server.traffic import canary as canary_module
from charonia.server.traffic import split
from charonia.server.traffic.canary import VersionFigures
from charonia.server.traffic.service import TrafficService

ALL = CONFIG + "version_policy: { all { } }\n"
SEQUENCES = (
    ALL + "sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 8 } }\n"
)


class Served(Harness):
    """A model with versions 1, 2 and 3, whose answers are 1, 2 and 3."""

    @property
    def traffic(self) -> TrafficService:
        return self.lifecycle.table.traffic

    async def begin(self, config: str) -> None:
        write_model(self.repository, config=config, v1=1, v2=2, v3=3)
        assert await self.lifecycle.load_at_start(("*",)) == []
        self.engine.started()

    async def change(self, **members: object) -> Mapping[str, Any]:
        return await self.traffic.change("m", dict(members))

    async def shown(self) -> dict[str, Any]:
        return await self.traffic.show("m")

    async def send(self, model: str = "m", **fields: Any) -> float:
        return await self.sent(InferRequest(model, {"IN": Tensor("IN", DataType.FP32, np.zeros(1, "<f4"))}, **fields))

    async def sent(self, request: InferRequest) -> float:
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def reply(outcome: object, final: bool) -> None:
            if isinstance(outcome, InferResponse):
                assert request.model_name == "e" or outcome.model_version == str(int(outcome.outputs[0].array[0]))
                future.set_result(float(outcome.outputs[0].array[0]))
            else:
                future.set_exception(outcome if isinstance(outcome, ServingError) else AssertionError(outcome))

        self.engine.infer(request, reply)
        return await asyncio.wait_for(future, 10)

    async def counts(self, number: int = 100, **fields: Any) -> Counter[float]:
        return Counter([await self.send(**fields) for _ in range(number)])

    async def version(self, number: int) -> Mapping[str, Any]:
        shown = await self.shown()
        return next(each for each in shown["versions"] if each["version"] == str(number))


@asynccontextmanager
async def serving(path: Path, config: str = ALL) -> AsyncIterator[Served]:
    harness = Served(path)
    await harness.begin(config)
    yield harness
    await harness.lifecycle.drain()
    harness.traffic.close()
    assert (harness.backend.open_models, harness.backend.open_instances) == (0, 0)


@pytest.fixture
def served(tmp_path: Path) -> InLoop:
    return InLoop(lambda: serving(tmp_path))


async def test_without_traffic_the_route_is_the_runner_of_the_newest_version(served: Served) -> None:
    routes = served.lifecycle.table.routes
    assert routes["m", ""] is routes["m", "3"]
    assert [(await served.version(number))["share"] for number in (1, 2, 3)] == [0.0, 0.0, 1.0]
    assert served.traffic.words("m") == []

    await served.change(weights={"1": 1})
    assert routes["m", ""] is not routes["m", "1"]
    assert served.engine.find("m") is routes["m", "1"]

    await served.traffic.reset("m")
    assert routes["m", ""] is routes["m", "3"]


async def test_weights_split_requests_that_name_no_version(served: Served) -> None:
    await served.change(weights={"1": 70, "2": 30})

    assert await served.counts() == pytest.approx({1: 70, 2: 30}, abs=2)
    assert await served.counts(10, model_version="3") == {3: 10}
    one = await served.version(1)
    assert (one["errors"], one["in_flight"], one["share"]) == (0, 0, 0.7)
    assert one["requests"] + (await served.version(2))["requests"] == 100
    assert one["latency_us"]["p50"] > 0
    assert (await served.version(3))["requests"] == 0
    assert (await served.engine.model_statistics("m", "3"))[0].inference_count == 10


async def test_a_client_stays_on_its_version(served: Served) -> None:
    await served.change(weights={"1": 50, "2": 50}, sticky="header:x-user")
    first = [await served.send(affinity=f"user-{number}") for number in range(40)]

    assert set(first) == {1, 2}
    assert [await served.send(affinity=f"user-{number}") for number in range(40)] == first
    await served.change(weights={"1": 20, "2": 80})
    later = [await served.send(affinity=f"user-{number}") for number in range(40)]
    assert {(a, b) for a, b in zip(first, later, strict=True)} == {(1, 1), (1, 2), (2, 2)}

    await served.change(sticky="correlation_id")
    by_id = [await served.send(correlation_id=number) for number in range(1, 41)]
    assert [await served.send(correlation_id=number) for number in range(1, 41)] == by_id
    assert set(by_id) == {1, 2}


async def test_the_headers_that_front_ends_look_at_follow_the_settings(served: Served) -> None:
    assert served.traffic.sticky == {}
    await served.change(sticky="header:X-User")
    assert served.traffic.sticky == {"m": (b"x-user",)}
    await served.change(sticky="key")
    assert served.traffic.sticky == {"m": (b"authorization", b"x-api-key")}
    await served.change(sticky="correlation_id")
    assert served.traffic.sticky == {}


async def test_the_share_of_a_version_that_is_not_ready_goes_to_the_others(tmp_path: Path, served: Served) -> None:
    await served.change(weights={"1": 50, "2": 25, "3": 25})
    write_model(tmp_path, config=CONFIG + "version_policy: { specific { versions: [ 1, 3 ] } }")
    await served.engine.load_model("m")

    assert await served.counts(90) == pytest.approx({1: 60, 3: 30}, abs=3)
    assert (await served.version(2))["is_ready"] is False
    assert "Version 2 has a weight and is not ready: the others get its share" in served.traffic.words("m")

    write_model(tmp_path, config=CONFIG + "version_policy: { specific { versions: [ 2 ] } }")
    await served.engine.load_model("m")
    assert await served.counts(10) == {2: 10}
    write_model(tmp_path, config=ALL)
    await served.engine.load_model("m")
    assert set(await served.counts(100)) == {1, 2, 3}


async def test_without_any_weighted_version_the_newest_that_is_ready_answers(tmp_path: Path, served: Served) -> None:
    await served.change(weights={"1": 1})
    write_model(tmp_path, config=CONFIG + "version_policy: { specific { versions: [ 2, 3 ] } }")
    await served.engine.load_model("m")

    assert await served.counts(10) == {3: 10}


async def test_settings_outlast_a_model_that_is_unloaded_and_comes_back(served: Served) -> None:
    await served.change(weights={"1": 1})
    await served.engine.unload_model("m")
    with pytest.raises(ServingError, match="has no available versions"):
        await served.send()
    await served.engine.load_model("m")

    assert await served.counts(10) == {1: 10}


async def test_no_request_is_lost_while_weights_and_versions_change(tmp_path: Path, served: Served) -> None:
    answers: Counter[float] = Counter()
    is_over = False

    async def client() -> None:
        while not is_over:
            answers[await served.send()] += 1
            await asyncio.sleep(0.001)  # a loop that is never idle leaves the threads that load next to nothing

    clients = [asyncio.create_task(client()) for _ in range(8)]
    for round_ in range(12):
        await served.change(weights={"1": round_ % 3, "2": 1, "3": round_ % 2})
        versions = (1, 2) if round_ % 2 else (2, 3)
        policy = f"version_policy: {{ specific {{ versions: {list(versions)} }} }}"
        write_model(tmp_path, config=CONFIG + policy)
        await served.engine.load_model("m")
        write_model(tmp_path, config=ALL)
        await served.engine.load_model("m")
    is_over = True
    await asyncio.gather(*clients)

    assert min(answers[version] for version in (1, 2, 3)) > 0
    shown = await served.shown()
    assert sum(each["requests"] for each in shown["versions"]) == sum(answers.values())
    assert [each["in_flight"] for each in shown["versions"]] == [0, 0, 0]


async def test_errors_are_counted_and_requests_that_clients_give_up_are_not(served: Served) -> None:
    await served.change(weights={"2": 1})
    wrong = InferRequest("m", {"OTHER": Tensor("OTHER", DataType.FP32, np.zeros(1, "<f4"))})
    with pytest.raises(ServingError) as refused:
        await served.sent(wrong)
    assert refused.value.code is Code.INVALID_ARG

    gate = asyncio.Event()
    served.backend.gate = lambda: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(200)
    loop = asyncio.get_running_loop()
    outcomes: list[object] = []
    tensor = Tensor("IN", DataType.FP32, np.zeros(1, "<f4"))
    ticket = served.engine.infer(InferRequest("m", {"IN": tensor}), lambda outcome, final: outcomes.append(outcome))
    await asyncio.sleep(0.05)
    assert (await served.version(2))["in_flight"] == 1
    ticket.cancel()
    gate.set()
    await until(lambda: bool(outcomes))

    two = await served.version(2)
    assert (two["requests"], two["errors"], two["in_flight"], two["latency_us"]) == (2, 1, 0, {})


async def test_an_open_sequence_stays_on_its_version(tmp_path: Path) -> None:
    async with serving(tmp_path, SEQUENCES) as served:
        await served.change(weights={"1": 1})
        assert await served.send(correlation_id=7, flags=SEQUENCE_START) == 1

        await served.change(weights={"2": 1})
        assert await served.send(correlation_id=8, flags=SEQUENCE_START) == 2
        assert await served.send(correlation_id=7) == 1
        await served.traffic.reset("m")
        assert await served.send(correlation_id=9, flags=SEQUENCE_START) == 3
        assert [await served.send(correlation_id=key) for key in (7, 8, 9)] == [1, 2, 3]

        await served.change(weights={"2": 50, "3": 50})
        assert await served.send(correlation_id=7, flags=SEQUENCE_END) == 1
        assert await served.send(correlation_id=7, flags=SEQUENCE_START) in (2, 3)
        assert [await served.send(correlation_id=key, flags=SEQUENCE_END) for key in (8, 9)] == [2, 3]


async def test_a_version_that_is_unloaded_finishes_its_open_sequences(tmp_path: Path) -> None:
    async with serving(tmp_path, SEQUENCES) as served:
        await served.change(weights={"1": 50, "2": 50})
        versions = {key: await served.send(correlation_id=key, flags=SEQUENCE_START) for key in range(1, 9)}
        assert set(versions.values()) == {1, 2}
        policy = "version_policy: { specific { versions: [ 2, 3 ] } }"
        write_model(tmp_path, config=SEQUENCES.replace("version_policy: { all { } }", policy))
        await served.engine.load_model("m")

        assert {key: await served.send(correlation_id=key) for key in versions} == versions
        for key in versions:
            await served.send(correlation_id=key, flags=SEQUENCE_END)
        assert await served.send(correlation_id=1, flags=SEQUENCE_START | SEQUENCE_END) == 2


async def test_steps_of_an_ensemble_follow_the_traffic_of_their_model(tmp_path: Path, served: Served) -> None:
    config = models.chain_pbtxt("m", given="IN", wanted="OUT", dims=(1,), max_batch_size=0)
    models.write_model(tmp_path, "e", "", config=config)
    await served.engine.load_model("e")
    await served.change(weights={"1": 25, "2": 75})

    assert Counter([await served.send("e") for _ in range(40)]) == pytest.approx({1: 10, 2: 30}, abs=2)
    users = [await served.send("e", affinity=f"user-{number}") for number in range(20)]
    assert [await served.send("e", affinity=f"user-{number}") for number in range(20)] == users
    assert "its requests without a version are split" in served.engine.offers.reason(served.engine.find("e"))


async def test_a_shadow_gets_copies_that_are_compared_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "COPIES_MAX", 100)  # all of them may wait while the requests are answered

    async with serving(tmp_path) as served:
        await served.change(weights={"1": 50, "3": 50}, shadow={"2": 0.5, "3": {"share": 1, "absolute_tolerance": 5}})
        assert set(await served.counts()) == {1, 3}

        shadows = served.traffic._models["m"].shadows
        await until(lambda: shadows[2].compared == 50 and shadows[3].compared == 50)
        two, three = (await served.version(2))["shadow"], (await served.version(3))["shadow"]
        assert (two["sent"], two["different"], two["difference_rate"]) == (50, 50, 1.0)
        assert (three["sent"], three["different"], three["difference_rate"]) == (50, 0, 0.0)
        assert 0 < three["latency_us"]["p99"] < 10_000_000
        assert (await served.version(2))["requests"] == 0
        assert served.traffic._shadowings["m"].count == served.traffic._shadowings["m"].size_bytes == 0


async def test_a_shadow_that_fails_or_hangs_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "COPIES_MAX", 5)

    async with serving(tmp_path) as served:
        gate, loop = asyncio.Event(), asyncio.get_running_loop()
        await served.change(weights={"1": 1}, shadow={"2": 1})
        table = served.lifecycle.table
        hanging = table.models["m"].versions[2].loaded
        assert hanging is not None
        submit = hanging.runner.submit

        def later(request: InferRequest, reply: Any) -> Any:
            loop.create_task(gate.wait()).add_done_callback(lambda _: submit(request, reply))

        monkeypatch.setattr(type(hanging.runner), "submit", submit_of(later, hanging.runner))
        assert await served.counts(20) == {1: 20}
        shadow = (await served.version(2))["shadow"]
        assert (shadow["sent"], shadow["dropped"], shadow["compared"]) == (5, 15, 0)
        gate.set()
        await until(lambda: served.traffic._shadowings["m"].count == 0)
        assert (await served.version(2))["shadow"]["compared"] == 5


async def test_copies_that_fail_count_as_failed_and_figures_begin_again_after_a_reset(served: Served) -> None:
    loaded = served.lifecycle.table.models["m"].versions[2].loaded
    assert loaded is not None
    loaded.runner._executors[0]._instance.execute = fail  # type: ignore[attr-defined]
    for _ in range(2):
        await served.change(weights={"1": 1}, shadow={"2": 1})
        assert await served.counts(4) == {1: 4}
        await until(lambda: served.traffic._models["m"].shadows[2].failed == 4)
        shadow = (await served.version(2))["shadow"]
        assert (shadow["compared"], shadow["different"], shadow["difference_rate"]) == (4, 0, 1.0)
        await served.traffic.reset("m")


def submit_of(instead: Callable[[InferRequest, Any], Any], runner: object) -> Any:
    """Return a `submit` of a class that does something else for one of its objects."""
    original = type(runner).submit  # type: ignore[attr-defined]
    return lambda self, request, reply: (instead if self is runner else original.__get__(self))(request, reply)


async def test_large_answers_are_compared_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "COMPARED_AT_ONCE_BYTES", 0)

    async with serving(tmp_path) as served:
        await served.change(weights={"1": 1}, shadow={"2": 1})
        await served.counts(3)
        await until(lambda: served.traffic._models["m"].shadows[2].different == 3)


async def test_answers_are_part_of_the_bytes_that_copies_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "COPIES_BYTES_MAX", 7)  # an input of 4 bytes, and not its answer, too

    async with serving(tmp_path) as served:
        await served.change(weights={"1": 1}, shadow={"2": 1})
        assert await served.counts(5) == {1: 5}

        shadow = (await served.version(2))["shadow"]
        assert (shadow["sent"], shadow["dropped"]) == (0, 5)
        assert served.traffic._shadowings["m"].count == served.traffic._shadowings["m"].size_bytes == 0


async def test_copies_of_requests_that_fail_are_not_sent(served: Served) -> None:
    await served.change(weights={"1": 1}, shadow={"2": 1})
    with pytest.raises(ServingError):
        await served.sent(InferRequest("m", {}))

    assert (await served.version(2))["shadow"]["sent"] == 0
    assert served.traffic._shadowings["m"].count == 0


@pytest.mark.parametrize(
    ("config", "members", "says"),
    [
        (ALL, {"weights": {"4": 1}}, "weights: version 4 of 'm' is not ready (hint: versions that are ready: 1, 2, 3)"),
        (ALL, {"shadow": {"4": 1}}, "shadow: version 4 of 'm' is not ready"),
        (ALL, {"canary": {"version": 4}}, "canary.version: version 4 of 'm' is not ready"),
        (ALL, {"canary": {"version": 3, "stable": 4}}, "canary.stable: version 4 of 'm' is not ready"),
        (ALL, {"action": "pause"}, "there is no canary plan of 'm' to pause"),
        (ALL, {"canary": {"version": 2, "difference_rate_max": 0}}, "version 2 gets no copies to compare"),
        (CONFIG, {"weights": {"2": 1}}, "version 2 of 'm' is not ready: the version policy of the model keeps only"),
        (
            CONFIG,
            {"canary": {"version": 3}},
            "version 3 is the only one that is ready: the version policy of the model",
        ),
        (SEQUENCES, {"shadow": {"2": 1}}, "shadow: a model that works on sequences cannot have shadow versions"),
        (
            ALL + "model_transaction_policy { decoupled: true }",
            {"shadow": {"2": 1}},
            "shadow: a decoupled model cannot",
        ),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(
    tmp_path: Path, config: str, members: dict[str, object], says: str
) -> None:
    async with serving(tmp_path, config) as served:
        before = await served.shown()
        with pytest.raises(ServingError) as refused:
            await served.change(**members)

        assert says in str(refused.value)
        assert await served.shown() == before


async def test_an_unknown_model_has_no_traffic(served: Served) -> None:
    with pytest.raises(ServingError, match="'n' is not ready") as unknown:
        await served.traffic.show("n")
    assert unknown.value.code is Code.NOT_FOUND


async def test_settings_of_the_configuration_hold_until_a_request_replaces_them(tmp_path: Path) -> None:
    text = json.dumps({"weights": {"1": 1, "9": 1}}).replace('"', '\\"')
    config = ALL + f'parameters {{ key: "traffic" value {{ string_value: "{text}" }} }}'

    async with serving(tmp_path, config) as served:
        assert await served.counts(10) == {1: 10}
        assert (await served.shown())["source"] == "configuration"
        await served.change(weights={"2": 1})
        assert await served.counts(10) == {2: 10}
        assert (await served.traffic.reset("m"))["source"] == "configuration"
        assert await served.counts(10) == {1: 10}


async def under_load(served: Served, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(200):
        while not condition():
            await asyncio.gather(*(served.send() for _ in range(40)), return_exceptions=True)


@pytest.fixture
def fast_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary_module, "LOOK_NS", 20_000_000)


PLAN = {"version": 2, "step_seconds": 0, "samples_min": 20, "p99_ratio_max": None}


@pytest.mark.usefixtures("fast_looks")
async def test_a_canary_plan_finishes_and_pins_its_version(served: Served) -> None:
    await served.change(weights={"1": 1})
    shown = await served.change(canary={**PLAN, "steps": [20, 50, 100]})
    assert (shown["canary"]["plan"]["stable"], shown["weights"]) == (1, {"1": 80.0, "2": 20.0})
    with pytest.raises(ServingError, match="weights: the canary plan of version 2 sets them"):
        await served.change(weights={"1": 1})
    with pytest.raises(ServingError, match="canary: one of version 2 is under way"):
        await served.change(canary={"version": 3})

    await under_load(served, lambda: served.traffic._models["m"].running is None)

    shown = await served.shown()
    assert (shown["canary"]["state"], shown["weights"]) == ("finished", {"2": 100.0})
    assert await served.counts(20) == {2: 20}
    texts = [each["text"] for each in shown["history"]]
    assert [text.partition(":")[0] for text in texts] == [
        *("changed by request", "version 2 gets 20 % of the requests, version 1 the rest"),
        *("20 % went well", "50 % went well"),
    ]
    assert served.traffic._models["m"].figures[2].is_watched is False


@pytest.mark.usefixtures("fast_looks")
async def test_a_canary_that_fails_is_rolled_back(served: Served) -> None:
    loaded = served.lifecycle.table.models["m"].versions[2].loaded
    assert loaded is not None
    loaded.runner._executors[0]._instance.execute = fail  # type: ignore[attr-defined]
    await served.change(weights={"1": 1})
    await served.change(canary={**PLAN, "steps": [10, 100]})

    await under_load(served, lambda: served.traffic._models["m"].running is None)

    shown = await served.shown()
    assert (shown["canary"]["state"], shown["weights"]) == ("rolled_back", {"1": 100.0})
    assert "requests failed with version 2, 0 of" in shown["canary"]["reason"]
    assert await served.counts(20) == {1: 20}
    assert any("Canary of version 2, rolled back" in line for line in served.traffic.words("m"))


def fail(requests: object) -> Any:
    raise ServingError(Code.INTERNAL, "broken")


BROKEN, CANCELLED = (ServingError(code, "no") for code in (Code.INTERNAL, Code.CANCELLED))


@pytest.mark.parametrize(
    ("outcomes", "errors", "counted"),
    [
        ([None], 0, 1),
        ([BROKEN], 1, 1),
        ([None, BROKEN], 1, 1),
        ([BROKEN, None, None], 1, 1),  # a stream goes on after the error of one response
        ([CANCELLED], 0, 0),
        ([BROKEN, CANCELLED], 1, 1),
    ],
)
def test_a_request_counts_once_whatever_its_stream_had(
    outcomes: list[ServingError | None], errors: int, counted: int
) -> None:
    figures = VersionFigures()
    figures.sent()
    passed: list[tuple[object, bool]] = []
    reply = split._Counted(figures, lambda outcome, final: passed.append((outcome, final)))

    *earlier, last = outcomes
    for outcome in earlier:
        reply(outcome, False)
    reply(last, True)

    window = figures.take()
    assert (window.requests, window.errors, figures.errors, figures.in_flight) == (counted, errors, errors, 0)
    assert [outcome for outcome, _ in passed] == outcomes


@pytest.mark.usefixtures("fast_looks")
async def test_an_operator_pauses_resumes_promotes_and_aborts(served: Served) -> None:
    await served.change(weights={"1": 1})
    await served.change(canary={**PLAN, "steps": [20, 100], "samples_min": 10**6})
    assert (await served.change(action="pause", sticky="key"))["canary"]["state"] == "paused"
    assert served.traffic.words("m") == [
        "Requests without a version go 80.0% to version 1, 20.0% to version 2; by API key",
        "Canary of version 2, paused: paused at 20 % by an operator; "
        "it waits for an operator, who resumes, promotes or aborts it",
    ]
    assert (await served.change(action="resume"))["canary"]["state"] == "running"
    shown = await served.change(action="promote")
    assert (shown["canary"]["state"], shown["weights"]) == ("finished", {"2": 100.0})
    await served.change(canary={**PLAN, "version": 3})
    shown = await served.change(action="abort")
    assert (shown["canary"]["state"], shown["weights"]) == ("aborted", {"2": 100.0})


async def test_a_canary_whose_version_is_unloaded_is_rolled_back(tmp_path: Path, served: Served) -> None:
    await served.change(canary={**PLAN, "stable": 1})
    write_model(tmp_path, config=CONFIG + "version_policy: { specific { versions: [ 1, 3 ] } }")
    await served.engine.load_model("m")

    shown = await served.shown()
    assert (shown["canary"]["state"], shown["weights"]) == ("rolled_back", {"1": 100.0})


async def test_a_step_begins_again_when_the_files_of_its_canary_change(tmp_path: Path, served: Served) -> None:
    await served.change(canary={**PLAN, "stable": 1})
    (tmp_path / "m" / "3" / "value.txt").write_text("3.5")
    await served.engine.load_model("m")
    assert len((await served.shown())["history"]) == 1

    (tmp_path / "m" / "2" / "value.txt").write_text("2.5")
    await served.engine.load_model("m")
    shown = await served.shown()
    assert [each["text"] for each in shown["history"]][1:] == [
        "version 2 was loaded again: the step of 1 % begins again"
    ]
    assert shown["canary"]["state"] == "running"


async def test_a_model_that_comes_back_answers_when_the_versions_with_weights_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its canary is ready first, and must not get all requests meanwhile. The plan goes on."""

    async with serving(tmp_path) as served:
        await served.change(canary={**PLAN, "stable": 1})
        await served.engine.unload_model("m")
        opened, load = asyncio.Event(), served.backend.load

        async def slowly(files: ModelFiles, *others: Any) -> Any:
            if files.version_dir.name == "1":
                await opened.wait()
            return await load(files, *others)

        monkeypatch.setattr(served.backend, "load", slowly)
        loading = asyncio.ensure_future(served.engine.load_model("m"))
        await until(lambda: {"2", "3"} <= {v for v, state in served.states().items() if state is ModelState.READY})
        with pytest.raises(ServingError, match="is not at ready state: it is being loaded"):
            await served.send()
        assert await served.send(model_version="2") == 2
        opened.set()
        await loading

        assert (await served.shown())["canary"]["state"] == "running"
        assert set(await served.counts()) == {1, 2}


async def test_a_model_that_comes_back_without_a_version_that_has_a_weight_answers_with_the_others(
    tmp_path: Path, served: Served
) -> None:
    await served.change(weights={"1": 90, "2": 10})
    await served.engine.unload_model("m")
    (tmp_path / "m" / "1" / "value.txt").unlink()
    with pytest.raises(ServingError, match="there is no value"):
        await served.engine.load_model("m")

    assert await served.counts(10) == {2: 10}


async def test_what_is_kept_makes_the_traffic_of_the_engine_that_follows(tmp_path: Path) -> None:
    kept: dict[str, str] = {}

    async with serving(tmp_path) as served:
        served.traffic.keep = kept.__setitem__
        await served.change(weights={"1": 1}, sticky="key", shadow={"3": 0.5})
        await served.change(canary={"version": 2, "steps": [30, 100]})
        await served.change(action="pause")
        served.traffic.keep = None

    async with serving(tmp_path) as served:
        served.traffic.restore("m", kept["m"])
        shown = await served.shown()
        assert (shown["weights"], shown["sticky"]) == ({"1": 70.0, "2": 30.0}, "key")
        assert (shown["canary"]["state"], shown["canary"]["percent"]) == ("paused", 30)
        assert len(shown["history"]) == 3
        assert await served.counts(10) == pytest.approx({1: 7, 2: 3}, abs=1)
        served.traffic.keep = kept.__setitem__
        served.traffic.engine_ended()
        served.traffic.restore("m", kept["m"])
        served.traffic.engine_ended()
        assert (await served.shown())["canary"]["state"] == "rolled_back"
        assert await served.counts(10) == {1: 10}
        await served.traffic.reset("m")
        assert kept == {"m": ""}
        served.traffic.keep = None
        served.traffic.restore("m", "")
        assert await served.counts(10) == {3: 10}


async def test_metrics_show_models_with_traffic_only(served: Served) -> None:
    assert served.traffic.families() == []
    await served.change(weights={"1": 3, "2": 1}, shadow={"3": 1})
    await served.counts(8)
    await until(lambda: served.traffic._models["m"].shadows[3].compared == 8)

    found = {
        (family.name, *sample.labels.values()): sample.value
        for family in served.traffic.families()
        for sample in family.samples
    }
    assert found["charonia_traffic_requests_total", "m", "1"] == pytest.approx(6, abs=1)
    assert found["charonia_traffic_share", "m", "2"] == 0.25
    assert found["charonia_traffic_shadow_total", "m", "3", "different"] == 8
    await served.change(canary={"version": 2, "steps": [30]})
    (percent,) = [f.samples for f in served.traffic.families() if f.name == "charonia_traffic_canary_percent"]
    assert [sample.value for sample in percent] == [30]


async def test_a_model_of_two_repositories_is_named_with_its_own() -> None:
    service = TrafficService(lambda key: None)
    for key in ("a/m", "b/m", "a/n"):
        service.restore(key, json.dumps({"settings": {"weights": {"1": 1}}, "canary": None, "history": []}))

    assert (await service.show("n"))["model"] == "a/n"
    assert (await service.show("b/m"))["model"] == "b/m"
    with pytest.raises(ServingError, match="there are 2 models named 'm'"):
        await service.show("m")
