"""Repository agents: Python hooks around the load of a model."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.errors import Code, ServingError
from charonia.server.lifecycle.repository.agents import AgentRun, ChecksumAgent, prepare_agents
from charonia.server.lifecycle.repository.scan import ModelFolder

RECORDING = """
class RepositoryAgent:
    def __init__(self, parameters):
        self.name = parameters["name"]

    def note(self, hook, model):
        with open(model.config["parameters"]["log"]["string_value"], "a") as log:
            log.write(f"{self.name}:{hook} ")

    def on_load(self, model):
        self.note("load", model)
        if self.name == "refuses":
            raise ValueError("not this one")

    def on_load_complete(self, model):
        self.note("complete", model)

    def on_load_fail(self, model):
        self.note("fail", model)

    def on_unload(self, model):
        self.note("unload", model)
        raise RuntimeError("too late")

    def on_unload_complete(self, model):
        self.note("unloaded", model)
"""
REPLACING = """
class RepositoryAgent:
    def __init__(self, parameters):
        pass

    def on_load(self, model):
        folder = model.make_folder()
        (folder / "made.txt").write_text(model.name)
        return folder
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.agents = folder / "agents"
        self.model = folder / "models" / "m"
        self.log = folder / "log"
        self.model.mkdir(parents=True)

    def agent(self, name: str, text: str) -> None:
        (self.agents / name).mkdir(parents=True)
        (self.agents / name / "agent.py").write_text(text)

    def config(self, *agents: tuple[str, dict[str, str]]) -> ModelConfig:
        sections = ""
        for name, parameters in agents:
            values = "".join(f'parameters {{ key: "{k}" value: "{v}" }}' for k, v in parameters.items())
            sections += f'agents {{ name: "{name}" {values} }}'
        log = f'parameters {{ key: "log" value {{ string_value: "{self.log}" }} }}'
        return parse(f"{log} model_repository_agents {{ {sections} }}")

    def run(self, *agents: tuple[str, dict[str, str]]) -> AgentRun:
        found = prepare_agents(ModelFolder("m", self.model.parent, self.model), self.config(*agents), self.agents)
        assert found is not None
        return found

    @property
    def told(self) -> list[str]:
        return self.log.read_text().split()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_agents_are_told_in_order_and_back(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.agent("rec", RECORDING)
    run = place.run(("rec", {"name": "a"}), ("rec", {"name": "b"}))

    assert run.load() == place.model
    run.complete()
    run.unload()
    run.unloaded()

    assert place.told == [
        *("a:load", "b:load", "b:complete", "a:complete"),
        *("a:unload", "b:unload", "b:unloaded", "a:unloaded"),
    ]
    assert "on_unload failed" in caplog.text


def test_one_that_refuses_keeps_the_model_from_being_loaded(place: Place) -> None:
    place.agent("rec", RECORDING)
    run = place.run(("rec", {"name": "a"}), ("rec", {"name": "refuses"}), ("rec", {"name": "c"}))

    with pytest.raises(ServingError, match="'rec' of model 'm' refused: ValueError: not this one") as caught:
        run.load()

    assert caught.value.code is Code.INVALID_ARG
    assert place.told == ["a:load", "refuses:load", "a:fail"]


def test_an_agent_may_put_another_folder_in_the_place_of_the_models(place: Place) -> None:
    place.agent("made", REPLACING)
    run = place.run(("made", {}))

    folder = run.load()
    content = (folder / "made.txt").read_text()
    run.complete()
    run.unload()
    run.unloaded()

    assert (folder.name, content) == ("m", "m")
    assert not folder.exists()


def test_what_was_made_for_a_model_that_fails_is_removed(place: Place) -> None:
    place.agent("made", REPLACING)
    run = place.run(("made", {}))
    folder = run.load()

    run.fail()

    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("../x", "", "is not the name of a repository agent"),
        ("none", "", "unable to find repository agent 'none' of model 'm'"),
        ("broken", "raise OSError('x')", "OSError: x"),
        ("empty", "", "has no attribute 'RepositoryAgent'"),
        ("idle", "class RepositoryAgent:\n    def __init__(self, parameters): pass", "has none of the methods on_load"),
        ("lost", REPLACING.replace("return folder", "return '/none'"), "/none', which is not a folder"),
    ],
)
def test_an_agent_that_cannot_be_used_is_named(place: Place, name: str, text: str, reason: str) -> None:
    if "/" not in name and name != "none":
        place.agent(name, text)

    with pytest.raises(ServingError) as caught:
        place.run((name, {})).load()

    assert reason in caught.value.message
    assert caught.value.code is Code.INVALID_ARG


def test_without_a_directory_there_are_the_built_in_agents(place: Place) -> None:
    folder = ModelFolder("m", place.model.parent, place.model)

    assert prepare_agents(folder, place.config(("checksum", {})), None) is not None
    assert prepare_agents(folder, ModelConfig(), None) is None
    with pytest.raises(ServingError, match="built in: checksum"):
        prepare_agents(folder, place.config(("other", {})), None)


def checked(folder: Path, **digests: str) -> None:
    class Model:
        name = "m"

    model: Any = Model()
    model.folder = folder
    ChecksumAgent({key.replace("__", ":"): value for key, value in digests.items()}).on_load(model)


def test_files_with_the_right_digest_pass(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"content")

    checked(
        tmp_path, MD5__w=hashlib.md5(b"content").hexdigest(), sha256__w=hashlib.sha256(b"content").hexdigest().upper()
    )


@pytest.mark.parametrize(
    ("digests", "reason", "code"),
    [
        ({"MD5__w": "00"}, "mismatched MD5, expected 00, got 9a0364b9e99bb480dd25e1f0284c8555", Code.INVALID_ARG),
        ({"MD5__none": "00"}, "no such file", Code.INVALID_ARG),
        ({"MD5": "00"}, "expected <algorithm>:<file>", Code.INVALID_ARG),
        ({"crc__w": "00"}, "unsupported algorithm 'crc'", Code.UNSUPPORTED),
        ({"MD5__../w": "00"}, "must stay within", Code.INVALID_ARG),
        ({"MD5__/etc/passwd": "00"}, "must stay within", Code.INVALID_ARG),
    ],
)
def test_others_are_refused(tmp_path: Path, digests: dict[str, str], reason: str, code: Code) -> None:
    (tmp_path / "w").write_bytes(b"content")

    with pytest.raises(ServingError) as caught:
        checked(tmp_path, **digests)

    assert reason in caught.value.message
    assert caught.value.code is code
