"""Keys of models."""

import pytest

from charonia.core.metadata import model_key, name_of, namespace_of


@pytest.mark.parametrize(
    ("namespace", "name", "key"), [("", "mlp", "mlp"), ("/models", "mlp", "/models/mlp"), ("a/b", "c", "a/b/c")]
)
def test_a_key_joins_namespace_and_name(namespace: str, name: str, key: str) -> None:
    assert model_key(namespace, name) == key
    assert (namespace_of(key), name_of(key)) == (namespace, name)
