"""Single sign-on with OpenID Connect: the code flow, with PKCE, state and nonce."""

import hmac
import ipaddress
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from authlib.integrations.base_client import OAuthError
from authlib.integrations.httpx_client import OAuth2Client
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from httpx2 import HTTPError
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet, KeySetSerialization, OctKey

from charonia.core.errors import ServingError, invalid, unavailable
from charonia.platform.database.connection import now
from charonia.platform.people.access import new_secret
from charonia.platform.settings import Oidc

SCOPE = "openid profile email"
CALLBACK_PATH = "/login/callback"

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures that only the provider can create."""

ANSWER_S_MAX = 10.0
"""Time limit for the provider to answer."""

METADATA_S = 3600.0
"""How long its metadata and its keys are cached."""

LEEWAY_S = 60
"""How much its clock may differ."""

RETRY_S = 5.0
"""After the provider has failed to answer, the platform does not call it again for this time."""

SIGN_IN_S = 600.0
"""Time limit for a user to sign in at the provider."""

STARTS_MAX = 60
"""Sign-ins that an address may start in `WINDOW_S`."""

WINDOW_S = 60.0

ADDRESSES_MAX = 100_000
"""Addresses that are counted in a window; more are not limited."""

_SEAL = "HS256"


class PendingLogin(NamedTuple):
    """The values that must match when a browser returns from the provider.

    Attributes:
        state: In the address to which it returns.
        verifier: The provider received its hash: PKCE.
        next: Path of the page to show afterwards.
    """

    state: str
    nonce: str
    verifier: str
    next: str = "/"


class Identity(NamedTuple):
    """A user whom the provider has authenticated.

    Attributes:
        subject: Their permanent identifier there.
        email: Their address, "" unless the provider has verified it.
    """

    issuer: str
    subject: str
    name: str
    email: str


class Provider:
    """The provider of single sign-on."""

    def __init__(self, settings: Oidc, url: str) -> None:
        self._settings = settings
        self._callback = f"{url}{CALLBACK_PATH}"
        self._lock = threading.Lock()
        self._metadata: Mapping[str, Any] = {}
        self._keys: Mapping[str, Any] = {}
        self._read_at = -METADATA_S
        self._failure: tuple[float, ServingError] | None = None
        self._seal = OctKey.generate_key(256)  # sign-ins under way do not survive a restart of the platform
        self._starts = AddressLimit()

    def send(self, address: str, next: str) -> tuple[str, str]:
        """Return the address to redirect a browser to, and the cookie that it must send back.

        The cookie holds the state of the sign-in, signed: the platform stores nothing for anonymous callers.

        Args:
            next: Path of the page to show afterwards.
        """
        if not self._starts.take(address):
            raise unavailable(
                f"single sign-on: {address} starts more than {STARTS_MAX} sign-ins in {WINDOW_S:.0f} s",
                hint="try again",
            )
        sent = PendingLogin(new_secret(), new_secret(), new_secret(), next)
        claims = {**sent._asdict(), "exp": int(now() + SIGN_IN_S)}
        return self._address(sent), jwt.encode({"alg": _SEAL}, claims, self._seal)

    def returned(self, cookie: str, state: str) -> PendingLogin:
        """Return the values that a browser was sent with, from its cookie."""
        try:
            claims = jwt.decode(cookie, self._seal, [_SEAL]).claims
            if claims["exp"] > now() and hmac.compare_digest(claims["state"].encode(), state.encode()):
                return PendingLogin(*(claims[name] for name in PendingLogin._fields))
        except (JoseError, ValueError):
            pass
        raise invalid("single sign-on: this browser did not start this sign-in, or too long ago", hint="sign in again")

    def _address(self, sent: PendingLogin) -> str:
        metadata, _ = self._known()
        address: str = prepare_grant_uri(
            metadata["authorization_endpoint"],
            self._settings.client_id,
            "code",
            redirect_uri=self._callback,
            scope=SCOPE,
            state=sent.state,
            nonce=sent.nonce,
            code_challenge=create_s256_code_challenge(sent.verifier),
            code_challenge_method="S256",
        )
        return address

    def identity(self, code: str, sent: PendingLogin) -> Identity:
        """Return the identity of a user who has returned.

        Args:
            sent: The values that it was sent with.
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

    def _token(self, client: OAuth2Client, endpoint: str, code: str, sent: PendingLogin) -> Mapping[str, Any]:
        """Exchange a code for tokens; afterwards the client has the access token."""
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

    def _claims(self, token: Mapping[str, Any], keys: Mapping[str, Any], sent: PendingLogin) -> Mapping[str, Any]:
        """Return the claims of the ID token after checking it."""
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
        with self._lock:
            if self._failure is not None and time.monotonic() - self._failure[0] < RETRY_S:
                raise self._failure[1]
            if fresh or time.monotonic() - self._read_at >= METADATA_S:
                try:
                    self._metadata, self._keys = self._read()
                except ServingError as error:
                    self._failure = (time.monotonic(), error)
                    raise
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
            timeout=ANSWER_S_MAX,
        )


class AddressLimit:
    """Limits how often an address may start a sign-in. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._counts: dict[str, int] = {}

    def take(self, address: str) -> bool:
        """Count a start; return False if the address has used up its window. The /64 of an IPv6 address counts."""
        key = _network(address)
        with self._lock:
            if self._clock() - self._began >= WINDOW_S:
                self._began = self._clock()
                self._counts.clear()
            count = self._counts.get(key, 0)
            if key in self._counts or len(self._counts) < ADDRESSES_MAX:
                self._counts[key] = count + 1
            return count < STARTS_MAX


def _network(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if parsed.version == 4 else str(ipaddress.IPv6Network((int(parsed), 64), strict=False))


def _json(client: OAuth2Client, address: str) -> dict[str, Any]:
    response = client.request("GET", address, withhold_token=True)
    response.raise_for_status()
    found = response.json()
    if not isinstance(found, dict):
        raise ValueError(f"expected an object at {address}")
    return found


def _asked(client: OAuth2Client, endpoint: str, subject: str) -> Mapping[str, Any]:
    """Return the claims that a provider leaves out of ID tokens, as OpenID Connect 5.4 permits."""
    try:
        response = client.request("GET", endpoint)
        response.raise_for_status()
        found = response.json()
    except (HTTPError, OAuthError, ValueError) as error:
        raise unavailable(f"single sign-on: the provider does not say who is signing in: {error!r}") from error
    if not isinstance(found, dict) or found.get("sub") != subject:
        raise invalid("single sign-on: the provider's user information is not about the user of its token")
    return found
