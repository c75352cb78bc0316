"""How requests and responses of SageMaker and Vertex AI are rewritten."""

from pathlib import Path

import pytest
from tests.support.models import identity_pbtxt, write_model

from charonia.core.errors import ServingError
from charonia.server.http import clouds
from charonia.server.http.clouds import archive_of, as_sagemaker, json_size, links_of
from charonia.server.http.exchange import JSON_TYPE, Reshaped

BINARY = b"application/vnd.vertex-ai-triton.binary+json;json-header-size="


def test_the_content_type_says_how_long_the_json_part_is() -> None:
    assert json_size(BINARY + b"17", BINARY, 20) == 17


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (b"text/" + BINARY + b"1", "expect MIME type for binary data starts with"),
        (BINARY, "Unable to parse inference header size, got: "),
        (BINARY + b"x", "Unable to parse inference header size, got: x"),
        (BINARY + b"-1", r"inference header size should be in range \(0, 20\), got: -1"),
        (BINARY + b"21", r"inference header size should be in range \(0, 20\), got: 21"),
        (BINARY + b"12345678901234567890", "Unable to parse inference header size, value is out of range, got: 123"),
    ],
)
def test_another_content_type_is_refused(kind: bytes, reason: str) -> None:
    with pytest.raises(ServingError, match=reason):
        json_size(kind, BINARY, 20)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b"", 200),
        (503, b"the queue is full", 400),
        (500, b"CUDA out of memory", 507),
        (500, b"MemoryError", 507),
        (404, b"", 404),
    ],
)
def test_errors_get_the_statuses_that_sagemaker_knows(status: int, body: bytes, expected: int) -> None:
    assert as_sagemaker(Reshaped(status, [body], JSON_TYPE, b"")).status == expected


@pytest.mark.parametrize("url", ["/opt/ml/models/a/model", "/opt/ml/models/a/model/", "/opt/ml/models/a/model/sub"])
def test_an_archive_lies_where_sagemaker_extracts_it(url: str) -> None:
    assert archive_of(url) == Path(url)


@pytest.mark.parametrize(
    "url",
    [
        None,
        7,
        "/etc",
        "/opt/ml/models/a",
        "/opt/ml/models/../model",
        "/opt/ml/models/a/model/..",
        "/opt/ml/models/a/model/b/c",
        "a/model",
    ],
)
def test_no_other_folder_can_be_loaded(url: object) -> None:
    with pytest.raises(ServingError, match="expected a path of the form /opt/ml/models/<hash>/model"):
        archive_of(url)


def test_of_several_models_in_an_archive_the_ensemble_gets_the_name(tmp_path: Path) -> None:
    write_model(tmp_path, "first", b"", config=identity_pbtxt())
    write_model(tmp_path, "whole", b"", config='name: "whole" platform: "ensemble" ensemble_scheduling { }')
    write_model(tmp_path, "zlast", b"", config=identity_pbtxt())

    links, config = links_of(tmp_path, "hash")
    alone, own = links_of(tmp_path / "whole", "hash")

    assert links == {"first": tmp_path / "first", "hash": tmp_path / "whole", "zlast": tmp_path / "zlast"}
    assert '"name":""' in config.replace(" ", "")
    assert alone == {"hash": tmp_path / "whole"}
    assert own == config


def test_an_archive_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="does not contain a model"):
        links_of(tmp_path, "hash")


def test_the_type_of_inference_is_checked_and_routes_must_be_named() -> None:
    with pytest.raises(ServingError, match="SAGEMAKER_TRITON_INFERENCE_TYPE: expected infer, generate"):
        clouds.SageMaker(lambda _: None, lambda _: True, {"SAGEMAKER_TRITON_INFERENCE_TYPE": "x"}, "")
    with pytest.raises(ServingError, match="AIP_HEALTH_ROUTE is not defined for Vertex AI endpoint"):
        clouds.VertexAi(lambda _: None, lambda _: True, {"AIP_PREDICT_ROUTE": "/predict"}, "m")
