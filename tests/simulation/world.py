"""One run of a scenario: the server, its clients and its faults on the simulated machine, and the history of it all."""

import asyncio
import contextvars
import json
import logging
import shutil
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.simulation import models
from tests.simulation.checks import FINISH_S, check_history, check_quiet
from tests.simulation.clients import INFER_REQUEST, INFER_RESPONSE, STREAM_RESPONSE, GrpcClient, HttpClient, Outcome
from tests.simulation.machine import (
    MACHINE,
    PROCESS,
    SECOND_NS,
    START_NS,
    Faults,
    NothingLeftError,
    SimulatedLoop,
)
from tests.simulation.network import Network
from tests.simulation.scenario import PORTS, Model, Operation, Scenario
from tests.simulation.workers import WORKERS, kill_workers

from charonia.server import app
from charonia.server.app import InferenceServer
from charonia.server.front_ends.engine_port import EnginePort
from charonia.server.front_ends.front_end import FrontEnd
from charonia.server.front_ends.hand_over import SOCKET_NAME
from charonia.server.front_ends.keeper import read_changes
from charonia.server.model_options import ControlMode
from charonia.server.options import GrpcOptions, HttpOptions, MetricsOptions, ModelOptions, ServerOptions
from charonia.server.response_cache.options import CacheOptions

vars(app)["installed_backends"] = lambda directory=None: {"simulated": models.SimulatedBackend}

QUIET_S = 90.0
"""Time after the last operation in which every request must have its outcome."""

CALM_S = 20.0
"""Time without requests after which nothing may be left."""


NONE = Outcome("none")


@dataclass(slots=True)
class Request:
    """A request and its outcome, as the client saw it.

    Attributes:
        floor: Generation of the model whose load had returned when the request began.
        value: INPUT[0].
        sums: What a sequence's answer must be, None outside of sequences.
        was_cut: Whether its connection was broken on purpose.
    """

    number: int
    operation: Operation
    model: Model
    begin_s: float
    floor: int
    value: int
    sums: int | None = None
    end_s: float = -1.0
    outcome: Outcome = NONE
    version: int = 0
    output: list[int] = field(default_factory=list)
    responses: int = 1
    ceiling: int = 0
    was_cut: bool = False


@dataclass(slots=True)
class Change:
    """A load or an unload: while it lasts, the model may be away."""

    model: str
    begin_s: float
    end_s: float = float("inf")


