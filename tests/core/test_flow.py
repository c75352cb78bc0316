"""Flows of addresses."""

import pytest

from charonia.core.request import NO_FLOW, Flow, flow_of_peer


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (("192.0.2.7", 5000), Flow("192.0.2.7")),
        (("2001:db8:1:2:3::4", 5000, 0, 0), Flow("2001:db8:1:2::")),
        (("2001:db8:1:2:ffff::9", 80, 0, 0), Flow("2001:db8:1:2::")),
        (("::ffff:192.0.2.7", 5000, 0, 0), Flow("192.0.2.7")),
        (("fe80::1%eth0", 5000, 0, 2), Flow("fe80::")),
        (("not an address", 1), NO_FLOW),
        ("", NO_FLOW),
        (None, NO_FLOW),
        ((), NO_FLOW),
    ],
)
def test_a_client_is_an_address_or_an_ipv6_site(peer: object, expected: Flow) -> None:
    assert flow_of_peer(peer) == expected
