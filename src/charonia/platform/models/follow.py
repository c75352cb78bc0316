"""Models that follow a branch: a signed push makes a version, and a deployment gets it if the model says so.

A push is only a sign: the platform fetches the address that the model follows, and nothing that the push names.

Source: the documentation of webhooks of GitHub, GitLab and Gitea.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from charonia.core.errors import RefusalKind, ServingError, invalid, not_found
from charonia.platform.artifacts.uploads import UploadFolder
from charonia.platform.database.tables import ModelRow, ProjectRow, TaskRow
from charonia.platform.models import arrival, registry
from charonia.platform.models.git import parse_git
from charonia.platform.models.records import ADD, AddedVersion
from charonia.platform.models.sources import VersionSource
from charonia.platform.people import audit, projects
from charonia.platform.people.access import Grant, NotPermittedError, Principal, ProjectRole, permits
from charonia.platform.people.secrets import ProjectSecrets
from charonia.platform.values import check_name

HOOK_SECRET_CHARS_MIN = 16

Strategy = Literal["replace", "beside", "canary"]

_PREFIX = "refs/heads/", "refs/tags/"


@dataclass(frozen=True, slots=True)
class Follow:
    """What a model follows.

    Attributes:
        place: Address of a Git repository with a branch or tag; none for the default branch.
        secret: Secret of the project with the repository's token or key, "" for none.
        hook: Secret of the project that the host signs its calls with.
        deployment: Deployment that gets new versions, "" for none.
        strategy: How they get requests.
        author: Name of the caller who has set it up, with whose permissions versions are added.
        path: Path that the host calls.
    """

    place: str
    hook: str
    secret: str = ""
    deployment: str = ""
    strategy: Strategy = "canary"
    author: str = ""
    path: str = ""


def put(session: Session, secrets: ProjectSecrets, who: Principal, project: str, name: str, wanted: Follow) -> Follow:
    """Let a model follow a branch; a model that does not exist is created."""
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    VersionSource("git", wanted.place, secret=wanted.secret).check()
    if wanted.deployment:
        check_name("deployment", wanted.deployment)
    for each in (wanted.hook, wanted.secret):
        value = secrets.value(session, found.id, each) if each or each is wanted.hook else ""
        if each is wanted.hook and len(value.strip()) < HOOK_SECRET_CHARS_MIN:
            raise invalid(f"secret '{each}': expected at least {HOOK_SECRET_CHARS_MIN} characters to sign calls with")
    owner = _owner(session, found.id, name) or registry.create(session, who, project, name, registry.ModelDetails())
    kept = {**asdict(wanted), "author": who.name, "path": f"/hooks/{project}/{name}"}
    may = {
        "may_run_code": permits(who.demand_code, project),
        "may_read_folders": permits(who.demand, ProjectRole.ADMIN),
    }
    owner.follows = {"follow": kept, **may}
    audit.note(session, who, "model.follow", f"{project}/{name}", kept, project_id=found.id)
    return Follow(**kept)


def get(session: Session, who: Principal, project: str, name: str) -> Follow:
    """Return what a model follows."""
    owner = registry.find(session, projects.find(session, who, project), name)
    if not owner.follows:
        raise not_found(f"model '{name}' follows no branch")
    return Follow(**owner.follows["follow"])


def remove(session: Session, who: Principal, project: str, name: str) -> None:
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    registry.find(session, found, name).follows = {}
    audit.note(session, who, "model.unfollow", f"{project}/{name}", project_id=found.id)


def is_signed(headers: Mapping[str, str], body: bytes, secret: str) -> bool:
    """Whether a call has the signature of GitHub or Gitea, or GitLab's token."""
    digest = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    expected = {"x-hub-signature-256": f"sha256={digest}", "x-gitea-signature": digest, "x-gitlab-token": secret}
    name = next((name for name in expected if name in headers), "")
    return bool(name) and hmac.compare_digest(headers[name].encode(), expected[name].encode())


def is_push(headers: Mapping[str, str], body: bytes, ref: str) -> bool:
    """Whether a call tells of commits on a branch or tag, "" for the default branch."""
    events = [headers.get(f"x-{host}-event", "") for host in ("github", "gitea", "gitlab")]
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise invalid(
            "body of the push: expected JSON", hint="the content type of the webhook is application/json"
        ) from None
    if not isinstance(found, dict) or not any("push" in event.lower() for event in events):
        return False
    if not ref:
        about: object = next((found[key] for key in ("repository", "project") if _default(found.get(key))), {})
        ref = _default(about) or str(found.get("ref")).removeprefix(_PREFIX[0])
    is_gone = not str(found.get("after", "1")).strip("0")
    return not is_gone and found.get("ref") in [prefix + ref for prefix in _PREFIX]


def _default(about: object) -> str:
    return str(about.get("default_branch") or "") if isinstance(about, dict) else ""


def received(
    session: Session,
    uploads: UploadFolder,
    secrets: ProjectSecrets,
    project: str,
    name: str,
    headers: Mapping[str, str],
    body: bytes,
) -> AddedVersion | None:
    """Add a version after a push; None for a call about something else. A version that waits already will do.

    Raises:
        NotPermittedError: The call is not signed, or nothing is followed there.
    """
    found = session.scalar(select(ProjectRow).where(ProjectRow.name == project))
    owner = _owner(session, found.id, name) if found is not None else None
    if found is None or owner is None or not owner.follows:
        raise _refused()
    follow = Follow(**owner.follows["follow"])
    try:
        secret = secrets.value(session, found.id, follow.hook).strip()
    except ServingError:  # it was removed
        raise _refused() from None
    if not is_signed(headers, body, secret):
        raise _refused()
    if not is_push(headers, body, parse_git(follow.place).ref):
        return None
    source = VersionSource("git", follow.place, secret=follow.secret)
    waiting = select(TaskRow).where(TaskRow.project_id == found.id, TaskRow.kind == ADD, TaskRow.state == "waiting")
    for task in session.scalars(waiting):
        if task.subject.startswith(f"{name}/") and task.arguments.get("source") == asdict(source):
            return AddedVersion(name, int(task.subject.rpartition("/")[2]), task.id)
    grants = [Grant(ProjectRole.DEPLOYER, project, bool(owner.follows["may_run_code"]))]
    grants += [Grant(ProjectRole.ADMIN)] if owner.follows["may_read_folders"] else []
    who = Principal.of(follow.author, grants)
    roll = {"deployment": follow.deployment, "strategy": follow.strategy} if follow.deployment else {}
    return arrival.add(session, uploads, who, project, name, source, "after a push", roll)


def _owner(session: Session, project_id: int, name: str) -> ModelRow | None:
    return session.scalar(select(ModelRow).where(ModelRow.project_id == project_id, ModelRow.name == name))


def _refused() -> NotPermittedError:
    return NotPermittedError(RefusalKind.FORBIDDEN, "the signature of the call does not fit its address")
