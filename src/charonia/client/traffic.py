"""How the requests of a model that name no version are split among its versions, as clients read and change it."""

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from charonia.core.errors import invalid
from charonia.wire.query import Dialect, Json, Query

T = TypeVar("T")


class Asks(Protocol):
    """Sends a query and returns its parsed answer."""

    def __call__(self, query: Query[Any, T]) -> Coroutine[Any, Any, T]:
        """Send a query. Raises ClientError."""


class AsyncTraffic:
    """The traffic of models. All methods raise `ClientError`, and return the traffic as the server documents it."""

    def __init__(self, dialect: Dialect[Any], ask: Asks, change: Asks) -> None:
        self._dialect = dialect
        self._ask = ask
        self._change = change

    async def get(self, model: str) -> Json:
        """Return the settings, with the figures of each version, the canary plan and the history."""
        return await self._ask(self._dialect.traffic(model, {}))

    async def update(self, model: str, change: Mapping[str, object]) -> Json:
        """Change the settings: any of `weights`, `sticky`, `shadow`, and `canary` or `action`."""
        if not change:
            raise invalid("traffic: expected a change, got none", hint="reset() goes back to the configuration")
        return await self._change(self._dialect.traffic(model, change))

    async def reset(self, model: str) -> Json:
        """Forget what requests have changed."""
        return await self._change(self._dialect.reset_traffic(model))
