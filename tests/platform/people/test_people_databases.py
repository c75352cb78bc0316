"""People on each kind of database."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.platform.conftest import on_both

from charonia.core.errors import Code, ServingError
from charonia.platform.database.connection import Database
from charonia.platform.people import audit, keys, projects, users
from charonia.platform.people.access import Grant, Principal, ProjectRole

ROOT = Principal.of("root", [Grant(ProjectRole.ADMIN)])
CALLERS = 8


@on_both
def test_a_link_that_many_use_at_once_signs_in_one(database: Database) -> None:
    with database.transaction() as session:
        link = users.new_link(session, users.owner(session))

    def use(_: int) -> str | None:
        with database.transaction() as session:
            return users.use_link(session, link, "")

    with ThreadPoolExecutor(CALLERS) as pool:
        cookies = [cookie for cookie in pool.map(use, range(CALLERS)) if cookie is not None]
    with database.reading() as session:
        [visitor] = [users.visitor(session, cookie, "") for cookie in cookies]
    assert visitor is not None
    assert visitor.principal.everywhere is ProjectRole.ADMIN


@on_both
def test_a_name_that_many_want_at_once_is_given_once(database: Database) -> None:
    def make(_: int) -> bool:
        try:
            with database.transaction() as session:
                keys.create(session, ROOT, "ci", [Grant(ProjectRole.VIEWER)])
        except ServingError as error:
            assert error.code is Code.ALREADY_EXISTS  # noqa: PT017 # of one thread of many
            return False
        return True

    with ThreadPoolExecutor(CALLERS) as pool:
        assert sum(pool.map(make, range(CALLERS))) == 1


@on_both
def test_who_leaves_takes_roles_and_sessions_along(database: Database) -> None:
    with database.transaction() as session:
        projects.create(session, ROOT, "vision")
        ada = users.create(session, ROOT, "Ada")
        users.set_role(session, ROOT, ada.id, "vision", Grant(ProjectRole.ADMIN, "vision"))
        cookie = users.begin_session(session, ada, "")
        secret = keys.create(session, ROOT, "ci", [Grant(ProjectRole.VIEWER, "vision")])[1]
    with database.reading() as session:
        visitor = users.visitor(session, cookie, "")
        assert visitor is not None
        assert visitor.principal.roles == {"vision": ProjectRole.ADMIN}
        assert [key.name for key in keys.visible(session, visitor.principal)] == ["ci"]
        assert [row.subject for row in audit.entries(session, visitor.principal)] == ["Ada", "vision"]
    with database.transaction() as session:
        users.remove(session, ROOT, ada.id)
        keys.revoke(session, ROOT, "ci")
    with database.reading() as session:
        assert users.visitor(session, cookie, "") is None
        assert keys.holder(session, secret, "") is None


@on_both
def test_a_change_that_fails_leaves_nothing_in_the_log(database: Database) -> None:
    def fail_later() -> None:
        with database.transaction() as session:
            projects.create(session, ROOT, "vision")
            projects.create(session, ROOT, "vision")

    with pytest.raises(ServingError, match="project 'vision' already exists"):
        fail_later()
    with database.reading() as session:
        assert audit.entries(session, ROOT) == []
