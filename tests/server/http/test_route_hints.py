import pytest

from charonia.server.http.routes import route_hint


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/models/bert:predict", "POST /v2/models/bert/infer"),
        ("/v1/models/bert/versions/3:predict", "POST /v2/models/bert/infer"),
        ("/v1/models/bert", "POST /v2/models/bert/infer"),
        ("/v1/models", "GET /v2/models lists"),
        ("/predictions/bert/2.0", "POST /v2/models/bert/infer"),
        ("/predictions/{0}", "POST /v2/models/{0}/infer"),
        ("/predict", "POST /v2/models/MODEL/infer"),
        ("/invocations/", "POST /v2/models/MODEL/infer"),
        ("/v1/chat/completions", "--openai=true serves OpenAI's API"),
        ("/healthz", "GET /v2/health/live"),
        ("/docs", "GET /openapi.json"),
        ("/metrics", "--metrics-port"),
        ("/v2/models/bert/predict", "/v2/models/bert/infer"),
        ("/v2/models/bert/infer/", "/v2/models/bert/infer"),
        ("/v2/model/bert/infer", "/v2/models/bert/infer"),
        ("/v3", "GET /v2 describes the server"),
        ("", "GET /v2 describes the server"),
    ],
)
def test_a_path_of_another_server_leads_to_the_one_here(path: str, hint: str) -> None:
    assert hint in route_hint(path)
