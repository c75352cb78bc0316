"""A platform as a user starts it: processes, signals, browsers."""

import json
import signal
import socket
import stat
from pathlib import Path

import pytest
from httpx2 import Client
from tests.support.platform_process import PlatformProcess

from charonia.core.errors import ServingError
from charonia.platform.data_folder import claim
from charonia.platform.serve import serve
from charonia.platform.settings import PlatformSettings


def browser(platform: PlatformProcess) -> Client:
    return Client(base_url=platform.url, timeout=200.0)


def with_key(platform: PlatformProcess) -> Client:
    return Client(base_url=platform.url, timeout=200.0, headers={"Authorization": f"Bearer {platform.key}"})


def test_a_session_survives_kill_and_restart(tmp_path: Path) -> None:
    with PlatformProcess(tmp_path) as first, browser(first) as client:
        assert client.get(first.link).headers["location"] == "/"
        cookies = dict(client.cookies)
        key = first.key
        assert client.get("/api/v1/me").json()["name"] == "owner"
        first.kill()
    with PlatformProcess(tmp_path) as second, browser(second) as client:
        client.cookies.update(cookies)
        assert client.get("/api/v1/me").json()["name"] == "owner"
        assert second.key == key
        assert second.link.partition("token=")[2] != first.link.partition("token=")[2]


def test_the_link_signs_in_once_and_is_in_no_log(tmp_path: Path) -> None:
    with PlatformProcess(tmp_path) as platform:
        with browser(platform) as client:
            client.get(platform.link)
            assert client.get("/api/v1/me").status_code == 200
        with browser(platform) as client:
            assert client.get(platform.link).headers["location"] == "/login?problem=link"
            assert client.get("/api/v1/me").status_code == 401
        platform.stop()
    assert platform.output.count("token=") == 1


@pytest.mark.cold_start
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(number: signal.Signals, tmp_path: Path) -> None:
    with PlatformProcess(tmp_path) as platform, with_key(platform) as client:
        assert client.get("/api/v1/projects").json() == [{"name": "default"}]
        assert platform.stop(number) == 0


def test_the_data_folder_is_for_its_owner(tmp_path: Path) -> None:
    with PlatformProcess(tmp_path / "data") as platform:
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in platform.data.iterdir()}
        record = json.loads((platform.data / "running.json").read_text())

        assert stat.S_IMODE(platform.data.stat().st_mode) == 0o700
        assert (modes["owner.key"], modes["running.json"]) == (0o600, 0o600)
        assert record == {"pid": platform.process.pid, "url": platform.url}


def test_commands_of_this_machine_reach_it_when_others_do_too(tmp_path: Path) -> None:
    with PlatformProcess(tmp_path, "--host=0.0.0.0", "--public-url=http://127.0.0.1:1") as platform:
        record = json.loads((platform.data / "running.json").read_text())
        assert platform.link.startswith("http://127.0.0.1:1/")
        assert record["url"].startswith("http://127.0.0.1:")
        with Client(base_url=record["url"], headers={"Authorization": f"Bearer {platform.key}"}) as client:
            assert client.get("/api/v1/me").status_code == 200


def refusal(settings: PlatformSettings) -> ServingError:
    with pytest.raises(ServingError) as raised:
        serve(settings)
    return raised.value


def test_a_folder_has_one_platform(tmp_path: Path) -> None:
    with claim(tmp_path):
        error = refusal(PlatformSettings(tmp_path, isolation="available", port=0))

    assert error.message == f"another platform uses the folder '{tmp_path}'"


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = refusal(PlatformSettings(tmp_path, isolation="available", port=port))

    assert error.message == f"port {port} of 127.0.0.1 cannot be used: Address already in use"


def test_a_database_that_is_away_is_named(tmp_path: Path) -> None:
    url = "postgresql://somebody:secret@127.0.0.1:9/x"
    error = refusal(PlatformSettings(tmp_path, isolation="available", port=0, database=url))

    assert error.message.startswith("the database cannot be used")
    assert "secret" not in str(error)
    with claim(tmp_path):  # nothing holds the folder any more
        pass
