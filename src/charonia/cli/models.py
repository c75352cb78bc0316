"""`charonia models`: the registry of a platform.

Exit status: 0 done, 1 refused or not found, 2 for invalid arguments.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from charonia.cli.command_line import Option, flag
from charonia.cli.platform_access import (
    THIS_MACHINE,
    Columns,
    PlatformAccess,
    Resource,
    Verb,
    at,
    facts,
    follow,
    listed,
    moment,
    table,
)
from charonia.cli.values import integer, one_of
from charonia.core.errors import ServingError, internal, invalid, not_found
from charonia.platform.api_client import PlatformClient, path_of
from charonia.platform.models.git import is_git
from charonia.platform.models.sources import default_name
from charonia.stores.location import is_store
from charonia.tools.report.quantities import size
from charonia.wire.traffic import CANARY, STRATEGIES

_MLFLOW = "models:/"


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """The options of all verbs."""

    search: str = ""
    tag: str = ""
    model: str = ""
    version: str = ""
    source: str = ""
    name: str = ""
    notes: str = ""
    take: int = 0
    mlflow: str = ""
    secret: str = ""
    hook: str = ""
    every_s: int = 0
    deployment: str = ""
    strategy: str = CANARY
    is_there: bool = False
    waits: bool = True
    access: PlatformAccess = THIS_MACHINE


def add_versions(client: PlatformClient, options: RegistryOptions, *, reuse: bool = False) -> list[tuple[str, int]]:
    """Add a version, or one of each model of a repository, optionally wait for the checks, and return them.

    Args:
        reuse: Whether a version that has the same files will do.
    """
    name = options.name or default_name(options.source)
    project = options.access.project
    kind, source_place = _source(client, options)
    source = {"kind": kind, "place": source_place, "take": options.take, "server": options.mlflow}
    source |= {"secret": options.secret} if options.secret else {}
    place = path_of("projects", project, "models", name, "versions")
    added = client.call("POST", place, {"source": source, "notes": options.notes})
    model, number = str(added["model"]), int(added["number"])
    place = path_of("projects", project, "models", model, "versions", number)
    if not options.waits:
        return [(model, number)]
    try:
        versions = follow(client, added["task"])["result"].get("versions")
    except ServingError:
        same = client.call("GET", place)["report"]["same_as"]
        if not (reuse and same):
            raise
        client.call("DELETE", place)
        return [(model, int(same))]
    problems = []
    for each in versions or ():
        try:
            if each["task"]:
                follow(client, each["task"])
        except ServingError as error:
            problems.append(error.message)
    if problems:
        raise internal("\n".join(problems))
    return [(each["model"], each["number"]) for each in versions or [{"model": model, "number": number}]]


def files_of(source: Path) -> dict[str, Path]:
    """Return the files to upload by their target path: below the name of the folder, if the source is a folder."""
    if source.is_file():
        return {source.name: source}
    source = source.resolve()
    found = {path.relative_to(source.parent).as_posix(): path for path in sorted(source.rglob("*")) if path.is_file()}
    if not found:
        raise not_found(f"'{source}' has no files" if source.exists() else f"there is no '{source}' on this machine")
    return found


def _source(client: PlatformClient, options: RegistryOptions) -> tuple[str, str]:
    """Return kind and place of a source, after its files are sent where it is on this machine."""
    if options.is_there:
        return "folder", options.source
    if options.source.startswith(_MLFLOW):
        return "mlflow", options.source
    if is_git(options.source):
        return "git", options.source
    if is_store(options.source):
        return "address", options.source
    batch = client.send_files(options.access.project, files_of(Path(options.source).expanduser()), _show_progress)
    return "upload", batch


def _show_progress(sent: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if sent == total else ""
        sys.stderr.write(f"\rsending {size(sent)} of {size(total)}{end}")


def _list(client: PlatformClient, options: RegistryOptions) -> int:
    place = path_of("projects", options.access.project, "models")
    models = listed(client, place, "models", search=options.search, tag=options.tag)
    rows = ({**_NO_VERSION, "created": each["created"], **(each["latest"] or {}), "model": each} for each in models)
    columns: Columns = {
        "Model": lambda row: row["model"]["name"],
        "Latest": "number",
        **_VERSION,
        "Added": at("created"),
        "Tags": lambda row: ", ".join(row["model"]["tags"]),
    }
    print(table(columns, rows))
    return 0


def _show(client: PlatformClient, options: RegistryOptions) -> int:
    name, _, number = options.model.partition("/")
    number = number or options.version
    place = path_of("projects", options.access.project, "models", name)
    found = client.call("GET", f"{place}/versions/{quote(number, safe='')}" if number else place)
    print("\n".join(version_text(found) if number else model_text(found)))
    return 0


def _add(client: PlatformClient, options: RegistryOptions) -> int:
    for model, number in add_versions(client, options):
        print(f"{model}/{number}")
    return 0


def _follow(client: PlatformClient, options: RegistryOptions) -> int:
    if not (options.source and (options.hook or options.every_s)):
        raise invalid("expected the address of a Git repository, and --hook or --every")
    place = path_of(
        "projects", options.access.project, "models", options.name or default_name(options.source), "follow"
    )
    wanted = {name: getattr(options, name) for name in ("secret", "hook", "every_s", "deployment", "strategy")}
    found = client.call("PUT", place, {"place": options.source, **wanted})
    if options.every_s:
        print(f"{options.source}: polled every {options.every_s} s")
    if options.hook:
        hook = f"add a webhook for pushes, JSON, with the value of secret '{options.hook}', to {found['path']}"
        print(f"{options.source}: {hook}")
    return 0


def _unfollow(client: PlatformClient, options: RegistryOptions) -> int:
    client.call("DELETE", path_of("projects", options.access.project, "models", options.model, "follow"))
    print(f"{options.model}: follows no branch")
    return 0


def model_text(model: Mapping[str, Any]) -> list[str]:
    return [
        model["name"],
        *([model["description"]] if model["description"] else []),
        *facts({"owner": model["owner"], "tags": ", ".join(model["tags"])}),
        *facts(model["links"]),
        *facts({"deployed in": ", ".join(model["deployments"])}),
        "",
        table({"Version": "number", **_VERSION, "Added": at("created"), "By": "author"}, model["versions"]),
    ]


def version_text(version: Mapping[str, Any]) -> list[str]:
    """Return a version in words."""
    report = version["report"]
    tensors = [{**each, "kind": kind} for kind in ("inputs", "outputs") for each in report[kind]]
    columns: Columns = {"": "kind", "Name": "name", "Type": "data_type", "Shape": _shape}
    named = {
        "state": version["state"],
        "problem": report["problem"],
        "hint": report["hint"],
        "backend": report["backend"],
        "size": size(version["size"]),
        "from": version["source"],
        "added": f"{moment(version['created'])} by {version['author']}",
        "calls": ", ".join(report["calls"]),
        "runs code": "; ".join(report["code"]),
        "loads": report["load"],
        "needs": ", ".join(each["name"] for each in report["needs"]),
        "deployed in": ", ".join(version["deployments"]),
        "notes": version["notes"],
    }
    return [
        f"{version['model']}/{version['number']}",
        *facts(named),
        *(f"warning: {text}" for text in report["warnings"]),
        *(["", table(columns, tensors)] if tensors else []),
    ]


def _shape(tensor: Mapping[str, Any]) -> str:
    return "x".join(map(str, tensor["shape"])) or "-"


_NO_VERSION: Mapping[str, Any] = {"number": "-", "state": "-", "backend": "-", "size": None}
_VERSION: Columns = {
    "State": "state",
    "Backend": lambda version: version["backend"] or "-",
    "Size": lambda version: "-" if version["size"] is None else size(version["size"]),
}

# fmt: off
RESOURCE = Resource(
    "charonia models", "Manage models with versions, on a platform.", RegistryOptions(),
    {
        "list": Verb("List models", _list, "List the models of a project.", "",
                     (Option("--search", "search", str, "TEXT",
                             "Only models with this in name, owner, description or tags"),
                      Option("--tag", "tag", str, "TAG", "Only models with this tag"))),
        "show": Verb("Show a model, or a version with its signature", _show,
                     "Show a model with its versions, or a version with its signature.", "MODEL [VERSION]",
                     (Option("MODEL", "model", str, "MODEL", "NAME or NAME/VERSION", default=""),
                      Option("--model-version VERSION", "version", str, "VERSION", "One version with its signature"))),
        "add": Verb("Add models from a file, a folder, a repository, an object store, Git or MLflow", _add,
                    """\
