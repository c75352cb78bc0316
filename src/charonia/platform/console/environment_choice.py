"""Which environment suits a model. Pure."""

from collections.abc import Sequence
from typing import Any, Protocol

from charonia.platform.models.records import VersionReport


class BuiltEnvironment(Protocol):
    """What is looked at of an environment."""

    name: Any
    state: Any
    packages: Any


def suggested(report: VersionReport, environments: Sequence[BuiltEnvironment]) -> str:
    """Return the name of an environment in which a version can be loaded, "" for the platform's own Python.

    Where nothing fits, that is the answer as well: the deployment says what is missing.
    """
    if report.checked_with:
        return report.checked_with
    stated = [
        line.partition("==")[0].partition(">")[0].partition("[")[0].strip() for line in report.requirements.splitlines()
    ]
    missing = {_plain(need.name) for need in report.needs if not need.is_here} | {
        _plain(name) for name in stated if name
    }
    if not missing:
        return ""
    for environment in environments:
        if environment.state == "ready" and missing <= {_plain(name) for name, _ in environment.packages}:
            return str(environment.name)
    return ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
