"""Snapshot of the Python API: a change here is a change for users and shows up in review."""

import charonia

PUBLIC = ["Code", "Server", "ServerOptions", "ServingError", "__version__"]


def test_the_public_names_are_these() -> None:
    assert sorted(getattr(charonia, "__all__", [])) == PUBLIC


def test_every_public_name_exists_and_is_documented() -> None:
    undocumented = [name for name in PUBLIC if name != "__version__" and not getattr(charonia, name).__doc__]

    assert undocumented == []
