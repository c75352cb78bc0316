"""One run of a scenario: the server, its clients and its faults on the simulated machine, and the history of it all."""

import asyncio
import base64
import contextvars
import errno
import gc
import json
import logging
import os
import shutil
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.simulation import left, models, processes
from tests.simulation.checks import FINISH_S, check_history, check_quiet
from tests.simulation.clients import INFER_REQUEST, INFER_RESPONSE, STREAM_RESPONSE, GrpcClient, HttpClient, Outcome
from tests.simulation.machine import (
    DISK,
    MACHINE,
    PROCESS,
    SECOND_NS,
    START_NS,
    Faults,
    NothingLeftError,
    SimulatedLoop,
)
from tests.simulation.network import Network
from tests.simulation.processes import HEARTBEAT_S, Process
from tests.simulation.scenario import PORTS, Model, Operation, Scenario
from tests.simulation.workers import WORKERS

from charonia.config.json_form import to_json
from charonia.config.pbtxt import parse
from charonia.server import app
from charonia.server.app import InferenceServer
from charonia.server.channel import channel
from charonia.server.front_ends import bursts
from charonia.server.front_ends.children import process_specs, write_options
from charonia.server.front_ends.processes import Upgrades
from charonia.server.front_ends.reconnect import HOLD_NS_MAX
from charonia.server.guard.notify import Notifier
from charonia.server.guard.restarts import State
from charonia.server.guard.supervisor import Supervisor
from charonia.server.model_options import AutoOptions, ControlMode
from charonia.server.options import GrpcOptions, HttpOptions, MetricsOptions, ModelOptions, ServerOptions
from charonia.server.response_cache.options import CacheOptions
from charonia.server.response_cache.runner import CachedCall

vars(app)["installed_backends"] = lambda directory=None: {"simulated": models.SimulatedBackend}

DISK_FAULT = "disk"
REGION, SLOT_BYTES = "clients", 512
REGION_BYTES = SLOT_BYTES << 14
"""Shared memory of the clients: a slot for each request, its inputs in the first half, its outputs in the other."""

WAIT_S = 20
"""Time that a request waits for a model that is loaded on demand."""

RECOVERY_S = 120.0
"""Time in which the guard brings processes back."""

QUIET_S = 300.0
"""Time after the last operation in which every request must have its outcome."""

LATE_NS = 500_000_000

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
    kind: str = "unload"


@dataclass(slots=True)
class Traffic(Change):
    """A change of the traffic between versions.

    Attributes:
        kind: "weights", "canary", "long canary", or an action.
        share: Of version 1.
    """

    share: float = 0.0
    status: str = ""


