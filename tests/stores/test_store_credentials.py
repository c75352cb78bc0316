"""With whose rights a store is read."""

import json
from collections.abc import Mapping

import pytest

from charonia.core.errors import ServingError
from charonia.stores.location import (
    Credentials,
    StoreKind,
    credentials,
    missing_credentials,
    parse_address,
    profile_settings,
    read_credential_file,
)

FILE = {
    "s3": {
        "": {"key_id": "all", "secret_key": "s", "region": "eu-west-1"},
        "s3://models": {"key_id": "models", "secret_key": "t", "session_token": "u"},
        "s3://models/private": {"profile": "private"},
    },
    "gs": {"": "/keys/all.json", "gs://other": "/keys/other.json"},
    "as": {"": {"account_str": "acme", "account_key": "k"}},
}


def found(
    uri: str, environment: Mapping[str, str], sections: dict[str, dict[str, object]] | None = None
) -> Credentials:
    return credentials(parse_address(uri), environment, sections)


def test_the_longest_beginning_in_the_file_counts() -> None:
    sections = read_credential_file(json.dumps(FILE), "file")

    assert found("s3://elsewhere", {}, sections).keys["access_key_id"] == "all"
    assert found("s3://elsewhere", {}, sections).settings["region"] == "eu-west-1"
    assert found("s3://models/a", {}, sections).keys["access_key_id"] == "models"
    assert found("s3://models2", {}, sections).keys["access_key_id"] == "all"
    assert found("s3://models/private/a", {}, sections).profile == "private"
    assert found("gs://other/a", {}, sections).settings == {"application_credentials": "/keys/other.json"}
    assert found("az://c", {}, sections).settings == {"account_name": "acme", "account_key": "k"}


def test_without_a_file_the_environment_counts() -> None:
    assert found("s3://m", {"AWS_DEFAULT_REGION": "eu-1", "AWS_ACCESS_KEY_ID": "k"}) == Credentials({"region": "eu-1"})
    assert found("s3://m", {"AWS_REGION": "eu-2", "AWS_PROFILE": "dev"}) == Credentials({"region": "eu-2"}, "dev")
    assert found("s3://m", {}) == Credentials({"region": "us-east-1"}, "default")
    assert found("gs://m", {"GOOGLE_APPLICATION_CREDENTIALS": "/k"}).settings == {"application_credentials": "/k"}
    assert found("gs://m", {}).settings == {}
    environment = {"AZURE_STORAGE_ACCOUNT": "a", "AZURE_STORAGE_KEY": "k"}
    assert found("az://m", environment).settings == {"account_name": "a", "account_key": "k"}
    assert found("as://b/m", environment).settings == {"account_name": "b", "account_key": "k"}


def test_another_server_is_asked_with_paths_and_not_with_host_names() -> None:
    settings = found("s3://minio:9000/m", {"AWS_ACCESS_KEY_ID": "k"}).settings

    assert settings["endpoint"] == "http://minio:9000"
    assert settings["virtual_hosted_style_request"] == "false"


def test_other_clouds_have_variables_of_their_own() -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": "aws",
        "OSS_ACCESS_KEY_ID": "o",
        "OSS_ACCESS_KEY_SECRET": "s",
        "OSS_REGION": "cn-hangzhou",
        "COS_SECRET_ID": "c",
        "COS_SECRET_KEY": "t",
        "COS_ENDPOINT": "cos.internal:8443",
    }

    oss, cos, anonymous = (found(uri, environment) for uri in ("oss://m", "cos://m", "r2://m?region=0f"))

    assert oss.keys == {"access_key_id": "o", "secret_access_key": "s"}
    assert oss.settings["endpoint"] == "https://m.oss-cn-hangzhou.aliyuncs.com"
    assert cos.keys["access_key_id"] == "c"
    assert cos.settings["endpoint"] == "https://m.cos.internal:8443"
    assert (anonymous.keys, anonymous.settings["skip_signature"]) == ({}, "true")


def test_a_cloud_without_a_region_is_refused_with_its_variables() -> None:
    with pytest.raises(ServingError, match="expected the region") as caught:
        found("oss://m", {})

    assert "OSS_REGION" in caught.value.hint


@pytest.mark.parametrize("text", ["{", "[]", '{"s3": 1}'])
def test_a_file_that_is_none_is_refused_without_its_content(text: str) -> None:
    with pytest.raises(ServingError, match="secret") as caught:
        read_credential_file(text, "secret.json")

    assert text not in caught.value.message


@pytest.mark.parametrize(
    ("uri", "sections"),
    [("s3://m", {"s3": {"": "text"}}), ("gs://m", {"gs": {"": {}}}), ("az://m", {"as": {"": {"account_key": 1}}})],
)
def test_an_entry_of_another_form_is_refused(uri: str, sections: dict[str, dict[str, object]]) -> None:
    with pytest.raises(ServingError, match="the entry for"):
        found(uri, {}, sections)


def test_a_profile_is_read_from_the_files_of_the_aws_tools() -> None:
    keys = "[default]\naws_access_key_id = d\n[dev]\naws_access_key_id = k%1\naws_secret_access_key = s\nx = y\n"
    config = "[profile dev]\nregion = eu-3\n"

    settings = profile_settings("dev", keys, config)

    assert settings == {"access_key_id": "k%1", "secret_access_key": "s", "region": "eu-3"}
    assert profile_settings("none", keys, config) == {}
    with pytest.raises(ServingError, match="profile 'dev'"):
        profile_settings("dev", "no section", "")


@pytest.mark.parametrize(
    ("kind", "reason", "expected"),
    [
        (StoreKind.S3, "Error performing PUT http://169.254.169.254/latest/api/token in 1 ms", "AWS_ACCESS_KEY_ID"),
        (StoreKind.AZURE, "Error performing GET http://169.254.169.254/metadata/identity", "AZURE_STORAGE_ACCOUNT"),
        (StoreKind.GCS, "GET http://metadata.google.internal/computeMetadata", "GOOGLE_APPLICATION_CREDENTIALS"),
        (StoreKind.S3, "Error performing GET http://localhost:9/bucket in 573 ms, after 4 retries", ""),
    ],
)
def test_who_gave_no_credentials_is_told_which(kind: StoreKind, reason: str, expected: str) -> None:
    hint = missing_credentials(kind, reason)

    assert expected in hint
    assert bool(hint) == bool(expected)


def test_the_key_of_a_service_account_names_no_server() -> None:
    key = {"type": "service_account", "private_key_id": "i", "private_key": "hidden", "client_email": "e"}
    more = {"token_uri": "https://elsewhere", "gcs_base_url": "https://elsewhere"}

    settings = found("gs://b/m", {}, {"gs": {"": {**key, **more}}}).settings

    assert json.loads(settings["service_account_key"]) == key
    for wrong in ({**key, "type": "authorized_user"}, {**key, "private_key": ""}):
        with pytest.raises(ServingError, match="expected the JSON key of a service account") as caught:
            found("gs://b/m", {}, {"gs": {"": wrong}})
        assert "hidden" not in str(caught.value)
