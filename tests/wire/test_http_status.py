import pytest

from charonia.core.errors import Code
from charonia.wire.http_status import REASONS, STATUS


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_a_status_with_a_reason(code: Code) -> None:
    assert STATUS[code] in REASONS
