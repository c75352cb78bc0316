"""Makes the calls of a scenario on Charonia and on Triton, each over a copy of the repository of its own."""

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from tests.interop.campaign.calls import (
    Call,
    Counted,
    Following,
    Grpc,
    Http,
    Scenario,
    Stream,
    Together,
    Write,
    is_control,
    scenario,
)
from tests.interop.campaign.compare import Difference, differences
from tests.support.peers import ANSWER_SECONDS_MAX, TritonProcess, ask
from tests.support.process import ServeProcess
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

COUNTED_WITHIN_S = 2.0
SCENARIOS_A_START = 25
SILENCES_MAX = 3
"""So many calls a start may take their whole time limit, for which Triton gets no other chance than a new start."""
FLAGS = ("--model-control-mode=explicit", "--strict-readiness=false")


@dataclass(frozen=True)
class Side:
    """One server and its repository."""

    server: ServeProcess | TritonProcess
    repository: Path
    stub: Any

    def write(self, files: Mapping[str, str]) -> None:
        """Write files into the repository; a path that ends with a slash is a folder."""
        for path, text in files.items():
            target = self.repository / path
            target.mkdir(parents=True, exist_ok=True) if path.endswith("/") else target.parent.mkdir(
                parents=True, exist_ok=True
            )
            if not path.endswith("/"):
                target.write_text(text)

    def make(self, call: Call) -> Any:
        """Make a call; return what came back as plain data, to be compared."""
        match call:
            case Http():
                endpoint = self.server.metrics if call.metrics else self.server.http
                try:
                    answer = ask(endpoint, call.method, call.path, call.body, call.headers)
                except (OSError, HTTPException) as error:
                    return {"status": "no answer", "body": {"error": str(error)}}
                size = int(answer.headers.get("inference-header-content-length", len(answer.body)))
                kind = answer.headers.get("content-type", "").split(";")[0]
                content = answer.document if answer.document is not None else answer.body[:size].decode()
                return {"status": answer.status, "type": kind, "body": content, "binary": answer.body[size:].hex()}
            case Grpc():
                try:
                    return _plain(getattr(self.stub, call.method)(call.message, timeout=ANSWER_SECONDS_MAX))
                except grpc.RpcError as error:
                    return {"status": error.code().name, "error": error.details()}
            case Stream():
                answers: list[Any] = []
                try:
                    answers.extend(
                        map(_plain, self.stub.ModelStreamInfer(iter(call.messages), timeout=ANSWER_SECONDS_MAX))
                    )
                except grpc.RpcError as error:
                    answers.append({"status": error.code().name, "error": error.details()})
                return answers
            case Together():
                with ThreadPoolExecutor(len(call.calls)) as pool:
                    return list(pool.map(self.make, call.calls))
            case Write():
                self.write(call.files)
                return {}
            case Counted():
                return self.make(call.call)


class DiedError(Exception):
    """Triton has ended, or answers no longer: the campaign can only keep clear of what does that."""


class Campaign:
    """Both servers, ready for scenarios."""

    def __init__(self, ours: Side, theirs: Side) -> None:
        self._sides = (ours, theirs)
        self._pool = ThreadPoolExecutor(2)
        self._silences = 0

    def run(self, scenario: Scenario) -> Iterator[Difference]:
        """Run a scenario; yield what differs.

        What only follows from a difference is left out: a model that one of them did not load is left alone from then
        on, and the counts of models whose answers differed are not compared. So is what follows a call that had no
        answer in time: its client has gone, which ends the sequence here, but not in Triton.

        Raises:
            DiedError: Triton has ended, or answers no longer.
            RuntimeError: Charonia has ended.
        """
        for side in self._sides:
            for entry in scenario.models:
                side.write(entry.folder())
        apart: set[str] = set()
        miscounted: set[str] = set()
        try:
            for call in scenario.calls:
                used = scenario.used_by(call)
                if used & (apart | miscounted if isinstance(call, Counted) else apart):
                    continue
                if isinstance(call, Together) or (isinstance(call, Stream) and len(call.messages) > 1):
                    miscounted |= used & scenario.batching  # which of them make a batch is chance
                silences = self._silences
                for found in self._differences(scenario, call):
                    yield found
                    miscounted |= scenario.used_by(found.call)
                    if is_control(found.call):
                        apart |= scenario.used_by(found.call)
                if self._silences > silences:
                    apart |= used
        finally:
            for side in self._sides:
                for entry in scenario.models:
                    shutil.rmtree(side.repository / entry.name, ignore_errors=True)

    def _differences(self, scenario: Scenario, call: Call) -> list[Difference]:
        found: list[Difference] = []
        if isinstance(call, Following):
            silences = self._silences
            for part in call.calls:
                if found or self._silences > silences:
                    self._make(part)
                else:
                    found = self._differences(scenario, part)
            return found
        deadline = time.monotonic() + (COUNTED_WITHIN_S if isinstance(call, Counted) else 0)
        while True:
            found = differences(scenario, call, *self._make(call))
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def _make(self, call: Call) -> Sequence[Any]:
        began_s = time.monotonic()
        answers = list(self._pool.map(lambda side: side.make(call), self._sides))
        for side in self._sides:
            if side.server.process.poll() is not None:
                kind = DiedError if isinstance(side.server, TritonProcess) else RuntimeError
                raise kind(f"{type(side.server).__name__} ended with {side.server.process.poll()} at {call}")
        if time.monotonic() - began_s >= ANSWER_SECONDS_MAX:
            self._silences += 1
            if self._silences >= SILENCES_MAX:
                raise DiedError(f"{self._silences} calls had no answer in time, the last is {call}")
        return answers


def run(seeds: Sequence[int], folder: Path) -> Iterator[tuple[int, Difference | DiedError]]:
    """Run these scenarios; yield each difference with its seed. A scenario ends where a server does."""
    left = list(reversed(seeds))
    while left:
        with _campaign(folder) as servers:
            for _ in range(min(SCENARIOS_A_START, len(left))):
                seed = left.pop()
                try:
                    for found in servers.run(scenario(seed)):
                        yield seed, found
                except DiedError as died:
                    yield seed, died
                    break


@contextmanager
def _campaign(folder: Path) -> Iterator[Campaign]:
    """Start both servers, each with an empty repository in this folder."""
    with ExitStack() as stack:
        sides = []
        for kind in (ServeProcess, TritonProcess):
            repository = Path(stack.enter_context(TemporaryDirectory(dir=folder)))
            server: Any = stack.enter_context(kind(repository, *FLAGS))
            channel = stack.enter_context(grpc.insecure_channel(server.grpc))
            sides.append(Side(server, repository, GRPCInferenceServiceStub(channel)))
        yield Campaign(*sides)


def _plain(message: Any) -> Any:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
