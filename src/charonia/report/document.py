"""One HTML file that needs nothing else: nothing is loaded from anywhere, and only our own script is executed.

What users name (models, servers, messages of errors) has to be escaped in the markup; in the JSON that the page carries
it is without `<`, and the script puts it into the page as text. The content policy allows the one script, by its hash.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

SCRIPTS = ("plots.js", "controls.js")
"""Scripts of every page: plots, and what is around them."""


def document(title: str, body: Sequence[str], data: Any, *, script: str, style: str = "") -> bytes:
    """Return a page as UTF-8.

    Args:
        title: Its title, as text.
        body: Its markup, with user's text escaped.
        data: What its script draws; anything that JSON has.
        script: The page's own script, beside `SCRIPTS`.
        style: Its own style sheet, beside `page.css`.
    """
    whole = "\n".join([*(asset("charonia.report", name) for name in SCRIPTS), script])
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(whole)}'"
    # A `<` could only be the begin of `</script>`: JSON needs none.
    shown = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{asset('charonia.report', 'page.css')}{style}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>",
            f'<script type="application/json" id="data">{shown}</script>',
            f"<script>{whole}</script>\n</body>\n</html>\n",
        ]
    ).encode("utf-8", "replace")


def asset(package: str, name: str) -> str:
    """Return a file of the folder `page` of a package."""
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()
