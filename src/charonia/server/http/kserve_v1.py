"""The routes of KServe's v1 protocol, and MLflow's `/invocations`, whose bodies are the same.

They share `/v1/models` with OpenAI's API: answers have the members of both.
"""

import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal, not_found, unavailable, unsupported
from charonia.core.request import RequestedOutput
from charonia.core.response import Outcome
from charonia.server.facade import Engine, Services, SingleResponse
from charonia.server.http.exchange import CONTENT_ENCODING, Exchange, Submitter, Tasks
from charonia.server.http.limits import HttpLimits
from charonia.server.http.routes import Route, RouteTarget, route_hint
from charonia.wire.openai_models import model_object, models_list, routes_of
from charonia.wire.v1_predict import decode_predict, encode_predictions

_log = logging.getLogger(__name__)

PREDICT = ":predict"

_NOT_ONE = unsupported(
    "the v1 protocol has exactly one response a request, and the model sent none, or several",
    hint="POST /v2/models/MODEL/generate_stream sends its responses as events",
)


class KserveV1Handlers:
    """The routes."""

    def __init__(self, engine: Engine, limits: HttpLimits, services: Services, tasks: Tasks) -> None:
        self._engine = engine
        self._body_bytes_max = limits.body_bytes_max
        self._demand = services.demand
        self._has_openai = services.has_openai
        self._has_kserve_v1 = services.has_kserve_v1
        self._mlflow_model = services.mlflow_model
        self._submitter = Submitter(engine, services)
        self._tasks = tasks
        self._created_s = int(time.time())

    def routes(self) -> list[Route]:
        mlflow = [Route("/invocations", {b"POST": self._invoke})] if self._mlflow_model else []
        v1 = [
            Route("/v1/models", {b"GET": self._tasks.document(self._models)}),
            Route("/v1/models/{model}", {b"GET": self._tasks.document(self._model), b"POST": self._predict}),
        ]
        return mlflow + (v1 if self._has_kserve_v1 else [])

    async def _models(self, exchange: Exchange, target: RouteTarget) -> object:
        entries = await self._engine.repository_index(ready_only=True)
        names = list(dict.fromkeys(entry.name for entry in entries))
        document: dict[str, object] = {"models": names}
        if self._has_openai:
            configs = []
            for name in names:
                with suppress(ServingError):  # it has just been unloaded
                    configs.append(self._engine.model_config(name))
            document |= models_list(configs, self._created_s)
        return document

    async def _model(self, exchange: Exchange, target: RouteTarget) -> object:
        config = self._engine.model_config(target.model)
        if not await self._engine.model_ready(target.model):
            raise unavailable(f"model '{target.model}' is not ready")
        document: dict[str, object] = {"name": target.model, "ready": True}
        if self._has_openai and routes_of(config):
            document |= model_object(target.model, config, self._created_s)
        return document

    def _predict(self, exchange: Exchange, target: RouteTarget) -> None:
        exchange.is_kserve = True
        model = target.model.removesuffix(PREDICT)
        if model == target.model:
            path = f"/v1/models/{model:.200}"
            raise not_found(
                f"there is nothing to POST to at {path}", hint=f"{path.partition(':')[0]}{PREDICT}; {route_hint(path)}"
            )
        self._run(exchange, model)

    def _invoke(self, exchange: Exchange, target: RouteTarget) -> None:
        exchange.is_kserve = True
        self._run(exchange, self._mlflow_model, first_only=True)

    def _run(self, exchange: Exchange, model: str, *, first_only: bool = False) -> None:
        exchange.model = model
        loaded = self._demand(model, "") if self._demand is not None else None
        if loaded is not None or CONTENT_ENCODING in exchange.request.headers:
            self._tasks.start(exchange, self._later(loaded, exchange, model, first_only))
        else:
            self._ask(exchange, model, exchange.request.body, first_only)

    async def _later(self, loaded: Awaitable[None] | None, exchange: Exchange, model: str, first_only: bool) -> None:
        if loaded is not None:
            await loaded
        body = await self._tasks.body(exchange.request)
        if exchange.is_open:
            self._ask(exchange, model, body, first_only)

    def _ask(self, exchange: Exchange, model: str, body: bytes | memoryview, first_only: bool) -> None:
        config = self._engine.model_config(model)
        content_type = exchange.request.headers.get(b"content-type", b"")
        request, is_rows = decode_predict(config, body, self._body_bytes_max, content_type)
        if first_only:  # what `predict` returns, without probabilities
            request.outputs = (RequestedOutput(config.output[0].name),)
        exchange.single = SingleResponse(_NOT_ONE)
        self._submitter.submit(exchange, request, partial(_reply, exchange, is_rows, config), config)


def _reply(exchange: Exchange, is_rows: bool, config: ModelConfig, outcome: Outcome, final: bool) -> None:
    exchange.is_over = final
    if not exchange.is_open or exchange.single is None:
        return
    answer = exchange.single.take(outcome, final)
    if answer is None:
        return
    ticket = None if final else exchange.ticket
    if isinstance(answer, ServingError):
        exchange.fail(answer)
    else:
        exchange.outcome = answer
        try:
            exchange.respond(200, [encode_predictions(answer, is_rows, config)])
        except ServingError as error:
            exchange.fail(error)
        except Exception as fault:  # the model's output is malformed: only this request fails
            _log.exception("the response of model '%s' cannot be encoded", exchange.model)
            exchange.fail(internal(f"the response of model '{exchange.model}' is broken: {type(fault).__name__}"))
    if ticket is not None:  # after the response, which the outcome of cancellation would replace
        ticket.cancel()
