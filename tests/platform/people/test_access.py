from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.platform.people.access import Grant, NotPermittedError, Principal, ProjectRole

VIEWER, DEPLOYER, ADMIN = ProjectRole

ROLES = st.sampled_from(ProjectRole)


def may(who: Principal, role: ProjectRole, project: str = "") -> bool:
    try:
        who.demand(role, project)
    except NotPermittedError:
        return False
    return True


def may_use_code(who: Principal, project: str) -> bool:
    try:
        who.demand_code(project)
    except NotPermittedError:
        return False
    return True


@pytest.mark.parametrize("role", ProjectRole)
def test_a_role_includes_those_below_it_in_its_project_only(role: ProjectRole) -> None:
    who = Principal.of("ada", [Grant(role, "vision")])

    assert [may(who, each, "vision") for each in ProjectRole] == [each <= role for each in ProjectRole]
    assert not any(may(who, each, "other") or may(who, each) for each in ProjectRole)


@pytest.mark.parametrize("role", ProjectRole)
def test_a_role_everywhere_holds_in_every_project(role: ProjectRole) -> None:
    who = Principal.of("ada", [Grant(role)])

    assert all(may(who, each, "any") == may(who, each) == (each <= role) for each in ProjectRole)


def test_the_greater_of_two_roles_counts() -> None:
    who = Principal.of("ada", [Grant(ADMIN, "vision"), Grant(VIEWER), Grant(VIEWER, "vision")])

    assert (who.role("vision"), who.role("other")) == (ADMIN, VIEWER)


@pytest.mark.parametrize(
    ("grants", "expected"),
    [
        ([Grant(DEPLOYER, "vision")], {"vision": False, "other": False}),
        ([Grant(DEPLOYER, "vision", may_run_code=True)], {"vision": True, "other": False}),
        ([Grant(VIEWER, "vision", may_run_code=True)], {"vision": False, "other": False}),
        ([Grant(ADMIN, "vision")], {"vision": True, "other": False}),
        ([Grant(DEPLOYER, may_run_code=True)], {"vision": True, "other": True}),
        ([Grant(DEPLOYER), Grant(VIEWER, "vision", may_run_code=True)], {"vision": True, "other": False}),
        ([], {"vision": False, "other": False}),
    ],
)
def test_code_needs_a_deployer_who_may_or_an_administrator(grants: list[Grant], expected: Mapping[str, bool]) -> None:
    who = Principal.of("ada", grants)

    assert {project: may_use_code(who, project) for project in expected} == expected


def test_what_somebody_administers() -> None:
    assert Principal.of("ada", [Grant(ADMIN), Grant(VIEWER, "vision")]).administered() is None
    assert Principal.of("ada", [Grant(ADMIN, "a"), Grant(DEPLOYER, "b"), Grant(VIEWER)]).administered() == frozenset(
        {"a"}
    )
    with pytest.raises(NotPermittedError, match="expected the role admin in a project"):
        Principal.of("ada", [Grant(DEPLOYER)]).administered()


@given(st.dictionaries(st.sampled_from(["", "a", "b"]), st.tuples(ROLES, st.booleans())))
def test_a_principal_has_the_roles_that_it_was_made_of(roles: dict[str, tuple[ProjectRole, bool]]) -> None:
    grants = {Grant(role, project, code) for project, (role, code) in roles.items()}

    assert set(Principal.of("ada", grants).grants()) == grants
