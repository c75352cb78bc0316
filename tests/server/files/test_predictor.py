"""The repository of a transformer."""

from pathlib import Path

import pytest

from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError
from charonia.server.files.served_files import make_with_predictor


def test_one_model_passes_its_requests_on_and_the_others_are_as_they_were(tmp_path: Path) -> None:
    for name in ("iris", "prepare"):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
    (tmp_path / "made").mkdir()

    make_with_predictor([str(tmp_path / "models")], "iris", "iris-predictor.prod", tmp_path / "made")

    config = parse((tmp_path / "made" / "iris" / "config.pbtxt").read_text())
    assert (config.name, config.backend) == ("iris", "python")
    assert config.parameters["PREDICTOR_HOST"] == "iris-predictor.prod"
    assert (tmp_path / "made" / "prepare").readlink() == tmp_path / "models" / "prepare"


@pytest.mark.parametrize(
    ("path", "message"),
    [("models", "there is no model 'iris' .*there are prepare"), ("none", "expected a folder of models, got")],
)
def test_a_model_that_is_not_there_is_refused(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "models" / "prepare").mkdir(parents=True)

    with pytest.raises(ServingError, match=message):
        make_with_predictor([str(tmp_path / path)], "iris", "host", tmp_path)
