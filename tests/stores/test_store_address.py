"""What the URI of a repository means."""

import pytest

from charonia.core.errors import Code, ServingError
from charonia.stores.location import StoreAddress, StoreKind, is_store, parse_address


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://models", StoreAddress("s3://models", StoreKind.S3, "models")),
        ("s3://models/a/b/", StoreAddress("s3://models/a/b", StoreKind.S3, "models", "a/b")),
        ("s3://models//a", StoreAddress("s3://models//a", StoreKind.S3, "models", "a")),
        (
            "s3://minio:9000/models/a",
            StoreAddress("s3://minio:9000/models/a", StoreKind.S3, "models", "a", endpoint="http://minio:9000"),
        ),
        (
            "s3://https://minio:9000/models",
            StoreAddress("s3://https://minio:9000/models", StoreKind.S3, "models", endpoint="https://minio:9000"),
        ),
        (
            "s3://http://minio/models",
            StoreAddress("s3://http://minio/models", StoreKind.S3, "models", endpoint="http://minio"),
        ),
        (
            "s3://[::1]:9000/models",
            StoreAddress("s3://[::1]:9000/models", StoreKind.S3, "models", endpoint="http://[::1]:9000"),
        ),
        ("gs://models/a", StoreAddress("gs://models/a", StoreKind.GCS, "models", "a")),
        ("as://acme/models/a", StoreAddress("as://acme/models/a", StoreKind.AZURE, "models", "a", account="acme")),
        ("az://models/a", StoreAddress("az://models/a", StoreKind.AZURE, "models", "a")),
        (
            "abfs://models@acme.dfs.core.windows.net/a",
            StoreAddress("abfs://models@acme.dfs.core.windows.net/a", StoreKind.AZURE, "models", "a", account="acme"),
        ),
    ],
)
def test_a_uri_names_store_bucket_and_path(uri: str, expected: StoreAddress) -> None:
    assert parse_address(uri) == expected


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3:///models",
        "s3://host:1/",
        "gs://",
        "as://acme",
        "as:///models",
        "az://",
        "s3://models/../other",
        "ftp://h/m",
        "m",
    ],
)
def test_what_names_no_bucket_is_refused(uri: str) -> None:
    with pytest.raises(ServingError, match="expected") as caught:
        parse_address(uri)

    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize(("text", "expected"), [("s3://m", True), ("models", False), ("/a/b", False), ("C:/m", False)])
def test_a_uri_is_told_from_a_path(text: str, expected: bool) -> None:
    assert is_store(text) is expected
