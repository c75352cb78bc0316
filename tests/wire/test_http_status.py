from http import HTTPStatus

import pytest

from charonia.core.errors import Code
from charonia.wire.http_status import REASONS, STATUS


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_a_status_with_a_reason(code: Code) -> None:
    assert STATUS[code] in REASONS


def test_reasons_are_those_of_http() -> None:
    renamed = {413: "Content Too Large", 414: "URI Too Long"}  # in RFC 9110

    assert {status: renamed.get(status, HTTPStatus(status).phrase) for status in REASONS} == REASONS
