"""Access control: parts of the protocol that require a header, and API keys with scopes. Pure.

Each call is checked against both, first the restriction, then the key. Secrets are compared in constant time. Keys are
looked up by a digest keyed with a secret of this process, so that the time of a look-up reveals nothing about them.

Source: Triton's restricted APIs; scopes exist only in Charonia.
"""

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from charonia.core.errors import RefusalKind
from charonia.core.request import Flow

KEYS_MAX = 10_000
"""Most keys that a file may hold."""

KEY_LENGTH_MIN = 16
"""Shortest key, in characters."""

KEY_LENGTH_MAX = 1024
"""Longest key, in characters."""

WEIGHT_MAX = 1000
"""Largest weight of a key."""

PER_MINUTE_MAX = 1_000_000_000
"""Largest limit of a key a minute."""

KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
"""The headers that may carry a key."""

KEY_LINE = "a line is NAME SCOPES KEY, for example: ci infer,read sha256:..."
"""The form of a line, for hints."""

NO_KEY = "none"
"""In place of a key: the line has the permissions of callers without a known key."""

_DIGEST_PREFIX = "sha256:"
_NO_DIGEST = b""
_WEIGHT = "weight"
_NUMBERS = {_WEIGHT: WEIGHT_MAX, "requests/min": PER_MINUTE_MAX, "tokens/min": PER_MINUTE_MAX}
"""Largest numbers that may follow a key, in the order of the fields of `ApiKey`."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,128}")


class Api(Enum):
    """A part of the protocol that can be restricted, by Triton's name for it."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


class Scope(Enum):
    """The permissions of a key."""

    INFER = "infer"
    """Inference, and the shared memory for it."""

    READ = "read"
    """Read-only information about models and server."""

    ADMIN = "admin"
    """Everything, including loading models and changing settings."""


class Operation(NamedTuple):
    """A call, as access control sees it.

    Attributes:
        api: The part of the protocol that it belongs to.
        scope: The scope that a key must have; None if no key is needed.
    """

    api: Api
    scope: Scope | None


@dataclass(frozen=True, slots=True)
class Restriction:
    """Parts of the protocol that require a header.

    Attributes:
        apis: The parts.
        header: Name of the header, as it was configured.
        value: Value that the header must have.
    """

    apis: tuple[Api, ...]
    header: str
    value: str


class Refusal(NamedTuple):
    """The refusal of a call.

    Attributes:
        kind: The reason, which determines the status.
        message: One sentence for the caller.
    """

    kind: RefusalKind
    message: str


class ApiKey(NamedTuple):
    """A key, without the key itself.

    Attributes:
        name: Name of its owner.
        scopes: Its permissions.
        digest: SHA-256 of the key; empty for callers without a known key.
        weight: Its share of busy models, relative to the shares of other clients.
        requests_per_minute: Limit of its requests for inference, 0 for none.
        tokens_per_minute: Limit of its tokens of language models, 0 for none.
    """

    name: str
    scopes: frozenset[Scope]
    digest: bytes
    weight: int = 1
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


Header = Callable[[bytes], bytes | None]
"""Returns the value of a header by its lower-case name, None if it is absent."""


def digest_of(key: str) -> str:
    """Return the form of a key in a key file, which does not reveal the key."""
    return _DIGEST_PREFIX + hashlib.sha256(key.encode()).hexdigest()


class KeyLines(NamedTuple):
    """The content of a key file.

    Attributes:
        keys: The keys of its valid lines.
        problems: The other lines, by number and reason, without their keys.
    """

    keys: list[ApiKey]
    problems: list[str]


def parse_keys(text: str) -> KeyLines:
    """Parse lines of name, scopes and key; empty lines and comments (#) are ignored."""
    keys: dict[bytes, ApiKey] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = _parse_line(line)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        if key.digest in keys:
            problems.append(f"line {number}: the key of '{key.name}' is also that of '{keys[key.digest].name}'")
        elif len(keys) == KEYS_MAX:
            problems.append(
                f"line {number}: expected at most {KEYS_MAX} keys, this line and those below it are ignored"
            )
            break
        else:
            keys[key.digest] = key
    return KeyLines(list(keys.values()), problems)


