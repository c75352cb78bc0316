from http import HTTPStatus

import pytest

from charonia.core.errors import Code
from charonia.wire.http_codec import CODES
from charonia.wire.http_status import REASONS, STATUS


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_a_status_with_a_reason(code: Code) -> None:
    assert STATUS[code] in REASONS


@pytest.mark.parametrize(
    ("code", "statuses"),
    [
        (Code.INVALID_ARG, {400, 413}),
        (Code.NOT_FOUND, {404}),
        (Code.UNAVAILABLE, {408, 429, 502, 503, 504}),
        (Code.INTERNAL, {500}),
        (Code.UNSUPPORTED, {501}),
    ],
)
def test_a_client_knows_the_code_of_a_status(code: Code, statuses: set[int]) -> None:
    assert {status for status, known in CODES.items() if known is code} == statuses
    assert STATUS[code] in statuses


def test_reasons_are_those_of_http() -> None:
    renamed = {413: "Content Too Large", 414: "URI Too Long"}  # in RFC 9110

    assert {status: renamed.get(status, HTTPStatus(status).phrase) for status in REASONS} == REASONS
