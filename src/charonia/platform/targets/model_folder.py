"""The folder of a model in a repository, as a server reads it."""

import os
from pathlib import Path

from charonia.platform.targets.api import PlacedModel


def make_model_folder(repository: Path, model: PlacedModel) -> None:
    """Create a model's folder with hard links to the files of its versions; shared files are those in the latest."""
    folder = repository / model.name
    for number, source in sorted(model.versions.items()):
        for path in sorted(source.rglob("*")):
            parts = path.relative_to(source).parts
            target = folder.joinpath(str(number) if parts[0] == "1" else parts[0], *parts[1:])
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                os.link(path, target)
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
    config = folder / "config.pbtxt"
    config.unlink(missing_ok=True)
    config.write_text(model.config, encoding="utf-8")
