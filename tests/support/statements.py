"""The statements that a database is sent."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, event


def in_the_test() -> bool:
    """Whether the test itself asks, and not a thread of the platform."""
    return threading.current_thread() is threading.main_thread()


def in_a_request() -> bool:
    """Whether a request to the platform asks, and not one of its own threads."""
    return threading.current_thread().name.startswith("AnyIO worker")


@contextmanager
def noted(engine: Engine, is_noted: Callable[[], bool] = in_the_test) -> Iterator[list[str]]:
    """Note the statements that a database is sent meanwhile; the platform's own threads read all the time."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if is_noted():
            seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)
