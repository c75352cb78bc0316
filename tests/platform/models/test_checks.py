"""Versions with real checks: real models, real processes."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from tests.platform.models.conftest import add_files
from tests.support.models import PYTHON_IDENTITY, identity, identity_pbtxt

from charonia.platform.models import check
from charonia.platform.models.check import CheckingPython
from charonia.platform.models.version_import import VersionTasks
from charonia.platform.state import Platform

pytestmark = pytest.mark.timeout(400)

Caller = Callable[..., dict[str, str]]

PYTHON_CONFIG = identity_pbtxt("python", dims=(4,), max_batch_size=0).encode()


def zipped(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return content.getvalue()


def test_a_model_gets_its_signature_and_its_complete_configuration(admin: TestClient, platform: Platform) -> None:
    version = add_files(admin, "echo", {"whatever.onnx": identity()})

    assert version["state"] == "ready", version["report"]
    report = version["report"]
    assert (report["is_checked"], report["checked_with"], report["backend"]) == (True, "", "onnxruntime")
    assert report["inputs"] == [{"name": "INPUT0", "data_type": "FP32", "shape": [16], "is_optional": False}]
    assert report["outputs"][0]["name"] == "OUTPUT0"
    assert report["config"]["max_batch_size"] == report["max_batch_size"] == 4
    assert "backend: onnxruntime, from the file 'model.onnx'" in report["inferred"]
    assert (report["code"], report["warnings"], report["problem"]) == ([], [], "")
    assert report["load"].startswith("yes, in ")
    assert list((platform.artifacts.local.folder / "incoming").iterdir()) == []


def test_an_archive_is_unpacked_and_its_problems_are_told_without_paths_of_the_machine(
    admin: TestClient, platform: Platform
) -> None:
    config = b'backend: "nothing"'
    version = add_files(
        admin, "echo", {"echo.zip": zipped({"echo/config.pbtxt": config, "echo/1/model.onnx": identity()})}
    )

    assert version["state"] == "refused"
    assert [file["path"] for file in version["files"]] == ["1/model.onnx", "config.pbtxt"]
    assert "unable to find backend 'nothing'" in version["report"]["problem"]
    assert str(platform.settings.data) not in version["report"]["problem"]


def test_a_damaged_file_is_refused(admin: TestClient) -> None:
    version = add_files(admin, "echo", {"echo.onnx": b"no model"})

    assert version["state"] == "refused"
    assert "model.onnx" in version["report"]["problem"]


def test_a_file_that_crashes_its_reader_is_refused_and_the_platform_lives(
    admin: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr(VersionTasks, "_python", lambda *_: CheckingPython("", crash))

    version = add_files(admin, "echo", {"echo.onnx": identity()})

    assert version["report"]["problem"] == "the process that read 'echo' was ended by signal 11"


def test_a_python_model_runs_without_the_credentials_of_the_platform(
    admin: TestClient, as_caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    code = PYTHON_IDENTITY.replace(
        "    def execute",
        """    @staticmethod
    def auto_complete_config(config):
        import os
        assert "AWS_SECRET_ACCESS_KEY" not in os.environ
        config.set_max_batch_size(8)
        return config

    def execute""",
    )

    version = add_files(
        admin,
        "own",
        {"config.pbtxt": PYTHON_CONFIG, "1/model.py": code.encode()},
        as_caller("deployer", may_run_code=True),
    )

    assert version["state"] == "ready", version["report"]
    assert (version["report"]["max_batch_size"], version["report"]["code"]) == (8, ["1/model.py: Python code"])


def test_a_pickled_estimator_is_trusted_by_who_may_run_code(admin: TestClient) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    estimator = linear.LinearRegression().fit([[0.0, 1.0], [1.0, 0.0]], [1.0, 2.0])

    version = add_files(admin, "rows", {"rows.pkl": pickle.dumps(estimator)})

    assert version["state"] == "ready", version["report"]
    assert [file["path"] for file in version["files"]] == ["1/model.pkl", "config.pbtxt"]
    assert version["report"]["code"] == ["1/model.pkl: a pickle", "parameter TRUSTED: its pickles are read"]
    assert version["report"]["needs"] == [{"name": "scikit-learn", "extra": "sklearn", "is_here": True}]


def test_warnings_of_the_doctor_are_kept(admin: TestClient) -> None:
    config = b"instance_group { count: 200 kind: KIND_CPU }"

    version = add_files(admin, "echo", {"config.pbtxt": config, "1/model.onnx": identity()})

    (warning,) = version["report"]["warnings"]
    assert warning.startswith("200 instances compute on")


def test_the_configuration_of_another_model_is_refused(admin: TestClient) -> None:
    version = add_files(admin, "echo", {"config.pbtxt": b'name: "other"', "1/model.onnx": identity()})

    assert version["report"]["problem"].startswith("config.pbtxt: name: expected 'echo'")


def test_a_tensor_that_contradicts_the_file_is_found_by_loading_it(admin: TestClient, platform: Platform) -> None:
    config = b"""
    max_batch_size: 4
    input { name: "INPUT0" data_type: TYPE_INT8 dims: 16 }
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
    """

    version = add_files(admin, "echo", {"config.pbtxt": config, "1/model.onnx": identity()})

    assert (version["state"], version["report"]["load"]) == ("ready", "no")
    (warning,) = version["report"]["warnings"]
    assert warning.startswith("it does not load on this machine (limits: 120 s, ")
    assert "configuration expects datatype TYPE_INT8 for input 'INPUT0', model provides TYPE_FP32" in warning
    assert str(platform.settings.data) not in warning


def python_model(initialize: str) -> dict[str, bytes]:
    code = PYTHON_IDENTITY.replace(
        "    def execute", f"    def initialize(self, args):\n{initialize}\n\n    def execute"
    )
    return {"config.pbtxt": PYTHON_CONFIG, "1/model.py": code.encode()}


def test_code_that_does_not_start_is_told(admin: TestClient) -> None:
    version = add_files(admin, "own", python_model("        raise RuntimeError('there is no dictionary')"))

    assert version["state"] == "ready"
    assert "RuntimeError: there is no dictionary" in version["report"]["warnings"][0]


def test_a_load_that_takes_too_long_is_given_up(admin: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LOAD_S_MAX", 3.0)

    version = add_files(admin, "own", python_model("        import time; time.sleep(60)"))

    assert version["report"]["warnings"][0].endswith("it was not ready after 3 s")


def test_a_load_that_takes_too_much_memory_is_given_up(admin: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MEMORY_SHARE_MAX", (2 * 2**30 + 2**19) / machine_memory())

    version = add_files(admin, "own", python_model("        self.much = bytearray(4 << 30)"))

    assert "2048 MiB" in version["report"]["warnings"][0]
    assert "MemoryError" in version["report"]["warnings"][0]


def machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
