"""Single sign-on with OpenID Connect: the code flow, with PKCE, state and nonce."""

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from authlib.integrations.base_client import OAuthError
from authlib.integrations.httpx_client import OAuth2Client
from authlib.oidc.core import CodeIDToken
from httpx2 import HTTPError
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet, KeySetSerialization

from charonia.core.errors import invalid, unavailable
from charonia.platform.settings import Oidc

SCOPE = "openid profile email"
CALLBACK_PATH = "/login/callback"

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures that nobody but the provider can make."""

ANSWER_S_MAX = 10.0
"""Time that the provider has to answer."""

METADATA_S = 3600.0
"""Time for which its metadata and its keys are kept."""

LEEWAY_S = 60
"""How much its clock may differ."""


class SentBrowser(NamedTuple):
    """What must match when a browser comes back from the provider.

    Attributes:
        state: In the address to which it comes back.
        nonce: In the ID token.
        verifier: Whose hash the provider got: PKCE.
    """

    state: str
    nonce: str
    verifier: str


class Identity(NamedTuple):
    """Somebody whom the provider vouches for.

    Attributes:
        issuer: The provider.
        subject: Their name there, which stays the same.
        name: As people call them.
        email: Their address, "" unless the provider has verified it.
    """

    issuer: str
    subject: str
    name: str
    email: str


class Provider:
    """The provider of single sign-on.

    Args:
        settings: Its address, and who we are there.
        url: Where browsers reach the platform.
    """

    def __init__(self, settings: Oidc, url: str) -> None:
        self._settings = settings
        self._callback = f"{url}{CALLBACK_PATH}"
        self._lock = threading.Lock()
        self._metadata: Mapping[str, Any] = {}
        self._keys: Mapping[str, Any] = {}
        self._read_at = -METADATA_S

    def address(self, sent: SentBrowser) -> str:
        """Return where to send a browser.

        Raises:
            ServingError: UNAVAILABLE when the provider does not answer, or not as one.
        """
        metadata, _ = self._known()
        with self._client() as client:
            address, _ = client.create_authorization_url(
                metadata["authorization_endpoint"],
                state=sent.state,
                nonce=sent.nonce,
                code_verifier=sent.verifier,
            )
        return str(address)

    def identity(self, code: str, sent: SentBrowser) -> Identity:
        """Return who has come back.

        Args:
            code: What the browser brings.
            sent: What it was sent with.

        Raises:
            ServingError: INVALID_ARG if the provider refuses the code, or its token is not valid; UNAVAILABLE when it
                does not answer.
        """
        metadata, keys = self._known()
        with self._client() as client:
            token = self._token(client, metadata["token_endpoint"], code, sent)
            try:
                claims = self._claims(token, keys, sent)
            except InvalidKeyIdError:  # it has new keys
                claims = self._claims(token, self._known(fresh=True)[1], sent)
            if "email" not in claims and "userinfo_endpoint" in metadata:
                claims = {**_asked(client, metadata["userinfo_endpoint"], claims["sub"]), **claims}
        subject, email = str(claims["sub"]), str(claims.get("email") or "")
        email = email if claims.get("email_verified") is True else ""
        name = str(claims.get("name") or claims.get("preferred_username") or subject)
        return Identity(self._settings.issuer, subject, name if email else f"{name} ({subject})", email)

    def _token(self, client: OAuth2Client, endpoint: str, code: str, sent: SentBrowser) -> Mapping[str, Any]:
        """Return what the provider gives for a code; the client has its access token then."""
        try:
            token: Mapping[str, Any] = client.fetch_token(
                endpoint,
                grant_type="authorization_code",
                code=code,
                redirect_uri=self._callback,
                code_verifier=sent.verifier,
            )
        except OAuthError as error:
            raise invalid(f"single sign-on: the provider refuses the code: {error}") from error
        except (HTTPError, ValueError) as error:
            raise unavailable(f"single sign-on: the provider does not answer: {error}") from error
        return token

    def _claims(self, token: Mapping[str, Any], keys: Mapping[str, Any], sent: SentBrowser) -> Mapping[str, Any]:
        """Return what the ID token says, after it was checked."""
        try:
            decoded = jwt.decode(
                str(token.get("id_token", "")), KeySet.import_key_set(cast(KeySetSerialization, keys)), list(ALGORITHMS)
            )
            claims = CodeIDToken(
                decoded.claims,
                decoded.header,
                {
                    "iss": {"essential": True, "value": self._settings.issuer},
                    "aud": {"essential": True, "value": self._settings.client_id},
                },
                {
                    "nonce": sent.nonce,
                    "client_id": self._settings.client_id,
                    "access_token": token.get("access_token"),
                },
            )
            claims.validate(leeway=LEEWAY_S)
        except InvalidKeyIdError:
            raise
        except (JoseError, ValueError, KeyError, TypeError) as error:
            raise invalid(f"single sign-on: the token of the provider is not valid: {error}") from error
        return cast(Mapping[str, Any], claims)

    def _known(self, *, fresh: bool = False) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the metadata and the keys of the provider."""
        with self._lock:
            if fresh or time.monotonic() - self._read_at >= METADATA_S:
                self._metadata, self._keys = self._read()
                self._read_at = time.monotonic()
            return self._metadata, self._keys

    def _read(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        issuer = self._settings.issuer
        try:
            with self._client() as client:
                metadata = _json(client, f"{issuer.rstrip('/')}/.well-known/openid-configuration")
                if metadata["issuer"] != issuer:
                    raise unavailable(
                        f"single sign-on: expected the issuer '{issuer}', got '{metadata['issuer']}'",
                        hint="--oidc-issuer must be written as the provider does, with or without a slash at the end",
                    )
                _ = metadata["authorization_endpoint"], metadata["token_endpoint"]
                return metadata, _json(client, metadata["jwks_uri"])
        except (HTTPError, ValueError, KeyError) as error:
            raise unavailable(f"single sign-on: '{issuer}' does not answer as a provider: {error!r}") from error

    def _client(self) -> OAuth2Client:
        return OAuth2Client(
            self._settings.client_id,
            self._settings.client_secret or None,
            scope=SCOPE,
            redirect_uri=self._callback,
            code_challenge_method="S256",
            timeout=ANSWER_S_MAX,
        )


def _json(client: OAuth2Client, address: str) -> dict[str, Any]:
    response = client.request("GET", address, withhold_token=True)
    response.raise_for_status()
    found = response.json()
    if not isinstance(found, dict):
        raise ValueError(f"expected an object at {address}")
    return found


def _asked(client: OAuth2Client, endpoint: str, subject: str) -> Mapping[str, Any]:
    """Return the claims that a provider does not write into ID tokens, as OpenID Connect 5.4 lets it."""
    try:
        response = client.request("GET", endpoint)
        response.raise_for_status()
        found = response.json()
    except (HTTPError, OAuthError, ValueError) as error:
        raise unavailable(f"single sign-on: the provider does not say who is signing in: {error!r}") from error
    if not isinstance(found, dict) or found.get("sub") != subject:
        raise invalid("single sign-on: the provider names somebody other than its token does")
    return found
