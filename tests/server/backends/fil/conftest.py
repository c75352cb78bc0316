"""What the tests of forests have in common."""

import pytest

for library in ("treelite", "xgboost", "lightgbm", "sklearn"):
    pytest.importorskip(library)
