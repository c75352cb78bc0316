"""Callers and their permissions, and the secrets that the platform issues: it stores only their SHA-256.

What takes a caller checks it first: it raises `NotPermittedError` unless the caller has the role that the code names,
and NOT_FOUND for projects and objects that do not exist. Docstrings only list other errors.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Self

from joserfc import jwe
from joserfc.errors import JoseError
from joserfc.jwk import OctKey

from charonia.core.errors import RefusalKind

SECRET_BYTES = 32


def new_secret(prefix: str = "") -> str:
    return prefix + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: str) -> str:
    """Return the stored form of a secret. Secrets are long and random, so a plain hash is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def seal(value: Mapping[str, Any], key: OctKey) -> str:
    """Return a value encrypted with a key of 256 bits."""
    return jwe.encrypt_compact({"alg": "dir", "enc": "A256GCM"}, json.dumps(value).encode(), key)


def unseal(text: str, key: OctKey) -> dict[str, Any]:
    """Return the value that was encrypted, {} if it was not with this key."""
    try:
        return dict(json.loads(jwe.decrypt_compact(text, key).plaintext or b""))
    except (JoseError, ValueError):
        return {}


class ProjectRole(IntEnum):
    """Permissions in a project. Each role includes the previous ones."""

    VIEWER = 1
    DEPLOYER = 2
    ADMIN = 3


class NotPermittedError(Exception):
    """A call that is not permitted.

    Attributes:
        kind: Whether the caller is unknown, or lacks a permission.
        message: One sentence.
    """

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Grant:
    """A role of a user or key.

    Attributes:
        project: Name of the project, "" for all.
        may_run_code: Whether a deployer may use models that contain code.
    """

    role: ProjectRole
    project: str = ""
    may_run_code: bool = False


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        name: As the audit log has it: "key ci", "Ada Lovelace <ada@example.org>".
        everywhere: The role in all projects, None for none.
        may_run_code: Names of the projects in which a deployer may use models that contain code; "*" for all.
        id: Identifies the key or user in records of later work: see `keys.standing`. "" for the platform.
    """

    name: str
    everywhere: ProjectRole | None = None
    roles: Mapping[str, ProjectRole] = field(default_factory=dict)
    may_run_code: frozenset[str] = frozenset()
    address: str = ""
    id: str = ""

    @classmethod
    def of(cls, name: str, grants: Iterable[Grant], address: str = "", id: str = "") -> Self:
        """Return a principal with these roles."""
        grants = list(grants)
        return cls(
            name,
            max((grant.role for grant in grants if not grant.project), default=None),
            {grant.project: grant.role for grant in sorted(grants, key=lambda g: g.role) if grant.project},
            frozenset(grant.project or "*" for grant in grants if grant.may_run_code),
            address,
            id,
        )

    def grants(self) -> list[Grant]:
        """Return the roles; the role in all projects comes first."""
        code = self.may_run_code
        everywhere = [] if self.everywhere is None else [Grant(self.everywhere, "", "*" in code)]
        return everywhere + [Grant(role, project, project in code) for project, role in sorted(self.roles.items())]

    def role(self, project: str) -> ProjectRole | None:
        """Return the role in a project, None for none."""
        found = [role for role in (self.everywhere, self.roles.get(project)) if role is not None]
        return max(found, default=None)

    def visible_roles(self, grants: Iterable[Grant]) -> list[Grant]:
        """Return the roles of another user that the caller may see: not those in foreign projects."""
        return [grant for grant in grants if not grant.project or self.role(grant.project) is not None]

    def demand(self, role: ProjectRole, project: str = "") -> None:
        """Check that the caller has a role, in a project or everywhere."""
        has = self.role(project) if project else self.everywhere
        if has is None or has < role:
            where = f"in project '{project}'" if project else "in all projects"
            raise NotPermittedError(
                RefusalKind.FORBIDDEN, f"{self.name}: expected the role {role.name.lower()} {where}"
            )

    def administered(self) -> frozenset[str] | None:
        """Return the projects that the caller administers, None for all."""
        if self.everywhere is ProjectRole.ADMIN:
            return None
        found = frozenset(name for name, role in self.roles.items() if role is ProjectRole.ADMIN)
        if not found:
            raise NotPermittedError(RefusalKind.FORBIDDEN, f"{self.name}: expected the role admin in a project")
        return found

    def demand_code(self, project: str) -> None:
        """Check that the caller may add and deploy models that contain code."""
        self.demand(ProjectRole.DEPLOYER, project)
        if self.role(project) is not ProjectRole.ADMIN and not self.may_run_code & {project, "*"}:
            raise NotPermittedError(
                RefusalKind.FORBIDDEN, f"{self.name}: may not use models that run code in '{project}'"
            )


def permits(demand: Callable[..., None], *arguments: object) -> bool:
    """Return whether a caller satisfies one of their `demand` methods."""
    try:
        demand(*arguments)
    except NotPermittedError:
        return False
    return True
