"""`charonia.serve` without a file: in an interactive interpreter, as notebooks are, and from standard input."""

import subprocess
import sys

import pytest

CELLS = """
import charonia, json, urllib.request
import numpy as np
def ask(served, x):
    body = json.dumps({"x": x}).encode()
    with urllib.request.urlopen(f"{served.url}/v2/models/{served.name}/generate", body) as answer:
        return json.load(answer)["output"]

class Scaler:
    factor = 2
    def predict(self, x):
        return x * self.factor

rows, scaler = np.array([[1.0, 2.0], [3.0, 4.0]]), Scaler()
served = charonia.serve(scaler, example=rows)
print(ask(served, [[1, 2]]))
scaler.factor = 5
print(ask(served, [[1, 2], [3, 4]]))
first, served = served, charonia.serve(lambda x: x + 1, example=rows, name="scaler")
print(ask(served, [[1, 2]]))
print(repr(first).partition("\\n")[0])
print(repr(served))
served.stop()
served.stop()
print(repr(served).partition("\\n")[0])
"""


def run(*arguments: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], input=code, capture_output=True, text=True, timeout=200)


def test_in_a_notebook_an_object_is_served_by_a_thread_until_it_is_stopped() -> None:
    done = run("-i", "-q", code=CELLS)

    lines = done.stdout.splitlines()
    assert lines[:4] == ["[[2.0, 4.0]]", "[[5.0, 10.0], [15.0, 20.0]]", "[[2.0, 3.0]]", "scaler: stopped"], done.stderr
    assert lines[4].startswith("scaler: http://127.0.0.1:")
    url = lines[4].removeprefix("scaler: ")
    assert lines[6] == f"    curl {url}/v2/models/scaler/generate -d '{{\"x\":[1.0,2.0]}}'"
    assert lines[7:] == ["scaler: stopped"]
    assert "Error" not in done.stderr


@pytest.mark.parametrize("arguments", [("-",), ("-c", "import charonia; charonia.serve(abs, example=[1.0])")])
def test_code_that_is_in_no_file_says_what_is_needed(arguments: tuple[str, ...]) -> None:
    done = run(*arguments, code="import charonia\ncharonia.serve(abs, example=[1.0])\n")

    assert done.returncode == 1
    assert "charonia.serve: expected a script in a file, or a notebook; this code comes from" in done.stderr
