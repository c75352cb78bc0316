"""Models that follow a branch: a new commit makes a version, and a deployment gets it if the model says so.

The platform hears of commits by signed pushes, and by polling. A push is only a sign: the platform fetches the address
that the model follows, and nothing that the push names.

Source: the documentation of webhooks of GitHub, GitLab and Gitea.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from sqlalchemy import String, cast, select
from sqlalchemy.orm import Session, joinedload

from charonia.core.errors import RefusalKind, ServingError, invalid, not_found
from charonia.platform.artifacts.uploads import UploadFolder
from charonia.platform.database.lease import RepeatedStep
from charonia.platform.database.tables import ModelRow, ProjectRow, TaskRow, named
from charonia.platform.models import registry, version_import
from charonia.platform.models.git import latest_commit, parse_git
from charonia.platform.models.records import ADD, AddedVersion
from charonia.platform.models.sources import ANY, PLACE_CHARS_MAX, AllowedHosts, VersionSource
from charonia.platform.models.version_import import VersionTasks
from charonia.platform.people import audit, keys, projects
from charonia.platform.people.access import NotPermittedError, Principal, ProjectRole, permits
from charonia.platform.people.secrets import ProjectSecrets
from charonia.platform.values import Number, RequestBody, Text, check_name

HOOK_SECRET_CHARS_MIN = 16

EVERY_S_MIN = 60
EVERY_S_MAX = 86_400

LOOK_S = 10.0
"""Interval between checks which models are due."""

POLLS_AT_ONCE = 20
"""Most branches that are polled in one check."""

_PREFIX = "refs/heads/", "refs/tags/"


class FollowBody(RequestBody):
    """The Git branch that a model follows."""

    place: Text = Field(max_length=PLACE_CHARS_MAX, description="git+https://host/group/repo.git@BRANCH#FOLDER")
    hook: Text = Field(
        default="", description="Secret that the host of the repository signs its calls with, empty for none."
    )
    every_s: Number = Field(default=0, description="Interval of polls in seconds, from a minute to a day; 0 for none.")
    secret: Text = Field(default="", description="Secret with the token or key of the repository.")
    deployment: Text = Field(default="", description="Deployment that gets new versions, empty for none.")
    strategy: Literal["replace", "beside", "canary"] = Field(default="canary", description="How they get requests.")


class Follow(FollowBody):
    """The Git branch that a model follows, and the state after the latest poll or push.

    Attributes:
        author: Name of the caller who has set it up, with whose present permissions versions are added.
        path: Path that the host calls.
        looked: When the branch was polled, or a push came, in seconds since the epoch; 0 for never.
        commit: The commit at the last poll.
        added: The last version that was added.
        problem: Why the last poll failed, "" if it did not.
    """

    author: str = ""
    path: str = ""
    looked: float = 0.0
    commit: str = ""
    added: int = 0
    problem: str = ""


def put(
    session: Session, secrets: ProjectSecrets, who: Principal, project: str, name: str, wanted: FollowBody
) -> Follow:
    """Let a model follow a branch; a model that does not exist is created."""
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    VersionSource(kind="git", place=wanted.place, secret=wanted.secret).check()
    if wanted.deployment:
        check_name("deployment", wanted.deployment)
    if not (wanted.hook or wanted.every_s):
        raise invalid("expected `hook`, a secret that calls of the host are signed with, or `every_s` for polls")
    if wanted.every_s and not EVERY_S_MIN <= wanted.every_s <= EVERY_S_MAX:
        raise invalid(f"every_s: expected {EVERY_S_MIN} to {EVERY_S_MAX} seconds, or 0, got {wanted.every_s}")
    if wanted.secret:
        secrets.value(session, found.id, wanted.secret)
    if wanted.hook and len(secrets.value(session, found.id, wanted.hook).strip()) < HOOK_SECRET_CHARS_MIN:
        raise invalid(
            f"secret '{wanted.hook}': expected at least {HOOK_SECRET_CHARS_MIN} characters to sign calls with"
        )
    owner = named(session, ModelRow, found.id, name) or registry.create(
        session, who, project, name, registry.DetailsBody()
    )
    kept = Follow(**wanted.model_dump(), author=who.name, path=f"/hooks/{project}/{name}")
    owner.follows = {"follow": kept.model_dump(), "by": who.id}
    audit.record(session, who, "model.follow", f"{project}/{name}", kept.model_dump(), project_id=found.id)
    return kept


def get(session: Session, who: Principal, project: str, name: str) -> Follow:
    """Return what a model follows."""
    owner = registry.find(session, projects.find(session, who, project), name)
    if not owner.follows:
        raise not_found(f"model '{name}' follows no branch")
    return Follow(**owner.follows["follow"])


def every(session: Session, who: Principal, project: str) -> Sequence[tuple[str, Follow]]:
    """Return the models of a project that follow a branch, by name, and what they follow."""
    found = projects.find(session, who, project)
    rows = session.scalars(_following().where(ModelRow.project_id == found.id))
    return [(row.name, Follow(**row.follows["follow"])) for row in rows]


def remove(session: Session, who: Principal, project: str, name: str) -> None:
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    registry.find(session, found, name).follows = {}
    audit.record(session, who, "model.unfollow", f"{project}/{name}", project_id=found.id)


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
    owner = named(session, ModelRow, found.id, name) if found is not None else None
    if found is None or owner is None or not owner.follows:
        raise _refused()
    follow = Follow(**owner.follows["follow"])
    if not follow.hook:
        raise _refused()
    try:
        secret = secrets.value(session, found.id, follow.hook).strip()
    except ServingError:  # it was removed
        raise _refused() from None
    if not is_signed(headers, body, secret):
        raise _refused()
    if not is_push(headers, body, parse_git(follow.place).ref):
        return None
    return _add(session, uploads, found, owner, "after a push", looked=time.time())


def _add(
    session: Session, uploads: UploadFolder, project: ProjectRow, owner: ModelRow, notes: str, **seen: Any
) -> AddedVersion:
    """Add a version of what a model follows, and record what was seen. A version that waits already will do."""
    follow = Follow(**owner.follows["follow"])
    source = VersionSource(kind="git", place=follow.place, secret=follow.secret)
    waiting = select(TaskRow).where(TaskRow.project_id == project.id, TaskRow.kind == ADD, TaskRow.state == "waiting")
    for task in session.scalars(waiting):
        if task.subject.startswith(f"{owner.name}/") and task.arguments.get("source") == source.model_dump():
            return AddedVersion(owner.name, int(task.subject.rpartition("/")[2]), task.id)
    who = keys.standing_deployer(session, owner.follows.get("by", ""), follow.author, project.name)
    roll = {"deployment": follow.deployment, "strategy": follow.strategy} if follow.deployment else {}
    added = version_import.add(session, uploads, who, project.name, owner.name, source, notes, roll)
    _record(owner, added=added.number, problem="", **seen)
    return added


def _record(owner: ModelRow, **seen: Any) -> None:
    owner.follows = {**owner.follows, "follow": {**owner.follows["follow"], **seen}}


class Polls:
    """Polls the branches of models.

    Args:
        work: What carries out the tasks of the registry.
        has_turn: Whether this platform polls now.
    """

    def __init__(self, work: VersionTasks, has_turn: Callable[[], bool] = lambda: True) -> None:
        self._work = work
        self.loop = RepeatedStep("polls of branches", lambda: self.step(time.time()), LOOK_S, has_turn)

    def step(self, now_s: float) -> None:
        """Poll the branches that are due. Several platforms over one database poll each one time."""
        due = [number for number, follow in self._all() if _is_due(follow, now_s)][:POLLS_AT_ONCE]
        for number in due:
            if self.loop.is_closing:
                return
            with self._work.database.transaction() as session:
                row = session.scalar(_following().where(ModelRow.id == number).with_for_update(of=ModelRow))
                if row is None or not _is_due(Follow(**row.follows["follow"]), now_s):
                    continue
                _record(row, looked=now_s)
                follow, project_id = Follow(**row.follows["follow"]), row.project_id
                by, project = row.follows.get("by", ""), row.project.name
            self._poll(number, follow, project_id, project, by)

    def _all(self) -> Sequence[tuple[int, Follow]]:
        with self._work.database.reading() as session:
            return [(row.id, Follow(**row.follows["follow"])) for row in session.scalars(_following())]

    def _poll(self, number: int, follow: Follow, project_id: int, project: str, by: str) -> None:
        """Add a version if the commit has changed, and record a failure."""
        try:
            address = parse_git(follow.place)
            with self._work.database.reading() as session:
                who = keys.standing_deployer(session, by, follow.author, project)
                may_name_any = permits(who.demand, ProjectRole.ADMIN)
                AllowedHosts((ANY,) if may_name_any else self._work.hosts.entries).check(address.url)
                secret = self._work.secrets.value(session, project_id, follow.secret) if follow.secret else ""
            with self._work.store.local.scratch() as folder:
                commit = latest_commit(address, secret, folder, self._work.isolation)
            with self._work.database.transaction() as session:
                row = session.scalar(_following().where(ModelRow.id == number).with_for_update(of=ModelRow))
                if row is None or row.follows["follow"]["place"] != follow.place:
                    return
                if commit != follow.commit:
                    _add(session, self._work.uploads, row.project, row, f"commit {commit[:12]}", commit=commit)
                _record(row, commit=commit, problem="")
        except ServingError as error:
            with self._work.database.transaction() as session:
                row = session.scalar(_following().where(ModelRow.id == number))
                if row is not None:
                    _record(row, problem=error.message)


def _is_due(follow: Follow, now_s: float) -> bool:
    return bool(follow.every_s) and now_s - follow.looked >= follow.every_s


def _following() -> Any:
    query = select(ModelRow).where(cast(ModelRow.follows, String) != "{}").order_by(ModelRow.name)
    return query.options(joinedload(ModelRow.project))


def _refused() -> NotPermittedError:
    return NotPermittedError(RefusalKind.FORBIDDEN, "the signature of the call does not fit its address")
