import asyncio
import gc
import inspect
import warnings
from collections.abc import Generator

import pytest
import uvloop


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("new_loop")
        loops = [asyncio.new_event_loop, uvloop.new_event_loop]
        metafunc.parametrize("new_loop", loops, ids=["asyncio", "uvloop"])


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A socket that a coroutine leaves open fails the test."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return (yield)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        result = yield
        gc.collect()
    assert [str(warning.message) for warning in caught if issubclass(warning.category, ResourceWarning)] == []
    return result
