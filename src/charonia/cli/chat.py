"""`charonia chat`: talk to a language model in the terminal.

Text on standard input that is no terminal is one message, whose answer is printed and nothing else. Exit status: 0
done, 1 the server does not respond or refuses, 2 misuse.
"""

import json
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.client import HTTPResponse
from typing import Any

from charonia.cli.command_line import CommandLine, Option, carry_out
from charonia.cli.server_access import SSL_CA, THIS_MACHINE, ServerAccess, url_option
from charonia.cli.terminal import Style, style_of
from charonia.cli.values import KEY_VARIABLE, api_key, integer, number
from charonia.core.errors import ServingError, invalid, unavailable

COMMANDS = {
    "/reset": "start a new conversation",
    "/system TEXT": "set the system message, and start a new conversation",
    "/help": "show this",
    "/exit": "leave, like Ctrl-D",
}

ROUTE = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The model, and the options of requests to it."""

    model: str = ""
    server: ServerAccess = THIS_MACHINE
    key: str = ""
    system: str = ""
    max_tokens: int = 0
    temperature: float = -1.0
    timeout_s: float = 300.0


LINE = CommandLine(
    command="charonia chat",
    intro="""\
usage: charonia chat [OPTIONS] [MODEL]

Talk to a language model. With a pipe, the text from it is the only message: echo 'Why?' | charonia chat MODEL
""",
    groups={
        "Options": (
            Option("--model -m MODEL", "model", str, "MODEL", "Name, or NAME:ADAPTER", default="the only one"),
            url_option(),
            Option("--key -k", "key", str, "KEY", "API key", default=f"${KEY_VARIABLE}"),
            Option("--system -s", "system", str, "TEXT", "System message"),
            Option("--max-tokens", "max_tokens", integer(1), "N", "Longest answer", default="the model's"),
            Option(
                "--temperature",
                "temperature",
                number(0, 2),
                "T",
                "Randomness of answers, 0 to 2",
                default="the model's",
            ),
            Option("--timeout", "timeout_s", number(0.1), "SECONDS", "Longest time without a piece of an answer"),
            SSL_CA,
        )
    },
    record=ChatOptions(),
)


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _chat)


def _chat(options: ChatOptions) -> int:
    chat = Chat(options if options.model else replace(options, model=only_model(options)))
    if sys.stdin.isatty():
        _converse(chat, style_of(sys.stdout))
        return 0
    text = sys.stdin.read().strip()
    if not text:
        raise invalid("expected a message on standard input, got nothing")
    for piece in chat.send(text):
        print(piece, end="", flush=True)
    print()
    return 0


@dataclass
class Chat:
    """A conversation.

    Attributes:
        system: The system message, "" for none.
        usage: Usage of the last answer, empty where the server does not report it.
    """

    options: ChatOptions
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.system = self.options.system

    def reset(self, system: str | None = None) -> None:
        """Begin anew, with another system message unless it is None."""
        self.messages.clear()
        self.system = self.system if system is None else system

    def send(self, text: str) -> Generator[str, None, None]:
        """Send a message, and yield the pieces of the answer. The pieces received are kept even if the caller stops.

        Raises:
                ServingError: The server does not respond, or refuses; then the conversation is unchanged.
        """
        self.messages.append({"role": "user", "content": text})
        self.usage = {}
        pieces: list[str] = []
        try:
            for chunk in events(self.options, self._request()):
                self.usage = chunk.get("usage") or self.usage
                for choice in chunk.get("choices") or ():
                    piece = (choice.get("delta") or {}).get("content")
                    if piece:
                        pieces.append(piece)
                        yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()

    def _request(self) -> dict[str, object]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        request: dict[str, object] = {"model": self.options.model, "messages": [*system, *self.messages]}
        request |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.options.max_tokens:
            request["max_tokens"] = self.options.max_tokens
        if self.options.temperature >= 0:
            request["temperature"] = self.options.temperature
        return request


def events(options: ChatOptions, request: dict[str, object]) -> Generator[dict[str, Any], None, None]:
    """Send a request, and yield the chunks of its answer. Closing the iterator cancels the request."""
    with _response(options, "POST", ROUTE, json.dumps(request).encode()) as response:
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            if data and line.startswith(b"data: "):
                chunk = json.loads(data)
                if "error" in chunk:
                    raise unavailable(_message(data, "the answer broke off"))
                yield chunk


def only_model(options: ChatOptions) -> str:
    """Return the name of the only model that chats. Raises as `events`, and when there is another number of them."""
    with _response(options, "GET", "/v1/models", None) as response:
        names = [each["id"] for each in json.load(response)["data"]]
    if len(names) == 1:
        return str(names[0])
    found = f"one of {', '.join(names[:10])}" if names else "a server with a language model"
    raise invalid(f"MODEL: expected {found}, got nothing")


@contextmanager
def _response(options: ChatOptions, method: str, path: str, body: bytes | None) -> Iterator[HTTPResponse]:
    """Send a request, and yield its response. Raises as `events`."""
    key = api_key(options.key)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    with options.server.call(method, path, body, headers, timeout_s=options.timeout_s) as response:
        if response.status != HTTPStatus.OK:
            raise invalid(_message(response.read(), f"status {response.status}"))
        yield response


def _message(body: bytes, otherwise: str) -> str:
    """Return the message of an error in OpenAI's form."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return otherwise


def _converse(chat: Chat, style: Style) -> None:
    with suppress(ImportError):  # not in every build of Python
        import readline  # noqa: F401  # line editing and history
    print(
        style.dim(f"{chat.options.model} at {chat.options.server.url}. /help shows commands, Ctrl-C stops an answer.")
    )
    while True:
        try:
            print()
            text = input(style.prompt("> ")).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(style.dim("\nCtrl-D leaves"))
            continue
        if text in ("/exit", "/quit"):
            return
        if text.startswith("/"):
            _command(chat, text, style)
        elif text:
            _answer(chat, text, style)


def _command(chat: Chat, text: str, style: Style) -> None:
    name, _, rest = text.partition(" ")
    if name == "/reset":
        chat.reset()
        print(style.dim("a new conversation"))
    elif name == "/system":
        chat.reset(rest.strip())
        print(style.dim("a new conversation, with this system message" if chat.system else "no system message"))
    else:
        if name != "/help":
            print(style.bad(f"unknown command {name}"))
        width = max(map(len, COMMANDS))
        print(style.dim("\n".join(f"{command:<{width}}  {what}" for command, what in COMMANDS.items())))


def _answer(chat: Chat, text: str, style: Style) -> None:
    began = first = time.monotonic()
    pieces = chat.send(text)
    count = 0
    try:
        for piece in pieces:
            first = time.monotonic() if not count else first
            count += 1
            print(piece, end="", flush=True)
        print(f"\n{style.dim(_summary(chat.usage, began, first, time.monotonic()))}")
    except KeyboardInterrupt:
        pieces.close()
        print(style.dim("\nstopped"))
    except ServingError as error:
        print(("\n" if count else "") + style.bad(str(error)))


def _summary(usage: dict[str, Any], began_s: float, first_s: float, end_s: float) -> str:
    """Return one line on an answer, e.g. "42 tokens, 21.0/s, first after 0.15 s"."""
    tokens = usage.get("completion_tokens")
    parts = []
    if type(tokens) is int:
        parts.append(f"{tokens} token{'s' * (tokens != 1)}")
        if tokens > 1 and end_s > first_s:
            parts.append(f"{(tokens - 1) / (end_s - first_s):.1f}/s")
    return ", ".join([*parts, f"first after {first_s - began_s:.2f} s"])
