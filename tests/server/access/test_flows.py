"""Which flow a request belongs to, over HTTP and gRPC: a header, a key, an address."""

import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient

from charonia.core.errors import ServingError, invalid
from charonia.core.request import FLOW_NAME_LENGTH_MAX, Flow
from charonia.core.response import InferResponse, Outcome, Reply
from charonia.core.statistics import COMPLETION_TOKENS, PROMPT_TOKENS
from charonia.server.access.rules import WEIGHT_MAX, Gate, KeyRing, parse_keys
from charonia.server.facade import Services
from charonia.server.http.frontend import HttpFrontend
from charonia.server.http.limits import HttpLimits
from charonia.server.metrics.key_usage import KEYS_COUNTED_MAX, OTHER, KeyUsage, Usage

KEY = "a-key-of-sixteen-characters"
PEER = Flow("192.0.2.7")
BODY = b'{"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}'


def gate(line: str = f"ci infer {KEY} weight=7") -> Gate:
    return Gate((), KeyRing(parse_keys(line).keys, b"secret"), what="API")


@pytest.mark.parametrize(
    ("header", "with_keys", "sent", "expected"),
    [
        (b"", False, {}, PEER),
        (b"", True, {b"x-api-key": KEY.encode()}, Flow("ci", 7, "ci")),
        (b"", True, {b"authorization": b"Bearer " + KEY.encode()}, Flow("ci", 7, "ci")),
        (b"", True, {}, PEER),
        (b"x-tenant", False, {b"x-tenant": b"acme"}, Flow("acme")),
        (b"x-tenant", False, {b"x-tenant": b"a" * 1000}, Flow("a" * FLOW_NAME_LENGTH_MAX)),
        (b"x-tenant", False, {}, PEER),
        (b"x-tenant", True, {b"x-tenant": b"acme", b"x-api-key": KEY.encode()}, Flow("acme", 1, "ci")),
    ],
)
def test_a_header_comes_before_a_key_and_a_key_before_an_address(
    header: bytes, with_keys: bool, sent: dict[bytes, bytes], expected: Flow
) -> None:
    services = Services(http_gate=gate() if with_keys else None, fairness_header=header)

    assert services.has_named_flows == (bool(header) or with_keys)
    assert services.flow(PEER, services.http_gate, sent.get) == expected


def http_flow(services: Services, headers: bytes) -> Flow:
    """The flow with which a request over HTTP reaches the engine."""
    engine = FakeEngine(hold=True)
    client = MemoryClient(HttpFrontend(engine, HttpLimits(), services=services), ("192.0.2.7", 5000))
    client.send(
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n%b" % (headers, len(BODY), BODY)
    )
    return engine.tickets[0].request.flow


def test_http_passes_the_address_the_key_or_the_header_on() -> None:
    assert http_flow(Services(), b"") == PEER
    assert http_flow(Services(http_gate=gate()), b"x-api-key: " + KEY.encode() + b"\r\n") == Flow("ci", 7, "ci")
    assert http_flow(Services(fairness_header=b"x-tenant"), b"X-Tenant: acme\r\n") == Flow("acme")


@pytest.mark.parametrize("weight", ["weight=0", "weight=-1", "weight=1.5", f"weight={WEIGHT_MAX + 1}", "weight="])
def test_a_weight_is_a_number_within_limits(weight: str) -> None:
    lines = parse_keys(f"ci infer {KEY} {weight}")

    assert not lines.keys
    assert "weight" in lines.problems[0]
    assert KEY not in lines.problems[0]


def test_a_key_without_a_weight_has_a_single_share() -> None:
    assert gate(f"ci infer {KEY}").flow({b"x-api-key": KEY.encode()}.get) == Flow("ci", 1, "ci")


def test_a_limit_lets_its_number_through_at_once_and_then_one_after_the_other() -> None:
    given = gate(f"ci infer {KEY} requests/min=3 tokens/min=100 weight=2")
    flow = given.flow({b"x-api-key": KEY.encode()}.get)
    assert flow is not None
    assert flow == Flow("ci", 2, "ci", 3, 100)
    now = [0]
    usage = Usage(lambda: now[0])
    refused: list[Outcome] = []

    def begin(at_s: float) -> Reply | None:
        now[0] = int(at_s * 1e9)
        return usage.begin(flow, lambda outcome, final: refused.append(outcome))

    replies = [begin(1000), begin(1000), begin(1001)]
    assert None not in replies
    assert begin(1001) is None
    error = refused.pop()
    assert isinstance(error, ServingError)
    assert (error.retry_after_s, str(error)) == (
        19, "API key 'ci' has used its limit of 3 requests a minute (hint: retry in 19 s)",
    )  # fmt: skip
    assert begin(1019.9) is None
    last = begin(1020)
    assert last is not None

    last(InferResponse("m", "1", "", [], {PROMPT_TOKENS: 130, COMPLETION_TOKENS: 20}), True)  # 50 too many: 30 s
    assert begin(1049.9) is None
    assert "limit of 100 tokens" in str(refused[-1])
    failing = begin(1051)
    assert failing is not None
    failing(invalid("no"), True)
    assert usage.of("ci") == KeyUsage(5, 1, 3, 130, 20)


def test_keys_beyond_a_number_share_their_counters() -> None:
    usage = Usage(lambda: 1)
    for number in range(KEYS_COUNTED_MAX + 2):
        usage.begin(Flow("ci", 1, str(number), 1), lambda outcome, final: None)

    samples = usage.families()[0].samples
    assert len({sample.labels["key"] for sample in samples}) == KEYS_COUNTED_MAX + 1
    assert usage.of(OTHER).requests == 2
