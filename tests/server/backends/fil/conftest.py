"""The libraries that the tests of forests need."""

import pytest

for library in ("treelite", "xgboost", "lightgbm", "sklearn"):
    pytest.importorskip(library)
