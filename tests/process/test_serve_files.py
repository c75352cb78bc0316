"""Files in place of a repository, as a user serves them, and requests from the command line."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.fork_server import run_command
from tests.support.onnx_writer import GraphWriter
from tests.support.process import ServeProcess
from tests.support.wheels import inline_metadata

from charonia.cli.terminal import CLEAR_LINE
from charonia.client import Client
from charonia.core.dtypes import DataType

EXAMPLE = Path(__file__).parents[2] / "examples" / "functions" / "service.py"


def charonia(*arguments: str, status: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = run_command(*arguments, folder=cwd)
    assert done.returncode == status, done.stderr
    return done


def test_the_example_of_functions_answers_as_its_page_says() -> None:
    with ServeProcess(EXAMPLE, "--workers=2") as server:
        texts = ("-i", "first=The harbour is closed.", "-i", "second=The harbor was closed")
        similar = charonia("infer", "Similar", "-u", server.http, *texts)
        assert similar.stdout == "similarity FP64[1]: 0.689359\nsame BOOL[1]: True\n"

        refused = charonia("infer", "Similar", "-u", server.http, "-i", "first= ", status=1)
        assert refused.stderr == "charonia infer: first, second: expected some letters\n"

        for command in ("infer", "explain"):
            several = charonia(command, "-u", server.http, status=1).stderr
            assert several.startswith(
                f"charonia {command}: expected the name of a model, got none (hint: the server has "
            )

        words = ("-u", f"grpc://{server.grpc}", "-i", "text=one word after the other")
        assert charonia("infer", "words", *words).stdout == "one word after the other \n"
        assert len(charonia("infer", "words", *words, "--json").stdout.splitlines()) == 5

        assert server.ask("/v2/models/average/generate", {"x": [1, 2, 6]})["output"] == 3.0
        with Client(f"grpc://{server.grpc}") as client:
            vectors = client.infer("features", {"text": [["a"], ["b"]]})["output"]
            assert vectors.shape == (2, 256)
            instances = client.model_config("features")["instance_group"]
        assert [group["count"] for group in instances] == [2]  # type: ignore[attr-defined]

        curl = charonia("infer", "average", "-u", server.http, "--curl").stdout
        assert curl == f"""curl http://{server.http}/v2/models/average/generate -d '{{"x":[1.0,2.0,6.0]}}'\n"""


def test_a_terminal_has_what_matters_and_no_log_lines() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-P", "-m", "charonia", "serve", str(EXAMPLE), "--port=0"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as server:
        os.close(theirs)
        text = ""
        while "this machine only" not in text:
            text += os.read(ours, 4096).decode()
        server.terminate()
        assert server.wait(200) == 0
    os.close(ours)

    assert re.search(r"  loading service.py \(\d+ s\)", text)
    shown = text.rpartition(CLEAR_LINE)[2].splitlines()
    assert shown[1].startswith("  features: text BYTES[-1,1]")
    assert not re.search(r"[IWE]\d{4} ", text)


def test_an_onnx_file_and_a_folder_of_a_model_are_served_beside_a_repository(tmp_path: Path) -> None:
    graph = GraphWriter()
    graph.node("Neg", [graph.input("x", DataType.FP32, ["n", 2])], "y")
    graph.output("y", DataType.FP32, ["n", 2])
    (tmp_path / "net.onnx").write_bytes(graph.model())
    inside = tmp_path / "models" / "inside" / "1"
    inside.mkdir(parents=True)
    (inside / "model.onnx").write_bytes(graph.model())

    configuration = charonia("config", str(tmp_path / "net.onnx")).stdout
    assert 'name: "net"' in configuration
    assert 'name: "x"' in configuration
    examined = charonia("doctor", "--models-only", str(tmp_path / "net.onnx"), str(EXAMPLE)).stdout
    assert re.findall(r"^  (\w+) +(?:onnxruntime|python),", examined, re.M) == [
        "Similar", "average", "features", "net", "words"
    ]  # fmt: skip
    missing = charonia("doctor", "--models-only", str(tmp_path / "nett.onnx"), status=1).stderr
    assert missing.startswith(f"charonia doctor: there is no file '{tmp_path / 'nett.onnx'}'")

    with ServeProcess(tmp_path / "net.onnx", str(tmp_path / "models" / "inside"), "--port=0") as server:
        for model in ("net", "inside"):
            answer = charonia("infer", model, "-u", server.http, "-i", "x=1,2")
            assert answer.stdout == "y FP32[1,2]\n  -1  -2\n"


