"""A runner whose instances come and go: no request is lost, and none is held up."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.server.execution.test_runner import Answers, config, request
from tests.support.recorded import RecordedScheduler
from tests.support.scripted import ScriptedInstance

from charonia.clock import now_ns
from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, InstanceGroup, ModelConfig, TransactionPolicy
from charonia.config.parameters import INSTANCES_MAX
from charonia.core.errors import unavailable
from charonia.server.backends.api import Placement
from charonia.server.execution.deadlock import DeadlockDetector
from charonia.server.execution.executor import AsyncExecutor
from charonia.server.execution.runner import ModelRunner
from charonia.server.scheduling.schedulers import make_scheduler


def scaled(cfg: ModelConfig, most: int = 3) -> ModelConfig:
    return replace(cfg, instance_group=(InstanceGroup("m_0", count=1),), parameters={INSTANCES_MAX: str(most)})


def executor_of(instance: ScriptedInstance, number: int = 0) -> AsyncExecutor:
    return AsyncExecutor(instance, Placement(f"m_0_{number}", InstanceKind.KIND_CPU))


def runner_of(cfg: ModelConfig, *instances: ScriptedInstance) -> ModelRunner:
    return ModelRunner(
        cfg,
        "1",
        scheduler=RecordedScheduler(make_scheduler(cfg)),
        executors=[executor_of(instance, number) for number, instance in enumerate(instances)],
        labels={},
        loop=asyncio.get_running_loop(),
        deadlocks=DeadlockDetector(),
    )


async def test_a_request_that_waits_runs_on_the_instance_that_is_added() -> None:
    first, second, answers = ScriptedInstance(), ScriptedInstance(), Answers()
    runner = runner_of(scaled(config()), first)
    runner.submit(request("a"), answers.reply_to("a"))
    runner.submit(request("b"), answers.reply_to("b"))
    assert runner.waited_ns(now_ns()) > 0
    assert runner.free_instances() == []

    runner.add_instance(1, executor_of(second, 1))
    await asyncio.sleep(0)

    assert runner.waited_ns(now_ns()) == 0
    second.finish()
    first.finish()
    assert answers.is_answered("a")
    assert answers.is_answered("b")
    assert runner.free_instances() == [0, 1]


async def test_only_a_free_instance_is_given_up_and_later_requests_go_to_the_others() -> None:
    first, second, answers = ScriptedInstance(), ScriptedInstance(), Answers()
    runner = runner_of(scaled(config()), first)
    runner.add_instance(1, executor_of(second, 1))
    runner.submit(request("a"), answers.reply_to("a"))
    busy, idle = (first, second) if first.batches else (second, first)

    given_up = runner.remove_instance()

    assert given_up is not None
    await given_up.aclose()
    assert idle.is_closed
    assert len(runner.instances) == 1
    assert runner.remove_instance() is None
    runner.submit(request("b"), answers.reply_to("b"))
    busy.finish()
    await asyncio.sleep(0)
    busy.finish()
    assert answers.is_answered("a")
    assert answers.is_answered("b")


async def test_an_instance_that_owes_a_response_is_not_given_up() -> None:
    instance, outcomes = ScriptedInstance(), list[object]()
    cfg = scaled(replace(config(), model_transaction_policy=TransactionPolicy(decoupled=True)))
    runner = runner_of(cfg, instance)
    runner.submit(request("a"), lambda outcome, final: outcomes.append((outcome, final)))
    _, sink = instance.batches.pop()
    sink.finish(now_ns(), now_ns(), leaves_open=True)

    assert runner.free_instances() == []
    assert runner.remove_instance() is None
    sink.respond(0, None, True)
    assert outcomes == [(None, True)]
    assert runner.free_instances() == [0]


async def test_while_requests_wait_for_others_to_join_no_instance_is_given_up() -> None:
    first, second, answers = ScriptedInstance(), ScriptedInstance(), Answers()
    dynamic = DynamicBatching(max_queue_delay_microseconds=10_000_000)
    cfg = scaled(config(dynamic, 4))
    runner = runner_of(replace(cfg, parameters={**cfg.parameters, "ADAPT_QUEUE_DELAY": "false"}), first)
    runner.add_instance(1, executor_of(second, 1))
    await asyncio.sleep(0)
    runner.submit(request("a", batch=1), answers.reply_to("a"))
    assert runner.pending == 1

    assert runner.remove_instance() is None

    runner.abandon(unavailable("the server stops"))
    assert runner.remove_instance() is not None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("batches", [False, True])
async def test_whatever_comes_and_goes_every_request_has_one_answer(seed: int, batches: bool) -> None:
    draw = random.Random(seed)

    answers = Answers()
    cfg = scaled(config(DynamicBatching(), 4) if batches else config(), 4)
    scripted = {0: ScriptedInstance()}
    closed: list[ScriptedInstance] = []
    runner = runner_of(cfg, scripted[0])
    of_executor = {id(executor): scripted[0] for executor in runner.instances.values()}

    def submit() -> None:
        name = str(len(sent))
        sent.append(name)
        runner.submit(request(name, batch=1 if batches else 0), answers.reply_to(name))

    def finish() -> None:
        busy = [each for each in scripted.values() if each.batches]
        if busy:
            draw.choice(busy).finish()

    def add() -> None:
        number = next((n for n in range(4) if n not in runner.instances), None)
        if number is not None:
            scripted[number] = ScriptedInstance()
            executor = executor_of(scripted[number], number)
            of_executor[id(executor)] = scripted[number]
            runner.add_instance(number, executor)

    def give_up() -> None:
        if len(runner.instances) > 1 and (executor := runner.remove_instance()) is not None:
            instance = of_executor[id(executor)]
            assert not instance.batches
            closed.append(instance)

    sent: list[str] = []
    actions: list[Callable[[], None]] = [submit, finish, finish, finish, add, give_up]
    for _ in range(300):
        draw.choice(actions)()
        if draw.random() < 0.5:
            await asyncio.sleep(0)
        assert not any(instance.batches for instance in closed)
    draining = asyncio.create_task(runner.drain())
    while not draining.done():
        finish()
        await asyncio.sleep(0)
    await draining

    assert all(answers.is_answered(name) for name in sent)
    assert closed
