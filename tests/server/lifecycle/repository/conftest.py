from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from charonia.server.lifecycle.repository.scan import ModelFolder

MakeFolder = Callable[[Mapping[str, bytes]], ModelFolder]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Makes the folder of model "m" from files by relative path; a path that ends with "/" makes an empty folder."""

    def make(files: Mapping[str, bytes]) -> ModelFolder:
        folder = tmp_path / "repository" / "m"
        folder.mkdir(parents=True, exist_ok=True)
        for relative, content in files.items():
            path = folder / relative
            if relative.endswith("/"):
                path.mkdir(parents=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return ModelFolder("m", folder.parent, folder)

    return make
