"""`charonia explain`: what the scheduler did for a model in the last minute, what limits it, and what to change.

Exit status: 0 done, 1 the server does not respond or has no such model, 2 misuse.
"""

import json
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.values import HEADER_HELP, header, with_key
from charonia.core.errors import ServingError, invalid, unavailable
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
usage: charonia explain [OPTIONS] MODEL

Show what the scheduler did for a model in the last minute, what limits it, and what to change.
""",
    groups={
        "Options": (
            Option("MODEL", "model", str, "MODEL", "Name of a loaded model"),
            Option("--url -u", "url", str, "URL", "HOST:PORT of the server's HTTP endpoint, or a URL"),
            Option("--model-version", "version", str, "VERSION", "That version", default="the newest"),
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
    request = urllib.request.Request(f"{base.rstrip('/')}/v2/models/{quote(given.model, safe='')}{version}/explain")
    if request.type not in ("http", "https"):
        raise invalid(f"--url: expected HOST:PORT, or a URL of http or https, got '{given.url}'")
    for name, value in with_key(given.headers):
        request.add_header(name, value)
    try:
        context = ssl.create_default_context(cafile=given.ssl_ca or None) if request.type == "https" else None
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX, context=context) as answer:
            document: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        raise invalid(_reason(error)) from None
    except (OSError, ValueError) as error:
        raise _no_answer(base, getattr(error, "reason", error)) from None
    return document


def _no_answer(base: str, reason: object) -> ServingError:
    if isinstance(reason, ssl.SSLCertVerificationError):
        text, hint = f"its certificate is not trusted: {reason.verify_message}", "--ssl-ca names certificates to trust"
    else:
        text, hint = str(getattr(reason, "strerror", None) or reason), "-u names its address"
    return unavailable(f"no charonia server answers at {base}: {text}", hint=hint)


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the server's error message; other servers have no such route."""
    if error.code == HTTPStatus.HTTP_VERSION_NOT_SUPPORTED:
        return "this port speaks gRPC (hint: -u names that of HTTP, 8000 by default)"
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {error.code} {error.reason}: is it charonia?"
