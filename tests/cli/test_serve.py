import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from charonia.cli import logs
from charonia.cli import serve as command
from charonia.cli.logs import BLOCK
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid, not_found
from charonia.core.metadata import ModelIndexEntry, ModelState
from charonia.server.files.served_files import classify
from charonia.server.machine import memory
from charonia.server.options import HttpOptions, MetricsOptions, ServerOptions

OPTIONS = ServerOptions(http=HttpOptions(address="127.0.0.1"), metrics=MetricsOptions(enabled=False))


class FakeEndpoint:
    def __init__(self, port: int) -> None:
        self.port = port


class FakeServer:
    """A server whose start does what a test says."""

    def __init__(
        self, start: Callable[[], object] = lambda: None, *, finishes: bool = True, slow: bool = False
    ) -> None:
        self.http: FakeEndpoint | None = None
        self.grpc: FakeEndpoint | None = None
        self.metrics: FakeEndpoint | None = None
        self.is_shut_down = False
        self._start, self._finishes, self._slow = start, finishes, slow

    def __call__(self, options: ServerOptions, log: object = None) -> "FakeServer":
        return self

    async def start(self) -> None:
        self._start()
        if self._slow:
            await asyncio.Event().wait()
        self.http, self.grpc = FakeEndpoint(4000), FakeEndpoint(4001)

    async def shutdown(self) -> bool:
        logging.info("successfully unloaded 'bert'")
        self.is_shut_down = True
        return self._finishes

    def models(self) -> list[ModelIndexEntry]:
        return [ModelIndexEntry("bert", "1", ModelState.READY)]

    def model_config(self, name: str) -> ModelConfig:
        if name != "bert":
            raise not_found(f"model '{name}' is not found")
        return ModelConfig(
            name=name,
            max_batch_size=4,
            input=(
                ModelInput("x", DataType.FP32, dims=(2,)),
                ModelInput("y", DataType.BYTES, dims=(1,), optional=True),
            ),
            output=(ModelOutput("z", DataType.INT64, dims=(-1,)),),
        )


