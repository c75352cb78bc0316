"""Calls a server with the clients of KServe's SDK, as their users do. Run with the SDK's interpreter.

The arguments are the endpoints of HTTP and gRPC. Each line that it prints is a call and its outcome, as JSON.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable
from typing import Any

import numpy as np
from kserve import (  # type: ignore[import-not-found]
    InferenceGRPCClient,
    InferenceRESTClient,
    InferInput,
    InferOutput,
    InferRequest,
)
from kserve.inference_client import RESTConfig  # type: ignore[import-not-found]
from kserve.protocol.infer_type import RequestedOutput  # type: ignore[import-not-found]

DTYPES = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")


async def tell(what: str, call: Awaitable[Any]) -> None:
    try:
        outcome = await call
    except Exception as error:
        response = getattr(error, "response", None)
        status = response.status_code if response is not None else getattr(error, "code", lambda: None)()
        outcome = f"{type(error).__name__} {getattr(status, 'name', status)}"
    print(json.dumps([what, outcome]), flush=True)


def array_of(dtype: str) -> Any:
    """Return values that differ, in the dtype of a datatype."""
    if dtype == "BYTES":
        return np.array([["a", "ü", "", "c"]], object)
    kind = {"BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64"}.get(dtype, dtype.lower())
    return np.array([[0, 1, 2, 3]]).astype(kind)


def asked(model: str, dtype: str, binary: bool, *, grpc: bool = False) -> Any:
    given = InferInput("INPUT0", [1, 4], dtype)
    given.set_data_from_numpy(array_of(dtype), binary_data=binary)
    outputs = None if grpc else [RequestedOutput("OUTPUT0", parameters={"binary_data": binary})]
    return InferRequest(model, [given], request_id="7", request_outputs=outputs)


async def echoed(client: Any, call: Any, dtype: str) -> Any:
    """Send a request, and return whether its input came back."""
    answer = await call
    output: InferOutput = answer.outputs[0]
    received, sent = output.as_numpy(), array_of(dtype)
    if dtype == "BYTES":
        received = [each.decode() if isinstance(each, bytes) else each for each in received.ravel().tolist()]
        return received == sent.ravel().tolist() and answer.id == "7"
    return bool(np.array_equal(received, sent)) and str(received.dtype) == str(sent.dtype) and answer.id == "7"


async def main(http: str, grpc: str) -> None:
    base = f"http://{http}"
    async with InferenceRESTClient(RESTConfig(protocol="v1")) as v1:
        await tell("v1 live", v1.is_server_live(base))
        await tell("v1 ready", v1.is_model_ready(base, "FP32"))
        await tell("v1 unknown", v1.is_model_ready(base, "none"))
        await tell("v1 rows", v1.infer(base, {"instances": [[0, 1, 2, 3]]}, model_name="FP32"))
        await tell("v1 columns", v1.infer(base, {"inputs": {"INPUT0": [[0, 1, 2, 3]]}}, model_name="FP32"))
        await tell("v1 wrong", v1.infer(base, {"instances": [[0]]}, model_name="FP32"))
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as v2:
        await tell("v2 live", v2.is_server_live(base))
        await tell("v2 ready", v2.is_server_ready(base))
        await tell("v2 model ready", v2.is_model_ready(base, "FP32"))
        await tell("v2 unknown", v2.is_model_ready(base, "none"))
        for binary in (True, False):
            for dtype in (*DTYPES, "BYTES"):
                if dtype == "FP16" and not binary:
                    continue  # JSON has no form for it
                call = v2.infer(base, asked(dtype, dtype, binary), model_name=dtype)
                await tell(f"v2 {dtype} {'binary' if binary else 'json'}", echoed(v2, call, dtype))
        await tell("v2 wrong", v2.infer(base, asked("FP32", "INT8", True), model_name="FP32"))
        await tell("v2 nothing", v2.infer(base, asked("none", "FP32", True), model_name="none"))
    async with InferenceGRPCClient(grpc, retries=0) as client:
        await tell("grpc live", client.is_server_live())
        await tell("grpc ready", client.is_server_ready())
        await tell("grpc model ready", client.is_model_ready("FP32"))
        await tell("grpc unknown", client.is_model_ready("none"))
        for binary in (True, False):
            for dtype in (*DTYPES, "BYTES"):
                if dtype == "FP16" and not binary:
                    continue
                call = client.infer(asked(dtype, dtype, binary, grpc=True))
                await tell(f"grpc {dtype} {'raw' if binary else 'typed'}", echoed(client, call, dtype))
        await tell("grpc wrong", client.infer(asked("FP32", "INT8", True, grpc=True)))
        await tell("grpc nothing", client.infer(asked("none", "FP32", True, grpc=True)))


asyncio.run(main(*sys.argv[1:]))
