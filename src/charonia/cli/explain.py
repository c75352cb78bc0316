"""`charonia explain`: what the scheduler did for a model in the last minute, what limits it, and what to change.

Exit status: 0 done, 1 the server does not answer or has no such model, 2 misuse.
"""

import argparse
import json
import shutil
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from charonia.cli.arguments import Parser
from charonia.core.errors import ServingError, invalid, unavailable
from charonia.tools.report.explain_text import COLUMNS_MAX, explain_text

ANSWER_SECONDS_MAX = 10.0


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    given = parser().parse_args(arguments)
    try:
        document = fetch(given)
    except ServingError as error:
        print(f"charonia explain: {error}", file=sys.stderr)
        return 1
    columns = min(shutil.get_terminal_size().columns, COLUMNS_MAX)
    print(json.dumps(document, indent=2) if given.json else explain_text(document, columns))
    return 0


def parser() -> Parser:
    """Return the parser of the arguments."""
    made = Parser(
        prog="charonia explain",
        description="Show what the scheduler did for a model in the last minute, what limits it, and what to change.",
    )
    made.add_argument("model", metavar="MODEL", help="name of a model that is loaded")
    made.add_argument(
        "-u", "--url", default="localhost:8000", metavar="URL", help="HOST:PORT of the server's HTTP endpoint, or a URL"
    )
    made.add_argument("--model-version", default="", metavar="VERSION", help="that version (default: the newest)")
    made.add_argument("-H", "--header", action="append", default=[], metavar="NAME:VALUE", help="header; repeatable")
    made.add_argument(
        "--ssl-ca", default="", metavar="FILE", help="certificates to trust, for https (default: the system's)"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def fetch(given: argparse.Namespace) -> dict[str, Any]:
    """Return what the server says.

    Raises:
        ServingError: It does not answer, or refuses.
    """
    base = given.url if "://" in given.url else f"http://{given.url}"
    version = f"/versions/{quote(given.model_version, safe='')}" if given.model_version else ""
    request = urllib.request.Request(f"{base.rstrip('/')}/v2/models/{quote(given.model, safe='')}{version}/explain")
    if request.type not in ("http", "https"):
        raise invalid(f"--url: expected HOST:PORT, or a URL of http or https, got '{given.url}'")
    for header in given.header:
        name, colon, value = header.partition(":")
        if not colon:
            raise invalid(f"--header: expected NAME:VALUE, got '{header}'")
        request.add_header(name.strip(), value.strip())
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
    """Return what the server says is wrong; one that is not ours has no such route."""
    if error.code == HTTPStatus.HTTP_VERSION_NOT_SUPPORTED:
        return "this port speaks gRPC (hint: -u names that of HTTP, 8000 by default)"
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {error.code} {error.reason}: is it charonia?"
