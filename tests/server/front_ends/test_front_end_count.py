"""How many front ends `--front-ends auto` stands for, and what the log says about it."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.models import identity_pbtxt, write_model

from charonia.server.front_ends import processes
from charonia.server.front_ends.processes import FED_BY_ENGINE, LARGE_BYTES, choose_front_ends, with_number
from charonia.server.options import FRONT_ENDS_AUTO, FRONT_ENDS_MAX, ModelOptions, ServerOptions

STAYS = "model 'm' will run in the engine only: it is decoupled"


@pytest.mark.parametrize(("cores", "count"), [(4, 0), (8, 1), (16, 2), (64, FED_BY_ENGINE)])
def test_a_large_model_keeps_the_cores_that_it_computes_on(cores: int, count: int) -> None:
    chosen = choose_front_ends(cores, STAYS, LARGE_BYTES)

    assert chosen.number == count
    assert chosen.reason == f"{cores} cores; {STAYS}, and one of 20 MiB needs the cores"
    assert choose_front_ends(cores, STAYS, LARGE_BYTES - 1) == choose_front_ends(cores, STAYS)
    assert choose_front_ends(cores, "", LARGE_BYTES).number == cores


@pytest.mark.parametrize(
    ("cores", "stays", "count"),
    [
        (1, "", 0),
        (2, "", 2),
        (3, "", 3),
        (16, "", 16),
        (4 * FRONT_ENDS_MAX, "", FRONT_ENDS_MAX),
        (1, STAYS, 0),
        (3, STAYS, 0),
        (4, STAYS, 3),
        (7, STAYS, 3),
        (8, STAYS, 4),
        (16, STAYS, 5),
        (32, STAYS, 6),
        (64, STAYS, 6),
    ],
)
def test_the_number_follows_from_cores_and_models(cores: int, stays: str, count: int) -> None:
    chosen = choose_front_ends(cores, stays)

    assert chosen.number == count
    assert chosen.reason.startswith(f"{cores} core")
    assert cores == 1 or (stays or "every model may run in front ends") in chosen.reason


def options(repository: Path, front_ends: int = FRONT_ENDS_AUTO) -> ServerOptions:
    return ServerOptions(models=ModelOptions(repositories=(str(repository),)), front_ends=front_ends)


def test_the_choice_is_made_once_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(processes, "usable_cores", lambda given: given or 2)
    write_model(tmp_path, "m", "", config=identity_pbtxt())

    assert with_number(options(tmp_path)).front_ends == 2
    write_model(tmp_path, "other", "", config=identity_pbtxt("python"))
    assert with_number(options(tmp_path)).front_ends == 0

    assert caplog.messages == [
        "--front-ends=auto: 2 (2 cores, and every model may run in front ends)",
        "--front-ends=auto: 0 (2 cores, and model 'other' will run in the engine only: "
        "models of backend 'python' exist once)",
    ]


@pytest.mark.parametrize(("gpus", "number"), [(0, 0), (1, 3)])
def test_the_files_of_models_count_where_these_compute_on_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, number: int
) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda given: given or 4)
    monkeypatch.setattr(processes, "visible_gpus", lambda: gpus)
    write_model(tmp_path, "m", "", config=identity_pbtxt("python"))
    with (tmp_path / "m" / "1" / "weights").open("wb") as file:
        file.truncate(LARGE_BYTES)

    assert with_number(options(tmp_path)).front_ends == number


@pytest.mark.parametrize(("cores", "number"), [(1, 0), (3, 3)])
def test_the_given_number_of_cores_counts(tmp_path: Path, cores: int, number: int) -> None:
    write_model(tmp_path, "m", "", config=identity_pbtxt())

    assert with_number(replace(options(tmp_path), cpu_cores=cores)).front_ends == number


def test_a_number_that_is_given_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    given = options(tmp_path, 3)

    assert with_number(given) is given
    assert caplog.messages == []
