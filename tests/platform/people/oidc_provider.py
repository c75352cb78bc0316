"""A small provider of single sign-on: everybody who comes is Ada Lovelace."""

import base64
import hashlib
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import Key, KeySet, RSAKey

CLIENT = "charonia"
SECRET = "its-secret"
ACCESS_TOKEN = "x"


class OidcProvider:
    """A provider on a port of its own. Use it as a context manager."""

    def __init__(self) -> None:
        self.claims: dict[str, Any] = {}
        self.signing_key: Key = RSAKey.generate_key(2048, {"kid": "1"}, private=True)
        self.keys = KeySet([self.signing_key])
        self.algorithm = "RS256"
        self.key_id = "1"
        self.asked: dict[str, str] = {}
        self.userinfo: dict[str, Any] | None = None
        self._codes: dict[str, dict[str, str]] = {}
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                split = urlsplit(self.path)
                match split.path:
                    case "/.well-known/openid-configuration":
                        self.answer(provider.metadata())
                    case "/keys":
                        self.answer(provider.keys.as_dict(private=False))
                    case "/authorize":
                        self.send_response(302)
                        self.send_header("Location", provider.authorize(_single(split.query)))
                        self.end_headers()
                    case "/userinfo" if self.headers["Authorization"] == f"Bearer {ACCESS_TOKEN}":
                        self.answer(provider.userinfo)
                    case _:
                        self.send_error(404)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                user = base64.b64decode(self.headers.get("Authorization", "Basic ")[6:]).decode()
                self.answer(*provider.token(_single(body), user))

            def answer(self, content: object, status: int = 200) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.issuer = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "OidcProvider":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def metadata(self) -> dict[str, Any]:
        found = {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
        }
        return found if self.userinfo is None else found | {"userinfo_endpoint": f"{self.issuer}/userinfo"}

    def authorize(self, asked: dict[str, str]) -> str:
        self.asked = asked
        code = secrets.token_urlsafe()
        self._codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"

    def token(self, asked: dict[str, str], user: str) -> tuple[dict[str, Any], int]:
        """Answer a code as RFC 6749 and 7636 say."""
        before = self._codes.pop(asked.get("code", ""), None)
        if before is None or (user != f"{CLIENT}:{SECRET.replace(' ', '+')}" and user != f"{CLIENT}:{SECRET}"):
            return {"error": "invalid_grant"}, 400
        hashed = hashlib.sha256(asked["code_verifier"].encode()).digest()
        if _base64(hashed) != before["code_challenge"] or asked["redirect_uri"] != before["redirect_uri"]:
            return {"error": "invalid_grant"}, 400
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "sub": "42",
            "aud": CLIENT,
            "iat": now,
            "exp": now + 300,
            "nonce": before["nonce"],
            "name": "Ada Lovelace",
            "email": "ada@example.org",
            "email_verified": True,
        } | self.claims
        claims = {name: value for name, value in claims.items() if value is not None}
        header = {"alg": self.algorithm, "kid": self.key_id}
        if self.algorithm == "none":
            token = ".".join([*(_base64(json.dumps(part).encode()) for part in (header, claims)), ""])
        else:
            token = jwt.encode(header, claims, self.signing_key, algorithms=[self.algorithm])
        return {"access_token": ACCESS_TOKEN, "token_type": "Bearer", "expires_in": 300, "id_token": token}, 200


def _single(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query).items()}


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
