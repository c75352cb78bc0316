"""Every code has a status on every wire."""

import re
from pathlib import Path

import pytest

from charonia.core.errors import Code

WIRE = Path(__file__).parents[2] / "src" / "charonia" / "wire"


@pytest.mark.parametrize("table", ["http_status.py", "grpc_status.py"])
def test_a_status_table_names_every_code(table: str) -> None:
    named = set(re.findall(r"\bCode\.([A-Z_]+)", (WIRE / table).read_text(encoding="utf-8")))

    assert named == {code.name for code in Code}
