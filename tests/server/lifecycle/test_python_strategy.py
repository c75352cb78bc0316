"""Batching strategies in Python: what they are asked, and what becomes of their faults."""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.support.recorded import RecordedScheduler
from tests.support.scripted import ScriptedInstance

from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.core.tensor import Tensor
from charonia.server.backends.api import Placement
from charonia.server.execution.executor import AsyncExecutor
from charonia.server.execution.runner import ModelRunner
from charonia.server.lifecycle.python_strategy import PythonStrategy, load_strategy
from charonia.server.lifecycle.repository.scan import ModelFolder
from charonia.server.scheduling.schedulers import make_scheduler

CONFIG = ModelConfig(
    name="m",
    max_batch_size=8,
    input=(ModelInput("IN", DataType.FP32, dims=(1,)),),
    output=(ModelOutput("OUT", DataType.FP32, (1,)),),
    dynamic_batching=DynamicBatching(),
    parameters={"BATCHING_STRATEGY": "batching.py"},
)
BUDGET = """
import pathlib

def note(*words):
    with pathlib.Path(__file__).with_name("seen.txt").open("a") as file:
        print(*words, file=file)

def batcher_initialize(config):
    note("load", config["max_batch_size"])
    return float(config["parameters"].get("BUDGET", {"string_value": "10"})["string_value"])

def batch_initialize(budget):
    return {"left": budget}

def batch_include_request(request, batch):
    cost = float(request.inputs["IN"].sum())
    if "bad" in request.parameters:
        raise ValueError("no cost")
    if cost > batch["left"]:
        return False
    batch["left"] -= cost
    note(request.id, request.batch_size, request.priority)
    return True

def batch_finalize(batch):
    note("end")

def batcher_finalize(budget):
    note("unload")
"""


def strategy_of(folder: Path, code: str, config: ModelConfig = CONFIG) -> PythonStrategy | None:
    (folder / "m").mkdir(exist_ok=True)
    (folder / "m" / "batching.py").write_text(code)
    return load_strategy(ModelFolder("m", folder, folder / "m"), 1, config)


def request(id: str, cost: float, **parameters: bool) -> InferRequest:
    array = np.array([[cost]], "f4")
    return InferRequest("m", {"IN": Tensor("IN", DataType.FP32, array)}, id=id, parameters=dict(parameters))


def batches_of(strategy: PythonStrategy, requests: list[InferRequest]) -> tuple[list[list[str]], dict[str, Outcome]]:
    """Run requests that wait together; return the batches, by the ids in them, and what each request was answered."""

    async def main() -> tuple[list[list[str]], dict[str, Outcome]]:
        instance = ScriptedInstance()
        answers: dict[str, Outcome] = {}

        def note(request_id: str, outcome: Outcome, final: bool) -> None:
            assert final
            answers[request_id] = outcome

        runner = ModelRunner(
            CONFIG,
            "1",
            scheduler=RecordedScheduler(make_scheduler(CONFIG, strategy)),
            executors=[AsyncExecutor(instance, Placement("m_0", InstanceKind.KIND_CPU))],
            labels={},
            loop=asyncio.get_running_loop(),
        )
        strategy.entry_of = runner.entry
        for each in requests:
            runner.submit(each, partial(note, each.id))
        batches = []
        while instance.batches or runner.pending:
            if instance.batches:
                batches.append([each.id for each in instance.batches[0][0]])
                instance.finish()
            await asyncio.sleep(0)
        await runner.drain()
        await runner.aclose()
        return batches, answers

    return asyncio.run(main())


def test_a_strategy_decides_which_requests_share_a_batch(tmp_path: Path) -> None:
    strategy = strategy_of(tmp_path, BUDGET)
    assert strategy is not None

    batches, answers = batches_of(
        strategy, [request("first", 1), request("a", 6), request("b", 4), request("c", 3), request("d", 99)]
    )

    assert batches == [["first"], ["a", "b"], ["c"], ["d"]]
    assert all(isinstance(answer, InferResponse) for answer in answers.values())