class World:
    """The simulated world of a scenario.

    Attributes:
        requests: All requests so far, in order.
        ended: Those with an outcome, in the order of their ends.
        changes: Times in which models were loaded or unloaded.
        outages: Times in which a process was killed until it was back.
        harmed: Times in which a worker may be down.
        away: Times in which a model was unloaded.
        brought: Models that were loaded from the files of a request.
        failures: Times in which a call of the server has failed on purpose.
    """

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.requests: list[Request] = []
        self.ended: list[Request] = []
        self.parts_of: dict[int, list[Request]] = defaultdict(list)  # by the number of their operation
        self.changes: list[Change] = []
        self.outages: list[Change] = []
        self.harmed: list[Change] = []
        self.away: list[Change] = []
        self.failures: list[Change] = []
        self.problems: list[str] = []
        self.history: list[str] = []
        self.recent: deque[str] = deque(maxlen=60)
        self.leaving_s = self.stopped_s = float("inf")
        self.models = {model.name: model for model in scenario.models}
        self.written = dict.fromkeys(self.models, 1)
        self.returned = dict.fromkeys(self.models, 1)
        self.unloaded: set[str] = set()
        self.shadowed: set[str] = set()
        self.brought: set[str] = set()
        self.traffics: list[Traffic] = []
        self.plans: dict[str, dict[str, Any]] = {}  # traffic in the end, by model
        self.counts: list[dict[str, Any]] = []
        self._folder = folder
        self._idle: dict[str, deque[Any]] = {"http": deque(), "grpc": deque()}
        self._busy: dict[int, Any] = {}  # by the number of the request
        self._shared: dict[int, Any] = {}
        self._server: InferenceServer | None = None  # of one process
        self._guard: Supervisor | None = None
        self._upgrades: Any = None
        self._is_stopping = False
        self._is_clean = False  # a server of one process has answered everything before its exit timeout
        self.steps = 0  # callbacks until all requests had their outcomes

    # The run.

    def run(self) -> None:
        """Run the scenario and check its history."""
        MACHINE.reset(self.scenario.seed)
        MACHINE.late = self.scenario.options["late"]
        self.record = models.begin(self.scenario.seed)
        self.loop = loop = SimulatedLoop()
        asyncio.set_event_loop(loop)
        self.network = Network(loop, self.scenario.seed)
        loop.set_exception_handler(self._loop_fault)
        self.faults = faults = Faults()
        faults.recent = self.recent
        vars(channel)["INLINE_BYTES_MAX"] = vars(bursts)["BURST_BYTES_MAX"] = self.scenario.options["inline_bytes"]
        root = logging.getLogger()
        root.handlers, root.level = [faults], logging.WARNING
        self._write_repository()
        self._region = Path("/dev/shm", f"simulation-{os.getpid()}")
        self._region.write_bytes(bytes(REGION_BYTES))
        self._slots = self._region.open("r+b", buffering=0)
        try:
            loop.run_until_complete(self._main())
        except NothingLeftError:
            self.problem("nothing is left to do, and the scenario has not ended")
        except Exception as error:
            self.problem(f"the run failed: {type(error).__name__}: {error}")
            logging.getLogger("simulation").exception("the run failed")
        finally:
            self._slots.close()
            self._region.unlink()
        self.problems += faults.found + self.record.problems
        check_history(self)

    def now_s(self) -> float:
        return (MACHINE.now_ns - START_NS) / SECOND_NS

    def event(self, text: str) -> None:
        line = f"{self.now_s():.9f} {text}".replace(str(self._folder), "")
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
        self.before = left.files()
        await self._start()
        if self.scenario.options["regions"]:
            await self._register()
        self.started_s = self.now_s()
        self.calm = self.left({})
        self.event("ready")
        watching = self.spawn("clients", self._watch())
        tasks: list[asyncio.Task[None]] = []

        def begin(operation: Operation) -> None:
            self.recent.append(str(operation))
            tasks.append(self.spawn("clients", getattr(self, operation.kind)(operation)))

        async def operate() -> None:
            for operation in self.scenario.operations:
                wait_s = self.started_s + operation.at_s - self.now_s()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                begin(operation)

        operating = self.spawn("clients", operate())
        if (injected := self.scenario.injected) is not None and injected.kind == "error":
            MACHINE.fails_at, MACHINE.failed = injected.number, self._failed
        elif injected is not None:
            self.loop.at_step(
                injected.number, operating.cancel if injected.kind == "shutdown" else lambda: begin(injected)
            )
        await asyncio.wait({operating})
        if not operating.cancelled():
            operating.result()
        if not (self.scenario.options["exits_busy"] or operating.cancelled()):
            await self._finish(tasks)
            self.steps = self.loop.steps
            await self._settle()
            await self._read_statistics()
            self._hang_up()
            await asyncio.sleep(CALM_S)
            check_quiet(self)
        await self._settle()
        watching.cancel()
        if watching.done() and not watching.cancelled():
            watching.result()
        await self._shutdown()
        await self._finish(tasks)
        self.steps = self.steps or self.loop.steps
        self._hang_up()
        await asyncio.sleep(CALM_S)
        self._check_ended()

    async def _register(self) -> None:
        document = {"key": self._region.name, "offset": 0, "byte_size": REGION_BYTES}
        outcome = await self._control("POST", f"/v2/systemsharedmemory/region/{REGION}/register", document)
        self.event(f"register {outcome.status} {outcome.code}")

    async def _finish(self, tasks: list["asyncio.Task[Any]"]) -> None:
        if tasks:
            _, open_tasks = await asyncio.wait(tasks, timeout=QUIET_S)
            for operation, task in zip(self.scenario.operations, tasks, strict=False):
                if task in open_tasks and operation.kind != "request":
                    self.problem(f"it does not end: {operation}")
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
                control_mode=ControlMode("explicit" if given["control"] == "idle" else given["control"]),
                load=("*",) if given["control"] in ("explicit", "idle") else (),
                poll_secs=1 if given["control"] == "poll" else 0,
                auto=AutoOptions(
                    memory_mb=given["memory_mb"] if given["control"] == "auto" else 0,
                    wait_secs=WAIT_S if given["control"] == "auto" else 300,
                    idle_secs=1 if given["control"] == "idle" else 0,
                ),
            ),
            client_shm=given["regions"],
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
        tempfile.tempdir = str(self._folder / "temporary")
        Path(tempfile.tempdir).mkdir()

    async def _start(self) -> None:
        if self.scenario.shape == "one":
            self._server = InferenceServer(self._options())
            await self.spawn("engine 1", self._server.start())
            return
        options, folder = self._options(), self._folder / "private"
        processes.begin(options, self._process_ended, self.scenario.options["starts_s"])
        write_options(folder, options)

        async def start() -> bool:
            self._upgrades = upgrades = Upgrades(folder, options, (), Notifier(), {})
            self._guard = upgrades.guard = Supervisor(
                process_specs(folder, {}, [{} for _ in range(options.front_ends)]),
                folder,
                exit_timeout_s=options.exit_timeout_secs,
                heartbeat_s=HEARTBEAT_S,
                hand_over=upgrades.hand_over,
                upgraded=upgrades.reported,
                reaps_orphans=False,
            )
            return await self._guard.start()

        if not await self.spawn("guard", start()):
            self.problem("the server does not start")

    def _process_ended(self, process: Process, status: int) -> None:
        self.event(f"{process.process} has ended with status {status}")
        for name in [each for each in self.record.open if each.startswith(f"{process.process} ")]:
            del self.record.open[name]
        if status > 0 and not self.outages and not self._is_stopping:  # 1 where requests have outlasted the limit
            self.problem(f"{process.process} has ended with status {status}")

    async def _shutdown(self) -> None:
        begin_s = self.leaving_s = self.now_s()
        self.event("shutdown")
        self._is_stopping = True
        limit_s = self.scenario.options["exit_timeout_secs"] + 8.0  # 2 s of an execution whose client has gone

        async def stop() -> None:
            if self._guard is None:
                assert self._server is not None
                self._is_clean = await self._server.shutdown()
                return
            self._upgrades.close()
            self._guard.stop()
            await self._guard.ended
            self._guard.close()

        try:
            await asyncio.wait_for(self.spawn("guard" if self._guard is not None else "engine 1", stop()), limit_s + 60)
        except TimeoutError:
            self.problem("the shutdown hangs")
        self.stopped_s = self.now_s()
        took_s = self.stopped_s - begin_s
        self.event("stopped")
        if took_s > limit_s:
            self.problem(f"the shutdown took {took_s:.1f} s, the limits allow {limit_s:g} s")

    def left(self, ended: left.Objects) -> Counter[str]:
        """Return what the server has: tasks, timers, descriptors and files, except those of objects."""
        found = left.tasks(self.loop) + left.timers(self.loop) + left.files(ended) + left.paths(self._folder)
        return found + left.links(ended)

    def living(self) -> list[object]:
        """Return what is not part of a process that has ended."""
        alive = Process.all.values() if self._guard is not None else ()
        return [self, self.network, self._guard, self.record, *alive, *(each.server for each in alive), *self.models]

    def _check_ended(self) -> None:
        if any(not end.is_gone for end in self.network.ends):
            self.problem("after the shutdown, a connection is still open")
        self.network.ends.clear()
        self._server = None
        while gc.collect():
            pass
        more = left.tasks(self.loop) + left.timers(self.loop)
        if self._is_clean:
            more += left.files() - self.before + Counter(left.threads()) + self.record.open
            more += left.paths(self._folder)
        if more:
            self.problem(f"after the shutdown, there is still: {more}")
        if self.network.listeners:
            self.problem("after the shutdown, a port is still open")

    @property
    def front_ends(self) -> list[Any]:
        if self._guard is None:
            return []
        return [each.server for name, each in Process.all.items() if name.startswith("front_end") and each.server]

    def endpoints(self) -> list[Any]:
        """Return the endpoints of all processes."""
        return [each.endpoints for each in self.front_ends] or [self.engine.front_ends]

    async def _watch(self) -> None:
        while not self._is_beyond_limits():
            await asyncio.sleep(0.01 if self._busy else 0.1)

    def _is_beyond_limits(self) -> bool:
        """Check the limits of queues; return whether one is broken."""
        engine = self.engine
        for loaded in engine._lifecycle.table.loaded() if engine is not None else ():
            model = self.models[loaded.runner.config.name]
            queue_max = model.queue_max * (2 if "priority_levels" in model.pbtxt else 1)  # of each level
            scheduler = getattr(getattr(loaded.runner, "inner", loaded.runner), "_scheduler", None)
            queue = getattr(scheduler, "_queue", None)
            late_ns = queue.next_deadline_ns() if queue is not None else None
            if late_ns is not None and late_ns < MACHINE.now_ns - LATE_NS:
                self.problem(f"{loaded.runner} has not noticed that a request has waited for too long")
                return True
            calls: list[Any] = [each for each in getattr(loaded.runner, "_calls", ()) if isinstance(each, CachedCall)]
            calls = [each for each in calls if each.flight and each.flight.leader]
            limit_ns = loaded.runner._policy.limits.timeout_ns if calls else 0
            for call in calls if limit_ns and not loaded.runner._policy.limits.delay_expired else ():
                if call.flight.leader is not call and MACHINE.now_ns - call.arrival_ns > limit_ns + LATE_NS:
                    self.problem(f"{call.request.id} of {model.name} follows another request beyond its timeout")
                    return True
            if queue_max and (loaded.runner.pending or 0) > queue_max:
                self.problem(f"{loaded.runner} has more than {queue_max} requests in its queue")
                return True
        for front_end in [each for each in self.front_ends if each._engine is not None]:  # while it starts
            held = front_end._engine.current.held
            if (
                held._held
                and MACHINE.now_ns > (held._reconnect._disconnected_ns or MACHINE.now_ns) + HOLD_NS_MAX + LATE_NS
            ):
                self.problem(f"a front end holds {len(held._held)} requests for too long")
                return True
        return False

    @property
    def engine(self) -> Any:
        """The engine that gets new requests, None while there is none."""
        if self._guard is None:
            return self._server
        process = Process.all.get(self._guard._restarts.engine)
        return process.server if process is not None else None

    # Requests.

    def _client(self, protocol: str, shared: int | None) -> Any:
        """Return a client with a connection that nobody else uses, or only calls with the same number."""
        kind = "grpc" if protocol in ("grpc", "stream") else "http"
        if shared is not None:
            client = self._shared.get(shared)
            if client is None or not client.is_open:
                client = self._shared[shared] = self._connected(kind)
                client.is_shared = True
            return client
        idle = self._idle[kind]
        while idle and not idle[0].is_open:
            idle.popleft()
        return idle.popleft() if idle and self.network.chance.random() < 0.95 else self._connected(kind)

    def _connected(self, kind: str) -> Any:
        client: Any = (
            GrpcClient(self.network, PORTS["grpc"])
            if kind == "grpc"
            else HttpClient(self.network, PORTS["http"], self.problems)
        )
        client.was_cut = client.is_shared = False
        return client

    def _release(self, number: int, protocol: str) -> None:
        client = self._busy.pop(number)
        if client.is_open and not client.is_shared:
            self._idle["grpc" if protocol in ("grpc", "stream") else "http"].append(client)

    def _hang_up(self) -> None:
        for client in (*self._idle["http"], *self._idle["grpc"], *self._busy.values(), *self._shared.values()):
            if client.end is not None:
                client.end.close()
        self._idle = {"http": deque(), "grpc": deque()}
        self._busy, self._shared = {}, {}

    async def request(self, operation: Operation) -> None:
        """Ask one time, or for each of a sequence: after the answer before, or (pipelined) right behind each other."""
        model = self.models[operation.model]
        values = operation.values
        if model.role != "sequence":
            await self._ask(operation, model, 7 + values.get("repeat", operation.number % 1000), {})
            return
        key, total = operation.number + 1, 0
        length = min(values["length"], values.get("stops_after", 99))
        asked = []
        for index in range(length):
            if index and not values.get("pipelined"):
                await asyncio.sleep(values["gap_ms"] / 1000)
            total += index + 1
            flags = {"sequence_id": key, "sequence_start": index == 0, "sequence_end": index == values["length"] - 1}
            asking = self._ask(operation, model, index + 1, flags, total)
            if values.get("pipelined"):
                asked.append(self.spawn("clients", asking))
            elif (await asking).outcome.status != "ok":
                return
        await asyncio.gather(*asked)

    async def _ask(
        self, operation: Operation, model: Model, value: int, flags: dict[str, Any], sums: int | None = None
    ) -> Request:
        values, protocol = operation.values, operation.values["protocol"]
        number = len(self.requests) + 1
        floor = self.returned[model.name]
        request = Request(number, operation, model, self.now_s(), floor, value, sums)
        self.requests.append(request)
        self.parts_of[operation.number].append(request)
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
        if values.get("region"):
            os.pwrite(self._slots.fileno(), array.tobytes(), number * SLOT_BYTES)
        shared = operation.number if values.get("pipelined") else values.get("shared")
        client = self._busy[number] = self._client(protocol, shared)
        if values.get("reads_slowly") and client.end is not None:
            client.end.pause_reading()
            self.loop.call_later(0.5, client.end.resume_reading)
        if protocol in ("json", "binary"):
            call = self._over_http(client, number, model.name, version, array, shape, parameters, values)
        else:
            call = self._over_grpc(client, number, model.name, version, array, shape, parameters, values)
        if values.get("leaves_ms") is None:
            request.outcome = await call
        else:
            task = asyncio.ensure_future(call)
            done, _ = await asyncio.wait({task}, timeout=values["leaves_ms"] / 1000)
            if done:
                request.outcome = task.result()
            else:
                if protocol in ("json", "binary") or (number % 3 == 0 and shared is None):
                    client.leave()
                task.cancel()
                request.outcome = Outcome("left")
        request.was_cut = client.was_cut
        self._release(number, protocol)
        request.end_s = self.now_s()
        self.ended.append(request)
        request.ceiling = self.written[model.name]
        self._read(request, protocol)
        code, body = request.outcome.code, request.outcome.body
        detail = request.output if request.outcome.status == "ok" else bytes(body)[:300].decode("utf-8", "replace")
        self.event(
            f"request {number} {model.name} {protocol} {request.outcome.status} {code} {request.version} {detail}"
        )
        return request

    async def _over_http(
        self, client: HttpClient, number: int, model: str, version: str, array: Any, shape: list[int],
        parameters: dict[str, Any], values: dict[str, Any],
    ) -> Outcome:  # fmt: skip
        tensor: dict[str, Any] = {"name": "INPUT", "shape": shape, "datatype": "INT32"}
        document: dict[str, Any] = {"inputs": [tensor]}
        path = f"/v2/models/{model}{'/versions/' + version if version else ''}/infer"
        if values.get("region"):
            data, is_binary = b"", False
            tensor["parameters"] = _place(number, array.nbytes)
            output = {"name": "OUTPUT", "parameters": _place(number, array.nbytes, is_output=True)}
            document["outputs"] = [output]
        elif is_binary := values["protocol"] == "binary":
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
        self, client: GrpcClient, number: int, model: str, version: str, array: Any, shape: list[int],
        parameters: dict[str, Any], values: dict[str, Any],
    ) -> Outcome:  # fmt: skip
        message = INFER_REQUEST(model_name=model, model_version=version)
        tensor = message.inputs.add(name="INPUT", datatype="INT32", shape=shape)
        if values.get("region"):
            output = message.outputs.add(name="OUTPUT")
            for each, is_output in ((tensor, False), (output, True)):
                for key, value in _place(number, array.nbytes, is_output=is_output).items():
                    setattr(each.parameters[key], "string_param" if isinstance(value, str) else "int64_param", value)
        else:
            message.raw_input_contents.append(array.tobytes())
        for key, value in parameters.items():
            parameter = message.parameters[key]
            if isinstance(value, bool):
                parameter.bool_param = value
            else:
                parameter.int64_param = value
        headers = []
        if values.get("deadline_ms"):
            headers.append((b"grpc-timeout", b"%du" % int(values["deadline_ms"] * 1000)))
        if values["protocol"] == "stream" and values.get("shared") is not None:
            return await client.ask(message.SerializeToString())
        method = "ModelStreamInfer" if values["protocol"] == "stream" else "ModelInfer"
        return await client.call(method, [message.SerializeToString()], *headers)

    def _read(self, request: Request, protocol: str) -> None:
        """Read version and values of an answer."""
        outcome = request.outcome
        if outcome.status != "ok":
            return
        is_placed = bool(request.operation.values.get("region"))
        if is_placed:
            rows = request.operation.values.get("rows", 1)
            data = os.pread(self._slots.fileno(), 16 * rows, request.number * SLOT_BYTES + SLOT_BYTES // 2)
            request.output = np.frombuffer(data, "<i4").tolist()
        if protocol in ("json", "binary"):
            document, end = json.JSONDecoder().raw_decode(outcome.body.decode("latin-1"))
            request.version = int(document["model_version"])
            data = outcome.body[end:]
            if not is_placed:
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
            if not is_placed:
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
        change = Change(name, self.now_s(), kind="load")
        self.changes.append(change)
        if self.scenario.options["control"] == "poll":
            await asyncio.sleep(3.0)
            outcome = Outcome("error")
        else:
            outcome = await self._control("POST", f"/v2/repository/models/{name}/load", self._files(operation))
        if outcome.status == "ok" and not (is_bad and self.written[name] == generation):
            self.returned[name] = max(self.returned[name], generation)
        self.event(f"load {name} generation {generation} {outcome.status} {outcome.code}")
        if not is_bad:
            await self._check_known(name, outcome, is_there=True)
        if outcome.status == "ok" and is_bad and self.written[name] == generation:
            self.problem(f"{name} was loaded from damaged files")
        if is_bad and self.written[name] == generation:
            self.written[name] += 1
            for version in model.versions:
                models.write_generation(folder, version, self.written[name])
        change.end_s = self.now_s()

    def _files(self, operation: Operation) -> dict[str, object]:
        """Return the body of a load request; some bring the files of the model themselves."""
        model = self.models[operation.model]
        if operation.number % 3 or model.role == "ensemble":
            return {}
        paths = [f"{version}/{models.GENERATION}" for version in model.versions]
        texts = {path: (self._folder / "models" / model.name / path).read_bytes() for path in paths}
        self.brought.add(model.name)
        files = {f"file:{path}": base64.b64encode(text).decode() for path, text in texts.items()}
        return {"parameters": {"config": json.dumps(to_json(parse(model.pbtxt))), **files}}

    async def _check_known(self, name: str, outcome: Outcome, *, is_there: bool) -> None:
        """Ask for the metadata of a model that has just been loaded or unloaded, while nothing else changes it."""
        if outcome.status != "ok" or self.scenario.options["control"] != "explicit":
            return
        begin_s = self.now_s()
        for _ in range(3):
            found = await self._control("GET", f"/v2/models/{name}")
            others = [each for each in self.changes if each.end_s >= begin_s and each.model == DISK_FAULT]
            others += [each for each in self.outages if each.end_s >= begin_s and each.model == "engine"]  # not told
            own = [each for each in self.changes if each.end_s >= begin_s and each.model == name]
            is_answer = found.status in ("ok", "error") and found.code in (200, 400, 404)
            if is_answer and not others and len(own) == 1 and not self._is_stopping and (found.code == 200) != is_there:
                self.problem(f"after a change of {name}, its metadata is {found}")

    async def unload(self, operation: Operation) -> None:
        if self.scenario.options["control"] == "poll":
            return
        change = Change(operation.model, self.now_s())
        self.changes.append(change)
        self.unloaded.add(operation.model)
        outcome = await self._control("POST", f"/v2/repository/models/{operation.model}/unload", {})
        self.event(f"unload {operation.model} {outcome.status} {outcome.code}")
        away = Change(operation.model, self.now_s(), kind=outcome.status)
        await self._check_known(operation.model, outcome, is_there=False)
        await asyncio.sleep(operation.values["back_s"])
        away.end_s = self.now_s()
        self.away.append(away)
        for _ in range(20):
            again = await self._control("POST", f"/v2/repository/models/{operation.model}/load", {})
            if again.status == "ok" or self._is_stopping:
                break
            await asyncio.sleep(1.0)
        self.event(f"load {operation.model} {again.status} {again.code}")
        await self._check_known(operation.model, again, is_there=True)
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
            await self._change_traffic(model, "weights", document, share / 100)

    async def _change_traffic(self, model: Model, kind: str, document: object, share: float = 0.0) -> None:
        change = Traffic(model.name, self.now_s(), kind=kind, share=share)
        self.traffics.append(change)
        change.status = (await self._control("POST", f"/v2/models/{model.name}/traffic", document)).status
        change.end_s = self.now_s()
        self.event(f"{kind} {model.name} {change.status}")

    async def canary(self, operation: Operation) -> None:
        """A short plan for version 2, with copies to it, and what an operator does to it."""
        model, values = self.models[operation.model], operation.values
        if len(model.versions) == 1:
            return
        plan = {"version": 2, "stable": 1, "steps": [20, 60, 100], "step_seconds": 1, "samples_min": 0}
        plan |= {"p99_ratio_max": None} if operation.number % 4 else {}  # or it waits for many requests
        document: dict[str, Any] = {"canary": plan, "shadow": {"2": {"share": 0.5}} if values["shadow"] else None}
        if values["shadow"]:
            self.shadowed.add(model.name)
        await self._change_traffic(model, "canary" if operation.number % 4 else "long canary", document)
        await asyncio.sleep(1.5)
        if values["action"]:
            await self._change_traffic(model, values["action"], {"action": values["action"]})

    async def _read_traffic(self) -> None:
        """Read where requests go in the end."""
        for name in sorted({each.model for each in self.traffics}):
            outcome = await self._control("GET", f"/v2/models/{name}/traffic")
            if outcome.status == "ok":
                self.plans[name] = json.loads(outcome.body)
                self.event(f"traffic {name} {self.plans[name]['canary'] and self.plans[name]['canary']['state']}")

    async def _read_statistics(self) -> None:
        await asyncio.sleep(5.0)  # requests whose clients have left
        await self._read_traffic()
        outcome = await self._control("GET", "/v2/models/stats")
        if outcome.status != "ok" and self.failures and self.now_s() - self.failures[-1].begin_s < 1.0:
            await asyncio.sleep(1.0)  # the failure was put into this one
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
            client = [*self._busy.values()][operation.values["pick"] % len(self._busy)]
            if client.end is not None and not client.end.is_gone:
                client.was_cut = True
                self.network.cut(client.end)

    def _failed(self, what: str) -> None:
        """Note that a call of the server fails on purpose: what needs it may fail, too."""
        now_s = self.now_s()
        self.event(f"error of {PROCESS.get()}: {what}")
        self.failures.append(Change("error", now_s, now_s))
        if what.startswith(("socket", "recvmsg", "mmap")):  # a channel is given up, as if its other end had gone
            self.harmed.append(Change("worker", now_s, now_s + 40.0))
            self.outages += [Change("engine", now_s, now_s + 1.0)] if self._guard is not None else []

    async def wall_clock(self, operation: Operation) -> None:
        MACHINE.wall_ns += (operation.values["pick"] - 500) * SECOND_NS

    async def regions(self, operation: Operation) -> None:
        """The clients' memory is registered again."""
        change = Change(REGION, self.now_s())
        self.changes.append(change)
        outcome = await self._control("POST", f"/v2/systemsharedmemory/region/{REGION}/unregister", {})
        self.event(f"unregister {outcome.status} {outcome.code}")
        for _ in range(20):
            await self._register()
            outcome = await self._control("GET", f"/v2/systemsharedmemory/region/{REGION}/status")
            if outcome.status == "ok" or self._is_stopping:
                break
            await asyncio.sleep(1.0)
        change.end_s = self.now_s()

    async def disk(self, operation: Operation) -> None:
        """For a while, the repository cannot be read, or the server's own folder is full."""
        number, name = ((errno.EIO, "models"), (errno.ENOENT, "models"), (errno.ENOSPC, "private"))[
            operation.number % 3
        ]
        path, change = str(self._folder / name), Change(DISK_FAULT, self.now_s())
        self.changes.append(change)
        self.event(f"disk {errno.errorcode[number]} {name}")
        DISK[path] = number
        await asyncio.sleep(operation.values["down_s"])
        DISK.pop(path, None)
        change.end_s = self.now_s() + 2.0  # the next look at the repository
        self.event("disk is well")

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
        """A second engine starts, and the first one hands its front ends over, which are then renewed."""
        assert self._guard is not None
        if self._is_stopping:
            return
        stops_first, waiting_s = operation.values["pick"] % 4 == 0, self.now_s() + operation.values["pick"] % 20
        while not (self._guard._restarts.may_upgrade or self.now_s() > waiting_s or self._is_stopping):
            await asyncio.sleep(0.05)
        upgrade = Change("engine" if stops_first else "upgrade", self.now_s())
        self.outages.append(upgrade)
        last: dict[str, object] = {}

        killing: list[asyncio.Task[None]] = []

        async def follow() -> None:
            steps = 0
            async for message in self._upgrades.answer({"stop_first": stops_first, "finish_s": FINISH_S}):
                self.event(f"upgrade: {message}")
                last.update(message)
                if steps == operation.values.get("step"):
                    killing.append(self.spawn("clients", self._harm(operation.values["role"], operation.values)))
                steps += 1

        await self.spawn("guard", follow())
        await asyncio.gather(*killing)
        is_alone = not self.failures and all(each is upgrade or each.end_s < upgrade.begin_s for each in self.outages)
        if "error" in last and is_alone and not any(each.end_s > upgrade.begin_s for each in self.changes):
            self.problem(f"the upgrade has failed: {last}")
        await self._recover(upgrade)

    async def kill_engine(self, operation: Operation) -> None:
        await self._harm("engine", operation.values)

    async def kill_front_end(self, operation: Operation) -> None:
        await self._harm("front_end", operation.values)

    async def _harm(self, role: str, values: dict[str, Any]) -> None:
        """Kill a process, or let it hang, until the guard notices; some crash again when they are back."""
        outage, pick = Change(role, self.now_s()), values["pick"]
        self.outages.append(outage)
        for _ in range(values.get("again", 1)):
            alive = [each for name, each in Process.all.items() if name.startswith(role)]
            if self._is_stopping or not alive:
                outage.end_s = min(outage.end_s, self.now_s())
                break
            process, outage.end_s = alive[pick % len(alive)], float("inf")
            self.event(f"{'hang' if pick % 5 == 0 else 'kill'} {process.process}")
            if pick % 5:
                process.kill()
            else:
                process.hang()
                await asyncio.sleep(2 * HEARTBEAT_S)
            await self._recover(outage)

    async def _recover(self, outage: Change) -> None:
        """Wait until the guard has brought everything back; the outage ends then."""
        assert self._guard is not None
        end_s, restarts = self.now_s() + RECOVERY_S, self._guard._restarts
        await asyncio.sleep(0.1)  # it notices that a process has ended
        while not (restarts.may_upgrade and all(each.state is State.READY for each in restarts._children.values())):
            if self.now_s() > end_s:
                states = {name: each.state.name for name, each in restarts._children.items()}
                self.problem(f"the guard does not bring the server back: {states}")
                break
            await asyncio.sleep(0.1)
        outage.end_s = self.now_s() + 1.0  # the front ends find the engine


def _place(number: int, size: int, *, is_output: bool = False) -> dict[str, Any]:
    """Return the parameters of a tensor in the clients' region."""
    offset = number * SLOT_BYTES + (SLOT_BYTES // 2 if is_output else 0)
    return {"shared_memory_region": REGION, "shared_memory_offset": offset, "shared_memory_byte_size": size}
