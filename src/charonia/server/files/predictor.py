"""Makes the repository of a transformer: the models of a repository, one of which another server runs."""

from collections.abc import Sequence
from pathlib import Path

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig
from charonia.config.pbtxt import render
from charonia.core.errors import invalid

INSTANCES = 8
"""Requests that are passed on at a time; each instance waits for the answer of one."""

_SCRIPT = "from charonia.client.predictor_model import TritonPythonModel\n"


def make_with_predictor(repositories: Sequence[str], predictor: str, host: str, folder: Path) -> None:
    """Write the repository. Blocks on the disk.

    Args:
        repositories: Folders of models.
        predictor: The model that another server runs.
        host: That server.
        folder: The repository's folder, which is empty.

    Raises:
        ServingError: There is no such model, or what is given are no folders.
    """
    models = dict[str, Path]()
    for repository in map(Path, repositories):
        if not repository.is_dir():
            raise invalid(f"--predictor: expected a folder of models, got '{repository}'")
        models |= {each.name: each.absolute() for each in repository.iterdir() if not each.name.startswith(".")}
    if predictor not in models:
        raise invalid(f"--predictor: there is no model '{predictor}'", hint=f"there are {', '.join(sorted(models))}")
    for name, path in models.items():
        if name != predictor:
            (folder / name).symlink_to(path)
    version = folder / predictor / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_SCRIPT, encoding="utf-8")
    config = ModelConfig(
        name=predictor,
        backend="python",
        instance_group=(InstanceGroup(kind=InstanceKind.KIND_CPU, count=INSTANCES),),
        parameters={"PREDICTOR_HOST": host, "EXECUTION_MODE": "thread"},
    )
    (folder / predictor / "config.pbtxt").write_text(render(config), encoding="utf-8")
