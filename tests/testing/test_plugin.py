"""The plugin of pytest, in runs of pytest on tests as a user would write them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFIG = """
backend: "{backend}"
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}
"""


@pytest.fixture
def models(pytester: pytest.Pytester) -> Path:
    write_model(pytester.path / "models", "copy")
    return pytester.path / "models"


def write_model(repository: Path, name: str, backend: str = "identity") -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(backend=backend))
    return version


def test_a_test_gets_a_server_of_its_models(pytester: pytest.Pytester, models: Path) -> None:
    pytester.makepyfile(
        """
        import numpy as np

        def test_copy(charonia_server):
            outputs = charonia_server("models").infer("copy", {"INPUT0": np.float32([1, 2])})
            assert outputs["OUTPUT0"].tolist() == [1, 2]
        """
    )

    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_clients_reach_a_server_on_ports_of_its_own(pytester: pytest.Pytester, models: Path) -> None:
    pytester.makepyfile(
        """
        import tritonclient.grpc
        import tritonclient.http

        def test_clients(charonia_server):
            first, second = charonia_server("models", http=True, grpc=True), charonia_server("models", http=True)
            assert len({first.http_url, first.grpc_url, second.http_url}) == 3
            assert second.grpc_url == ""
            for module, url in ((tritonclient.http, first.http_url), (tritonclient.grpc, first.grpc_url)):
                with module.InferenceServerClient(url) as client:
                    assert client.is_model_ready("copy")
        """
    )

    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_every_server_is_stopped_when_its_test_ends(pytester: pytest.Pytester, models: Path) -> None:
    pytester.makepyfile(
        """
        import threading
        import pytest

        servers = []

        def test_two(charonia_server):
            servers.extend(charonia_server("models") for _ in range(2))
            assert all(server.is_ready() for server in servers)
            assert False, "and it fails"

        def test_none_is_left():
            for server in servers:
                with pytest.raises(Exception, match="the server is not running"):
                    server.is_ready()
            assert "charonia" not in {thread.name for thread in threading.enumerate()}
        """
    )

    pytester.runpytest_inprocess().assert_outcomes(passed=1, failed=1)


def test_a_failed_load_shows_the_line_of_the_test_and_the_reason(pytester: pytest.Pytester, models: Path) -> None:
    (write_model(models, "broken", backend="python") / "model.py").write_text("import no_such_library\n")
    pytester.makepyfile("def test_it(charonia_server):\n    charonia_server('models')\n")

    result = pytester.runpytest_inprocess()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">   * charonia_server('models')",
            "E   * load failed for model 'broken': *No module named 'no_such_library' (hint: *",
        ]
    )
    assert "embedding.py" not in result.stdout.str()


def test_a_test_can_expect_that_a_model_does_not_load(pytester: pytest.Pytester, models: Path) -> None:
    (write_model(models, "broken", backend="python") / "model.py").write_text("import no_such_library\n")
    pytester.makepyfile(
        """
        import charonia
        import pytest

        def test_it(charonia_server):
            with pytest.raises(charonia.ServingError, match="no_such_library"):
                charonia_server("models")
            assert charonia_server("models", control_mode="explicit", load_models=["copy"]).is_ready("copy")
        """
    )

    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_the_fixture_is_listed_with_what_it_does(pytester: pytest.Pytester) -> None:
    pytester.runpytest_inprocess("--fixtures").stdout.fnmatch_lines(
        ["charonia_server*", "*Start servers in this process*"]
    )


def test_a_run_that_does_not_use_it_imports_no_part_of_the_server() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules); import charonia.testing.plugin\n"
        "print(*sorted(set(sys.modules) - before))"
    )

    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.split() == [
        "charonia",
        "charonia.compiled",
        "charonia.core",
        "charonia.core.errors",
        "charonia.testing",
        "charonia.testing.plugin",
    ]
