"""The example of a Python model is served and answers as its page says."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

EXAMPLE = Path(__file__).parents[2] / "examples" / "python_model"


def test_the_example_finds_the_similar_sentence_and_refuses_an_empty_text() -> None:
    with ServeProcess(EXAMPLE / "models") as server:
        address = server.http
        client = [sys.executable, str(EXAMPLE / "similar.py"), address]
        lines = subprocess.run(client, capture_output=True, text=True, check=True, timeout=200).stdout.splitlines()
        assert lines[0].startswith("1.00  The harbour is closed")
        assert "Because of storms" in lines[1]
        assert "eggs" in lines[3]

        empty = infer_input(httpclient, "TEXT", np.array([[" "]], np.object_))
        with (
            httpclient.InferenceServerClient(address) as http,
            pytest.raises(InferenceServerException, match="expected some letters"),
        ):
            http.infer("text_features", [empty])
        assert "text_features_0 is ready" in server.log
