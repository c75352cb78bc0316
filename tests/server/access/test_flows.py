"""Which flow a request belongs to, over HTTP and gRPC: a header, a key, an address."""

import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient

from charonia.core.request import FLOW_NAME_LENGTH_MAX, Flow
from charonia.server.access.rules import WEIGHT_MAX, Gate, KeyRing, parse_keys
from charonia.server.facade import Services
from charonia.server.http.frontend import HttpFrontend
from charonia.server.http.limits import HttpLimits

KEY = "a-key-of-sixteen-characters"
PEER = Flow("192.0.2.7")
BODY = b'{"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}'


def gate(line: str = f"ci infer {KEY} weight=7") -> Gate:
    return Gate((), KeyRing(parse_keys(line).keys, b"secret"), what="API")


@pytest.mark.parametrize(
    ("header", "with_keys", "sent", "expected"),
    [
        (b"", False, {}, PEER),
        (b"", True, {b"x-api-key": KEY.encode()}, Flow("ci", 7)),
        (b"", True, {b"authorization": b"Bearer " + KEY.encode()}, Flow("ci", 7)),
        (b"", True, {}, PEER),
        (b"x-tenant", False, {b"x-tenant": b"acme"}, Flow("acme")),
        (b"x-tenant", False, {b"x-tenant": b"a" * 1000}, Flow("a" * FLOW_NAME_LENGTH_MAX)),
        (b"x-tenant", False, {}, PEER),
        (b"x-tenant", True, {b"x-tenant": b"acme", b"x-api-key": KEY.encode()}, Flow("acme")),
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
    assert http_flow(Services(http_gate=gate()), b"x-api-key: " + KEY.encode() + b"\r\n") == Flow("ci", 7)
    assert http_flow(Services(fairness_header=b"x-tenant"), b"X-Tenant: acme\r\n") == Flow("acme")


@pytest.mark.parametrize("weight", ["weight=0", "weight=-1", "weight=1.5", f"weight={WEIGHT_MAX + 1}", "weight="])
def test_a_weight_is_a_number_within_limits(weight: str) -> None:
    lines = parse_keys(f"ci infer {KEY} {weight}")

    assert not lines.keys
    assert "weight" in lines.problems[0]
    assert KEY not in lines.problems[0]


def test_a_key_without_a_weight_has_a_single_share() -> None:
    assert gate(f"ci infer {KEY}").flow({b"x-api-key": KEY.encode()}.get) == Flow("ci", 1)