def send(number: int) -> Callable[[], object]:
    """Makes a signal arrive soon after the start."""
    return lambda: asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), number)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_gracefully(number: int, caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer(send(number))

    status, is_clean = asyncio.run(command.serve(OPTIONS, server))

    assert (status, is_clean) == (0, True)
    assert server.is_shut_down
    assert caplog.messages == [
        "1 of 1 model versions ready",
        "Started GRPCInferenceService at 0.0.0.0:4001",
        "Started HTTPService at 127.0.0.1:4000",
        f"{signal.Signals(number).name}: shutting down",
        "successfully unloaded 'bert'",
        "server stopped",
    ]
    assert "bert   1        READY" in getattr(caplog.records[0], BLOCK)


def test_an_expired_exit_timeout_is_a_failure_that_leaves_something_running() -> None:
    server = FakeServer(send(signal.SIGTERM), finishes=False)

    assert asyncio.run(command.serve(OPTIONS, server)) == (1, False)


@pytest.mark.parametrize(("kind", "mib"), [("given", 1), ("container", 1)])
def test_a_server_of_one_process_that_exceeds_its_memory_shuts_down(
    kind: str, mib: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "MEMORY_S", 0)
    monkeypatch.setattr(command, "limit_before_kill_mib", lambda: mib if kind == "container" else 0)
    server = FakeServer()
    options = OPTIONS if kind == "container" else replace(OPTIONS, memory_limit_mib=mib)

    assert asyncio.run(command.serve(options, server)) == (1, True)
    assert server.is_shut_down
    assert "MiB of memory, more than --memory-limit-mib=1: shutting down" in caplog.text
    assert ("memory.oom.group: the kernel would end all processes" in caplog.text) == (kind == "container")


@pytest.mark.parametrize(
    ("front_ends", "given", "limit_mib", "consequence"),
    [(0, 0, 900, "the server shuts down"), (2, 0, 900, "the engine restarts"), (2, 100, 100, "")],
)
def test_where_the_kernel_ends_whole_containers_a_limit_acts_before(
    front_ends: int,
    given: int,
    limit_mib: int,
    consequence: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(command, "limit_before_kill_mib", lambda: 900)

    found = command.with_memory_limit(replace(OPTIONS, front_ends=front_ends, memory_limit_mib=given))

    assert found.memory_limit_mib == limit_mib
    assert consequence in caplog.text
    assert bool(consequence) == bool(caplog.records)


def test_a_signal_during_the_start_ends_it() -> None:
    server = FakeServer(send(signal.SIGTERM), slow=True)

    assert asyncio.run(command.serve(OPTIONS, server)) == (0, False)
    assert server.is_shut_down


def test_a_failed_start_says_why_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise invalid("port 80 is in use:\nby another server", hint="--http-port=0 takes a free one")

    server = FakeServer(fail)

    assert asyncio.run(command.serve(OPTIONS, server)) == (1, True)
    assert server.is_shut_down
    assert caplog.messages == [
        "successfully unloaded 'bert'",
        "the server cannot start: port 80 is in use:",
        "server stopped",
    ]
    assert getattr(caplog.records[1], BLOCK) == "by another server\n(hint: --http-port=0 takes a free one)"


@pytest.mark.parametrize(("hint", "end"), [("", ""), ("serve the rest", " (serve the rest)")])
def test_what_is_wrong_with_models_is_not_said_again_at_the_end(
    hint: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        logging.error("load failed for model 'net': no such file")
        raise invalid("not every model could be loaded:\nload failed for model 'net': no such file", hint=hint)

    assert asyncio.run(command.serve(OPTIONS, FakeServer(fail))) == (1, True)
    assert caplog.messages == [
        "load failed for model 'net': no such file",
        "successfully unloaded 'bert'",
        f"server stopped: not every model could be loaded{end}",
    ]


def test_an_unexpected_failure_is_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise KeyError("surprise")

    assert asyncio.run(command.serve(OPTIONS, FakeServer(fail))) == (1, True)
    assert "KeyError: 'surprise'" in caplog.text


@pytest.mark.parametrize(("same_signal_s", "expected"), [(0.0, [1]), (60.0, [])])
def test_a_second_signal_ends_the_process_at_once_unless_it_is_taken_for_the_first(
    same_signal_s: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(command, "_end_now", ended.append)
    monkeypatch.setattr(command, "SAME_SIGNAL_S", same_signal_s)

    class Hanging(FakeServer):
        async def shutdown(self) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.02)
            return await super().shutdown()

    asyncio.run(command.serve(OPTIONS, Hanging(send(signal.SIGTERM))))

    assert ended == expected


def test_mistakes_in_the_arguments_are_printed_and_nothing_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    status = command.run(["models", "--htp-port=80", "--grpc-port=x"])

    assert status == 1
    assert capsys.readouterr().err.splitlines() == [
        "charonia serve: unknown option '--htp-port' (hint: did you mean --http-port?)",
        "charonia serve: --grpc-port: expected an integer from 0 to 65535, got 'x'",
        "`charonia serve --help` lists the options.",
    ]


def test_a_missing_repository_is_reported_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "configure", lambda options, **further: None)

    status = command.run([str(tmp_path / "missing"), "--http-thread-count=8"])

    assert status == 1
    assert caplog.messages[0].startswith("--http-thread-count has no effect: ")
    assert "no such file or directory (hint: --model-repository takes a folder" in caplog.messages[1]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in command.SIGNALS]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.parametrize(("finishes", "ended"), [(True, []), (False, [1])])
def test_a_process_with_threads_that_still_compute_is_ended_without_waiting_for_them(
    finishes: bool, ended: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer(send(signal.SIGTERM), finishes=finishes)
    parts = SimpleNamespace(InferenceServer=server, new_event_loop=asyncio.new_event_loop)
    calls: list[int] = []
    monkeypatch.setitem(sys.modules, "charonia.server.app", parts)
    monkeypatch.setattr(logs, "configure", lambda options, **further: None)
    monkeypatch.setattr(command, "_end_now", calls.append)

    assert command.run([str(tmp_path)]) == (0 if finishes else 1)

    assert calls == ended


def test_a_repository_that_looks_like_a_model_is_remarked_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.pbtxt").write_text("")
    parts = SimpleNamespace(InferenceServer=FakeServer(send(signal.SIGTERM)), new_event_loop=asyncio.new_event_loop)
    monkeypatch.setitem(sys.modules, "charonia.server.app", parts)
    monkeypatch.setattr(logs, "configure", lambda options, **further: None)

    command.run([str(tmp_path)])

    assert "a repository is the folder around the model folders" in caplog.messages[0]


def test_a_server_without_models_says_what_a_repository_is(caplog: pytest.LogCaptureFixture) -> None:
    class Empty(FakeServer):
        def models(self) -> list[ModelIndexEntry]:
            return []

    asyncio.run(command.serve(OPTIONS, Empty(send(signal.SIGTERM))))

    assert caplog.messages[0].startswith("no models: a repository is a folder of model folders")


@pytest.mark.parametrize(
    ("arguments", "environment", "address"),
    [
        (["net.onnx"], {}, "127.0.0.1"),
        (["models"], {}, "0.0.0.0"),
        (["models", "net.onnx"], {}, "0.0.0.0"),
        (["net.onnx", "--host=10.0.0.1"], {}, "10.0.0.1"),
        (["net.onnx", "--host=*"], {}, "*"),
        (["net.onnx", "--model_name=net"], {}, "0.0.0.0"),
        (["net.onnx", "--allow-sagemaker=true"], {}, "0.0.0.0"),
        (["net.onnx"], {"PORT": "8080", "K_SERVICE": "net"}, "0.0.0.0"),
        (["net.onnx", "--host=127.0.0.1"], {"PORT": "8080", "K_SERVICE": "net"}, "127.0.0.1"),
    ],
)
def test_files_are_served_to_this_machine_only_and_repositories_to_all(
    arguments: list[str], environment: dict[str, str], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("net.onnx").write_bytes(b"")
    options, _ = command.parse(arguments, environment)

    options = command.with_addresses(options, classify(options.models))

    assert options.http.address == address


def test_options_for_files_need_one(tmp_path: Path) -> None:
    options, _ = command.parse([str(tmp_path), "--workers=2", "--name=a"], {})

    with pytest.raises(ServingError, match="--name, --workers: expected a file to serve, got repositories only"):
        classify(options.models)


def test_short_options_set_several_and_the_long_ones_override_them() -> None:
    options, _ = command.parse(
        ["m", "--grpc-port=7", "--port=9000", "--host=::1", "--metrics-address=::", "--reload"], {}
    )

    assert (options.http.port, options.grpc.port, options.metrics.port) == (9000, 7, 9002)
    assert (options.http.address, options.grpc.address, options.metrics_address) == ("::1", "::1", "::")
    assert (options.models.control_mode.value, options.models.poll_secs) == ("poll", 1)
    free, _ = command.parse(["m", "--port=0"], {})
    assert (free.http.port, free.grpc.port, free.metrics.port) == (0, 0, 0)
    with pytest.raises(
        ServingError, match=r"--cors-origins: expected \* or origins such as https://example.org, got 'a.org'"
    ):
        command.parse(["m", "--cors-origins=https://b.org,a.org"], {})