class World:
    """The simulated world of a scenario.

    Attributes:
        requests: All requests so far, in order.
        changes: Times in which models were loaded or unloaded.
        outages: Times in which a process was killed until it was back.
        harmed: Times in which a worker may be down.
    """

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.requests: list[Request] = []
        self.changes: list[Change] = []
        self.outages: list[Change] = []
        self.harmed: list[Change] = []
        self.problems: list[str] = []
        self.history: list[str] = []
        self.recent: deque[str] = deque(maxlen=60)
        self.leaving_s = float("inf")
        self.models = {model.name: model for model in scenario.models}
        self.written = dict.fromkeys(self.models, 1)
        self.returned = dict.fromkeys(self.models, 1)
        self.unloaded: set[str] = set()
        self.counts: list[dict[str, Any]] = []
        self._folder = folder
        self._idle: dict[str, list[Any]] = {"http": [], "grpc": []}
        self._busy: list[Any] = []
        self._sequences = 0
        self._engines = 0
        self._starts = 0
        self._front_ends: dict[int, tuple[str, FrontEnd]] = {}  # process and front end, by number
        self._server: InferenceServer | None = None
        self._engine = ""
        self._is_stopping = False

    # The run.

    def run(self) -> None:
        """Run the scenario and check its history."""
        MACHINE.reset(self.scenario.seed)
        self.record = models.begin(self.scenario.seed)
        self.loop = loop = SimulatedLoop()
        asyncio.set_event_loop(loop)
        self.network = Network(loop, self.scenario.seed)
        loop.set_exception_handler(self._loop_fault)
        self.faults = faults = Faults()
        faults.recent = self.recent
        root = logging.getLogger()
        root.handlers, root.level = [faults], logging.WARNING
        self._write_repository()
        try:
            loop.run_until_complete(self._main())
        except NothingLeftError:
            self.problem("nothing is left to do, and the scenario has not ended")
        except Exception as error:
            self.problem(f"the run failed: {type(error).__name__}: {error}")
            logging.getLogger("simulation").exception("the run failed")
        self.problems += faults.found + self.record.problems
        check_history(self)

    def now_s(self) -> float:
        return (MACHINE.now_ns - START_NS) / SECOND_NS

    def event(self, text: str) -> None:
        line = f"{self.now_s():.9f} {text}"
        self.history.append(line)
        self.recent.append(line)

    def problem(self, text: str) -> None:
        self.problems.append(f"{self.now_s():.6f}: {text}")

    def _loop_fault(self, loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.problem(f"the event loop met {context['message']}: {error!r}")
        logging.getLogger("simulation").error("fault of the loop", exc_info=error)

    def spawn(self, process: str, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run something as a part of a simulated process."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        task: asyncio.Task[Any] = self.loop.create_task(work, context=context)
        return task

    async def _main(self) -> None:
        await self._start()
        self.started_s = self.now_s()
        self.calm = self._left()
        self.event("ready")
        watching = self.spawn("clients", self._watch())
        tasks = []
        for operation in self.scenario.operations:
            wait_s = self.started_s + operation.at_s - self.now_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self.recent.append(str(operation))
            tasks.append(self.spawn("clients", getattr(self, operation.kind)(operation)))
        if not self.scenario.options["exits_busy"]:
            await self._finish(tasks)
            await self._settle()
            await self._read_statistics()
            self._hang_up()
            await asyncio.sleep(CALM_S)
            check_quiet(self)
        await self._settle()
        watching.cancel()
        await self._shutdown()
        await self._finish(tasks)
        self._hang_up()
        await asyncio.sleep(CALM_S)
        self._check_ended()

    async def _finish(self, tasks: list["asyncio.Task[Any]"]) -> None:
        if tasks:
            _, open_tasks = await asyncio.wait(tasks, timeout=QUIET_S)
            for request in self.requests:
                if request.end_s < 0 and open_tasks:
                    self.problem(
                        f"no outcome for request {request.number} of {request.model.name}: {request.operation}"
                    )
            for task in open_tasks:
                task.cancel()
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]

    async def _settle(self) -> None:
        """Wait until killed processes and unloaded models are back."""
        while self.now_s() < max((each.end_s for each in self.outages), default=0.0):
            await asyncio.sleep(0.1)

    # The server.

    def _options(self) -> ServerOptions:
        given = self.scenario.options
        return ServerOptions(
            exit_timeout_secs=given["exit_timeout_secs"],
            models=ModelOptions(
                repositories=(str(self._folder / "models"),),
                control_mode=ControlMode.EXPLICIT,
                load=("*",),
                poll_secs=0,
            ),
            http=HttpOptions(address="127.0.0.1", port=PORTS["http"], reuse_port=True),
            grpc=GrpcOptions(address="127.0.0.1", port=PORTS["grpc"], reuse_port=True),
            metrics=MetricsOptions(port=PORTS["metrics"], cpu=False, gpu=False),
            cache=CacheOptions(given["cache_bytes"]),
            front_ends=given["front_ends"] if self.scenario.shape == "apart" else 0,
            cpu_cores=4,
            busy_poll_us=0,
        )

    def _write_repository(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        for model in self.scenario.models:
            folder = self._folder / "models" / model.name
            folder.mkdir(parents=True)
            (folder / "config.pbtxt").write_text(model.pbtxt)
            for version in model.versions:
                models.write_generation(folder, version, 1)
        (self._folder / "private").mkdir()

    async def _start(self) -> None:
        await self._start_engine()
        if self.scenario.shape == "apart":
            await asyncio.gather(*(self._start_front_end(i + 1) for i in range(self.scenario.options["front_ends"])))

    async def _start_engine(self, socket_name: str = SOCKET_NAME) -> InferenceServer:
        self._engines += 1
        options, folder = self._options(), self._folder / "private"

        async def start() -> InferenceServer:
            if self.scenario.shape == "one":
                server = InferenceServer(options)
            else:
                port, left_out = EnginePort(folder, socket_name), read_changes(folder).models
                server = InferenceServer(options, front_ends=port, left_out=left_out)
            await server.start()
            return server

        server: InferenceServer = await self.spawn(f"engine {self._engines}", start())
        if socket_name == SOCKET_NAME:
            self._server, self._engine = server, f"engine {self._engines}"
        return server

    async def _start_front_end(self, number: int) -> None:
        async def start() -> FrontEnd:
            front_end = FrontEnd(self._options(), None, self._folder / "private", number)
            await front_end.start()
            return front_end

        self._starts += 1
        name = f"front end {self._starts}"
        self._front_ends[number] = name, await self.spawn(name, start())

    async def _shutdown(self) -> None:
        begin_s = self.leaving_s = self.now_s()
        self.event("shutdown")
        self._is_stopping = True
        limit_s = self.scenario.options["exit_timeout_secs"] + 6.0

        async def stop() -> None:
            if self._front_ends:
                for _, front_end in self._front_ends.values():
                    front_end.leave()
                await asyncio.gather(*(front_end.ended for _, front_end in self._front_ends.values()))
                for process, front_end in self._front_ends.values():
                    await self.spawn(process, front_end.close())
            assert self._server is not None
            await self._server.shutdown()

        try:
            await asyncio.wait_for(self.spawn(self._engine, stop()), limit_s + 60)
        except TimeoutError:
            self.problem("the shutdown hangs")
        took_s = self.now_s() - begin_s
        self.event("stopped")
        if took_s > limit_s:
            self.problem(f"the shutdown took {took_s:.1f} s, the limits allow {limit_s:g} s")

    def _left(self) -> list[str]:
        """Return what the server's processes have: tasks."""
        processes = [(process, task) for task, process in self.loop.process_of.items() if not task.done()]
        return sorted(
            f"task {task.get_coro().__qualname__} of {process}"  # type: ignore[union-attr]
            for process, task in processes
            if process not in (None, "clients", "world", *MACHINE.dead)
        )

    def _check_ended(self) -> None:
        if self._left():
            self.problem(f"after the shutdown, there is still: {'; '.join(self._left()[:5])}")
        if self.network.listeners:
            self.problem("after the shutdown, a port is still open")
        if any(not end.is_gone for end in self.network.ends):
            self.problem("after the shutdown, a connection is still open")

    @property
    def front_ends(self) -> list[Any]:
        return [front_end for _, front_end in self._front_ends.values()]

    def endpoints(self) -> list[Any]:
        """Return the endpoints of all processes."""
        return [each.endpoints for each in self.front_ends] or [self.engine.front_ends]

    async def _watch(self) -> None:
        """Check the limits of queues all the time."""
        while True:
            await asyncio.sleep(0.05)
            for loaded in self.engine._lifecycle.table.loaded():
                queue_max = self.models[loaded.runner.config.name].queue_max
                if queue_max and (loaded.runner.pending or 0) > 2 * queue_max:  # of each of two levels
                    self.problem(f"{loaded.runner} has more than {queue_max} requests in its queue")
                    return

    @property
    def engine(self) -> InferenceServer:
        assert self._server is not None
        return self._server

    # Requests.

    def _client(self, protocol: str) -> Any:
        """Return a client with a connection that nobody else uses."""
        kind = "grpc" if protocol in ("grpc", "stream") else "http"
        idle = [each for each in self._idle[kind] if each.is_open]
        self._idle[kind] = idle
        if idle and self.network.chance.random() < 0.95:
            client = idle.pop(0)
        elif kind == "grpc":
            client = GrpcClient(self.network, PORTS["grpc"])
        else:
            client = HttpClient(self.network, PORTS["http"], self.problems)
        client.was_cut = False
        self._busy.append(client)
        return client

    def _release(self, client: Any, protocol: str) -> None:
        self._busy.remove(client)
        if client.is_open:
            self._idle["grpc" if protocol in ("grpc", "stream") else "http"].append(client)

    def _hang_up(self) -> None:
        for client in (*self._idle["http"], *self._idle["grpc"], *self._busy):
            if client.end is not None:
                client.end.close()
        self._idle = {"http": [], "grpc": []}

    async def request(self, operation: Operation) -> None:
        model = self.models[operation.model]
        values = operation.values
        if model.role != "sequence":
            await self._ask(operation, model, 7 + values.get("repeat", operation.number % 1000), {})
            return
        self._sequences += 1
        key, total = operation.number + 1, 0
        length = min(values["length"], values.get("stops_after", 99))
        for index in range(length):
            if index:
                await asyncio.sleep(values["gap_ms"] / 1000)
            total += index + 1
            flags = {"sequence_id": key, "sequence_start": index == 0, "sequence_end": index == values["length"] - 1}
            request = await self._ask(operation, model, index + 1, flags, total)
            if request.outcome.status != "ok":
                return

    async def _ask(
        self, operation: Operation, model: Model, value: int, flags: dict[str, Any], sums: int | None = None
    ) -> Request:
        values, protocol = operation.values, operation.values["protocol"]
        number = len(self.requests) + 1
        floor = self.returned[model.name]
        request = Request(number, operation, model, self.now_s(), floor, value, sums)
        self.requests.append(request)
        tag = 0 if model.role == "cached" else number
        rows = values.get("rows", 1)
        row = [value, tag, values.get("responses", 1), values.get("fault", 0)]
        is_batched = "max_batch_size: 0" not in model.pbtxt
        array = np.array([row] * rows, np.int32)
        shape = [rows, 4] if is_batched else [4]
        parameters = dict(flags)
        for key, name in (("priority", "priority"), ("timeout_us", "timeout")):
            if values.get(key):
                parameters[name] = values[key]
        array = array if is_batched else array[:1]
        version = str(values.get("version", ""))
        client = self._client(protocol)
        if values.get("reads_slowly") and client.end is not None:
            client.end.pause_reading()
            self.loop.call_later(0.5, client.end.resume_reading)
        if protocol in ("json", "binary"):
            call = self._over_http(client, model.name, version, array, shape, parameters, protocol == "binary")
        else:
            call = self._over_grpc(client, model.name, version, array, shape, parameters, values)
        if values.get("leaves_ms") is None:
            request.outcome = await call
        else:
            task = asyncio.ensure_future(call)
            done, _ = await asyncio.wait({task}, timeout=values["leaves_ms"] / 1000)
            if done:
                request.outcome = task.result()
            else:
                if protocol in ("json", "binary") or number % 3 == 0:
                    client.leave()
                task.cancel()
                request.outcome = Outcome("left")
        request.was_cut = client.was_cut
        self._release(client, protocol)
        request.end_s = self.now_s()
        request.ceiling = self.written[model.name]
        self._read(request, protocol)
        code, body = request.outcome.code, request.outcome.body
        detail = request.output if request.outcome.status == "ok" else bytes(body)[:300].decode("utf-8", "replace")
        self.event(
            f"request {number} {model.name} {protocol} {request.outcome.status} {code} {request.version} {detail}"
        )
        return request

    async def _over_http(
        self, client: HttpClient, model: str, version: str, array: Any, shape: list[int], parameters: dict[str, Any],
        is_binary: bool,
    ) -> Outcome:  # fmt: skip
        tensor: dict[str, Any] = {"name": "INPUT", "shape": shape, "datatype": "INT32"}
        document: dict[str, Any] = {"inputs": [tensor]}
        path = f"/v2/models/{model}{'/versions/' + version if version else ''}/infer"
        if is_binary:
            data = array.tobytes()
            tensor["parameters"] = {"binary_data_size": len(data)}
            parameters = parameters | {"binary_data_output": True}
        else:
            data = b""
            tensor["data"] = array.reshape(-1).tolist()
        if parameters:
            document["parameters"] = parameters
        head = json.dumps(document).encode()
        headers = f"Inference-Header-Content-Length: {len(head)}\r\n" if is_binary else ""
        return await client.call("POST", path, head + data, headers)

    async def _over_grpc(
        self, client: GrpcClient, model: str, version: str, array: Any, shape: list[int], parameters: dict[str, Any],
        values: dict[str, Any],
    ) -> Outcome:  # fmt: skip
        message = INFER_REQUEST(model_name=model, model_version=version, raw_input_contents=[array.tobytes()])
        message.inputs.add(name="INPUT", datatype="INT32", shape=shape)
        for key, value in parameters.items():
            parameter = message.parameters[key]
            if isinstance(value, bool):
                parameter.bool_param = value
            else:
                parameter.int64_param = value
        headers = []
        if values.get("deadline_ms"):
            headers.append((b"grpc-timeout", b"%du" % int(values["deadline_ms"] * 1000)))
        method = "ModelStreamInfer" if values["protocol"] == "stream" else "ModelInfer"
        return await client.call(method, [message.SerializeToString()], *headers)

    def _read(self, request: Request, protocol: str) -> None:
        """Read version and values of an answer."""
        outcome = request.outcome
        if outcome.status != "ok":
            return
        if protocol in ("json", "binary"):
            end = outcome.body.rfind(b"}") + 1 if protocol == "binary" else len(outcome.body)
            end = _json_end(outcome.body) if protocol == "binary" else end
            document = json.loads(outcome.body[:end])
            request.version = int(document["model_version"])
            data = outcome.body[end:]
            request.output = np.frombuffer(data, "<i4").tolist() if data else document["outputs"][0]["data"]
            return
        responses = []
        for body in outcome.body:
            if protocol == "stream":
                streamed = STREAM_RESPONSE.FromString(body)
                if streamed.error_message:
                    request.outcome = Outcome("error", 0, streamed.error_message.encode())
                    return
                response = streamed.infer_response
            else:
                response = INFER_RESPONSE.FromString(body)
            responses.append(response)
        request.responses = len(responses)
        if responses:
            request.version = int(responses[0].model_version)
            request.output = np.frombuffer(responses[0].raw_output_contents[0], "<i4").tolist()

    # Control.

    async def _control(self, method: str, path: str, document: object = None) -> Outcome:
        client = HttpClient(self.network, PORTS["http"], self.problems)
        client.was_cut = False  # type: ignore[attr-defined]
        body = json.dumps(document).encode() if document is not None else b""
        outcome = await client.call(method, path, body)
        client.leave()
        return outcome

    async def load(self, operation: Operation) -> None:
        name = operation.model
        model, folder = self.models[name], self._folder / "models" / name
        self.written[name] += 1
        generation = self.written[name]
        is_bad = bool(operation.values.get("is_bad"))
        for version in model.versions:
            models.write_generation(folder, version, generation, is_bad=is_bad)
        change = Change(name, self.now_s())
        self.changes.append(change)
        outcome = await self._control("POST", f"/v2/repository/models/{name}/load", {})
        if outcome.status == "ok" and not (is_bad and self.written[name] == generation):
            self.returned[name] = max(self.returned[name], generation)
        self.event(f"load {name} generation {generation} {outcome.status} {outcome.code}")
        if outcome.status == "ok" and is_bad and self.written[name] == generation:
            self.problem(f"{name} was loaded from damaged files")
        if is_bad and self.written[name] == generation:
            self.written[name] += 1
            for version in model.versions:
                models.write_generation(folder, version, self.written[name])
        change.end_s = self.now_s()

    async def unload(self, operation: Operation) -> None:
        change = Change(operation.model, self.now_s())
        self.changes.append(change)
        self.unloaded.add(operation.model)
        outcome = await self._control("POST", f"/v2/repository/models/{operation.model}/unload", {})
        self.event(f"unload {operation.model} {outcome.status} {outcome.code}")
        await asyncio.sleep(operation.values["back_s"])
        for _ in range(20):
            again = await self._control("POST", f"/v2/repository/models/{operation.model}/load", {})
            if again.status == "ok" or self._is_stopping:
                break
            await asyncio.sleep(1.0)
        self.event(f"load {operation.model} {again.status} {again.code}")
        change.end_s = self.now_s()

    async def statistics(self, operation: Operation) -> None:
        outcome = await self._control("GET", f"/v2/models/{operation.model}/stats")
        self.event(f"statistics {operation.model} {outcome.status} {outcome.code}")

    async def index(self, operation: Operation) -> None:
        outcome = await self._control("POST", "/v2/repository/index", {})
        self.event(f"index {outcome.status} {outcome.code}")

    async def traffic(self, operation: Operation) -> None:
        model = self.models[operation.model]
        if len(model.versions) > 1:
            share = 10 + operation.number % 80
            document = {"weights": {"1": share, "2": 100 - share}}
            outcome = await self._control("POST", f"/v2/models/{model.name}/traffic", document)
            self.event(f"traffic {model.name} {outcome.status} {outcome.code}")

    async def _read_statistics(self) -> None:
        outcome = await self._control("GET", "/v2/models/stats")
        if outcome.status == "ok":
            self.counts = json.loads(outcome.body)["model_stats"]
        elif self.scenario.operations:
            self.problem(f"statistics cannot be read: {outcome}")
        client = HttpClient(self.network, PORTS["metrics"], self.problems)
        self.metrics = (await client.call("GET", "/metrics")).body.decode()
        client.leave()

    # Faults.

    async def cut(self, operation: Operation) -> None:
        if self._busy:
            client = self._busy[operation.values["pick"] % len(self._busy)]
            if client.end is not None and not client.end.is_gone:
                client.was_cut = True
                self.network.cut(client.end)

    async def wall_clock(self, operation: Operation) -> None:
        MACHINE.wall_ns += (operation.values["pick"] - 500) * SECOND_NS

    async def harm_worker(self, operation: Operation) -> None:
        alive = [each for each in WORKERS.values() if each.returncode is None]
        if alive:
            pick = operation.values["pick"]
            worker = alive[pick % len(alive)]
            kind = ("exit", "hang", "garbage")[pick % 3]
            self.event(f"worker {worker.pid} {kind}")
            self.harmed.append(Change("worker", self.now_s(), self.now_s() + 40.0))
            worker.harm(kind)

    async def upgrade(self, operation: Operation) -> None:
        """A second engine starts, and the first one hands its front ends over."""
        if self._is_stopping or any(each.end_s == float("inf") for each in self.outages):
            return
        upgrade = Change("upgrade", self.now_s())
        self.outages.append(upgrade)
        before, process = self.engine, self._engine
        name = f"engine_{self._engines + 1}.sock"
        after, next_process = await self._start_engine(name), f"engine {self._engines}"
        self.event(f"{process} hands over to {next_process}")
        port: Any = before.front_ends

        async def hand_over() -> None:
            await port.hand_over.run(name, before.engine.open_sequences)
            if before.metrics is not None:
                await before.metrics.close()
            await port.hand_over.finish(FINISH_S, port.is_busy, before.engine.open_sequences)
            await before.shutdown()

        self._server, self._engine = after, next_process
        await self.spawn(process, hand_over())
        self.loop.kill(process)
        kill_workers(process)
        for name in [each for each in self.record.open if each.startswith(f"{process} ")]:
            del self.record.open[name]
        self.event(f"{process} has ended")
        upgrade.end_s = self.now_s()

    async def kill_engine(self, operation: Operation) -> None:
        if self._is_stopping or any(each.end_s == float("inf") for each in self.outages):
            return
        outage = Change("engine", self.now_s())
        self.outages.append(outage)
        self.event(f"kill {self._engine}")
        self.loop.kill(self._engine)
        kill_workers(self._engine)
        self.record.open.clear()
        await asyncio.sleep(operation.values["down_s"])
        await self._start_engine()
        await asyncio.sleep(1.0)  # the front ends find it
        outage.end_s = self.now_s()

    async def kill_front_end(self, operation: Operation) -> None:
        if self._is_stopping or any(each.end_s == float("inf") for each in self.outages):
            return
        number = operation.values["pick"] % len(self._front_ends) + 1
        outage = Change(self._front_ends[number][0], self.now_s())
        self.outages.append(outage)
        self.event(f"kill {outage.model}")
        self.loop.kill(outage.model)
        await asyncio.sleep(operation.values["down_s"])
        await self._start_front_end(number)
        outage.end_s = self.now_s()


def _json_end(body: bytes) -> int:
    depth = 0
    for position, each in enumerate(body):
        depth += (each == 0x7B) - (each == 0x7D)
        if not depth and position:
            return position + 1
    return len(body)
