"""Which requests are those of pages of other sites, and which hosts are this machine's own."""

import pytest

from charonia.wire.browsers import foreign_page, host_name, is_local_host, listens_locally


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS"])
def test_what_changes_nothing_is_not_judged(method: bytes) -> None:
    assert foreign_page(method, {b"origin": b"https://a.example", b"sec-fetch-site": b"cross-site"}) == ""


def test_what_the_browser_says_of_a_page_goes_before_its_origin() -> None:
    fields = {b"origin": b"https://a.example", b"host": b"127.0.0.1"}

    assert foreign_page(b"POST", {**fields, b"sec-fetch-site": b"same-origin"}) == ""
    assert foreign_page(b"POST", {b"origin": b"http://b", b"host": b"b", b"sec-fetch-site": b"same-site"}) == "http://b"
    assert foreign_page(b"POST", {b"sec-fetch-site": b"cross-site"}) == "cross-site"


@pytest.mark.parametrize("origin", [b"null", b"https://", b"https://a.example:1", b"https://a.example.evil.example"])
def test_an_origin_that_is_not_the_host_is_another_page(origin: bytes) -> None:
    assert foreign_page(b"DELETE", {b"origin": origin, b"host": b"a.example"}) == origin.decode()
    assert foreign_page(b"DELETE", {b"origin": b"https://a.example", b"host": b"a.example"}) == ""
    assert foreign_page(b"DELETE", {b"host": b"a.example"}) == ""


@pytest.mark.parametrize(
    ("field", "name"),
    [("a.b:80", "a.b"), ("A.b.", "a.b"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("1.2.3.4", "1.2.3.4"), ("", "")],
)
def test_the_name_of_a_host(field: str, name: str) -> None:
    assert host_name(field) == name


def test_listeners_of_this_machine_alone() -> None:
    assert [listens_locally(each) for each in ("127.0.0.1", "127.1.2.3", "::1", "localhost")] == [True] * 4
    assert [listens_locally(each) for each in ("0.0.0.0", "::", "10.0.0.1", "box")] == [False] * 4


def test_local_hosts() -> None:
    assert [is_local_host(each) for each in ("localhost:1", "a.localhost", "box", "x.internal", "[::1]:2")] == [
        True
    ] * 5
    assert [is_local_host(each) for each in ("a.example", "internal.example", "localhost.example")] == [False] * 3
