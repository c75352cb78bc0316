"""Which deployments have which versions, as far as the registry needs it."""

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from charonia.platform.database.tables import DeploymentRow, RevisionRow


@dataclass(frozen=True, slots=True)
class Use:
    """A deployment that has a model.

    Attributes:
        deployment: Its name.
        versions: The versions of the model; none for the latest.
    """

    deployment: str
    versions: frozenset[int]

    def has(self, number: int, newest: int) -> bool:
        """Return whether it has a version; `newest` is the latest one that is ready."""
        return number in self.versions or (not self.versions and number == newest)


def uses(session: Session, project_id: int, model: str) -> list[Use]:
    """Return the deployments that have a model in what they are to be or are, each once for every revision."""
    rows = session.execute(
        select(DeploymentRow.name, RevisionRow.spec)
        .join(RevisionRow.deployment)
        .where(DeploymentRow.project_id == project_id, ~DeploymentRow.removed)
        .where(RevisionRow.number.in_([DeploymentRow.latest, DeploymentRow.wanted, DeploymentRow.serving]))
        .order_by(DeploymentRow.name)
    )
    return [
        Use(name, _numbers(entry.get("versions")))
        for name, spec in rows
        for entry in spec.get("models", [])
        if entry.get("name") == model
    ]


def names(found: Iterable[Use]) -> list[str]:
    """Return the names of deployments, each once."""
    return list(dict.fromkeys(use.deployment for use in found))


def _numbers(versions: object) -> frozenset[int]:
    return frozenset(map(int, versions)) if isinstance(versions, list | tuple) else frozenset()
