"""Restrictions by header, and keys with scopes."""

import pytest

from charonia.core.errors import RefusalKind
from charonia.server.access.rules import (
    CHANGES,
    KEYS_MAX,
    METHODS,
    ROUTES,
    Api,
    ApiKey,
    Gate,
    Header,
    KeyRing,
    Operation,
    Restriction,
    Scope,
    digest_of,
    parse_keys,
)

KEY = "a-key-of-sixteen-or-more"
INFER = Operation(Api.INFERENCE, Scope.INFER)
HEALTH = Operation(Api.HEALTH, None)
LOAD = Operation(Api.MODEL_REPOSITORY, Scope.ADMIN)


def headers(**given: str) -> Header:
    return {name.replace("_", "-").encode(): value.encode() for name, value in given.items()}.get


def ring(*lines: str) -> KeyRing:
    return KeyRing(parse_keys("\n".join(lines or (f"ci infer,read {KEY}",))).keys, b"secret")


def gate(*restrictions: Restriction, keys: KeyRing | None = None, prefix: str = "") -> Gate:
    return Gate(restrictions, keys, what="API", prefix=prefix)


def test_a_restricted_part_asks_for_its_header_and_its_value() -> None:
    given = gate(Restriction((Api.INFERENCE, Api.TRACE), "X-Key", "secret"))

    assert given.check(INFER, headers(x_key="secret")) is None
    for wrong in (headers(), headers(x_key=""), headers(x_key="Secret"), headers(x_key="secret ")):
        refusal = given.check(INFER, wrong)
        assert refusal is not None
        assert refusal.kind is RefusalKind.RESTRICTED
        assert refusal.message == "This API is restricted, expecting header 'X-Key'"
    assert given.check(HEALTH, headers()) is None


def test_the_header_of_a_restriction_may_have_a_prefix() -> None:
    given = gate(Restriction((Api.INFERENCE,), "Key", "v"), prefix="triton-grpc-protocol-")

    refusal = given.check(INFER, headers(key="v"))
    assert refusal is not None
    assert refusal.message.endswith("'triton-grpc-protocol-Key'")
    assert given.check(INFER, headers(triton_grpc_protocol_key="v")) is None


@pytest.mark.parametrize(
    "sent",
    [
        headers(authorization=f"Bearer {KEY}"),
        headers(authorization=f"bearer  {KEY} "),
        headers(x_api_key=KEY),
        headers(authorization="Basic abc", x_api_key=KEY),
    ],
)
def test_a_key_is_taken_from_either_header(sent: Header) -> None:
    assert gate(keys=ring()).check(INFER, sent) is None


@pytest.mark.parametrize(
    ("sent", "fragment"),
    [
        (headers(), "needs an API key"),
        (headers(authorization="Bearer "), "needs an API key"),
        (headers(authorization=f"Basic {KEY}"), "needs an API key"),
        (headers(authorization=f"Bearer {KEY}x"), "not known"),
        (headers(x_api_key=digest_of(KEY)), "not known"),
    ],
)
def test_a_call_without_a_known_key_is_not_authenticated(sent: Header, fragment: str) -> None:
    refusal = gate(keys=ring()).check(INFER, sent)

    assert refusal is not None
    assert refusal.kind is RefusalKind.UNAUTHENTICATED
    assert fragment in refusal.message
    assert KEY not in refusal.message


def test_a_key_without_the_scope_is_forbidden_and_told_which_it_needs() -> None:
    refusal = gate(keys=ring()).check(LOAD, headers(x_api_key=KEY))

    assert refusal is not None
    assert refusal.kind is RefusalKind.FORBIDDEN
    assert refusal.message == "This call needs the scope 'admin', the key 'ci' has infer, read"


@pytest.mark.parametrize("scope", list(Scope))
def test_admin_is_good_for_everything(scope: Scope) -> None:
    assert ring(f"ops admin {KEY}").check(Operation(Api.STATISTICS, scope), headers(x_api_key=KEY)) is None


def test_what_needs_no_key_is_open_unless_it_is_restricted() -> None:
    assert gate(keys=ring()).check(HEALTH, headers()) is None
    assert gate(Restriction((Api.HEALTH,), "h", "v"), keys=ring()).check(HEALTH, headers()) is not None


def test_a_restriction_and_a_key_are_both_asked_for() -> None:
    given = gate(Restriction((Api.INFERENCE,), "h", "v"), keys=ring())

    assert given.check(INFER, headers(h="v")) is not None
    assert given.check(INFER, headers(x_api_key=KEY)) is not None
    assert given.check(INFER, headers(h="v", x_api_key=KEY)) is None


def test_other_keys_take_the_place_of_those_there_were() -> None:
    keys = ring()

    keys.replace(parse_keys("new infer another-key-of-sixteen").keys)

    assert keys.check(INFER, headers(x_api_key=KEY)) is not None
    assert keys.check(INFER, headers(x_api_key="another-key-of-sixteen")) is None


OPEN = (f"platform admin {KEY}", "clients infer,read none")

CLOSED_HTTP = {
    *(path for path in ROUTES if "sharedmemory" in path or path.endswith(("{model}/load", "{model}/unload"))),
    *("/v2/logging", "/v2/trace/setting", "/v2/models/{model}/trace/setting"),
}
CLOSED_GRPC = {
    *(name for name in METHODS if "SharedMemory" in name),
    *("RepositoryModelLoad", "RepositoryModelUnload", "ModelTrafficChange", "ModelTrafficReset"),
    *("TraceSetting", "LogSettings"),
}


