"""How requests and responses of SageMaker and Vertex AI are rewritten."""

import asyncio
from pathlib import Path

import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, request
from tests.support.models import identity_pbtxt, write_model

from charonia.core.errors import ServingError
from charonia.server.access.rules import Api, Gate, Restriction
from charonia.server.facade import Services
from charonia.server.http import clouds
from charonia.server.http.clouds import archive_of, as_sagemaker, json_size, links_of
from charonia.server.http.exchange import JSON_TYPE, Reshaped
from charonia.server.http.frontend import HttpFrontend, HttpLimits

KEY = "a-key-of-sixteen-or-more"

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
        (403, b"", 403),
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
        clouds.SageMaker(lambda _: None, lambda _: True, lambda _: None, {"SAGEMAKER_TRITON_INFERENCE_TYPE": "x"}, "")
    with pytest.raises(ServingError, match="AIP_HEALTH_ROUTE is not defined for Vertex AI endpoint"):
        clouds.VertexAi(lambda _: None, lambda _: True, {"AIP_PREDICT_ROUTE": "/predict"}, "m")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/ping"),
        ("POST", "/invocations"),
        ("GET", "/models"),
        ("POST", "/models"),
        ("GET", "/models/none"),
        ("DELETE", "/models/none"),
        ("POST", "/models/none/invoke"),
        ("POST", "/predict"),
        ("POST", "/redirected"),
    ],
)
@pytest.mark.parametrize("key", ["", KEY])
async def test_calls_need_the_permissions_of_those_that_they_stand_for(
    tmp_path: Path, method: str, path: str, key: str
) -> None:
    restriction = Restriction((Api.HEALTH, Api.INFERENCE, Api.MODEL_REPOSITORY), "x-key", KEY)
    front_end = HttpFrontend(
        FakeEngine(), HttpLimits(), services=Services(http_gate=Gate((restriction,), None, what="API"))
    )
    environment = {
        "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m",
        "AIP_PREDICT_ROUTE": "/predict",
        "AIP_HEALTH_ROUTE": "/h",
    }
    cloud = (
        clouds.VertexAi(front_end.handle, front_end.admit, environment, "m")
        if path in ("/predict", "/redirected")
        else clouds.SageMaker(front_end.handle, front_end.admit, front_end.refusal, environment, str(tmp_path))
    )
    front_end.handle = cloud.handle
    headers = {"x-key": key} | ({"x-vertex-ai-triton-redirect": "v2/repository/index"} if path == "/redirected" else {})

    client = MemoryClient(front_end)
    client.send(request(path.replace("redirected", "predict"), method=method, body=b"{}", headers=headers))
    while not client.responses:
        await asyncio.sleep(0)

    assert (client.responses[0].status == 403) == (not key)
