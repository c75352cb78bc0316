"""OpenAI's responses, of models that answer chats: each is a chat whose answer takes another form."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from uuid import uuid4

import orjson

from charonia.core.errors import not_found, unsupported
from charonia.server.http.exchange import Exchange, Reshaped
from charonia.server.http.limits import HttpLimits
from charonia.server.openai.events import DONE, EventStream, EventTurns
from charonia.wire.json_text import Object, dump
from charonia.wire.openai_responses import ResponseForm, chat_request, input_messages

STORED_BYTES_MAX = 64 * 1024 * 1024
"""Most bytes of the stored conversations of a server; the oldest are dropped."""


class ResponseStore:
    """The conversations that later requests can continue, by the id of their last response.

    Args:
        count_max: Most conversations, 0 for none.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._bytes = 0
        self._stored: OrderedDict[str, bytes] = OrderedDict()

    def messages(self, id: object) -> list[Object]:
        """Return the messages up to a response.

        Raises:
            ServingError: Nothing is stored, or not this.
        """
        if id is None:
            return []
        if not self._count_max:
            raise unsupported("previous_response_id: the server stores no responses", hint="--stored-responses=1000")
        stored = self._stored.get(str(id))
        if stored is None:
            raise not_found(
                f"previous_response_id: there is no response {id!r:.100}", hint="send its messages as input"
            )
        self._stored.move_to_end(str(id))
        messages: list[Object] = orjson.loads(stored)
        return messages

    def put(self, id: str, messages: list[Object]) -> None:
        """Store a conversation."""
        if not self._count_max:
            return
        self._stored[id] = dump(messages)
        self._bytes += len(self._stored[id])
        while len(self._stored) > self._count_max or self._bytes > STORED_BYTES_MAX:
            _, dropped = self._stored.popitem(last=False)
            self._bytes -= len(dropped)


def as_response(
    exchange: Exchange, document: Object, store: ResponseStore
) -> tuple[Object, Callable[[Exchange, EventTurns, HttpLimits], EventStream]]:
    """Return the request of the chat, and the class of the stream of its answer.

    Args:
        exchange: The client's exchange, whose answer takes the form of a response.
        document: The client's request.
        store: Takes the conversation, unless the request forbids it.

    Raises:
        ServingError: The request is wrong; the message begins with the member.
    """
    chat = chat_request(document, store.messages(document.get("previous_response_id")))
    form = ResponseForm(document, uuid4().hex, int(time.time()))

    def keep() -> None:
        if document.get("store") is not False:
            first = 1 if document.get("instructions") else 0  # which are not part of the conversation
            store.put(form.id, [*chat["messages"][first:], *(input_messages(form.output) if form.output else ())])

    def reshape(response: Reshaped) -> Reshaped:
        if response.status != 200:
            return response
        body = form.document(orjson.loads(b"".join(response.body)))
        keep()
        return response._replace(body=[body])

    exchange.reshape = reshape
    return chat, partial(ResponseEvents, form=form, keep=keep)


class ResponseEvents(EventStream):
    """Sends the chunks of a chat as the events of a response."""

    __slots__ = ("_form", "_has_begun", "_keep")

    def __init__(
        self, exchange: Exchange, turns: EventTurns, limits: HttpLimits, form: ResponseForm, keep: Callable[[], None]
    ) -> None:
        """Create a stream; `keep` is called when the answer is complete."""
        super().__init__(exchange, turns, limits)
        self._form = form
        self._keep = keep
        self._has_begun = False

    def send(self, event: bytes) -> None:
        """Send the events of a chunk of the chat."""
        if not self._has_begun:
            self._has_begun = True
            self._send_all(self._form.begin())
        self._send_all(self._form.take(orjson.loads(event)))

    def end(self, last: bytes = DONE) -> None:
        """End the stream with its own event, in place of the chat's."""
        self._send_all(self._form.end())
        self._keep()
        super().end(b"")

    def _send_all(self, events: Iterator[bytes]) -> None:
        for event in events:
            super().send(event)
