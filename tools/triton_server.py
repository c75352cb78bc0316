"""Stands for the program `tritonserver` in suites of `triton_suites`: `charonia serve`, with what suites need.

Their models ask for GPUs, and for test backends in C++, which Python
models replace here. They hold a scheduler up until as many requests have arrived as TRITONSERVER_DELAY_SCHEDULER and
TRITONSERVER_BACKLOG_DELAY_SCHEDULER say, so that batches do not depend on time.
"""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

from charonia.cli.main import main
from charonia.server.grpc.calls import UnaryCall
from charonia.server.lifecycle.backends import Backends
from charonia.server.scheduling.api import Command, Event, Scheduler, SlotIdle, Submit

HOLDS = ("TRITONSERVER_DELAY_SCHEDULER", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER")

DELAY = "TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC"

SEQUENCE = """
import json, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        delay = config.get("parameters", {}).get("execute_delay_ms", {"string_value": "0"})
        self.delay_s = int(delay["string_value"]) / 1000
        self.sums = {}

    def execute(self, requests):
        time.sleep(self.delay_s)
        return [self.one(request) for request in requests]

    def one(self, request):
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        id = tensors["CORRID"].flat[0] if "CORRID" in tensors else request.correlation_id()
        given, total = tensors["INPUT"].flat[0], self.sums.get(id, 0)
        total = given if tensors["START"].flat[0] else total + given
        if "CORRID" in tensors and tensors["END"].flat[0]:
            total += int(id)
        self.sums[id] = total
        values = np.full(tensors["INPUT"].shape, total, tensors["INPUT"].dtype)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", values)])
"""

REPEAT = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        waits = []
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy().ravel() for tensor in request.inputs()}
            shapes = [list(inputs[name].shape) for name in ("IN", "DELAY") if name in inputs]
            if shapes[0] != shapes[-1]:
                text = f"expected IN and DELAY shape to match, got {shapes[0]} and {shapes[1]}"
                response = pb_utils.InferenceResponse([], error=pb_utils.TritonError(text))
                request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            threading.Thread(target=self.send, args=(request.get_response_sender(), inputs), daemon=True).start()
            waits.append(int(inputs["WAIT"][0]) if "WAIT" in inputs else 0)
        time.sleep(max(waits) / 1000)

    def send(self, sender, inputs):
        for index, value in enumerate(inputs["IN"]):
            if "DELAY" in inputs:
                time.sleep(int(inputs["DELAY"][index]) / 1000)
            tensors = [pb_utils.Tensor("OUT", np.array([value], np.int32))]
            tensors.append(pb_utils.Tensor("IDX", np.array([index], np.uint32)))
            sender.send(pb_utils.InferenceResponse(tensors))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

SQUARE = """
import json, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().flat[0])
            threading.Thread(target=self.send, args=(request.get_response_sender(), count), daemon=True).start()

    def send(self, sender, count):
        for _ in range(count):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([count], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

ITERATIVE = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            tensor, id = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy(), request.correlation_id()
            left = self.left[id] = self.left.get(id, int(tensor.flat[0])) - 1
            time.sleep(0.5)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.full_like(tensor, left))])
            if left > 0:
                request.get_response_sender().send(response)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                self.left.pop(id)
                request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

BACKENDS = Path("/opt/tritonserver/backends")

_LIBRARY = re.compile(r"^default_model_filename:.*\.so.*\n", re.MULTILINE)

_SPANS = re.compile(r', { key: "(nested_span_count|single_activity_frequency)"\s*value: { string_value: "\d+" } }')
"""Parameters that the identity backend refuses."""

STAND_INS = {
    **dict.fromkeys(("sequence", "dyna_sequence", "implicit_state"), SEQUENCE),
    "iterative_sequence": ITERATIVE,
    "repeat": REPEAT,
    "square": SQUARE,
}


def main_of_suites(arguments: list[str]) -> int:
    """Prepare the repositories among the arguments and run the server."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, value = argument.partition("=")
        if name in ("--model-repository", "--model-store"):
            prepare(Path(value or following))
    held = sum(int(os.environ.get(name, 0)) for name in HOLDS)
    if held:
        hold(held)
    if seconds := int(os.environ.get(DELAY, 0)):
        if "CHARONIA_PURE" not in os.environ:  # methods of compiled classes cannot be replaced
            os.execve(sys.executable, sys.orig_argv, {**os.environ, "CHARONIA_PURE": "1"})
        delay_calls(seconds)
    if not any(argument.startswith("--backend-directory") for argument in arguments):
        arguments = [*arguments, f"--backend-directory={BACKENDS}"]
    return main(["serve", *arguments])


def hold(requests: int) -> None:
    """Hold the schedulers of all models up until so many requests have arrived."""
    begin = Backends.__init__

    def held(self: Backends, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self.observed = lambda scheduler: Held(scheduler, requests)

    setattr(Backends, "__init__", held)  # noqa: B010


def delay_calls(seconds: int) -> None:
    """Answer calls over gRPC later."""
    begin = UnaryCall._begin

    def delayed(self: UnaryCall, message: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, begin, self, bytes(message))

    setattr(UnaryCall, "_begin", delayed)  # noqa: B010


def prepare(repository: Path) -> None:
    """Let the models of a repository run on the CPU, without the libraries and what else only test backends know."""
    for file in repository.glob("*/config.pbtxt"):
        given = file.read_text()
        text = _SPANS.sub("", _LIBRARY.sub("", given.replace("KIND_GPU", "KIND_CPU")))
        if text != given:
            file.write_text(text)


class Held:
    """A scheduler whose slots become idle when a number of requests has arrived."""

    def __init__(self, scheduler: Scheduler, missing: int) -> None:
        self._scheduler, self._missing = scheduler, missing
        self._idle: list[SlotIdle] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._scheduler, name)

    def slot_at_once(self) -> None:
        """Return no slot: requests pass through `handle`."""

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        if self._missing and isinstance(event, SlotIdle):
            self._idle.append(event)
            return []
        commands = self._scheduler.handle(event, now_ns)
        if self._missing and isinstance(event, Submit):
            self._missing -= 1
            if not self._missing:
                for each in self._idle:
                    commands += self._scheduler.handle(each, now_ns)
        return commands


if __name__ == "__main__":
    sys.exit(main_of_suites(sys.argv[1:]))
