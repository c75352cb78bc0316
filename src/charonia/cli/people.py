"""`charonia people`: API keys, users and their roles on a platform, and its audit log.

Exit status: 0 done, 1 refused or not found, 2 for invalid arguments.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.cli.command_line import CommandLine, Option, flag
from charonia.cli.platform_access import (
    ACCESS,
    THIS_MACHINE,
    PlatformAccess,
    PlatformSubcommand,
    connect,
    moment,
    run_subcommand,
    table,
)
from charonia.cli.values import integer, number
from charonia.core.errors import invalid, not_found
from charonia.platform.api_client import PlatformClient, path_of

PAGE = 200
"""Entries that are asked for at a time."""

DAY_S = 86400.0
ROLES = ("none", "viewer", "deployer", "admin")


@dataclass(frozen=True, slots=True)
class ListPeople:
    """Where to list them."""

    access: PlatformAccess = THIS_MACHINE


@dataclass(frozen=True, slots=True)
class NamedPerson:
    """A key or a user.

    Attributes:
        name: Name of the key; number, name or e-mail address of the user.
        access: The platform.
    """

    name: str = ""
    access: PlatformAccess = THIS_MACHINE


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """A role, and who gets it.

    Attributes:
        name: Name of a new key; number, name or e-mail address of a user.
        role: The role.
        everywhere: Whether it is for all projects.
        code: Whether a deployer may use models that hold code.
        days: Days after which a key expires, 0 for never.
        access: The platform, and the project of the role.
    """

    name: str = ""
    role: str = "viewer"
    everywhere: bool = False
    code: bool = False
    days: float = 0.0
    access: PlatformAccess = THIS_MACHINE


@dataclass(frozen=True, slots=True)
class AddUser:
    """Somebody who will sign in with links."""

    name: str = ""
    email: str = ""
    access: PlatformAccess = THIS_MACHINE


@dataclass(frozen=True, slots=True)
class ShowAudit:
    """Which changes to show.

    Attributes:
        entries: How many, the newest.
        everywhere: Whether those of all projects that the caller sees.
        as_json: Whether an entry is a line of JSON.
        access: The platform, and the project.
    """

    entries: int = 50
    everywhere: bool = False
    as_json: bool = False
    access: PlatformAccess = THIS_MACHINE


def _role(text: str) -> str:
    if text not in ROLES:
        raise ValueError(f"expected one of {', '.join(ROLES)}, got '{text}'")
    return text


_USER = Option("NAME", "name", str, "USER", "Number, name or e-mail address", default="")
_KEY_NAME = Option("NAME", "name", str, "NAME", "Name of the key", default="")
_ROLE = (
    Option("--role", "role", _role, "ROLE", "viewer, deployer or admin; none removes a user's role"),
    flag("--everywhere", "everywhere", True, "In all projects, not just in --project"),
    flag("--code", "code", True, "A deployer may use models that hold code"),
)


def _line(name: str, operands: str, intro: str, options: Sequence[Option], record: Any) -> CommandLine[Any]:
    return CommandLine(
        command=f"charonia people {name}",
        intro=f"usage: charonia people {name} [OPTIONS]{operands}\n\n{intro}\n",
        groups={"Options": (*options, *ACCESS)},
        record=record,
    )


KEYS = _line("keys", "", "List the API keys with a role in a project that you administer.", (), ListPeople())
ADD_KEY = _line(
    "add-key",
    " NAME",
    "Make an API key, and print it: it is shown this once.",
    (
        _KEY_NAME,
        *_ROLE,
        Option("--days", "days", number(0), "DAYS", "Days after which it expires, 0 for never"),
    ),
    RoleOptions(),
)
REVOKE = _line(
    "revoke-key", " NAME", "Remove an API key; calls with it are refused at once.", (_KEY_NAME,), NamedPerson()
)
USERS = _line("users", "", "List the people who can sign in.", (), ListPeople())
ADD_USER = _line(
    "add-user",
    " NAME",
    "Add somebody who signs in with links, and print the first one: it works once, within a day.",
    (
        Option("NAME", "name", str, "NAME", "Their name", default=""),
        Option("--email", "email", str, "ADDRESS", "Their e-mail address"),
    ),
    AddUser(),
)
LINK = _line("link", " USER", "Print a link that signs a user in, once, within a day.", (_USER,), NamedPerson())
ROLE = _line(
    "role",
    " USER",
    "Give a user a role in a project, or in all, in place of the one before.",
    (_USER, *_ROLE),
    RoleOptions(),
)
REMOVE = _line("remove-user", " USER", "Remove a user, and end their sessions.", (_USER,), NamedPerson())
AUDIT = _line(
    "audit",
    "",
    "Show who changed what, the newest first.",
    (
        Option("--entries", "entries", integer(1), "N", "How many"),
        flag("--everywhere", "everywhere", True, "Those of all projects that you may see"),
        flag("--json", "as_json", True, "An entry is a line of JSON, with all its details"),
    ),
    ShowAudit(),
)


def run(arguments: Sequence[str]) -> int:
    return run_subcommand("charonia people", "Keys, users and roles of a platform.", SUBCOMMANDS, arguments)


def _keys(given: ListPeople) -> int:
    rows = [
        (each["name"], _roles(each), moment(each["created"]), moment(each["used"]), moment(each["expires"]))
        for each in _all(connect(given.access), "keys")
    ]
    print(table(("Name", "Roles", "Made", "Used", "Expires"), rows))
    return 0


def _add_key(given: RoleOptions) -> int:
    expires = time.time() + given.days * DAY_S if given.days else 0.0
    wanted = {"name": _named(given.name), "roles": [_wanted(given)], "expires": expires}
    print(connect(given.access).call("POST", path_of("keys"), wanted)["key"])
    return 0


def _revoke(given: NamedPerson) -> int:
    connect(given.access).call("DELETE", path_of("keys", _named(given.name)))
    return 0


def _users(given: ListPeople) -> int:
    rows = [
        (each["id"], each["name"], each["email"], each["issuer"], _roles(each))
        for each in _all(connect(given.access), "users")
    ]
    print(table(("Number", "Name", "E-mail", "Signed in by", "Roles"), rows))
    return 0


def _add_user(given: AddUser) -> int:
    client = connect(given.access)
    made = client.call("POST", path_of("users"), {"name": _named(given.name), "email": given.email})
    print(client.call("POST", path_of("users", made["id"], "link"))["url"])
    return 0


def _link(given: NamedPerson) -> int:
    client = connect(given.access)
    print(client.call("POST", path_of("users", _user(client, given.name), "link"))["url"])
    return 0


def _set_role(given: RoleOptions) -> int:
    client = connect(given.access)
    user = client.call("PUT", path_of("users", _user(client, given.name), "role"), _wanted(given))
    print(f"{user['name']}: {_roles(user)}")
    return 0


def _remove(given: NamedPerson) -> int:
    client = connect(given.access)
    client.call("DELETE", path_of("users", _user(client, given.name)))
    return 0


def _audit(given: ShowAudit) -> int:
    client = connect(given.access)
    project = "" if given.everywhere else given.access.project
    found, before = list[dict[str, Any]](), 0
    while len(found) < given.entries:
        query = {"project": project, "before": before, "limit": min(PAGE, given.entries - len(found))}
        page = client.call("GET", path_of("audit"), query=query)
        if not page:
            break
        found += page
        before = page[-1]["id"]
    if given.as_json:
        print("\n".join(map(json.dumps, found)))
        return 0
    rows = [(moment(each["time"]), each["who"], each["action"], each["subject"], each["address"]) for each in found]
    print(table(("Time", "Who", "What", "Of", "From"), rows))
    return 0


def _all(client: PlatformClient, what: str) -> Iterator[Mapping[str, Any]]:
    offset = 0
    while page := client.call("GET", path_of(what), query={"limit": PAGE, "offset": offset}):
        yield from page
        offset += len(page)


def _user(client: PlatformClient, wanted: str) -> int:
    """Return the number of a user.

    Raises:
        ServingError: NOT_FOUND if nobody is called so; INVALID_ARG if several are.
    """
    if _named(wanted).isdecimal():
        return int(wanted)
    found = [each["id"] for each in _all(client, "users") if wanted in (each["name"], each["email"])]
    if not found:
        raise not_found(f"there is no user '{wanted}'", hint="`charonia people users` lists them")
    if len(found) > 1:
        raise invalid(f"several users are called '{wanted}': {', '.join(map(str, found))}", hint="give the number")
    return int(found[0])


def _named(name: str) -> str:
    if not name:
        raise invalid("expected a name, got none")
    return name


def _wanted(given: RoleOptions) -> dict[str, Any]:
    project = "" if given.everywhere else given.access.project
    return {"role": given.role, "project": project, "may_run_code": given.code}


def _roles(holder: Mapping[str, Any]) -> str:
    texts = [
        f"{each['role']}{' with code' if each['may_run_code'] else ''} in {each['project'] or 'all projects'}"
        for each in holder["roles"]
    ]
    return ", ".join(texts) or "none"


SUBCOMMANDS = {
    "keys": PlatformSubcommand("List API keys", KEYS, _keys),
    "add-key": PlatformSubcommand("Make an API key", ADD_KEY, _add_key),
    "revoke-key": PlatformSubcommand("Remove an API key", REVOKE, _revoke),
    "users": PlatformSubcommand("List the people who can sign in", USERS, _users),
    "add-user": PlatformSubcommand("Add somebody who signs in with links", ADD_USER, _add_user),
    "link": PlatformSubcommand("Print a link that signs a user in", LINK, _link),
    "role": PlatformSubcommand("Give a user a role", ROLE, _set_role),
    "remove-user": PlatformSubcommand("Remove a user", REMOVE, _remove),
    "audit": PlatformSubcommand("Show who changed what", AUDIT, _audit),
}
