"""Both servers, and what compares their answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from tests.support.peers import TRITON, Answer, Leniency, Pair, TritonProcess, comparable
from tests.support.process import ServeProcess
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub


class StartPair(Protocol):
    def __call__(self, repository: Path, *flags: str, ours: Sequence[str] = (), theirs: Sequence[str] = ()) -> Pair: ...


class SameHttp(Protocol):
    def __call__(
        self,
        pair: Pair,
        method: str,
        path: str,
        body: bytes | object = b"",
        headers: Mapping[str, str] | None = None,
        *,
        lenient: Sequence[str] = (),
        absent: Sequence[str] = (),
    ) -> Answer: ...


class SameGrpc(Protocol):
    def __call__(
        self, pair: Pair, method: str, request: Any, *, lenient: Sequence[str] = (), absent: Sequence[str] = ()
    ) -> Any: ...


@pytest.fixture(scope="module")
def start_pair() -> Iterator[StartPair]:
    """Starts Charonia and Triton over one repository; both end with the module."""
    if not TRITON.exists():
        pytest.skip("Triton is not installed: bench/peers.sh installs it")
    with ExitStack() as stack:

        def start(repository: Path, *flags: str, ours: Sequence[str] = (), theirs: Sequence[str] = ()) -> Pair:
            triton = stack.enter_context(TritonProcess(repository, *flags, *theirs))
            return Pair(stack.enter_context(ServeProcess(repository, *flags, *ours)), triton)

        yield start


@pytest.fixture(scope="module")
def same_http() -> SameHttp:
    """Sends one HTTP request to both, asserts that status and document are the same, returns our answer."""

    def same(
        pair: Pair,
        method: str,
        path: str,
        body: bytes | object = b"",
        headers: Mapping[str, str] | None = None,
        *,
        lenient: Sequence[str] = (),
        absent: Sequence[str] = (),
    ) -> Answer:
        leniency = Leniency(Leniency().keys | set(lenient), frozenset(absent))
        ours, theirs = pair.ask(method, path, body, headers)
        assert ours.status == theirs.status, f"Charonia {ours}, Triton {theirs}"
        assert comparable(ours.document, leniency) == comparable(theirs.document, leniency)
        return ours

    return same


@pytest.fixture(scope="module")
def stub() -> Iterator[Callable[[str], GRPCInferenceServiceStub]]:
    """Makes a stub of `host:port`, one for each."""
    with ExitStack() as stack:

        @cache
        def make(endpoint: str) -> GRPCInferenceServiceStub:
            return GRPCInferenceServiceStub(stack.enter_context(grpc.insecure_channel(endpoint)))

        yield make


@pytest.fixture(scope="module")
def same_grpc(stub: Callable[[str], GRPCInferenceServiceStub]) -> SameGrpc:
    """Makes one gRPC call on both, asserts that the status code or the message is the same, returns ours."""

    def same(pair: Pair, method: str, request: Any, *, lenient: Sequence[str] = (), absent: Sequence[str] = ()) -> Any:
        leniency = Leniency(Leniency().keys | set(lenient), frozenset(absent))
        ours, theirs = pair.call(stub, method, request)
        assert comparable(_document(ours), leniency) == comparable(_document(theirs), leniency)
        return ours

    return same


def _document(answer: Any) -> object:
    if isinstance(answer, str):
        return answer
    return MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
