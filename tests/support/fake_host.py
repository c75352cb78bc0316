"""The host of a Python model that only takes notes: what `charonia.server.backends.python.worker.host.Host` names."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from charonia.server.backends.python.worker.host import Binding, Inbox, ModelBatch, ModelCall
from charonia.server.backends.python.worker.requests import InferenceResponse, result_of
from charonia.server.backends.python.worker.tensor import Tensor
from charonia.server.channel.datatypes import TritonModelException


def answer(value: float = 1, name: str = "OUT") -> InferenceResponse:
    return InferenceResponse([Tensor(name, np.array([value], np.float32))])


class FakeHost:
    """Answers calls with what `outcomes` says, in the thread that waits."""

    def __init__(self) -> None:
        self.name = "m_0_0"
        self.logged: list[tuple[int, str]] = []
        self.responses: list[tuple[int, int, Any, bool]] = []
        self.calls: list[ModelCall] = []
        self.ended: list[int] = []
        self.asked_to_stop: list[int] = []
        self.asked: list[tuple[str, str, dict[str, object]]] = []
        self.told: list[tuple[object, ...]] = []
        self.number = 0
        self.tracebacks: list[tuple[list[str], str]] = []
        self.polls = 0
        self.together: list[int] = []
        self.outcomes: Callable[[ModelCall], list[tuple[InferenceResponse | None, bool]]] = lambda call: [
            (answer(), True)
        ]
        self.refusal = ""

    def log(self, level: int, message: str, file: str, line: int) -> None:
        self.logged.append((level, message))

    def respond(self, batch: ModelBatch, index: int, result: Any, final: bool) -> None:
        self.responses.append((batch.number, index, result, final))

    def respond_together(self, answers: Sequence[Any]) -> None:
        self.together.append(len(answers))
        for given in answers:
            self.respond(*given)

    def poll(self) -> None:
        self.polls += 1

    def begin(self, call: ModelCall) -> None:
        self.calls.append(call)
        call.number = len(self.calls)
        for response, final in self.outcomes(call):
            names = () if response is None else tuple(tensor.name() for tensor in response.output_tensors())
            call.inbox.put((None if response is None else result_of(response, names, Binding(None)), final))

    def end(self, call: ModelCall, *, softly: bool = False) -> None:
        (self.asked_to_stop if softly else self.ended).append(call.number)

    def wait(self, inbox: Inbox[Any]) -> None:
        assert inbox.items, "nothing will ever come"

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        pass

    def control(self, action: str, model_name: str, options: dict[str, object]) -> Any:
        if self.refusal:
            raise TritonModelException(self.refusal)
        self.asked.append((action, model_name, options))
        return True

    def make_number(self) -> int:
        self.number += 1
        return self.number

    def raised(self, request_ids: list[str], traceback: str) -> None:
        self.tracebacks.append((request_ids, traceback))

    def ask_metrics(self, update: tuple[Any, ...]) -> float | None:
        if self.refusal:
            raise TritonModelException(self.refusal)
        self.told.append(update)
        return 2.5 if update[0] == "value" else None

    def metrics(self, updates: list[tuple[object, ...]]) -> None:
        self.told += updates

    def later(self, action: Callable[[], None]) -> None:
        action()
