"""The examples of other servers, served together and asked as the originals' clients ask; and the page about them."""

import ast
import base64
import importlib.util
import io
import json
import re
import wave
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from examples.voice_activity.voice import SAMPLE_RATE, recording
from PIL import Image
from tests.support.process import ServeProcess

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "from_other_servers"
SERVICES = sorted(FOLDER.glob("*.py"))
PAGE = ROOT / "docs" / "from_other_servers.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    for library in ("fastapi", "pandas", "silero_vad", "sklearn", "torch", "uvicorn"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    # One file that imports all, so that they share a process.
    together = tmp_path_factory.mktemp("services") / "together.py"
    imports = [f"import {path.stem}" for path in SERVICES]
    together.write_text("\n".join([f"import sys; sys.path.append({str(FOLDER)!r})", *imports]) + "\n")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")  # what is trained is too small for more, and threads turn on cores
        with ServeProcess(together, f"--mount={FOLDER}/bentoml_fastapi.py:app:/app", "--kserve-v1") as running:
            yield running


@pytest.fixture
def http(server: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}", timeout=200) as client:
        yield client


def output(http: httpx.Client, model: str, document: object) -> object:
    answer = http.post(f"/v2/models/{model}/generate", json=document)
    assert answer.status_code == 200, answer.text
    return answer.json()["output"]


def events(http: httpx.Client, model: str, document: object) -> list[object]:
    text = http.post(f"/v2/models/{model}/generate_stream", json=document).text
    return [json.loads(line.removeprefix("data: "))["output"] for line in text.splitlines() if line.startswith("data")]


def png(colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "png")
    return file.getvalue()


def text_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def test_numbers_batches_and_modules_as_with_litserve(http: httpx.Client) -> None:
    assert http.post("/predict", json={"input": 4.0}).json() == {"output": 16.0}
    assert output(http, "squares", {"input": 3}) == 9.0
    assert output(http, "squares", {"input": [1, 2, 3]}) == [1.0, 4.0, 9.0]
    assert output(http, "Linear", {"input": 4.0}) == 9.0
    assert events(http, "repeat", {"input": "Hi"}) == ["0: Hi", "1: Hi", "2: Hi"]


def test_clients_of_openai_as_with_litserve(server: ServeProcess) -> None:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="unused") as client:
        answer = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "Hello"}])
        vectors = client.embeddings.create(model="letters", input=["abba", "z"], encoding_format="float").data

    assert answer.choices[0].message.content == "You said: user: Hello"
    assert [vector.embedding[:2] for vector in vectors] == [[2, 2], [0, 0]]
    assert vectors[1].embedding[25] == 1


def test_an_uploaded_recording_as_with_litserve(http: httpx.Client) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        written.writeframes((recording() * 32767).astype(np.int16).tobytes())

    uploaded = http.post("/v2/models/Speech/generate", files={"file": ("voice.wav", file.getvalue())}).json()["output"]
    as_text = output(http, "Speech", {"file": {"b64": text_of(file.getvalue())}})

    assert uploaded == as_text
    (span,) = uploaded  # of a second of silence, two of a voice, and one of silence
    assert 0.8 < span["start"] < 1.3
    assert 2.7 < span["end"] < 3.4


def test_a_classifier_tables_and_forecasts_as_with_bentoml(http: httpx.Client) -> None:
    assert http.post("/classify", json={"input_series": [[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]]}).json() == [0, 2]
    rows = [{"night": 1, "amount": 925}, {"night": 0, "amount": 12}]
    answer = output(http, "is_fraud", {"payments": rows})
    assert isinstance(answer, dict)
    assert answer["is_fraud"] == [True, False]
    assert all(0 <= chance <= 1 for chance in answer["is_fraud_prob"])
    first, second = (output(http, "Forecast", {"observed": observed}) for observed in (16, 40))
    assert first == pytest.approx(32)
    assert 80 < second < 100  # type: ignore[operator]


def test_images_files_and_arrays_as_with_bentoml(http: httpx.Client) -> None:
    answer = http.post(
        "/v2/models/resize/generate",
        files={"image": ("a.png", png((1, 2, 3)), "image/png")},
        data={"width": "20"},
        headers={"Accept": "image/png"},
    )
    assert Image.open(io.BytesIO(answer.content)).size == (20, 64)
    assert output(http, "count_rows", {"input": [{"a": 1}, {"a": 2}, {"a": 3}]}) == 3
    assert output(http, "transpose", {"tensor": [[1, 2, 3, 4], [5, 6, 7, 8]]}) == [[1, 5], [2, 6], [3, 7], [4, 8]]
    answer = http.post(
        "/v2/models/append/generate", files={"txt_file": ("a.txt", b"one ")}, data={"input_string": "two"}
    )
    assert (answer.text, answer.headers["content-type"].partition(";")[0]) == ("one two", "text/plain")
    form = {"img": ("a.png", png((0, 200, 0)), "image/png")}
    assert http.post("/generate", files=form).json() == "a picture that is green"
    assert http.post("/generate", files=form, data={"prompt": "this is"}).json() == "this is green"