class KeyRing:
    """The valid keys."""

    def __init__(self, keys: Iterable[ApiKey], secret: bytes) -> None:
        """Start with some keys.

        Args:
            secret: Random bytes that stay in this process.

        Attributes:
            open_to: What callers without a known key may do. Shared memory, which is memory of the machine, is never
                among it.
        """
        self._secret = secret
        self._keys: dict[bytes, ApiKey] = {}
        self.replace(keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replace all keys."""
        found = {key.digest: key for key in keys}
        anybody = found.pop(_NO_DIGEST, None)
        self.open_to = anybody.scopes if anybody is not None else frozenset[Scope]()
        self._keys = {self._blinded(digest): key for digest, key in found.items()}

    def check(self, operation: Operation, header: Header) -> Refusal | None:
        """Return why a call is refused, None if it is permitted."""
        scope = operation.scope
        if scope is None or (scope in self.open_to and operation.api is not Api.SHARED_MEMORY):
            return None
        sent_key = _given_key(header)
        if not sent_key:
            return Refusal(
                RefusalKind.UNAUTHENTICATED,
                "This server needs an API key: 'authorization: Bearer KEY' or 'x-api-key: KEY'",
            )
        key = self._find(sent_key)
        if key is None:
            return Refusal(RefusalKind.UNAUTHENTICATED, "The API key is not known to this server")
        if scope in key.scopes or Scope.ADMIN in key.scopes:
            return None
        scopes = ", ".join(sorted(each.value for each in key.scopes))
        return Refusal(
            RefusalKind.FORBIDDEN, f"This call needs the scope '{scope.value}', the key '{key.name}' has {scopes}"
        )

    def flow(self, header: Header) -> Flow | None:
        """Return the flow of a call, None where it has no valid key."""
        sent_key = _given_key(header)
        key = self._find(sent_key) if sent_key else None
        if key is None:
            return None
        return Flow(key.name, key.weight, key.name, key.requests_per_minute, key.tokens_per_minute)

    def _find(self, key: bytes) -> ApiKey | None:
        return self._keys.get(self._blinded(hashlib.sha256(key).digest()))

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


class Gate:
    """Permits or refuses the calls of one protocol."""

    def __init__(
        self, restrictions: Sequence[Restriction], keys: KeyRing | None, *, what: str, prefix: str = ""
    ) -> None:
        """Create a gate.

        Args:
            restrictions: Parts that require a header, each part in at most one restriction.
            keys: The valid keys; None if no key is needed.
            what: The word for a part in a refusal.
            prefix: Prefix of the names of headers.

        Attributes:
            singular: Headers, in lower case, that a call must not give twice with different values: it would be open
                which of them counts, here and for a proxy in front.
        """
        self._keys = keys
        self._what = what
        self._by_api = {
            api: (
                prefix + restriction.header,
                (prefix + restriction.header).lower().encode(),
                restriction.value.encode(),
            )
            for restriction in restrictions
            for api in restriction.apis
        }
        self.singular: Set[bytes] = frozenset(key for _, key, _ in self._by_api.values()) | (
            KEY_HEADERS if keys is not None else frozenset()
        )

    @property
    def has_keys(self) -> bool:
        return self._keys is not None and Scope.INFER not in self._keys.open_to

    @property
    def knows_keys(self) -> bool:
        return self._keys is not None

    def flow(self, header: Header) -> Flow | None:
        """Return the flow of a call by its key, None where it has none."""
        return self._keys.flow(header) if self._keys is not None else None

    def check(self, operation: Operation, header: Header) -> Refusal | None:
        restriction = self._by_api.get(operation.api)
        if restriction is not None:
            name, key, value = restriction
            if not hmac.compare_digest(header(key) or b"", value):
                return Refusal(RefusalKind.RESTRICTED, f"This {self._what} is restricted, expecting header '{name}'")
        return self._keys.check(operation, header) if self._keys is not None else None


def _given_key(header: Header) -> bytes:
    authorization = header(b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.strip().partition(b" ")
        if scheme.lower() == b"bearer":
            return key.strip()
    return (header(b"x-api-key") or b"").strip()


def _parse_line(line: str) -> ApiKey:
    """Parse one key; the message of a ValueError must not reveal it."""
    fields = line.split()
    numbers = {name: 1 if name == _WEIGHT else 0 for name in _NUMBERS}
    while len(fields) > 3:
        setting, _, text = fields[-1].partition("=")
        if setting not in _NUMBERS:
            break
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= _NUMBERS[setting]):
            raise ValueError(f"{setting}: expected 1 to {_NUMBERS[setting]}")
        numbers[setting] = int(text)
        fields.pop()
    if len(fields) != 3:
        raise ValueError(f"expected NAME SCOPES KEY, got {len(fields)} words")
    name, words, key = fields
    if not _NAME.fullmatch(name):
        raise ValueError("expected a name of letters, digits and _.@-, at most 128 of them")
    known = {scope.value: scope for scope in Scope}
    wrong = [word for word in words.split(",") if word not in known]
    if wrong:
        raise ValueError(f"key '{name}': expected scopes of {', '.join(known)}, got '{wrong[0]}'")
    scopes = frozenset(known[word] for word in words.split(","))
    if key == NO_KEY:
        if Scope.ADMIN in scopes:
            raise ValueError(f"'{name}': the scope admin needs a key")
        return ApiKey(name, scopes, _NO_DIGEST)
    if key.startswith(_DIGEST_PREFIX):
        hexadecimal = key.removeprefix(_DIGEST_PREFIX).lower()
        if not _DIGEST.fullmatch(hexadecimal):
            raise ValueError(f"key '{name}': expected 64 hexadecimal digits after {_DIGEST_PREFIX}")
        return ApiKey(name, scopes, bytes.fromhex(hexadecimal), *numbers.values())
    if not KEY_LENGTH_MIN <= len(key) <= KEY_LENGTH_MAX or not key.isascii() or not key.isprintable():
        raise ValueError(f"key '{name}': expected {KEY_LENGTH_MIN} to {KEY_LENGTH_MAX} printable ASCII characters")
    return ApiKey(name, scopes, hashlib.sha256(key.encode()).digest(), *numbers.values())


class _Group(NamedTuple):
    api: Api
    scope: Scope | None
    routes: tuple[str, ...]
    methods: tuple[str, ...]
    changes: tuple[str, ...] = ()


_MODEL = "/v2/models/{model}"
_REPOSITORY = "/v2/repository/models/{model}"
_NAMED = "/v2/repository/{repository}"
_SYSTEM = "/v2/systemsharedmemory"
_CUDA = "/v2/cudasharedmemory"

_TABLE = (
    _Group(
        Api.HEALTH,
        None,
        ("/v2/health/live", "/v2/health/ready", f"{_MODEL}/ready", "/health"),
        ("ServerLive", "ServerReady", "ModelReady", "Check", "Watch"),
    ),
    _Group(
        Api.METADATA,
        Scope.READ,
        ("/v2", "/v2/models", _MODEL),
        ("ServerMetadata", "ModelMetadata", "ServerReflectionInfo"),
    ),
    _Group(Api.METADATA, Scope.READ, ("/openapi.json", "/samples/{model}"), ()),
    # The page is the same on every server: it fetches its content with other calls.
    _Group(Api.METADATA, None, ("/", "/page.css", "/page.js"), ()),
    _Group(Api.METADATA, Scope.READ, ("/v1/models", "/v1/models/{model}", "/version"), ()),
    _Group(
        Api.INFERENCE,
        Scope.INFER,
        (
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/responses",
            "/v1/messages",
            "/v1/rerank",
            "/v1/score",
            "/tokenize",
            "/detokenize",
        ),
        (),
        ("/v1/models/{model}",),
    ),
    _Group(
        Api.INFERENCE,
        Scope.INFER,
        (
            f"{_MODEL}/infer", f"{_MODEL}/generate", f"{_MODEL}/generate_stream",
            "/v2/results/{result}", "/invocations",
        ),
        ("ModelInfer", "ModelStreamInfer"),
    ),
    _Group(
        Api.SHARED_MEMORY,
        Scope.INFER,
        tuple(
            base + path
            for base in (_SYSTEM, _CUDA)
            for path in (
                "/status",
                "/region/{region}/status",
                "/region/{region}/register",
                "/region/{region}/unregister",
                "/unregister",
            )
        ),
        tuple(
            f"{kind}SharedMemory{what}" for kind in ("System", "Cuda") for what in ("Status", "Register", "Unregister")
        ),
    ),
    _Group(Api.MODEL_CONFIG, Scope.READ, (f"{_MODEL}/config",), ("ModelConfig",)),
    _Group(Api.MODEL_REPOSITORY, Scope.READ, ("/v2/repository/index", f"{_NAMED}/index"), ("RepositoryIndex",)),
    _Group(
        Api.MODEL_REPOSITORY,
        Scope.ADMIN,
        (
            f"{_REPOSITORY}/load",
            f"{_REPOSITORY}/unload",
            f"{_NAMED}/models/{{model}}/load",
            f"{_NAMED}/models/{{model}}/unload",
            "/v1/models/{model}/load",
            "/v1/models/{model}/unload",
        ),
        ("RepositoryModelLoad", "RepositoryModelUnload", "ModelTrafficChange", "ModelTrafficReset"),
        (f"{_MODEL}/traffic",),
    ),
    _Group(
        Api.STATISTICS,
        Scope.READ,
        (
            "/v2/models/stats",
            f"{_MODEL}/stats",
            f"{_MODEL}/sequences",
            f"{_MODEL}/explain",
            "/v2/ratelimit",
            f"{_MODEL}/traffic",
            "/v2/load",
        ),
        ("ModelStatistics", "ModelTraffic", "StreamCoreMetrics"),
    ),
    _Group(Api.TRACE, Scope.ADMIN, ("/v2/trace/setting", f"{_MODEL}/trace/setting"), ("TraceSetting",)),
    _Group(Api.LOGGING, Scope.ADMIN, ("/v2/logging",), ("LogSettings",)),
)  # fmt: skip

ROUTES: dict[str, Operation] = {path: Operation(g.api, g.scope) for g in _TABLE for path in g.routes}
"""Operation by route, without a version."""

CHANGES: dict[str, Operation] = {path: Operation(g.api, g.scope) for g in _TABLE for path in g.changes}
"""Operation by route of other methods than GET, where it is another one."""

METHODS: dict[str, Operation] = {name: Operation(g.api, g.scope) for g in _TABLE for name in g.methods}
"""Operation by gRPC method, without its service."""


def operation_of_route(path: str) -> Operation:
    return ROUTES[path.replace("/versions/{version}", "")]
