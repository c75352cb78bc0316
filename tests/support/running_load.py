"""Clients in threads that go on while servers come, go and fail."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Self

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.process import ServeProcess, eventually
from tests.support.stock_clients import infer_input

Ask = Callable[[int], object]
"""Sends the request of this number, which no other one has, and raises if its answer is wrong."""
Opened = Callable[[], AbstractContextManager[Ask]]
"""Opens a client."""


class Load:
    """Clients that send requests one after the other within a block, and never one again.

    Attributes:
        answers: Number of right answers by client.
        results: How often `Ask` returned what.
        errors: What went wrong; the client was then opened anew.
    """

    def __init__(self, clients: Mapping[str, Opened], pause_s: float = 0.005) -> None:
        self.answers = dict.fromkeys(clients, 0)
        self.results: Counter[object] = Counter()
        self.errors: list[str] = []
        self._pause_s = pause_s
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(*client, itertools.count(first, len(clients))), daemon=True)
            for first, client in enumerate(clients.items())
        ]

    def goes_on(self, more: int = 1) -> None:
        """Wait until each client has had so many more answers."""
        before = dict(self.answers)
        assert eventually(lambda: all(self.answers[kind] >= before[kind] + more for kind in before)), (
            before,
            self.errors,
        )

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(200)

    def _run(self, kind: str, opened: Opened, numbers: Iterator[int]) -> None:
        while not self._is_over.is_set():
            try:
                with opened() as ask:
                    while not self._is_over.wait(self._pause_s):
                        self.results[ask(next(numbers))] += 1
                        self.answers[kind] += 1
            except Exception as error:
                self.errors.append(f"{kind}: {type(error).__name__} {error}")


@contextmanager
def stock(module: Any, address: str, ask: Callable[[Any, Any, int], object], **options: Any) -> Iterator[Ask]:
    """A stock client.

    Args:
        module: That of its protocol.
        ask: It gets the module, the client and the number of the request.
        options: Those of the client.
    """
    with module.InferenceServerClient(address, **options) as client:
        yield partial(ask, module, client)


def echo(model: str, module: Any, client: Any, number: int) -> str:
    """Send numbers to a model that sends them back, check the answer and its id, and return the version."""
    sent = np.array([[number, 2 * number, 3, 4]], np.float32)
    given = infer_input(module, "INPUT0", sent)
    received = client.infer(model, [given], request_id=str(number))
    assert received.as_numpy("OUTPUT0").tolist() == sent.tolist()
    response = received.get_response()
    found = response if isinstance(response, dict) else {"id": response.id, "model_version": response.model_version}
    assert found["id"] == str(number)
    return str(found["model_version"])


def over_both(server: ServeProcess, **asks: Callable[[Any, Any, int], object]) -> dict[str, Opened]:
    """Return a stock client of each protocol for each of these."""
    return {
        f"{name} over {module.__name__}": partial(stock, module, address, ask)
        for name, ask in asks.items()
        for module, address in ((httpclient, server.http), (grpcclient, server.grpc))
    }