def test_graphs_applications_and_passwords_as_with_bentoml(http: httpx.Client) -> None:
    assert output(http, "graph", {}) == [
        {"generated": "I HAVE AN IDEA!", "score": pytest.approx(11 / 15)},
        {"generated": "I have an idea?", "score": pytest.approx(1 / 15)},
    ]
    assert output(http, "species", {"sepal_len": 5.1, "petal_len": 1.4}) == "setosa"
    assert http.get("/app/metadata").json() == {"name": "species", "version": 1}
    answer = http.post("/app/predict", json={"sepal_len": 6, "petal_len": 5}).json()
    assert answer == {"prediction": "another"}
    assert http.post("/echo", json={"text": "hi"}, auth=("alice", "alicepwd")).text == "alice: hi"
    for headers in ({}, *({"Authorization": f"Basic {text_of(user)}"} for user in (b"alice:wrong", b"eve:alicepwd"))):
        refused = http.post("/echo", json={"text": "hi"}, headers=headers)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Basic")


def test_text_images_streams_and_context_as_with_cog(http: httpx.Client) -> None:
    assert output(http, "hello", {"text": "world"}) == "hello world"
    blurred = output(http, "blur", {"image": text_of(png((10, 20, 30))), "blur": 2})
    assert str(blurred).startswith("data:image/png;base64,")
    one = Image.new("L", (8, 8))
    one.paste(16 * 15, (3, 0, 5, 8))  # a vertical bar
    file = io.BytesIO()
    one.save(file, "png")
    chances = output(http, "Digit", {"image": text_of(file.getvalue())})
    assert isinstance(chances, dict)
    assert next(iter(chances)) == "1"
    assert len(chances) == 3
    assert events(http, "generate", {"prompt": "to be", "max_new_tokens": 3}) == ["to ", "be ", "to "]
    refused = http.post("/v2/models/generate/generate_stream", json={"prompt": "to be", "max_new_tokens": 0})
    assert "max_new_tokens" in refused.text
    assert output(http, "context", {"text": "a", "user": "ada"}) == {
        "inputs": {"text": "a"},
        "context": {"agent": f"python-httpx/{httpx.__version__}", "user": "ada"},
    }


def test_json_and_content_types_as_with_mlserver(http: httpx.Client) -> None:
    request = {"name": "Foo Bar", "message": ["Hello", None, {"deep": 1.5}]}
    answer = output(http, "greeting", {"request": request})
    assert answer == {"request": request, "server_response": "Got your request. Hello from the server."}
    picture = output(http, "picture", {"image": text_of(png((7, 7, 7)))})
    assert picture == {"mode": "RGB", "size": [40, 30], "darkest": 7}


def test_raw_bodies_as_with_torchserve(http: httpx.Client) -> None:
    answer = http.post(
        "/v2/models/Colour/generate", content=png((255, 0, 0)), headers={"Content-Type": "image/png"}
    ).json()["output"]
    assert max(answer, key=answer.get) == "red"
    assert sum(answer.values()) == pytest.approx(1)
    chances = output(http, "topic", {"data": ["The shares fell", "A match in extra time"]})
    assert isinstance(chances, list)
    assert [max(each, key=each.get) for each in chances] == ["business", "sport"]


def test_instances_as_with_kserve(http: httpx.Client) -> None:
    instances = [{"image": {"b64": text_of(png(colour))}} for colour in ((0, 0, 0), (255, 255, 255))]

    dark, light = http.post("/v1/models/transformer:predict", json={"instances": instances}).json()["predictions"]

    assert dark == pytest.approx(np.mean(-np.array([0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]), rel=1e-4)
    assert light == pytest.approx(np.mean((1 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225]), rel=1e-4)


def lines_of(path: Path) -> int:
    """Return the lines of a file that are neither blank, nor comments, nor its docstring."""
    text = path.read_text(encoding="utf-8")
    documented = ast.parse(text).body[0].end_lineno or 0
    lines = text.splitlines()[documented:]
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines)


def test_the_page_has_every_example_with_its_lines() -> None:
    link = r"\]\(\.\./examples/from_other_servers/(\w+\.py)\)"
    rows = re.findall(rf"^\| .*{link} \| (\d+) \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.M)

    assert {name: int(here) for name, _, here in rows} == {path.name: lines_of(path) for path in SERVICES}
    assert len(rows) == len(SERVICES) == 25
