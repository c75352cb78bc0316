"""What holds for all tests.

An exception in a callback of an event loop goes to the loop's exception handler and no further: the test would wait for
ever for what the callback should have done. Here the loop of the main thread stops, and the test fails with the
exceptions of all loops. (pytest itself does so for exceptions in threads and finalizers.) A test that provokes such
exceptions on purpose has the marker `loop_faults`. The time limit reaches a test that hangs on uvloop by the same way:
what its signal raises becomes an exception in a callback.
"""

import asyncio
import faulthandler
import gc
import inspect
import logging
import marshal
import signal
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest
import uvloop
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings
from tests.support import closing, fork_server, warm_start

from charonia import compiled

assert fork_server  # imported before any test
warm_start.install()

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in background jobs: programs of the tests would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes, or takes to generate, says more about what else the machine does than about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

HANGS_S = 600.0
"""A test that the signal of its time limit does not reach has this time."""

LOOPS: tuple[Any, ...] = (asyncio.BaseEventLoop, uvloop.Loop)

# What takes longest begins first, or the last process would still be at it when the others have long been done.
# Of the first ones, some compute and some wait.
# fmt: off
SLOWEST_FILES = [
    "test_described_api.py", "test_ocr_example.py", "test_stories.py",
    "test_page.py", "test_hostile_folder.py", "test_platform_demo.py", "test_platform_story.py",
    "test_sentence_encoder_example.py",
    "test_tensorflow.py", "test_environments.py", "test_replicas.py", "test_platform_commands.py",
    "test_upgrade.py", "test_balancers.py", "test_demo.py", "test_from_other_servers.py",
    "test_llama_cpp_server.py", "test_traffic_served.py", "test_tune_command.py", "test_openai_served.py",
    "test_run.py", "test_balanced_process.py", "test_platform_faults.py", "test_slow_clients.py", "test_pods.py",
    "test_killed_platform.py", "test_voice_activity_torch.py",
    "test_tune_language.py", "test_local_target.py", "test_situations.py", "test_perf_command.py",
    "test_renewal.py", "test_on_this_machine.py", "test_scaling.py", "test_serve_files.py", "test_reconcile.py",
    "test_search_modes.py", "test_model_calls.py", "test_compare_runs.py", "test_chart.py",
    "test_tensorflow_server.py", "test_tracing.py", "test_answers.py",
    "test_fairness.py", "test_walked_ensembles.py", "test_scheduler_properties.py",
    "test_s3_server.py", "test_checks.py", "test_walks.py", "test_platform_process.py",
    "test_run_served.py", "test_faults.py", "test_repository_features.py", "test_cache_and_rate_limiter.py",
    "test_keepalive.py", "test_guarded_server.py", "test_campaign.py",
]
# fmt: on


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--campaign-scenarios",
        type=int,
        default=0,
        metavar="N",
        help="random scenarios that tests/interop runs on Charonia and Triton, besides those kept as tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pure_form: the test replaces methods, which compiled callers do not look up")
    config.addinivalue_line("markers", "loop_faults: the test provokes exceptions in callbacks of event loops")
    config.addinivalue_line(
        "markers", "cold_start: its programs start as they do elsewhere (tests/support/warm_start.py)"
    )


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(config: pytest.Config) -> Generator[None, Any, Any]:
    """Reports of workers are sent as one string: execnet writes and reads each value of them in Python."""
    data = yield
    return {"report": marshal.dumps(data)} if data is not None and hasattr(config, "workerinput") else data


@pytest.hookimpl(wrapper=True)
def pytest_report_from_serializable(data: dict[str, Any]) -> Generator[None, Any, Any]:
    if "report" in data:
        data.update(marshal.loads(data.pop("report")))
    return (yield)


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()
    warm_start.end()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if compiled.form == "compiled" and item.get_closest_marker("pure_form"):
            item.add_marker(pytest.mark.skip("it replaces methods of compiled classes"))
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=_begins)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected is large and stays: garbage collections, meanwhile and later, need not go through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _begins(item: pytest.Item) -> int:
    if item.path.name in SLOWEST_FILES:
        return SLOWEST_FILES.index(item.path.name)
    return len(SLOWEST_FILES) + (item.path.parent.name != "process")


_watches: list[float] = []
"""Since when a process ends that hangs in native code."""


def watch(config: pytest.Config) -> None:
    """End this process if it hangs in native code for `HANGS_S`, or up to a minute longer.

    pytest does so for each test in another thread, which takes as long as a small test.
    """
    now = time.monotonic()
    if not _watches or now > _watches[-1] + 60:
        _watches[:] = [now]
        must_end = config.getini("faulthandler_exit_on_timeout")
        faulthandler.dump_traceback_later(HANGS_S + 60, exit=must_end, file=config.stash[fault_handler_stderr_fd_key])


def pytest_exception_interact() -> None:
    _watches.clear()  # pytest has cancelled it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    watch(item.config)
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("cold_start") is not None:
            patch.setenv(warm_start.COLD, "yes")
        result = yield
    if nextitem is not None and nextitem.path != item.path:
        # Modules that the file's tests imported, such as those of PyTorch, stay as well: for tests that collect garbage
        # themselves, going through them takes 0.1 s each time.
        gc.collect()
        gc.freeze()
    return result


@pytest.fixture
def root_logger() -> Generator[None, None, None]:
    """For tests of what sets up the log of a process: afterwards the root logger is as before."""
    root = logging.getLogger()
    handlers, level, raising = root.handlers[:], root.level, logging.raiseExceptions
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, logging.raiseExceptions = handlers, raising
    root.setLevel(level)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine on a fresh event loop, of `new_loop`: an argument of the test, or a name in its module."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    factory: Any = pyfuncitem.funcargs.get("new_loop", getattr(pyfuncitem.module, "new_loop", None))
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(closing.closed_after(pyfuncitem.obj, arguments))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    result = yield
    root = logging.getLogger()
    if root.level != logging.WARNING:
        found = logging.getLevelName(root.level)
        root.setLevel(logging.WARNING)
        raise AssertionError(f"the test leaves the root logger at the level {found}")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("loop_faults") is not None:
        return (yield)
    faults: list[BaseException] = []
    with pytest.MonkeyPatch.context() as patch:
        for loop_class in LOOPS:
            patch.setattr(loop_class, "call_exception_handler", _noting(loop_class.call_exception_handler, faults))
        try:
            result = yield
        except BaseException as error:
            if not faults:
                raise
            raise BaseExceptionGroup("an event loop's callback failed, and the test", [*faults, error]) from None
    if faults:
        raise BaseExceptionGroup("an event loop's callback failed", faults)
    return result


def _noting(call_exception_handler: Any, faults: list[BaseException]) -> Any:
    def note(loop: Any, context: dict[str, Any]) -> None:
        fault = context.get("exception") or RuntimeError("no exception")
        # The loop may be in a thread that an earlier test left behind.
        fault.add_note(f"The loop's handler, in thread {threading.current_thread().name}, got: {context['message']}")
        faults.append(fault)
        call_exception_handler(loop, context)
        if threading.current_thread() is threading.main_thread() and loop.is_running():
            loop.stop()

    return note
