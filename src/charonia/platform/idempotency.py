"""Idempotency keys: calls that are sent again are answered as before.

A caller that sends a change with an `Idempotency-Key` may send it again, with the same key, when the answer is lost. It
gets the first answer, and nothing changes twice. The transaction of the change records the key, so a COMMIT whose
answer is lost counts as well. Answers can hold secrets, so they are encrypted with the key. Only its digest is stored.
"""

import hashlib
import logging
from contextlib import suppress
from typing import NamedTuple

from joserfc.jwk import OctKey
from sqlalchemy import delete, select, update
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia.core.errors import ServingError, conflict, invalid
from charonia.platform.database.connection import Database, KeyedCall, current_call
from charonia.platform.database.tables import CallRow
from charonia.platform.people.access import seal, unseal

HEADER = "Idempotency-Key"

REPLAYED = "Idempotent-Replayed"
"""Header of a repeated answer."""

KEY_CHARS_MAX = 255

ANSWER_BYTES_MAX = 64 * 1024
"""Longer answers are not stored: a repeated call then gets status 409."""

_CHANGES = frozenset({"POST", "PUT", "PATCH", "DELETE"})

_log = logging.getLogger(__name__)


class StoredResponse(NamedTuple):
    """An answer to a change."""

    status: int
    kind: str
    body: bytes


class AnsweredBeforeError(Exception):
    """A call that was answered before, with that answer."""

    def __init__(self, answer: StoredResponse) -> None:
        super().__init__()
        self.answer = answer

    def response(self) -> Response:
        """Return the answer."""
        status, kind, body = self.answer
        return Response(body, status, {REPLAYED: "true", **({"Content-Type": kind} if kind else {})})


class IdempotentCalls:
    """Records the answers to calls with a key, as a middleware."""

    def __init__(self, app: ASGIApp, database: Database) -> None:
        self._app = app
        self._database = database

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get(HEADER, "") if scope["type"] == "http" else ""
        if not key or scope["method"] not in _CHANGES:
            await self._app(scope, receive, send)
            return
        call = KeyedCall(key, f"{scope['method']} {scope['path']}?{scope['query_string'].decode('latin-1')}")
        token = current_call.set(call)
        start: Message = {}
        body = bytearray()

        async def reading() -> Message:
            message = await receive()
            call.read(message.get("body", b""))
            return message

        async def collecting(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                body.extend(message.get("body", b""))

        try:
            await self._app(scope, reading, collecting)
        except BaseException:
            if call.is_recorded:
                await run_in_threadpool(self._keep, call, StoredResponse(500, "", b""))
            raise
        finally:
            current_call.reset(token)
        answer = StoredResponse(start["status"], Headers(raw=start["headers"]).get("content-type", ""), bytes(body))
        if call.is_recorded:
            await run_in_threadpool(self._keep, call, answer)
        await send(start)
        await send({"type": "http.response.body", "body": answer.body})

    def _keep(self, call: KeyedCall, answer: StoredResponse) -> None:
        of_call = CallRow.digest == call.digest
        with suppress(ServingError), self._database.transaction() as session:
            if answer.status >= 500:  # what came after the transaction has failed: it is tried again
                session.execute(delete(CallRow).where(of_call))
            elif len(answer.body) <= ANSWER_BYTES_MAX:
                session.execute(update(CallRow).where(of_call).values(answer=_sealed(call, answer)))


def demand_first(database: Database, caller: str) -> None:
    """Check that the present call with a key was not carried out before.

    Args:
        caller: The caller, to whom the key belongs.

    Raises:
        AnsweredBeforeError: It was, with its answer.
    """
    call = current_call.get()
    if call is None:
        return
    if len(call.key) > KEY_CHARS_MAX or not call.key.isascii() or not call.key.isprintable():
        raise invalid(f"{HEADER}: expected at most {KEY_CHARS_MAX} printable ASCII characters, got {len(call.key)}")
    call.name(caller)
    with database.reading() as session:
        row = session.scalar(select(CallRow).where(CallRow.digest == call.digest))
    if row is None:
        return
    if row.request != call.request:
        raise invalid(f"{HEADER}: this key was used for another call", hint="use a new key for each call")
    found = unseal(row.answer, _sealing_key(call))
    answer = StoredResponse(found["status"], found["kind"], found["body"].encode("latin-1")) if found else None
    if answer is None:
        raise conflict(
            f"the call with this {HEADER} was carried out, and its answer is lost",
            hint="check the resource before you send another call",
        )
    raise AnsweredBeforeError(answer)


def _sealing_key(call: KeyedCall) -> OctKey:
    return OctKey.import_key(hashlib.sha256(f"answer\0{call.caller}\0{call.key}".encode()).digest())


def _sealed(call: KeyedCall, answer: StoredResponse) -> str:
    return seal({**answer._asdict(), "body": answer.body.decode("latin-1")}, _sealing_key(call))