Add a version of a model: a file, a folder or an archive of this machine, which is sent; an address such as
s3://bucket/path; git+https://HOST/PATH[@REF][#FOLDER], git+ssh:// or git@HOST:PATH for a Git repository; or
models:/NAME/VERSION of MLflow. The platform checks it, as `charonia config` does. Of a model repository, all models
are added, under the names of their folders.""", "SOURCE",
                    (Option("SOURCE", "source", str, "SOURCE", "File, folder or URI of the model", default=""),
                     Option("--name", "name", str, "NAME", "Name of the model; default: name of the file or folder"),
                     Option("--notes", "notes", str, "TEXT", "Note on this version"),
                     Option("--take", "take", integer(0), "VERSION",
                            "Which version of a folder with several, 0 for the highest"),
                     Option("--mlflow", "mlflow", str, "URL", "Address of MLflow's server"),
                     Option("--secret", "secret", str, "NAME",
                            "Secret of the project: the store's credentials, a token, a deploy key"),
                     flag("--on-server", "is_there", True, "SOURCE is a folder of the platform's machine"),
                     flag("--no-wait", "waits", False, "Do not wait for the check"))),
        "follow": Verb("Add a version after each new commit of a Git repository", _follow, """\
Let a model follow a branch of a Git repository: a webhook of GitHub, GitLab or Gitea, or polling, adds a version after
each new commit, with the permissions that you have then, and --deployment gets it when it is ready.""", "SOURCE",
                       (Option("SOURCE", "source", str, "SOURCE", "Address of the branch and folder", default=""),
                        Option("--name", "name", str, "NAME", "Name of the model; default: name of the file or folder"),
                        Option("--hook", "hook", str, "NAME", "Secret of the project that the webhook is signed with"),
                        Option("--every", "every_s", integer(60, 86400), "SECONDS", "Interval of polls"),
                        Option("--secret", "secret", str, "NAME",
                               "Secret of the project: the store's credentials, a token, a deploy key"),
                        Option("--deployment", "deployment", str, "NAME", "Deployment that gets new versions"),
                        Option("--strategy", "strategy", one_of(STRATEGIES), "replace|beside|canary",
                               "How new versions get requests"))),
        "unfollow": Verb("Stop adding versions after pushes", _unfollow, "Let a model follow no branch.", "MODEL",
                         (Option("MODEL", "model", str, "MODEL", "Name of the model", default=""),)),
    },
)
# fmt: on

run = RESOURCE.run