@pytest.mark.parametrize("sent", [headers(), headers(authorization="Bearer none"), headers(x_api_key="x" * 20)])
def test_callers_without_a_known_key_may_do_what_the_file_says_and_nothing_administrative(sent: Header) -> None:
    given = gate(keys=ring(*OPEN))

    assert {path for path, each in ROUTES.items() if given.check(each, sent)} == CLOSED_HTTP
    assert {name for name, each in METHODS.items() if given.check(each, sent)} == CLOSED_GRPC
    assert given.check(CHANGES["/v2/models/{model}/traffic"], sent) is not None


def test_a_known_key_may_do_more_than_callers_without_one() -> None:
    given = gate(keys=ring(*OPEN, "tool infer another-key-of-sixteen"))

    every = [*ROUTES.values(), *CHANGES.values(), *METHODS.values()]
    assert [each for each in every if given.check(each, headers(x_api_key=KEY))] == []
    assert given.check(Operation(Api.SHARED_MEMORY, Scope.INFER), headers(x_api_key="another-key-of-sixteen")) is None


def test_inference_needs_a_key_unless_the_file_opens_it() -> None:
    assert gate(keys=ring()).has_keys
    assert gate(keys=ring("clients read none")).has_keys
    assert not gate(keys=ring(*OPEN)).has_keys
    assert not gate().has_keys


def test_a_file_that_does_not_open_the_server_any_more_closes_it() -> None:
    keys = ring(*OPEN)
    keys.replace(parse_keys(OPEN[0]).keys)

    assert keys.check(INFER, headers()) is not None


def test_nobody_administers_without_a_key() -> None:
    found = parse_keys("clients infer,admin none\nclients infer none\nothers read none")

    assert [key.scopes for key in found.keys] == [{Scope.INFER}]
    assert found.problems == [
        "line 1: 'clients': the scope admin needs a key",
        "line 3: the key of 'others' is also that of 'clients'",
    ]


def test_a_file_holds_keys_or_their_digests_and_remarks() -> None:
    digest = digest_of("the-key-of-operations").upper().replace("SHA", "sha")
    text = f"# who\n\n  ci infer,read  {KEY}\nops\tadmin {digest}\n"

    assert parse_keys(text) == (
        [
            ApiKey("ci", frozenset({Scope.INFER, Scope.READ}), bytes.fromhex(digest_of(KEY)[7:])),
            ApiKey("ops", frozenset({Scope.ADMIN}), bytes.fromhex(digest_of("the-key-of-operations")[7:])),
        ],
        [],
    )


@pytest.mark.parametrize("text", ["", "# only\n", " \n"])
def test_a_file_may_hold_no_key(text: str) -> None:
    assert parse_keys(text) == ([], [])


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("ci infer", "line 1: expected NAME SCOPES KEY, got 2 words"),
        (f"ci infer {KEY} more", "got 4 words"),
        (f"c!i infer {KEY}", "expected a name"),
        (f"ci infer,write {KEY}", "key 'ci': expected scopes of infer, read, admin, got 'write'"),
        (f"ci , {KEY}", "got ''"),
        ("ci infer short", "key 'ci': expected 16 to 1024 printable ASCII characters"),
        ("ci infer " + "k" * 1025, "expected 16 to 1024"),
        ("ci infer schl\u00fcssel-der-lang-ist", "printable ASCII"),
        ("ci infer sha256:abc", "expected 64 hexadecimal digits"),
        (f"a infer {KEY}\nb read {digest_of(KEY)}", "line 2: the key of 'b' is also that of 'a'"),
        ("x\ny", "line 1: expected NAME SCOPES KEY, got 1 words; line 2: expected NAME SCOPES KEY, got 1 words"),
    ],
)
def test_every_wrong_line_is_reported_but_never_a_key_and_the_others_hold(text: str, fragment: str) -> None:
    lines = parse_keys(f"good admin the-key-of-operations\n{text}")

    reported = "; ".join(lines.problems)
    assert fragment.replace("line 2", "line 3").replace("line 1", "line 2") in reported
    assert KEY not in reported
    assert lines.keys[0].name == "good"


def test_the_first_owner_of_a_key_keeps_it() -> None:
    assert [key.name for key in parse_keys(f"a infer {KEY}\nb admin {KEY}").keys] == ["a"]


def test_there_is_a_limit_on_the_number_of_keys() -> None:
    lines = parse_keys("\n".join(f"k{n} read sha256:{n:064x}" for n in range(KEYS_MAX + 2)))

    assert len(lines.keys) == KEYS_MAX
    assert lines.problems == [
        f"line {KEYS_MAX + 1}: expected at most {KEYS_MAX} keys, this line and those below it are ignored"
    ]


def test_the_headers_of_keys_and_of_restrictions_must_not_differ() -> None:
    restriction = Restriction((Api.INFERENCE,), "X-Key", "secret")

    assert gate(restriction).singular == {b"x-key"}
    assert gate(keys=ring()).singular == {b"authorization", b"x-api-key"}
    assert gate(restriction, keys=ring(), prefix="p-").singular == {b"p-x-key", b"authorization", b"x-api-key"}
