"""Hostile models of each backend: refused without the permission to run code, harmless with it."""

import importlib.util
import json
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.campaign import hostile_models
from tests.campaign.hostile_models import HOSTILE, KERAS_WRITES, HostileModel, Prey, make_tensorflow
from tests.support.kept import kept_folder
from tests.support.platform_models import add_version
from tests.support.process import eventually

from charonia.platform.artifacts.blobs import BlobFolder
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.isolation.isolation import layers
from charonia.platform.models.check import first_look
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.state import Platform
from charonia.platform.trials import TrialPhase

pytestmark = pytest.mark.cold_start

ADMIN = Principal("tests", everywhere=ProjectRole.ADMIN)


@pytest.fixture
def prey(platform: Platform, pytestconfig: pytest.Config) -> Prey:
    data = platform.settings.data
    secret = data / "owner.key"
    secret.write_text("1e6d0d1c-the-key-of-the-owner")
    other = data / "deployments" / "other" / "project"
    other.mkdir(parents=True)
    folders = (str(data), str(data / "artifacts"), str(other))
    written = str(data.parent / f"{data.name}-written")
    models = ""
    if importlib.util.find_spec("tensorflow") is not None:
        sources, packages = [Path(hostile_models.__file__)], ["tensorflow-cpu", "keras"]
        models = str(kept_folder(pytestconfig, "hostile", make_tensorflow, sources=sources, packages=packages))
    return Prey(str(secret), secret.stat().st_size, written, os.getpid(), folders, tensorflow=models)


def made(hostile: HostileModel, prey: Prey) -> dict[str, bytes]:
    if hostile.module and importlib.util.find_spec(hostile.module) is None:
        pytest.skip(f"{hostile.module} is not installed")
    return dict(hostile.make(prey))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_a_hostile_model_is_not_data_and_gets_nothing_where_it_is_served(
    platform: Platform, prey: Prey, hostile: HostileModel, tmp_path: Path
) -> None:
    files = made(hostile, prey)
    store = ArtifactStore(BlobFolder(tmp_path / "store"))
    manifest = {path: store.add([content], what=path) for path, content in files.items()}

    assert first_look("m", manifest, store).code != []
    assert not Path(prey.written).exists()
    if not hostile.served or layers().landlock < 6:
        return
    add_version(platform.database, platform.settings.data, "m", files, runs_code=True)
    trials = platform.trials
    trials.start(ADMIN, "default", "m", 1)
    eventually(lambda: trials.state(ADMIN, "default", "m", 1)[0].phase is not TrialPhase.STARTING, 300)
    view, log = trials.state(ADMIN, "default", "m", 1)
    answer = infer(hostile, prey, *trials.use(ADMIN, "default", "m", 1)) if view.phase is TrialPhase.READY else ""
    trials.close()

    print(view, answer, log)
    assert secret_in(answer + log, prey) == []
    assert not Path(prey.written).exists()
    assert not Path(KERAS_WRITES).exists()
    if hostile.name == "python":
        assert json.loads(json.loads(answer)["outputs"][0]["data"][0]) == []


def infer(hostile: HostileModel, prey: Prey, address: str, key: str) -> str:
    """Return what a model answers, also where that is an error."""
    sent = {"name": "X", "shape": [1], "datatype": "FP32", "data": [1.0]}
    if hostile.path:
        sent |= {"datatype": "BYTES", "data": [getattr(prey, hostile.path)]}
    body = json.dumps({"inputs": [sent]}).encode()
    call = urllib.request.Request(f"{address}/v2/models/m/infer", body, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(call, timeout=200) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def secret_in(text: str, prey: Prey) -> list[str]:
    """Return how the secret is in a text: as it is, or as numbers."""
    secret = Path(prey.secret).read_bytes()
    numbers = [json.dumps(list(secret))[1:-1], json.dumps([float(byte) for byte in secret])[1:-1]]
    return [form for form in (secret.decode(), *numbers) if form.replace(" ", "") in text.replace(" ", "")]
