"""The demo as a user runs it."""

import signal
from pathlib import Path

import pytest
from examples.demo import reading
from examples.demo.server import free_ports, running_server

from charonia import ServingError
from charonia.cli.main import main


def test_the_demo_reads_its_pictures_in_every_way_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading, "ROUNDS", 1)  # the networks take their time, and the test needs no median
    former = signal.getsignal(signal.SIGTERM)

    status = main(["demo", "--once", f"--repository={tmp_path / 'models'}"])

    signal.signal(signal.SIGTERM, former)
    shown = capsys.readouterr()
    assert status == 0, shown.out + shown.err
    assert "unambiguously as either object or background" in shown.out
    assert "Open daily" in shown.out
    assert "all 6 ways below read the same" in shown.out
    assert (tmp_path / "models" / "page_read.png").exists()
    assert (tmp_path / "models" / "photo_read.png").exists()
    assert shown.out.count("labels.txt     csv") == 2
    assert shown.out.count("= [11. 22. 33. 44.]") == 2


def test_a_server_that_ends_before_it_is_ready_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "config.pbtxt").write_text("this is no configuration")

    with (
        pytest.raises(ServingError, match="ended with status 1 before it was ready"),
        running_server(tmp_path, free_ports()),
    ):
        pass
