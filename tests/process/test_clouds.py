"""SageMaker and Vertex AI call a server; models that are loaded over OpenAI's API."""

import http.client
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import ServeProcess

from charonia.server.http import clouds

VALUES = [1.0, 2.0, 3.0, 4.0]
BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": VALUES}]}).encode()
SAGEMAKER = "application/vnd.sagemaker-triton.binary+json;json-header-size="
VERTEX_AI = "application/vnd.vertex-ai-triton.binary+json;json-header-size="


class Clouds:
    def __init__(self, server: ServeProcess) -> None:
        found = dict(re.findall(r"Started (Sagemaker|Vertex AI) HTTPService at (127\.0\.0\.1:\d+)", server.log))
        self.sagemaker, self.vertex_ai, self.http = found["Sagemaker"], found["Vertex AI"], server.http


@pytest.fixture(scope="module")
def clouds_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clouds]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "m", b"", config=identity_pbtxt(dims=(4,)))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "m")
        environment.setenv("AIP_PREDICT_ROUTE", "/predict")
        environment.setenv("AIP_HEALTH_ROUTE", "/health")
        arguments = ("--allow-sagemaker=true", "--sagemaker-port=0", "--allow-vertex-ai=true", "--vertex-ai-port=0")
        with ServeProcess(folder, *arguments, "--model-control-mode=explicit", "--load-model=m") as server:
            yield Clouds(server)


def ask(
    address: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(address, timeout=200)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    found = response.status, response.read(), dict(response.headers)
    connection.close()
    return found


def document(answer: tuple[int, bytes, dict[str, str]]) -> Any:
    assert answer[0] == 200, answer
    return json.loads(answer[1])


@pytest.mark.parametrize("path", ["/ping", "/health"])
def test_health(clouds_of: Clouds, path: str) -> None:
    address = clouds_of.sagemaker if path == "/ping" else clouds_of.vertex_ai
    assert ask(address, "GET", path)[0] == 200
    assert ask(address, "GET", "/v2/health/ready")[0] == 400  # there is only what the cloud asks for


@pytest.mark.parametrize(("cloud", "kind"), [("sagemaker", SAGEMAKER), ("vertex_ai", VERTEX_AI)])
def test_inference_as_json_and_as_binary_tensors(clouds_of: Clouds, cloud: str, kind: str) -> None:
    address = getattr(clouds_of, cloud)
    path = "/invocations" if cloud == "sagemaker" else "/predict"
    assert document(ask(address, "POST", path, BODY))["outputs"][0]["data"] == VALUES

    asked: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4]}
    asked["parameters"] = {"binary_data_size": 16}
    head = json.dumps({"inputs": [asked], "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]})
    data = np.array(VALUES, "<f4").tobytes()
    status, body, headers = ask(address, "POST", path, head.encode() + data, Content_Type=f"{kind}{len(head)}")

    assert status == 200
    assert headers["Content-Type"] == f"{kind}{len(body) - 16}"
    assert ("Inference-Header-Content-Length" in headers) == (cloud == "vertex_ai")
    assert body[-16:] == data
    status, body, _ = ask(address, "POST", path, head.encode() + data, Content_Type=f"{kind}1000")
    assert (status, b"inference header size should be in range (0, " in body) == (400, True)
    assert ask(address, "POST", path, b"{")[0] == 400


def test_models_of_a_multi_model_endpoint(clouds_of: Clouds) -> None:
    archive = Path(clouds.ARCHIVES) / "charonia-test-archive"
    try:
        archive.mkdir(parents=True)
    except OSError:
        pytest.skip(f"{clouds.ARCHIVES} cannot be written")
    try:
        write_model(archive / "model", "any_name", b"", config='name: "any_name"\n' + identity_pbtxt(dims=(4,)))
        server, loaded = clouds_of.sagemaker, {"modelName": "abc", "modelUrl": str(archive)}
        load = json.dumps({"model_name": "abc", "url": f"{archive}/model"}).encode()

        assert ask(server, "POST", "/models", load)[0] == 200
        assert document(ask(server, "GET", "/models")) == {"models": [loaded]}
        assert document(ask(server, "GET", "/models/abc")) == loaded
        assert document(ask(server, "POST", "/models/abc/invoke", BODY))["outputs"][0]["data"] == VALUES
        assert ask(server, "POST", "/models", load)[0] == 409
        assert ask(server, "DELETE", "/models/abc")[0] == 200
        assert ask(server, "GET", "/models/abc")[0] == 404
        assert ask(server, "POST", "/models/abc/invoke", BODY)[0] == 404

        config = archive / "model" / "any_name" / "config.pbtxt"
        config.write_text("no such field: 1")
        assert ask(server, "POST", "/models", load)[0] == 400
        config.write_text(identity_pbtxt("no_such_backend", dims=(4,)))
        assert ask(server, "POST", "/models", load)[0] == 400
        config.write_text(identity_pbtxt(dims=(4,)))
        assert ask(server, "POST", "/models", load)[0] == 200  # nothing is left of those that failed
        assert ask(server, "DELETE", "/models/abc")[0] == 200
        other = json.dumps({"model_name": "abc", "url": str(archive.parent.parent)}).encode()
        assert ask(server, "POST", "/models", other)[0] == 400
    finally:
        shutil.rmtree(archive)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *(("v2", 200), ("v2/health/live", 200), ("v2/models/m", 200), ("v2/models/m/config", 200)),
        *(("v2/models/m/versions/1/ready", 200), ("v2/models/stats", 200), ("v2/repository/index", 200)),
        *(("v2/repository/models/m/unload", 403), ("v2/systemsharedmemory/region/x/register", 403)),
        *(("v2/models/nope/config", 404), ("metrics", 400), ("v2/logging", 400), ("v2/models/m/../../logging", 400)),
    ],
)
def test_redirections_of_vertex_ai(clouds_of: Clouds, path: str, status: int) -> None:
    assert ask(clouds_of.vertex_ai, "POST", "/predict", b"", X_Vertex_Ai_Triton_Redirect=path)[0] == status


def test_a_prediction_may_name_its_model(clouds_of: Clouds) -> None:
    answer = ask(clouds_of.vertex_ai, "POST", "/predict", BODY, X_Vertex_Ai_Triton_Redirect="v2/models/m/infer")
    assert document(answer)["outputs"][0]["data"] == VALUES


def test_models_are_loaded_and_unloaded_over_openais_api(clouds_of: Clouds) -> None:
    def change(action: str, model: str = "m") -> tuple[int, Any]:
        status, body, _ = ask(clouds_of.http, "POST", f"/v1/models/{model}/{action}")
        return status, json.loads(body)

    status, refused = change("load")
    assert (status, refused["error"]["message"]) == (400, "Model 'm' is already loaded")
    assert change("unload") == (200, {"status": "success", "model": "m"})
    status, refused = change("unload")
    assert (status, refused["error"]["message"]) == (404, "Unknown model: m")
    status, loaded = change("load")
    assert (status, loaded["id"], loaded["object"]) == (200, "m", "model")
    status, refused = change("load", "nope")
    assert status >= 400
    assert "failed to poll from model repository" in refused["error"]["message"]
