"""The checker: questions with known answers, invalid requests and control calls, all at once, on real servers.

Every answer is compared, bit by bit. Each client sends one request after the other:

- questions over HTTP (JSON and binary tensors), over gRPC, as `generate` and `generate_stream`, and on streams;
- sequences, whose sums have to be right;
- requests that must be refused, with the status that they must get;
- control calls: a model is loaded again with changed files and must answer from these; traffic between versions,
  shared memory and settings are changed, and must be as they were set.

One mode has one process, one has front ends, in two of them processes are killed at random, all or the workers of one
process, in one the server is upgraded again and again. Only where processes are killed may a request end with an error,
and only with one that says so, or with its connection.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import numpy as np
import psutil
import tritonclient.utils.shared_memory as shm
from tests.campaign.asking import (
    ANSWER_S_MAX,
    BrokenError,
    GrpcClient,
    HttpClient,
    HttpResponse,
    Refused,
    WrongAnswerError,
    check_grpc,
    check_http,
    error_text,
    from_raw,
    grpc_request,
    http_body,
    refusal,
)
from tests.campaign.figures import Context, Figures
from tests.campaign.known_models import (
    CHANGING,
    Question,
    part_of_sequence,
    question,
    texts,
    values,
    write_numbered,
    write_repository,
)
from tests.support.fork_server import run_command
from tests.support.process import ServeProcess, eventually, shared_memory_of, started_by

from charonia.core.dtypes import DataType

MODES: Mapping[str, Sequence[str]] = {
    "one process": (),
    "front ends": ("--front-ends=2",),
    "killed": ("--front-ends=2",),
    "workers killed": (),
    "upgraded": ("--front-ends=2",),
}
"""Arguments of the server by mode."""

ARGUMENTS = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true")
CLEAR = re.compile(
    r"the engine ended before the request was answered"
    r"|the engine is being started again"
    r"|the worker process was ended by SIGKILL"
    r"|is over: the process that remembered it has ended"
    r"|was lost: the engine that had its state has ended"
)
"""What a request may be told in place of its answer."""

GONE = ("has gone", "handed its front ends over")
TOGETHER = 32
"""Requests of the volume run that a connection has in flight."""

CONNECTIONS = 24
"""Connections of the volume run; a quarter of them is gRPC."""

POOL = 2000
"""Different questions of the volume run."""

INVALID: Sequence[tuple[str, str, object, int]] = (
    ("POST", "/v2/models/none/infer", {"inputs": []}, 404),
    ("POST", "/v2/models/add/versions/9/infer", {"inputs": []}, 404),
    ("POST", "/v2/models/add/versions/x/infer", {"inputs": []}, 404),
    ("POST", "/v2/models/add/infer", b"{", 400),
    ("POST", "/v2/models/add/infer", b"\xff\xfe", 400),
    ("POST", "/v2/models/add/infer", [], 400),
    ("POST", "/v2/models/add/infer", {}, 400),
    *(
        ("POST", f"/v2/models/{model}/infer", {"inputs": [{"name": name, **more}], "outputs": outputs}, 400)
        for model, name, more, outputs in (
            ("add", "A", {"datatype": "INT32", "shape": [1, 1], "data": [1]}, []),
            ("echo_fp32", "NONE", {"datatype": "FP32", "shape": [1, 1], "data": [1]}, []),
            ("echo_fp32", "INPUT0", {"datatype": "INT32", "shape": [1, 1], "data": [1]}, []),
            ("echo_fp32", "INPUT0", {"datatype": "FP32", "shape": [1, 2], "data": [1]}, []),
            ("echo_fp32", "INPUT0", {"datatype": "FP32", "shape": [2], "data": [1, 2]}, []),
            ("echo_fp32", "INPUT0", {"datatype": "FP32", "shape": [65, 1], "data": [0] * 65}, []),
            ("echo_fp32", "INPUT0", {"datatype": "FP32", "shape": [1, -1], "data": [1]}, []),
            ("echo_fp32", "INPUT0", {"datatype": "FP32", "shape": [1, 1], "data": ["x"]}, []),
            ("echo_fp32", "INPUT0", {"datatype": "FP32", "shape": [1, 1], "data": [1]}, [{"name": "NONE"}]),
            ("echo_uint8", "INPUT0", {"datatype": "UINT8", "shape": [1, 1], "data": [256]}, []),
            ("echo_bool", "INPUT0", {"datatype": "BOOL", "shape": [1, 1], "parameters": {"binary_data_size": 9}}, []),
            ("sums", "INPUT", {"datatype": "INT32", "shape": [1, 1], "data": [1]}, []),
        )
    ),
    ("POST", "/v2/repository/models/none/load", {}, 500),
    ("POST", "/v2/repository/models/add/load", {"parameters": {"config": "{"}}, 500),
    ("POST", "/v2/systemsharedmemory/region/none/register", {"key": "/none", "offset": 0, "byte_size": 8}, 500),
    ("POST", "/v2/logging", {"log_verbose_level": "x"}, 400),
    ("POST", "/v2/trace/setting", {"trace_rate": "x"}, 400),
    ("GET", "/v2/models/none", b"", 404),
    ("GET", "/nowhere", b"", 404),
    ("DELETE", "/v2/models/add/infer", b"", 405),
)
"""Method, path and body of requests that are refused, and the status that they get."""


Client = Callable[[random.Random, HttpClient, GrpcClient], Awaitable[None]]


class Checker:
    """The clients of one server.

    Args:
        repository: Folder of its models, of `write_repository`.
    """

    def __init__(
        self,
        server: ServeProcess,
        repository: Path,
        figures: Figures,
        seed: int,
        *,
        has_crashes: bool = False,
    ) -> None:
        self._server = server
        self._repository = repository
        self._figures = figures
        self._seed = seed
        self._has_crashes = has_crashes
        self._ids = itertools.count(1)
        self._goes_on: Callable[[], bool] = lambda: True
        self.right: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    @property
    def sent(self) -> int:
        """Requests that have got what they should."""
        counts = self._figures.counts
        return counts["right answers"] + counts["right refusals"] + counts["control calls"]

    async def run(self, goes_on: Callable[[], bool]) -> None:
        """Send requests as long as a condition holds, or until something is found."""
        self._goes_on = lambda: goes_on() and not self._figures.finding_count
        clients: list[Client] = [
            *(self._ask_http, self._ask_http, self._ask_grpc, self._ask_grpc, self._generate, self._stream_events),
            *(self._stream_grpc, self._sequences, self._sequences, self._invalid),
            *(self._traffic, self._memory, self._settings),
        ]
        clients += [partial(self._loads, model) for model in CHANGING]
        rngs = [random.Random(f"{self._seed} {number}") for number in range(len(clients))]
        await asyncio.gather(*(self._client(client, rng) for client, rng in zip(clients, rngs, strict=True)))

    async def _client(self, client: Client, rng: random.Random) -> None:
        while self._goes_on():
            over_http, over_grpc = HttpClient(self._server.http), GrpcClient(self._server.grpc)
            try:
                for _ in range(50):  # then over new connections
                    if self._goes_on():
                        await client(rng, over_http, over_grpc)
            except BrokenError as error:
                self._note("broken", f"connection lost: {error}")
            except Exception as error:
                name = getattr(client, "func", client).__name__.strip("_")
                self._figures.found(f"{name}: {type(error).__name__}: {error}")
            finally:
                await over_http.close()
                await over_grpc.close()

    # What is counted

    def _note(self, what: str, text: str) -> None:
        """Count a request that has ended without its answer, which may only be where processes are killed."""
        if self._has_crashes:
            self._figures.counts[what] += 1
        else:
            self._figures.found(text)

    def _is_right(self, model: str, refused: Refused | None) -> bool:
        """Count the end of a question; return whether it is the right answer."""
        if refused is None:
            self._figures.counts["right answers"] += 1
            self.right[model] += 1
            return True
        self.refused[model] += 1
        if CLEAR.search(refused.text) or any(each in refused.text for each in GONE):
            self._note("refused", f"{model}: {refused}")
        else:
            self._figures.found(f"{model}: {refused}")
        return False

    # Clients

    async def _ask(
        self, asked: Question, rng: random.Random, over_http: HttpClient, over_grpc: GrpcClient | None
    ) -> bool:
        """Ask a question in one of the ways there are; return whether its answer came."""
        number = str(next(self._ids))
        if over_grpc is not None and rng.random() < 0.5:
            return self._is_right(asked.model, await over_grpc.ask(asked, number))
        path = f"/v2/models/{asked.model}/infer"
        response = await over_http.ask("POST", path, *http_body(asked, number, rng))
        return self._is_right(asked.model, check_http(asked, number, response))

    async def _ask_http(self, rng: random.Random, over_http: HttpClient, _: GrpcClient) -> None:
        await self._ask(question(rng), rng, over_http, None)

    async def _ask_grpc(self, rng: random.Random, _: HttpClient, over_grpc: GrpcClient) -> None:
        asked = question(rng)
        self._is_right(asked.model, await over_grpc.ask(asked, str(next(self._ids))))

    async def _generate(self, rng: random.Random, over_http: HttpClient, _: GrpcClient) -> None:
        text = texts(rng, 1)[0].decode()
        response = await over_http.ask("POST", "/v2/models/upper/generate", json.dumps({"text_input": text}).encode())
        if response.status != 200:
            self._is_right("upper", Refused(response.status, error_text(response)))
            return
        found = json.loads(response.body)["text_output"]
        if found != text.upper():
            raise WrongAnswerError(f"generate: expected {text.upper()!r}, got {found!r}")
        self._is_right("upper", None)

    async def _stream_events(self, rng: random.Random, over_http: HttpClient, _: GrpcClient) -> None:
        upto = rng.randrange(1, 6)
        response = await over_http.ask("POST", "/v2/models/count/generate_stream", json.dumps({"UPTO": upto}).encode())
        events = [json.loads(line[5:]) for line in response.body.decode().splitlines() if line.startswith("data:")]
        failed = next((event["error"] for event in events if "error" in event), None)
        if response.status != 200 or failed is not None:
            self._is_right("count", Refused(response.status, failed or error_text(response)))
            return
        if [event["NUMBER"] for event in events] != list(range(upto)):
            raise WrongAnswerError(f"generate_stream: expected {upto} numbers, got {events}")
        self._is_right("count", None)

    async def _stream_grpc(self, rng: random.Random, _: HttpClient, over_grpc: GrpcClient) -> None:
        """Open a stream with requests to "count", all at once, and take their responses."""
        wanted = {str(next(self._ids)): rng.randrange(6) for _ in range(rng.randrange(1, 6))}
        numbers: dict[str, list[int]] = {number: [] for number in wanted}
        call = over_grpc.stub.ModelStreamInfer(timeout=ANSWER_S_MAX)
        try:
            for number, upto in wanted.items():
                array = np.array([upto], np.int32)
                message = grpc_request(Question("count", {"UPTO": (DataType.INT32, array)}, {}), number)
                message.parameters["triton_enable_empty_final_response"].bool_param = True
                await call.write(message)
            await call.done_writing()
            left = set(wanted)
            failed = 0
            while len(left) > failed:
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    if failed:
                        return
                    raise WrongAnswerError(f"count: the stream has ended without the last responses of {left}")
                if answer.error_message:
                    self._is_right("count", Refused("stream", answer.error_message))
                    failed += 1
                    continue
                response = answer.infer_response
                if response.raw_output_contents:
                    numbers[response.id] += from_raw(DataType.INT32, (-1,), response.raw_output_contents[0]).tolist()
                if response.parameters["triton_final_response"].bool_param:
                    left.remove(response.id)  # once: a second one is a KeyError
                    if numbers[response.id] != list(range(wanted[response.id])):
                        raise WrongAnswerError(f"count: expected {wanted[response.id]} numbers, got {numbers}")
                    self._is_right("count", None)
            if (more := await call.read()) is not grpc.aio.EOF:
                raise WrongAnswerError(f"count: a response after the last one: {more}")
        except grpc.aio.AioRpcError as error:
            self._is_right("count", refusal(error))
        finally:
            call.cancel()

    async def _sequences(self, rng: random.Random, over_http: HttpClient, over_grpc: GrpcClient) -> None:
        """Send a sequence, to its end or its loss, over any connection."""
        key, total, length = next(self._ids), 0, rng.randrange(1, 20)
        for index in range(length):
            value = rng.randrange(100)
            total += value
            part = part_of_sequence(key, value, total, starts=index == 0, ends=index == length - 1)
            if not await self._ask(part, rng, over_http, over_grpc):
                return

    async def _invalid(self, rng: random.Random, over_http: HttpClient, _: GrpcClient) -> None:
        method, path, content, status = rng.choice(INVALID)
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        response = await over_http.ask(method, path, body)
        if response.status == status:
            error_text(response)
            self._figures.counts["right refusals"] += 1
        elif self._has_crashes and response.status in (500, 503):
            self._is_right(path, Refused(response.status, error_text(response)))
        else:
            raise WrongAnswerError(f"{method} {path} {content!r}: expected {status}, got {response}")
        await asyncio.sleep(0.01)

    async def _control(self, over_http: HttpClient, method: str, path: str, document: object = None) -> HttpResponse:
        """Make a control call, again where its outcome is not known because a process was killed."""
        body = b"" if document is None else json.dumps(document).encode()
        while True:
            try:
                response = await over_http.ask(method, path, body)
            except BrokenError:
                if not self._has_crashes:
                    raise
                self._figures.counts["broken"] += 1
                continue
            if response.status == 200:
                self._figures.counts["control calls"] += 1
                return response
            text = error_text(response)
            self._note("refused", f"{method} {path}: {response.status}: {text}")
            if not (CLEAR.search(text) or any(each in text for each in GONE)):
                raise WrongAnswerError(f"{method} {path}: {response.status}: {text}")
            if not self._goes_on():
                raise BrokenError("the run is over")
            await asyncio.sleep(0.05)

    async def _hold(self, rng: random.Random, check: Callable[[], Awaitable[None]]) -> None:
        """Check what was set, now and after a while."""
        for _ in range(3):
            await check()
            await asyncio.sleep(rng.uniform(0, 0.3))

    async def _loads(self, model: str, rng: random.Random, over_http: HttpClient, over_grpc: GrpcClient) -> None:
        """Load a model again with changed files, or with files of the request; it answers from these."""
        number = next(self._ids)
        sent: dict[str, object] = {}
        if rng.random() < 0.7:
            await asyncio.to_thread(_replace, self._repository, model, number)
            if rng.random() < 0.2:
                await self._control(over_http, "POST", f"/v2/repository/models/{model}/unload", {})
        else:
            sent = {"parameters": await asyncio.to_thread(_files, self._repository, model, number)}
        await self._control(over_http, "POST", f"/v2/repository/models/{model}/load", sent)
        await self._hold(rng, lambda: self._ask_number(model, number, rng, over_http, over_grpc))

    async def _ask_number(
        self, model: str, number: int, rng: random.Random, over_http: HttpClient, over_grpc: GrpcClient
    ) -> None:
        integers = DataType.INT32
        any_number = np.array([[0]], np.int32)
        right = np.array([[number]], np.int32)
        asked = Question(model, {"ANY": (integers, any_number)}, {"NUMBER": (integers, right)})
        with contextlib.suppress(*((BrokenError,) if self._has_crashes else ())):
            await self._ask(asked, rng, over_http, over_grpc)

    async def _traffic(self, rng: random.Random, over_http: HttpClient, over_grpc: GrpcClient) -> None:
        """Send all requests without a version to one of two versions."""
        version = rng.choice((1, 2))
        weights = {str(each): int(each == version) for each in (1, 2)}
        await self._control(over_http, "POST", "/v2/models/split/traffic", {"weights": weights})
        await self._hold(rng, lambda: self._ask_number("split", version, rng, over_http, over_grpc))

    async def _memory(self, rng: random.Random, over_http: HttpClient, _: GrpcClient) -> None:
        """Register memory, ask with a tensor in it, and unregister it; its name is the same each time."""
        key = f"/charonia-campaign-{os.getpid()}"
        sent = values(rng, DataType.FP32, 4).reshape(1, 4)
        region = shm.create_shared_memory_region("region", key, 64)
        try:
            shm.set_shared_memory_region(region, [sent])
            path = "/v2/systemsharedmemory/region/campaign"
            await self._control(over_http, "POST", f"{path}/unregister")
            await self._control_once(over_http, f"{path}/register", {"key": key, "offset": 0, "byte_size": 64})
            place = {"shared_memory_region": "campaign", "shared_memory_byte_size": sent.nbytes}
            tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "parameters": place}
            asked = Question("echo_fp32", {}, {"OUTPUT0": (DataType.FP32, sent)})

            async def check() -> None:
                number = str(next(self._ids))
                body = json.dumps({"id": number, "inputs": [tensor]}).encode()
                with contextlib.suppress(*((BrokenError,) if self._has_crashes else ())):
                    response = await over_http.ask("POST", "/v2/models/echo_fp32/infer", body)
                    self._is_right("echo_fp32", check_http(asked, number, response))

            await self._hold(rng, check)
            await self._control(over_http, "POST", f"{path}/unregister")
        finally:
            shm.destroy_shared_memory_region(region)

    async def _control_once(self, over_http: HttpClient, path: str, document: object) -> None:
        """Register memory; one whose answer was lost is there already."""
        try:
            await self._control(over_http, "POST", path, document)
        except WrongAnswerError as error:
            if not (self._has_crashes and "already in manager" in str(error)):
                raise

    async def _settings(self, rng: random.Random, over_http: HttpClient, _: GrpcClient) -> None:
        """Change settings of the log and of traces, and read them."""
        path, name, value = rng.choice(
            [
                ("/v2/logging", "log_format", rng.choice(("default", "ISO8601"))),
                ("/v2/trace/setting", "trace_rate", str(rng.randrange(1, 10**6))),
                ("/v2/models/add/trace/setting", "trace_count", str(rng.randrange(1, 10**6))),
                ("/v2/models/add/trace/setting", "trace_rate", None),
            ]
        )
        response = await self._control(over_http, "POST", path, {name: value})
        right = json.loads(response.body)[name]
        if value is not None and right != value:
            raise WrongAnswerError(f"{path}: expected {name} {value}, got {right}")

        async def check() -> None:
            found = json.loads((await self._control(over_http, "GET", path)).body)[name]
            if found != right:
                raise WrongAnswerError(f"{path}: expected {name} {right}, got {found}")

        await self._hold(rng, check)


def _replace(repository: Path, model: str, number: int) -> None:
    """Let the files of a model answer with a number; never half of a file."""
    write_numbered(repository.parent / "next", model, number)
    (repository.parent / f"next/{model}/1/model.py").replace(repository / f"{model}/1/model.py")


def _files(repository: Path, model: str, number: int) -> dict[str, str]:
    """Return parameters of a load request with files of the model, which answer with a number."""
    write_numbered(repository.parent / "sent", model, number)
    code = (repository.parent / f"sent/{model}/1/model.py").read_bytes()
    tensor = {"data_type": "TYPE_INT32", "dims": [1]}
    config = {
        "backend": "python",
        "max_batch_size": 8,
        "input": [{"name": "ANY", **tensor}],
        "output": [{"name": "NUMBER", **tensor}],
    }
    return {"config": json.dumps(config), "file:1/model.py": base64.b64encode(code).decode()}


class Killer:
    """Kills processes of the server at random, one after the other."""

    def __init__(self, server: ServeProcess, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self._guard = psutil.Process(server.process.pid)
        self._server = server
        self._rng = random.Random(seed)
        self.is_apart = processes_of(self._guard)[0] != []
        self._kinds = {"worker", "front end", "engine"} if self.is_apart else {"worker"}
        self._back = self._seen_back()

    @property
    def is_done(self) -> bool:
        return self._kinds <= set(self.killed)

    @property
    def are_back(self) -> bool:
        """Whether the front ends and engines that were killed are ready again."""
        return self._seen_back() >= self._back

    def _seen_back(self) -> int:
        return self._server.log.count(") is ready again")

    def run(self, is_over: threading.Event) -> None:
        while not is_over.wait(self._rng.uniform(0.1, 0.8)):
            back = self._seen_back()
            with contextlib.suppress(
                psutil.NoSuchProcess
            ):  # an engine that is chosen from, or a victim, has just exited
                kind, victim = self._choose()
                if victim is None:
                    continue
                victim.kill()
                self.killed[kind] += 1
                if kind != "worker":
                    self._back = back + 1

    def _choose(self) -> tuple[str, psutil.Process | None]:
        front_ends, engine = processes_of(self._guard)
        kinds: dict[str, list[psutil.Process]] = {"worker": []}
        if self.are_back:  # So one front end is left, and on a slow machine an engine can load its models.
            kinds["worker"] = [] if engine is None else started_by(engine.pid)
            kinds["front end"] = front_ends
            if engine not in (None, self._guard):
                kinds["engine"] = [engine]
        kind = self._rng.choice([kind for kind in kinds if not self.killed[kind]] or list(kinds))
        return kind, self._rng.choice(kinds[kind]) if kinds[kind] else None


def processes_of(guard: psutil.Process) -> tuple[list[psutil.Process], psutil.Process | None]:
    """Return the front ends and the engine of a server; the process itself if it is the only one."""
    named = {}
    for process in guard.children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "charonia.cli.serve_process" in process.cmdline():
                named[next(word for word in process.cmdline() if re.fullmatch(r"engine|front_end_\d+", word))] = process
    front_ends = [process for name, process in named.items() if name != "engine"]
    return front_ends, named.get("engine", None if front_ends else guard)


def run(context: Context, mode: str) -> Figures:
    figures = Figures()
    repository = context.folder / "models"
    write_repository(repository)
    has_crashes, has_upgrades = "killed" in mode, mode == "upgraded"
    with ServeProcess(repository, *ARGUMENTS, *MODES[mode]) as server:
        checker = Checker(server, repository, figures, context.seed, has_crashes=has_crashes)
        files = psutil.Process(server.process.pid).num_fds()
        is_over = threading.Event()
        killer = Killer(server, context.seed) if has_crashes else None
        disturb = killer.run if killer else partial(_upgrade, server, figures) if has_upgrades else threading.Event.wait
        disturbing = threading.Thread(target=disturb, args=(is_over,), daemon=True)
        disturbing.start()
        end_s = time.monotonic() + (context.seconds if has_crashes or has_upgrades else 0)

        def goes_on() -> bool:
            is_disturbed = killer.is_done if killer else figures.counts["upgrades"] > 0 or not has_upgrades
            is_due = checker.sent < context.requests or time.monotonic() < end_s or not is_disturbed
            return is_due and disturbing.is_alive() and time.monotonic() < context.until_s

        asyncio.run(checker.run(goes_on))
        if not (disturbing.is_alive() or figures.finding_count):
            figures.found("the thread that kills or upgrades has failed")
        is_over.set()
        disturbing.join()
        if killer:
            figures.counts.update({f"kills of a {kind}": count for kind, count in killer.killed.items()})
            _check_recovery(server, killer, files, figures)
        if not (has_upgrades or mode == "killed" or figures.finding_count):
            _check_statistics(server, checker, figures)
        _stop(server, figures)
    return figures


def _check_recovery(server: ServeProcess, killer: "Killer", files: int, figures: Figures) -> None:
    """Check that all that was killed is back, that nothing is in flight, and that the guard has closed its files."""
    guard = psutil.Process(server.process.pid)
    most = files + (0 if killer.is_apart else 4)  # a connection or a region may take a moment to go
    if not eventually(lambda: killer.are_back and _is_idle(server) and guard.num_fds() <= most):
        figures.found(f"not as before: {guard.num_fds()} files open, {files} before; {server.log[-2000:]}")
    if not killer.is_apart and figures.counts["broken"]:
        figures.found("a connection was lost though its process lives")


def _is_idle(server: ServeProcess) -> bool:
    """Whether the server is ready and has no requests."""
    try:
        with urlopen(f"http://{server.http}/v2/health/ready", timeout=ANSWER_S_MAX):
            pass
        with urlopen(f"http://{server.metrics}/metrics", timeout=ANSWER_S_MAX) as page:
            text = page.read().decode()
    except OSError:
        return False
    return not any(map(int, re.findall(r"^nv_inference_pending_request_count\{.*\} (\d+)", text, re.M)))


def _upgrade(server: ServeProcess, figures: Figures, is_over: threading.Event) -> None:
    while not is_over.is_set():
        done = run_command("upgrade", str(server.process.pid))
        if done.returncode:
            figures.found(f"charonia upgrade: {done.stderr}")
            return
        figures.counts["upgrades"] += 1


def _check_statistics(server: ServeProcess, checker: Checker, figures: Figures) -> None:
    """Check that each request was executed once: what the server has counted is what the clients have got."""
    stats = {
        (each["name"], each["version"]): each["inference_stats"]
        for each in server.ask("/v2/models/stats")["model_stats"]
    }
    right = Counter(checker.right)
    right["add"] += 2 * right["chain"] + right["bls"]
    wrongly = {name: stats[name, "1"]["fail"]["count"] - checker.refused[name] for name in ("upper", "worker", "count")}
    names = ["chain", "bls", "sums", "echo_fp32", "echo_bytes", *wrongly]
    if not checker.refused:  # what a refused request has called may have been counted
        names.append("add")
    found = {name: stats[name, "1"]["success"]["count"] - right[name] for name in names}
    for what, counts in (("successes", found), ("failures", wrongly)):
        for model, more in counts.items():
            if more:
                figures.found(f"statistics of {model}: {more} {what} more than clients have seen")


def _stop(server: ServeProcess, figures: Figures) -> None:
    """Stop the server, and check that nothing of it is left."""
    guard = psutil.Process(server.process.pid)
    processes = [guard, *guard.children(recursive=True)]
    regions: set[str] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker that was killed last
            regions |= shared_memory_of(process.pid)
    status = server.stop()
    if status:
        figures.found(f"the server has ended with status {status}: {server.log[-2000:]}")
    _, left = psutil.wait_procs([each for each in processes if each.pid != guard.pid], timeout=200)
    left = [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    if left:
        figures.found(f"processes are left: {left}")
    if any(map(os.path.exists, regions)):
        figures.found(f"memory is left: {regions}")


def run_volume(context: Context) -> Figures:
    """Ask a large number of questions, many at once on each connection, over HTTP and gRPC."""
    figures = Figures()
    repository = context.folder / "models"
    write_repository(repository)
    with ServeProcess(repository, *ARGUMENTS, "--front-ends=2") as server:
        asyncio.run(_ask_many(server, context, figures))
        _stop(server, figures)
    return figures


class _Prepared:
    """A question that is asked again and again: its requests, without the id."""

    def __init__(self, asked: Question, rng: random.Random) -> None:
        body, self._headers = http_body(asked, "", rng)
        self.asked = asked
        self._rest = body.removeprefix(b'{"id": ""')
        self._json_size = int(self._headers.split(" ")[1]) if self._headers else 0
        self._message = grpc_request(asked, "")

    def over_http(self, client: HttpClient, number: str) -> bytes:
        body = b'{"id": "%b"%b' % (number.encode(), self._rest)
        size = f"Inference-Header-Content-Length: {self._json_size + len(number)}\r\n" if self._headers else ""
        return client.request("POST", f"/v2/models/{self.asked.model}/infer", body, size)

    def over_grpc(self, number: str) -> Any:
        """Return a message, which the next call changes."""
        self._message.id = number
        return self._message


async def _ask_many(server: ServeProcess, context: Context, figures: Figures) -> None:
    begun = itertools.count(TOGETHER, TOGETHER)
    numbers = itertools.count(1)
    counts = figures.counts
    source = random.Random(context.seed)
    pool = [_Prepared(question(source), source) for _ in range(POOL)]

    async def over_http(rng: random.Random, client: HttpClient) -> None:
        asked = [(rng.choice(pool), str(next(numbers))) for _ in range(TOGETHER)]
        responses = await client.ask_together([each.over_http(client, number) for each, number in asked])
        for (each, number), response in zip(asked, responses, strict=True):
            refused = check_http(each.asked, number, response)
            if refused is not None:
                raise WrongAnswerError(f"{each.asked.model}: {refused}")
        counts["right answers over HTTP"] += TOGETHER

    async def over_grpc(rng: random.Random, call: Any) -> None:
        asked = {str(next(numbers)): rng.choice(pool) for _ in range(TOGETHER)}
        for number, each in asked.items():
            await call.write(each.over_grpc(number))
        while asked:
            answer = await call.read()
            if answer is grpc.aio.EOF or answer.error_message:
                raise WrongAnswerError(f"stream: {answer}")
            number = answer.infer_response.id
            check_grpc(asked.pop(number).asked, number, answer.infer_response)  # once: a second one is a KeyError
        counts["right answers over gRPC"] += TOGETHER

    async def client(number: int) -> None:
        rng = random.Random(f"{context.seed} {number}")
        http, channel = HttpClient(server.http), GrpcClient(server.grpc)
        call = channel.stub.ModelStreamInfer() if number % 4 == 0 else None
        try:
            while next(begun) < context.volume + TOGETHER and not figures.finding_count:
                if time.monotonic() >= context.until_s:
                    break
                await (over_grpc(rng, call) if call is not None else over_http(rng, http))
        except Exception as error:
            figures.found(f"{type(error).__name__}: {error}")
        finally:
            await http.close()
            await channel.close()

    await asyncio.gather(*map(client, range(CONNECTIONS)))
