"""`charonia people`: API keys, users and their roles on a platform, secrets of projects, and its audit log.

Exit status: 0 done, 1 refused or not found, 2 for invalid arguments.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from getpass import getpass
from typing import Any

from charonia.cli.command_line import Option, flag
from charonia.cli.platform_access import PAGE, THIS_MACHINE, Columns, PlatformAccess, Resource, Verb, at, listed, table
from charonia.cli.values import integer, number, one_of
from charonia.core.errors import invalid, not_found
from charonia.platform.api_client import PlatformClient, path_of

DAY_S = 86400.0
ROLES = ("none", "viewer", "deployer", "admin")


@dataclass(frozen=True, slots=True)
class PeopleOptions:
    """The options of all verbs."""

    name: str = ""
    email: str = ""
    role: str = "viewer"
    everywhere: bool = False
    code: bool = False
    days: float = 0.0
    entries: int = 50
    as_json: bool = False
    access: PlatformAccess = THIS_MACHINE


_USER = Option("NAME", "name", str, "USER", "Number, name or e-mail address", default="")
_KEY_NAME = Option("NAME", "name", str, "NAME", "Name of the key", default="")
_SECRET_NAME = Option("NAME", "name", str, "NAME", "Name of the secret", default="")
_ROLE = (
    Option("--role", "role", one_of(ROLES), "ROLE", "viewer, deployer or admin; none removes a user's role"),
    flag("--everywhere", "everywhere", True, "In all projects, not just in --project"),
    flag("--code", "code", True, "A deployer may use models that hold code"),
)


def _keys(client: PlatformClient, options: PeopleOptions) -> int:
    columns: Columns = {
        "Name": "name",
        "Roles": _roles,
        "Made": at("created"),
        "Used": at("used"),
        "Expires": at("expires"),
    }
    print(table(columns, listed(client, path_of("keys"))))
    return 0


def _add_key(client: PlatformClient, options: PeopleOptions) -> int:
    expires = time.time() + options.days * DAY_S if options.days else 0.0
    wanted = {"name": _named(options.name), "roles": [_wanted(options)], "expires": expires}
    print(client.call("POST", path_of("keys"), wanted)["key"])
    return 0


def _revoke(client: PlatformClient, options: PeopleOptions) -> int:
    client.call("DELETE", path_of("keys", _named(options.name)))
    return 0


def _users(client: PlatformClient, options: PeopleOptions) -> int:
    columns: Columns = {"Number": "id", "Name": "name", "E-mail": "email", "Signed in by": "issuer", "Roles": _roles}
    print(table(columns, listed(client, path_of("users"))))
    return 0


def _add_user(client: PlatformClient, options: PeopleOptions) -> int:
    made = client.call("POST", path_of("users"), {"name": _named(options.name), "email": options.email})
    print(client.call("POST", path_of("users", made["id"], "link"))["url"])
    return 0


def _link(client: PlatformClient, options: PeopleOptions) -> int:
    print(client.call("POST", path_of("users", _user(client, options.name), "link"))["url"])
    return 0


def _set_role(client: PlatformClient, options: PeopleOptions) -> int:
    user = client.call("PUT", path_of("users", _user(client, options.name), "role"), _wanted(options))
    print(f"{user['name']}: {_roles(user)}")
    return 0


def _remove(client: PlatformClient, options: PeopleOptions) -> int:
    client.call("DELETE", path_of("users", _user(client, options.name)))
    return 0


def _audit(client: PlatformClient, options: PeopleOptions) -> int:
    project = "" if options.everywhere else options.access.project
    found, before = list[dict[str, Any]](), 0
    while len(found) < options.entries:
        query = {"project": project, "before": before, "limit": min(PAGE, options.entries - len(found))}
        page = client.call("GET", path_of("audit"), query=query)
        if not page:
            break
        found += page
        before = page[-1]["id"]
    columns: Columns = {"Time": at("time"), "Who": "who", "What": "action", "Of": "subject", "From": "address"}
    print("\n".join(map(json.dumps, found)) if options.as_json else table(columns, found))
    return 0


def _secrets(client: PlatformClient, options: PeopleOptions) -> int:
    columns: Columns = {"Name": "name", "Entered": at("created"), "By": "author"}
    print(table(columns, client.call("GET", _secret_path(options))))
    return 0


def _put_secret(client: PlatformClient, options: PeopleOptions) -> int:
    place = _secret_path(options, _named(options.name))
    value = getpass(f"Value of {options.name}: ") if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    client.call("PUT", place, {"value": value})
    return 0


def _remove_secret(client: PlatformClient, options: PeopleOptions) -> int:
    client.call("DELETE", _secret_path(options, _named(options.name)))
    return 0


def _secret_path(options: PeopleOptions, *name: str) -> str:
    return path_of("projects", options.access.project, "secrets", *name)


def _user(client: PlatformClient, wanted: str) -> int:
    if _named(wanted).isdecimal():
        return int(wanted)
    found = [each["id"] for each in listed(client, path_of("users")) if wanted in (each["name"], each["email"])]
    if not found:
        raise not_found(f"there is no user '{wanted}'", hint="`charonia people users` lists them")
    if len(found) > 1:
        raise invalid(f"several users are called '{wanted}': {', '.join(map(str, found))}", hint="give the number")
    return int(found[0])


def _named(name: str) -> str:
    if not name:
        raise invalid("expected a name, got none")
    return name


def _wanted(options: PeopleOptions) -> dict[str, Any]:
    project = "" if options.everywhere else options.access.project
    return {"role": options.role, "project": project, "may_run_code": options.code}


def _roles(holder: Mapping[str, Any]) -> str:
    texts = [
        f"{each['role']}{' with code' if each['may_run_code'] else ''} in {each['project'] or 'all projects'}"
        for each in holder["roles"]
    ]
    return ", ".join(texts) or "none"


# fmt: off
RESOURCE = Resource(
    "charonia people", "Keys, users, roles and secrets of a platform.", PeopleOptions(),
    {
        "keys": Verb("List API keys", _keys, "List the API keys with a role in a project that you administer."),
        "add-key": Verb("Create an API key", _add_key, "Create an API key, and print it one time only.", "NAME",
                        (_KEY_NAME, *_ROLE,
                         Option("--days", "days", number(0), "DAYS", "Days after which it expires, 0 for never"))),
        "revoke-key": Verb("Revoke an API key", _revoke, "Revoke an API key. The platform refuses it immediately.",
                           "NAME", (_KEY_NAME,)),
        "users": Verb("List the people who can sign in", _users, "List the people who can sign in."),
        "add-user": Verb("Add a user who signs in with links", _add_user,
                         "Add a user who signs in with links, and print a first link: it works one time, within a day.",
                         "NAME", (Option("NAME", "name", str, "NAME", "Their name", default=""),
                                  Option("--email", "email", str, "ADDRESS", "Their e-mail address"))),
        "link": Verb("Print a link that signs a user in", _link,
                     "Print a link that signs a user in, one time, within a day.", "USER", (_USER,)),
        "role": Verb("Give a user a role", _set_role,
                     "Give a user a role in a project, or in all projects. It replaces the previous role.",
                     "USER", (_USER, *_ROLE)),
        "remove-user": Verb("Remove a user", _remove, "Remove a user, and end the user's sessions.", "USER", (_USER,)),
        "secrets": Verb("List the secrets of a project", _secrets, "List the secrets of a project, without values."),
        "put-secret": Verb("Create a secret, or replace its value", _put_secret,
                           "Create a secret of a project, or replace its value, which is read from stdin.", "NAME",
                           (_SECRET_NAME,)),
        "remove-secret": Verb("Delete a secret", _remove_secret, "Delete a secret. Servers that run keep its value.",
                              "NAME", (_SECRET_NAME,)),
        "audit": Verb("Show who changed what", _audit, "Show who changed what, latest first.", "",
                      (Option("--entries", "entries", integer(1), "N", "How many"),
                       flag("--everywhere", "everywhere", True, "Entries of all projects that you may see"),
                       flag("--json", "as_json", True, "An entry is a line of JSON, with all its details"))),
    },
)
# fmt: on

run = RESOURCE.run
