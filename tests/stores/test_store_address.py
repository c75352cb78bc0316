"""What the URI of a repository means."""

from dataclasses import replace

import pytest

from charonia.core.errors import Code, ServingError
from charonia.stores.location import StoreAddress, StoreKind, credentials, is_store, parse_address

R2 = f"{'0f1e' * 8}.eu.r2.cloudflarestorage.com"


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
    schemes = {StoreKind.S3: "s3", StoreKind.GCS: "gs", StoreKind.AZURE: "as"}
    style = "path" if expected.endpoint else ""

    assert parse_address(uri) == replace(expected, scheme=schemes[expected.kind], style=style)


@pytest.mark.parametrize(
    ("uri", "server", "bucket", "prefix", "style"),
    [
        ("oss://b/a/m?region=cn-hangzhou", "https://b.oss-cn-hangzhou.aliyuncs.com", "b", "a/m", "virtual"),
        ("oss://b?region=oss-cn-hangzhou", "https://b.oss-cn-hangzhou.aliyuncs.com", "b", "", "virtual"),
        ("cos://b-125/m?region=ap-guangzhou", "https://b-125.cos.ap-guangzhou.myqcloud.com", "b-125", "m", "virtual"),
        ("obs://b/m?region=cn-north-4", "https://b.obs.cn-north-4.myhuaweicloud.com", "b", "m", "virtual"),
        ("tos://b/m?region=cn-beijing", "https://b.tos-s3-cn-beijing.volces.com", "b", "m", "virtual"),
        ("r2://b/m?region=0f1e", "https://b.0f1e.r2.cloudflarestorage.com", "b", "m", "virtual"),
        ("s3+https://minio:9000/b/m", "https://minio:9000", "b", "m", "path"),
        ("s3+http://minio:9000/b/m?style=virtual&region=x", "http://b.minio:9000", "b", "m", "virtual"),
        (
            "https://b.oss-cn-beijing-internal.aliyuncs.com/m/",
            "https://b.oss-cn-beijing-internal.aliyuncs.com",
            "b",
            "m",
            "virtual",
        ),
        ("https://s3.eu-west-1.amazonaws.com/b/m%20n", "https://s3.eu-west-1.amazonaws.com", "b", "m n", "path"),
        ("https://b.s3.amazonaws.com/m", "https://b.s3.amazonaws.com", "b", "m", "virtual"),
        (f"https://{R2}/b/m", f"https://{R2}", "b", "m", "path"),
    ],
)
def test_other_clouds_and_pasted_addresses_name_server_and_bucket(
    uri: str, server: str, bucket: str, prefix: str, style: str
) -> None:
    address = parse_address(uri)

    assert (address.kind, address.bucket, address.prefix, address.style) == (StoreKind.S3, bucket, prefix, style)
    assert credentials(address, {}, None).settings["endpoint"] == server


def test_pasted_addresses_of_google_and_azure_are_recognised() -> None:
    google = parse_address("https://storage.googleapis.com/b/m")
    azure = parse_address("https://acme.blob.core.windows.net/c/m")

    assert (google.kind, google.bucket, google.prefix) == (StoreKind.GCS, "b", "m")
    assert (azure.kind, azure.account, azure.bucket, azure.prefix) == (StoreKind.AZURE, "acme", "c", "m")


@pytest.mark.parametrize("query", ["X-Amz-Signature=se%2Fcret", "OSSAccessKeyId=k&Signature=secret"])
def test_a_signed_address_is_one_file_and_never_shows_its_signature(query: str) -> None:
    address = parse_address(f"https://b.oss-cn-beijing.aliyuncs.com/m/net.onnx?{query}")

    assert (address.kind, address.prefix) == (StoreKind.FILE, "m/net.onnx")
    assert address.url.endswith(f"net.onnx?{query}")
    assert "cret" not in address.uri + repr(address)


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
        "oss://",
        "s3+https://host",
        "s3+https://host/b?style=other",
        "s3+https://host/b?secret=x",
        "https://host",
        "https://user:secret@host/m",
        "https://[host/m",
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
