"""Users and passwords of the service itself: BentoML's authenticated endpoint."""

import base64
import secrets

import charonia

PASSWORDS = {"alice": "alicepwd", "bob": "bobpwd"}


@charonia.model(path="/echo")
def echo(text: str, request: charonia.Request) -> charonia.Response:
    user, _, password = base64.b64decode(request.headers.get("authorization", "")[6:]).decode().partition(":")
    if not secrets.compare_digest(PASSWORDS.get(user, secrets.token_hex()), password):
        return charonia.Response("who are you?", "text/plain", 401, {"WWW-Authenticate": "Basic"})
    return charonia.Response(f"{user}: {text}", "text/plain")