def test_the_example_of_a_file_has_the_height_that_the_network_needs_beyond_its_signature(tmp_path: Path) -> None:
    graph = GraphWriter()
    graph.weight("rows", DataType.FP32, np.zeros((1, 1, 48, 1), np.float32))
    graph.node("Add", [graph.input("x", DataType.FP32, ["n", 3, "h", "w"]), "rows"], "y")
    graph.output("y", DataType.FP32, ["n", 3, "h", "w"])
    (tmp_path / "lines.onnx").write_bytes(graph.model())

    with ServeProcess(tmp_path / "lines.onnx", "--port=0") as server:
        answer = charonia("infer", "lines", "-u", server.http)
        assert answer.stdout.startswith("y FP32[1,3,48,48]")
        assert charonia("infer", "-u", server.http).stdout == answer.stdout
        assert "lines" in charonia("explain", "-u", server.http).stdout
        assert '"shape":[1,3,48,48]' in charonia("infer", "lines", "-u", server.http, "--curl").stdout


def test_a_service_file_runs_where_the_dependencies_are_that_it_names(tmp_path: Path) -> None:
    service = tmp_path / "service.py"
    code = "import charonia\nimport tiny\n\n@charonia.model\ndef word() -> str:\n    return tiny.WORD\n"
    service.write_text(inline_metadata(tmp_path / "wheels") + code)
    (tmp_path / "charonia").mkdir()  # a checkout beside it, which is not the package

    with ServeProcess(service, f"--backend-config=python,environment-cache={tmp_path / 'cache'}") as server:
        assert server.ask("/v2/models/word/generate", {})["output"] == "tiny"
        assert server.logs("making the Python environment")


def test_a_file_that_changes_is_loaded_again(tmp_path: Path) -> None:
    service, helper = tmp_path / "service.py", tmp_path / "helper.py"
    helper.write_text("NAME = 'first'\n")
    service.write_text(
        "import charonia\nfrom helper import NAME\n\n@charonia.model\ndef who() -> str:\n    return NAME\n"
    )

    with ServeProcess(service, "--reload") as server:
        assert server.ask("/v2/models/who/generate", {})["output"] == "first"
        helper.write_text("NAME = 'the second'\n")
        assert server.logs("successfully loaded 'who'", times=2)
        assert server.ask("/v2/models/who/generate", {})["output"] == "the second"


def test_a_function_that_is_added_to_a_service_file_is_served_and_one_that_is_removed_is_not(tmp_path: Path) -> None:
    service = tmp_path / "service.py"
    start = "import charonia\n\n@charonia.model\ndef one() -> int:\n    return 1\n"
    service.write_text(start)

    with ServeProcess(service, "--reload") as server:
        service.write_text(start + "\n@charonia.model\ndef two() -> int:\n    return 2\n")
        assert server.logs("successfully loaded 'two'")
        assert [server.ask(f"/v2/models/{name}/generate", {})["output"] for name in ("one", "two")] == [1, 2]
        service.write_text(start.replace("one", "three"))
        assert server.logs("successfully unloaded 'one'")
        assert server.logs("successfully loaded 'three'")


def test_what_no_backend_serves_ends_the_command_with_lines_to_paste(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"{}")

    done = charonia("serve", "model.safetensors", status=1, cwd=tmp_path)

    assert done.stderr.startswith(
        f"charonia serve: '{tmp_path}/model.safetensors' is weights without their model, which"
    )
    assert "\ncat > service.py <<'EOF'\n" in done.stderr
    assert done.stderr.rstrip().endswith("\ncharonia serve service.py")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("service.py",), "'service.py' cannot be served: TypeError: model 'f': parameter 'x' has no type"),
        (("broken.py",), "SyntaxError"),
        (("missing.onnx",), "there is no file '{folder}/missing.onnx'"),
        ((".", "--workers=2"), "--workers: expected a file to serve, got repositories only"),
    ],
)
def test_what_cannot_be_served_says_why(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    (tmp_path / "service.py").write_text("import charonia\n\n@charonia.model\ndef f(x) -> int:\n    return 1\n")
    (tmp_path / "broken.py").write_text("def f(:\n")

    said = charonia("serve", *arguments, "--port=0", status=1, cwd=tmp_path).stderr

    assert reason.format(folder=tmp_path) in said


def test_infer_says_what_is_wrong() -> None:
    with ServeProcess(EXAMPLE) as server:
        missing = charonia("infer", "nothing", "-u", server.http, status=1).stderr
        assert "Request for unknown model: 'nothing' is not found" in missing
        wrong = charonia("infer", "average", "-u", server.http, "-i", "y=1", status=1).stderr
        assert wrong == "charonia infer: model 'average' has no input 'y': it has x\n"
        address = server.http
    assert "(hint: -u names the address of a server)" in charonia("infer", "average", "-u", address, status=1).stderr


def test_outputs_go_to_files(tmp_path: Path) -> None:
    with ServeProcess(EXAMPLE) as server:
        charonia("infer", "features", "-u", server.http, "-o", f"output={tmp_path / 'v.npy'}")

    assert np.load(tmp_path / "v.npy").shape == (1, 256)