def test_it_is_told_when_the_model_and_its_batches_begin_and_end(tmp_path: Path) -> None:
    strategy = strategy_of(tmp_path, BUDGET)
    assert strategy is not None

    batches_of(strategy, [request("a", 1)])
    strategy.close()

    assert (tmp_path / "m" / "seen.txt").read_text() == "load 8\na 1 0\nend\nunload\n"


def test_a_request_on_which_it_fails_gets_an_error_and_the_others_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = strategy_of(tmp_path, BUDGET)
    assert strategy is not None

    with caplog.at_level(logging.ERROR):
        batches, answers = batches_of(
            strategy, [request("first", 1), request("a", 1), request("x", 1, bad=True), request("b", 1)]
        )

    assert batches == [["first"], ["a", "b"]]
    failed = answers["x"]
    assert isinstance(failed, ServingError)
    assert failed.code is Code.INTERNAL
    assert "the batching strategy of model 'm' failed" in failed.message
    assert "no cost" in caplog.text


@pytest.mark.parametrize("function", ["batch_finalize", "batcher_finalize"])
def test_a_fault_at_the_end_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, function: str) -> None:
    code = f"def batch_include_request(request, batch): return True\ndef {function}(x): raise ValueError('late')\n"
    strategy = strategy_of(tmp_path, code)
    assert strategy is not None

    with caplog.at_level(logging.ERROR):
        batches, answers = batches_of(strategy, [request("a", 1)])
        strategy.close()

    assert batches == [["a"]]
    assert isinstance(answers["a"], InferResponse)
    assert f"failed in {function}" in caplog.text


def test_the_other_functions_may_be_left_out(tmp_path: Path) -> None:
    code = """
def batch_include_request(request, batch):
    batch["count"] = batch.get("count", 0) + 1
    return batch["count"] <= 2
"""
    strategy = strategy_of(tmp_path, code)
    assert strategy is not None

    batches, _ = batches_of(strategy, [request(str(index), 1) for index in range(6)])
    strategy.close()

    assert batches == [["0"], ["1", "2"], ["3", "4"], ["5"]]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = ", "'batching.py' cannot be imported: SyntaxError"),
        ("1 / 0", "'batching.py' cannot be imported: ZeroDivisionError"),
        ("", "'batching.py' has no function batch_include_request"),
        (
            "def batch_include_request(request, batch): ...\ndef batcher_initialize(config): raise ValueError('no')",
            "batcher_initialize failed: ValueError: no",
        ),
    ],
)
def test_a_file_that_is_no_strategy_is_refused_at_load(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(ServingError) as caught:
        strategy_of(tmp_path, code)

    assert caught.value.code is Code.INVALID_ARG
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, dynamic_batching=None), "a batching strategy needs dynamic_batching"),
        (replace(CONFIG, max_batch_size=0), "a batching strategy needs dynamic_batching"),
        (replace(CONFIG, parameters={"BATCHING_STRATEGY": "/x.py"}), "must be a path within the model's folder"),
        (replace(CONFIG, parameters={"BATCHING_STRATEGY": "../x.py"}), "must be a path within the model's folder"),
        (replace(CONFIG, parameters={"BATCHING_STRATEGY": ""}), "must be a path within the model's folder"),
        (replace(CONFIG, parameters={"BATCHING_STRATEGY": "x.py"}), "there is no file 'x.py'"),
    ],
)
def test_a_wrong_parameter_is_refused_at_load(tmp_path: Path, config: ModelConfig, message: str) -> None:
    with pytest.raises(ServingError) as caught:
        strategy_of(tmp_path, BUDGET, config)

    assert message in caught.value.message


def test_a_library_beside_the_model_is_refused_unless_python_takes_its_place(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "batchstrategy.so").write_bytes(b"")

    with pytest.raises(ServingError, match="a batching strategy from a library") as caught:
        strategy_of(tmp_path, BUDGET, replace(CONFIG, parameters={}))

    assert "BATCHING_STRATEGY" in caught.value.hint
    assert strategy_of(tmp_path, BUDGET) is not None
    assert strategy_of(tmp_path, BUDGET, replace(CONFIG, parameters={}, dynamic_batching=None)) is None
