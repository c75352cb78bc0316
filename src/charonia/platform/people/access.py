"""Who calls, and what they may do. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from charonia.core.errors import RefusalKind


class ProjectRole(IntEnum):
    """What somebody may do in a project. Each may do what those before it may."""

    VIEWER = 1
    DEPLOYER = 2
    ADMIN = 3


class NotPermittedError(Exception):
    """A call that may not be made.

    Attributes:
        kind: Whether nobody was named, or somebody who may not.
        message: One sentence.
    """

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who is known.

    Attributes:
        name: As the audit log has it: "key ci", "Ada Lovelace <ada@example.org>".
        everywhere: The role in all projects, None for none.
        roles: Roles by name of the project.
        may_run_code: Names of the projects in which a deployer may use models that hold code; "*" for all.
        address: Where the call came from.
    """

    name: str
    everywhere: ProjectRole | None = None
    roles: Mapping[str, ProjectRole] = field(default_factory=dict)
    may_run_code: frozenset[str] = frozenset()
    address: str = ""

    def role(self, project: str) -> ProjectRole | None:
        """Return the role in a project, None for none."""
        found = [role for role in (self.everywhere, self.roles.get(project)) if role is not None]
        return max(found, default=None)

    def demand(self, role: ProjectRole, project: str = "") -> None:
        """Check that the caller has a role, in a project or everywhere.

        Raises:
            NotPermittedError: If not.
        """
        has = self.role(project) if project else self.everywhere
        if has is None or has < role:
            where = f"in project '{project}'" if project else "in all projects"
            raise NotPermittedError(
                RefusalKind.FORBIDDEN, f"{self.name}: expected the role {role.name.lower()} {where}"
            )

    def demand_code(self, project: str) -> None:
        """Check that the caller may add and deploy models that hold code.

        Raises:
            NotPermittedError: If not.
        """
        self.demand(ProjectRole.DEPLOYER, project)
        if self.role(project) is not ProjectRole.ADMIN and not self.may_run_code & {project, "*"}:
            raise NotPermittedError(
                RefusalKind.FORBIDDEN, f"{self.name}: may not use models that run code in '{project}'"
            )
