"""Servers of single versions: who may start them, when they end, and what is said when they do not start."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from tests.support.models import mlp
from tests.support.platform_models import add_version
from tests.support.process import waited_for

from charonia.core.errors import ServingError
from charonia.platform import trials
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.people.access import Grant, NotPermittedError, Principal, ProjectRole
from charonia.platform.state import Platform
from charonia.platform.trials import TrialPhase, Trials, TrialServer

ADMIN = Principal("tests", everywhere=ProjectRole.ADMIN)
DEPLOYER = Principal.of("deployer", [Grant(ProjectRole.DEPLOYER, "default")])
VIEWER = Principal.of("viewer", [Grant(ProjectRole.VIEWER, "default")])

MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n\n"
CONFIG = b"""backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""
FAILS = MODEL + "    def initialize(self, args):\n        raise RuntimeError('there is no dictionary')\n"
SLEEPS = MODEL + "    def initialize(self, args):\n        import time\n        time.sleep(60)\n"


@pytest.fixture
def made(platform: Platform) -> Iterator[Trials]:
    yield platform.trials
    platform.trials.close()


def add(platform: Platform, name: str, files: dict[str, bytes], *, runs_code: bool = False) -> int:
    return add_version(platform.database, platform.settings.data, name, files, runs_code=runs_code)


def python(platform: Platform, name: str, text: str) -> int:
    return add(platform, name, {"1/model.py": text.encode(), "config.pbtxt": CONFIG}, runs_code=True)


def phase(made: Trials, name: str, *, ends: TrialPhase = TrialPhase.STARTING) -> TrialPhase:
    """Wait until a trial is no longer in a phase, and return the one that follows."""
    return waited_for(lambda: made.state(ADMIN, "default", name, 1)[0].phase, lambda found: found is not ends)


def infer(address: str, key: str) -> object:
    body = {"inputs": [{"name": "input", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]}
    headers = {"Authorization": f"Bearer {key}"}
    call = urllib.request.Request(f"{address}/v2/models/digits/infer", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call, timeout=200) as answer:
        return json.load(answer)["outputs"][0]["shape"]


def test_a_version_answers_on_a_server_of_its_own_until_it_is_stopped(platform: Platform, made: Trials) -> None:
    add(platform, "digits", {"1/model.onnx": mlp((64, 32, 10))})

    made.start(DEPLOYER, "default", "digits", 1)

    assert phase(made, "digits") is TrialPhase.READY
    address, key = made.use(DEPLOYER, "default", "digits", 1)
    assert infer(address, key) == [1, 10]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        infer(address, "another")
    made.stop(DEPLOYER, "default", "digits", 1)
    with pytest.raises(ServingError, match="version 1 of 'digits' has no running server"):
        made.use(DEPLOYER, "default", "digits", 1)
    made.start(DEPLOYER, "default", "digits", 1)
    assert phase(made, "digits") is TrialPhase.READY


def test_it_ends_when_nobody_uses_it(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    add(platform, "digits", {"1/model.onnx": mlp((64, 32, 10))})
    monkeypatch.setattr(trials, "TrialServer", lambda *given: TrialServer(*given, idle_s_max=0.2))

    platform.trials.start(DEPLOYER, "default", "digits", 1)

    assert phase(platform.trials, "digits") is TrialPhase.READY
    assert phase(platform.trials, "digits", ends=TrialPhase.READY) is TrialPhase.NONE
    platform.trials.close()
    assert list((platform.settings.data / "trials").iterdir()) == []


def test_a_version_that_cannot_be_loaded_says_why(platform: Platform, made: Trials) -> None:
    python(platform, "words", FAILS)

    made.start(ADMIN, "default", "words", 1)

    assert phase(made, "words") is TrialPhase.FAILED
    view, log = made.state(ADMIN, "default", "words", 1)
    assert "there is no dictionary" in view.reason
    assert str(platform.settings.data) not in view.reason
    assert "there is no dictionary" in log


def test_a_version_that_never_becomes_ready_is_given_up(
    platform: Platform, made: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    python(platform, "sleeper", SLEEPS)
    monkeypatch.setattr(trials, "TrialServer", lambda *given: TrialServer(*given, start_s_max=3.0))

    made.start(ADMIN, "default", "sleeper", 1)

    assert phase(made, "sleeper") is TrialPhase.FAILED
    assert made.state(ADMIN, "default", "sleeper", 1)[0].reason.startswith("it was not ready after 3 s")


def test_code_needs_the_permission_for_it(platform: Platform, made: Trials) -> None:
    python(platform, "words", MODEL)

    with pytest.raises(NotPermittedError, match="may not use models that run code"):
        made.start(DEPLOYER, "default", "words", 1)

    assert made.state(DEPLOYER, "default", "words", 1)[0].phase is TrialPhase.NONE


def test_a_viewer_may_not_start_one(platform: Platform, made: Trials) -> None:
    add(platform, "digits", {"1/model.onnx": mlp((64, 32, 10))})

    with pytest.raises(NotPermittedError, match="expected the role deployer"):
        made.start(VIEWER, "default", "digits", 1)
    with pytest.raises(NotPermittedError, match="expected the role deployer"):
        made.use(VIEWER, "default", "digits", 1)


def test_only_so_many_run_at_a_time(platform: Platform, made: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TRIALS_MAX", 1)
    python(platform, "sleeper", SLEEPS)
    add(platform, "digits", {"1/model.onnx": mlp((64, 32, 10))})
    made.start(ADMIN, "default", "sleeper", 1)

    with pytest.raises(ServingError, match="version 1 of 'sleeper'") as caught:
        made.start(ADMIN, "default", "digits", 1)

    assert caught.value.hint.startswith("stop one")
    made.start(ADMIN, "default", "sleeper", 1)  # which runs already


def test_a_version_that_there_is_not_is_refused(platform: Platform, made: Trials) -> None:
    add(platform, "digits", {"1/model.onnx": mlp((64, 32, 10))})

    with pytest.raises(ServingError, match="version 7 of 'digits' does not exist"):
        made.start(ADMIN, "default", "digits", 7)


def test_what_a_killed_platform_has_left_is_removed(platform: Platform) -> None:
    left = platform.settings.data / "trials" / "left"
    left.mkdir(parents=True)

    Trials(platform.database, platform.workloads, left.parent, Isolation(platform.settings.data))

    assert not left.exists()
