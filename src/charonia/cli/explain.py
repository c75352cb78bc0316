"""`charonia explain`: how the scheduler served a model in the last minute, its bottleneck, and what to change.

Exit status: 0 done, 1 the server does not respond or does not know the model, 2 misuse.
"""

import json
import shutil
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.values import HEADER_HELP, header, only_model, with_key
from charonia.core.errors import ServingError, invalid, unavailable
from charonia.http_call import NO_ANSWER, HttpAnswer, http_call
from charonia.tools.report.explain_text import COLUMNS_MAX, explain_text

ANSWER_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """The model, its server, and the format of the output."""

    model: str = ""
    url: str = "localhost:8000"
    version: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    ssl_ca: str = ""
    json: bool = False


LINE = CommandLine(
    command="charonia explain",
    intro="""\
usage: charonia explain [OPTIONS] [MODEL]

Show how the scheduler served a model in the last minute, its bottleneck, and what to change.
""",
    groups={
        "Options": (
            Option("--model -m MODEL", "model", str, "MODEL", "Name of a loaded model", default="the only one"),
            Option("--url -u", "url", str, "URL", "HOST:PORT of the server's HTTP endpoint, or a URL"),
            Option("--model-version", "version", str, "VERSION", "That version", default="the latest"),
            Option("--header -H", "headers", header, "NAME:VALUE|@FILE", HEADER_HELP, tuple),
            Option("--ssl-ca", "ssl_ca", str, "FILE", "Certificates to trust, for https", default="the system's"),
            flag("--json", "json", True, "Print JSON"),
        )
    },
    record=ExplainOptions(),
)


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _explain)


def _explain(given: ExplainOptions) -> int:
    document = fetch(given)
    columns = min(shutil.get_terminal_size().columns, COLUMNS_MAX)
    print(json.dumps(document, indent=2) if given.json else explain_text(document, columns))
    return 0


def fetch(given: ExplainOptions) -> dict[str, Any]:
    """Return the server's explanation of a model.

    Raises:
        ServingError: The server does not respond, or refuses.
    """
    base = given.url if "://" in given.url else f"http://{given.url}"
    version = f"/versions/{quote(given.version, safe='')}" if given.version else ""
    scheme = base.partition("://")[0]
    if scheme not in ("http", "https"):
        raise invalid(f"--url: expected HOST:PORT, or a URL of http or https, got '{given.url}'")
    context = ssl.create_default_context(cafile=given.ssl_ca or None) if scheme == "https" else None

    def call(method: str, path: str, body: bytes = b"") -> Any:
        url = f"{base.rstrip('/')}/v2/{path}"
        headers = dict(with_key(given.headers))
        try:
            answer = http_call(method, url, headers, body, timeout_s=ANSWER_SECONDS_MAX, context=context)
            if answer.status == HTTPStatus.OK:
                return json.loads(answer.body)
        except NO_ANSWER as error:
            raise _no_answer(base, error) from None
        raise invalid(_reason(answer))

    model = given.model
    if not model:
        model = only_model({entry["name"] for entry in call("POST", "repository/index", b'{"ready": true}')})
    document: dict[str, Any] = call("GET", f"models/{quote(model, safe='')}{version}/explain")
    return document


def _no_answer(base: str, reason: Exception) -> ServingError:
    if isinstance(reason, ssl.SSLCertVerificationError):
        text, hint = f"its certificate is not trusted: {reason.verify_message}", "--ssl-ca names certificates to trust"
    else:
        text, hint = str(getattr(reason, "strerror", None) or reason), "-u names its address"
    return unavailable(f"no charonia server answers at {base}: {text}", hint=hint)


def _reason(answer: HttpAnswer) -> str:
    """Return the server's error message; other servers lack this route."""
    if answer.status == HTTPStatus.HTTP_VERSION_NOT_SUPPORTED:
        return "this port speaks gRPC (hint: -u names that of HTTP, 8000 by default)"
    try:
        return str(json.loads(answer.body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {answer.status} {answer.reason}: is it charonia?"
