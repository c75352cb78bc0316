"""The demo as a user runs it."""

from pathlib import Path

import pytest
from examples.demo.server import free_ports, running_server
from tests.support.fork_server import run_command

from charonia import ServingError

TIMEOUT_S = 300.0


@pytest.mark.timeout(TIMEOUT_S)
def test_the_demo_reads_its_pictures_in_every_way_and_stops(tmp_path: Path) -> None:
    done = run_command("demo", "--once", f"--repository={tmp_path / 'models'}", seconds_max=TIMEOUT_S)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "unambiguously as either object or background" in done.stdout
    assert "Open daily" in done.stdout
    assert "all 6 ways below read the same" in done.stdout
    assert (tmp_path / "models" / "page_read.png").exists()
    assert (tmp_path / "models" / "photo_read.png").exists()
    assert done.stdout.count("labels.txt     csv") == 2
    assert done.stdout.count("= [11. 22. 33. 44.]") == 2


def test_a_server_that_ends_before_it_is_ready_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "config.pbtxt").write_text("this is no configuration")

    with (
        pytest.raises(ServingError, match="ended with status 1 before it was ready"),
        running_server(tmp_path, free_ports()),
    ):
        pass
