"""Clients that ask questions over HTTP and gRPC without a library of ours, and compare what comes with the answer."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from tests.campaign.known_models import Array, Question
from tritonclient.grpc import service_pb2, service_pb2_grpc

from charonia.core.dtypes import DataType

ANSWER_S_MAX = 120.0
"""A request without an answer for so long is lost."""


class WrongAnswerError(Exception):
    """An answer that is not the right one."""


class BrokenError(Exception):
    """The connection has ended before the answer."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An error of the server.

    Attributes:
        status: Status of HTTP, or name of that of gRPC.
    """

    status: int | str
    text: str


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response.

    Attributes:
        headers: Its headers, with names in lower case.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


def raw(datatype: DataType, array: Array) -> bytes:
    """Return the elements of a tensor as the protocol has them."""
    if datatype is DataType.BYTES:
        return b"".join(len(each).to_bytes(4, "little") + each for each in array.reshape(-1))
    return array.tobytes()


def from_raw(datatype: DataType, shape: Sequence[int], data: bytes) -> Array:
    if datatype is not DataType.BYTES:
        return np.frombuffer(data, datatype.numpy).reshape(shape)
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    array = np.empty(len(found), object)
    array[:] = found
    return array.reshape(shape)


def is_same(datatype: DataType, found: Array, right: Array) -> bool:
    """Whether two tensors are equal, bit by bit."""
    return found.shape == right.shape and raw(datatype, found.astype(right.dtype)) == raw(datatype, right)


def json_body(asked: Question, number: str) -> bytes:
    inputs = []
    for name, (datatype, array) in asked.inputs.items():
        data = (
            [each.decode() for each in array.reshape(-1)] if datatype is DataType.BYTES else array.reshape(-1).tolist()
        )
        inputs.append({"name": name, "datatype": datatype.name, "shape": array.shape, "data": data})
    return json.dumps({"id": number, "inputs": inputs, "parameters": dict(asked.parameters)}).encode()


def binary_body(asked: Question, number: str) -> tuple[bytes, int]:
    """Return a question with binary tensors, and the size of its JSON; the answer is to be binary, too."""
    inputs, tail = [], []
    for name, (datatype, array) in asked.inputs.items():
        data = raw(datatype, array)
        size = {"binary_data_size": len(data)}
        inputs.append({"name": name, "datatype": datatype.name, "shape": array.shape, "parameters": size})
        tail.append(data)
    document = {"id": number, "inputs": inputs, "parameters": {**asked.parameters, "binary_data_output": True}}
    head = json.dumps(document).encode()
    return b"".join([head, *tail]), len(head)


def http_body(asked: Question, number: str, rng: random.Random) -> tuple[bytes, str]:
    """Return a question as a body, as JSON or with binary tensors, and the headers that it needs."""
    if rng.random() < 0.5 and all(datatype is not DataType.FP16 for datatype, _ in asked.inputs.values()):
        return json_body(asked, number), ""
    body, size = binary_body(asked, number)
    return body, f"Inference-Header-Content-Length: {size}\r\n"


def check_http(asked: Question, number: str, response: HttpResponse) -> Refused | None:
    """Check an answer.

    Returns:
        The error of the server, None for the right answer.
    """
    if response.status != 200:
        return Refused(response.status, error_text(response))
    size = int(response.headers.get("inference-header-content-length", len(response.body)))
    document, at = json.loads(response.body[:size]), size
    if document.get("id") != number:
        raise WrongAnswerError(f"{asked.model}: expected id {number}, got {document.get('id')}")
    outputs = {}
    for output in document["outputs"]:
        datatype, shape = DataType[output["datatype"]], output["shape"]
        length = output.get("parameters", {}).get("binary_data_size")
        if length is not None:
            outputs[output["name"]] = from_raw(datatype, shape, response.body[at : at + length])
            at += length
        elif datatype is DataType.BYTES:
            array = np.empty(len(output["data"]), object)
            array[:] = [each.encode() for each in output["data"]]
            outputs[output["name"]] = array.reshape(shape)
        else:
            outputs[output["name"]] = np.array(output["data"], datatype.numpy).reshape(shape)
    _compare(asked, outputs)
    if at != len(response.body):
        raise WrongAnswerError(f"{asked.model}: {len(response.body) - at} bytes after the answer")
    return None


def error_text(response: HttpResponse) -> str:
    """Return the sentence of an error."""
    try:
        text = json.loads(response.body)["error"]
    except (ValueError, KeyError, TypeError):
        text = ""
    if not isinstance(text, str) or not text:
        raise WrongAnswerError(f"status {response.status} without a sentence: {response.body[:200]!r}")
    return text


def grpc_request(asked: Question, number: str) -> Any:
    message = service_pb2.ModelInferRequest(model_name=asked.model, id=number)
    for name, (datatype, array) in asked.inputs.items():
        message.inputs.add(name=name, datatype=datatype.name, shape=array.shape)
        message.raw_input_contents.append(raw(datatype, array))
    for key, value in asked.parameters.items():
        if isinstance(value, bool):
            message.parameters[key].bool_param = value
        else:
            message.parameters[key].int64_param = value
    return message


def check_grpc(asked: Question, number: str, message: Any) -> None:
    """Check an answer. Raises `WrongAnswerError`."""
    if message.id != number:
        raise WrongAnswerError(f"{asked.model}: expected id {number}, got {message.id}")
    outputs = {
        output.name: from_raw(DataType[output.datatype], tuple(output.shape), data)
        for output, data in zip(message.outputs, message.raw_output_contents, strict=True)
    }
    _compare(asked, outputs)


def _compare(asked: Question, outputs: Mapping[str, Array]) -> None:
    if outputs.keys() != asked.answer.keys():
        raise WrongAnswerError(f"{asked.model}: expected {sorted(asked.answer)}, got {sorted(outputs)}")
    for name, (datatype, right) in asked.answer.items():
        if not is_same(datatype, outputs[name], right):
            raise WrongAnswerError(f"{asked.model}: {name}: expected {right!r}, got {outputs[name]!r}")


class HttpClient:
    """A connection, which is opened again when the server closes it between two requests.

    Args:
        address: The server, as `host:port`.
    """

    def __init__(self, address: str) -> None:
        self._host, _, port = address.partition(":")
        self._port = int(port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", headers: str = "") -> HttpResponse:
        """Send a request and return its response. Raises `BrokenError`."""
        (response,) = await self.ask_together([self.request(method, path, body, headers)])
        return response

    def request(self, method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
        """Return the bytes of a request; each of `headers` ends with CR LF."""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        return head.encode() + body

    async def ask_together(self, requests: Sequence[bytes]) -> list[HttpResponse]:
        """Send requests one after the other without waiting, and return their responses. Raises `BrokenError`."""
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                if self._writer is None:
                    self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
                self._writer.write(b"".join(requests))
                return [await self._read() for _ in requests]
        except TimeoutError:
            raise
        except (OSError, EOFError) as error:  # an incomplete read is an EOFError
            await self.close()
            raise BrokenError(str(error)) from error

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _read(self) -> HttpResponse:
        reader = self._reader
        assert reader is not None
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection", "").lower() == "close":
            await self.close()
        return HttpResponse(int(head[0].split(" ")[1]), headers, body)


class GrpcClient:
    """A channel. Use it as an asynchronous context manager.

    Args:
        address: The server, as `host:port`.
    """

    def __init__(self, address: str) -> None:
        options = [
            *(("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 200)),
            *(("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)),
        ]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def ask(self, asked: Question, number: str) -> Refused | None:
        """Ask a question.

        Returns:
            The error of the server, None for the right answer.

        Raises:
            BrokenError: The connection has ended before the answer.
        """
        try:
            message = await self.stub.ModelInfer(grpc_request(asked, number), timeout=ANSWER_S_MAX)
        except grpc.aio.AioRpcError as error:
            return refusal(error)
        check_grpc(asked, number, message)
        return None

    async def close(self) -> None:
        await self._channel.close()


_BROKEN = ("Socket closed", "failed to connect", "GOAWAY", "RST_STREAM", "Connection reset", "recvmsg", "sendmsg")


def refusal(error: grpc.aio.AioRpcError) -> Refused:
    """Return the error of a call. Raises `BrokenError` where it is that of the connection."""
    text = error.details() or ""
    if any(each in text for each in _BROKEN):
        raise BrokenError(text)
    return Refused(error.code().name, text)
