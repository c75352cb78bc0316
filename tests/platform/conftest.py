"""A platform on SQLite in a folder of its own, without a socket."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from charonia.platform.app import make_app
from charonia.platform.people import local
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    app = make_app(PlatformSettings(tmp_path))
    yield app
    app.state.platform.database.close()


@pytest.fixture
def platform(app: FastAPI) -> Platform:
    found = app.state.platform
    assert isinstance(found, Platform)
    return found


@pytest.fixture
def link(platform: Platform) -> str:
    """The secret of a link that signs the owner in."""
    with platform.database.transaction() as session:
        return local.prepare(session, platform.settings.data)


@pytest.fixture
def anybody(app: FastAPI) -> Iterator[TestClient]:
    """A client without a key."""
    with TestClient(app, base_url="http://127.0.0.1:8080", follow_redirects=False) as client:
        yield client


@pytest.fixture
def admin(anybody: TestClient, link: str, platform: Platform) -> TestClient:
    """A client with the owner's key."""
    key = (platform.settings.data / "owner.key").read_text().strip()
    anybody.headers["Authorization"] = f"Bearer {key}"
    return anybody
