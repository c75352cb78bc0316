"""A Python model that forwards each request to a model of another server.

A transformer of KServe serves it in place of its predictor. It has the inputs and outputs of the other server's model
of the same name, which it waits for when it is loaded.
"""

import asyncio
import json
import time
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found] # workers have it

from charonia.client.async_client import AsyncClient
from charonia.core.errors import Code, ServingError, unsupported

HOST_PARAMETER = "PREDICTOR_HOST"
"""Model parameter: the other server, `HOST`, `HOST:PORT` or a URL."""

START_S_MAX = 600.0
"""Longest time to wait for the other server when the model is loaded."""

PAUSE_S = 1.0
"""Time between two attempts."""


class TritonPythonModel:
    """The model."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Return the configuration with the inputs and outputs of the other server's model.

        Raises:
            ServingError: It did not become ready in time, or can only be run where its caller is.
        """
        fields = config.as_dict()
        found = asyncio.run(_configuration(_url(fields), fields["name"]))
        untold = [each["name"] for each in (*found["input"], *found["output"]) if each["data_type"] == "TYPE_BF16"]
        if untold:
            raise unsupported(f"tensor '{untold[0]}' is BF16, which cannot be passed on", hint="convert it to FP32")
        config.set_max_batch_size(found.get("max_batch_size", 0))
        for each in found["input"]:
            config.add_input({key: each[key] for key in ("name", "data_type", "dims", "optional") if key in each})
        for each in found["output"]:
            config.add_output({key: each[key] for key in ("name", "data_type", "dims")})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Remember where requests go."""
        config = json.loads(args["model_config"])
        self._model = config["name"]
        self._url = _url(config)
        self._client: AsyncClient | None = None

    async def execute(self, requests: list[Any]) -> list[Any]:
        """Forward all requests concurrently, and return the responses."""
        if self._client is None:
            self._client = AsyncClient(self._url)  # on the loop that it belongs to
        return await asyncio.gather(*(self._ask(self._client, request) for request in requests))

    async def _ask(self, client: AsyncClient, request: Any) -> Any:
        try:
            result = await client.infer(
                self._model,
                {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
                request.requested_output_names() or None,
                request_id=request.request_id(),
                parameters=json.loads(request.parameters() or "{}"),
            )
        except ServingError as error:
            code = getattr(pb_utils.TritonError, error.code.name, pb_utils.TritonError.UNKNOWN)
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"predictor: {error}", code))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in result.outputs.items()])


def _url(config: dict[str, Any]) -> str:
    host: str = config["parameters"][HOST_PARAMETER]["string_value"]
    return host if ":" in host else f"{host}:80"


async def _configuration(url: str, model: str) -> dict[str, Any]:
    last = time.monotonic() + START_S_MAX
    is_said = False
    async with AsyncClient(url) as client:
        while True:
            try:
                return dict(await client.model_config(model))
            except ServingError as error:
                if error.code not in (Code.UNAVAILABLE, Code.NOT_FOUND, Code.INVALID_ARG) or time.monotonic() > last:
                    raise
                if not is_said:
                    pb_utils.Logger.log_warn(f"waiting for the predictor, '{model}' at {url}: {error}")
                    is_said = True
            await asyncio.sleep(PAUSE_S)
