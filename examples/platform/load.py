"""Clients that send requests one after the other, with pauses, until they are stopped."""

import threading
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import charonia
from charonia.client import Client

CLIENTS = 8

PAUSE_S = 0.05
"""Between an answer and the next request of a client. Without pauses, the clients would compete for the processor with
the new version that they measure."""


class Load:
    """Sends the same input again and again. Use it as a context manager.

    Attributes:
        answers: Answers by the version that gave them.
        errors: Errors by their words.
    """

    def __init__(self, address: str, model: str, inputs: Mapping[str, Any]) -> None:
        self.answers: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._request = (model, dict(inputs))
        self._address = address
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._send) for _ in range(CLIENTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        with Client(self._address) as client:
            while not self._is_over.is_set():
                answers = self.answers
                try:
                    answer = client.infer(*self._request)
                    with self._lock:
                        answers[answer.model_version] += 1
                    self._is_over.wait(PAUSE_S)
                except charonia.ServingError as error:
                    with self._lock:
                        self.errors[error.message] += 1
                    self._is_over.wait(0.1)

    def count_anew(self) -> None:
        """Count only answers to requests that are sent from now on."""
        self.answers = Counter()

    def summary(self) -> str:
        """Describe the answers in words."""
        by_version = ", ".join(f"{count} by version {version}" for version, count in sorted(self.answers.items()))
        errors = "".join(f"\n    {count} x {message}" for message, count in self.errors.items())
        return f"{self.answers.total()} requests answered ({by_version}), {self.errors.total()} errors{errors}"
