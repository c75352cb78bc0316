"""`charonia platform`: registry, environments and deployments of models, with pages and an API.

Exit status: 0 when it was ended by a signal, 1 when it cannot start, 2 for invalid arguments.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec

from charonia.cli import logs, people
from charonia.cli.command_line import CommandLine, Option, carry_out, joined
from charonia.cli.platform_access import THIS_MACHINE, Columns, PlatformAccess, Resource, Verb, at, table
from charonia.cli.values import file_text, filled, integer, names, number, one_of, path, path_text
from charonia.core.errors import unsupported
from charonia.install_hint import extra_hint
from charonia.platform.api_client import PlatformClient, path_of
from charonia.platform.data_folder import DEFAULT_FOLDER
from charonia.platform.settings import IN_CLUSTER, PlatformSettings
from charonia.wire.log_settings import LogOptions

SECRET_VARIABLE = "CHARONIA_OIDC_SECRET"
DATABASE_VARIABLE = "CHARONIA_DATABASE"

MODULES = ("alembic", "authlib", "fastapi", "httpx2", "jinja2", "obstore", "python_multipart", "sqlalchemy", "uvicorn")
"""Modules that the extra installs."""

TALKATIVE = ("alembic", "httpx2")
"""Libraries whose ordinary messages are of no use here."""

_PORTS = re.compile(r"(\d{1,5})-(\d{1,5})")


def _ports(text: str) -> tuple[int, int]:
    match = _PORTS.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected FIRST-LAST, got '{text}'")
    return int(match[1]), int(match[2])


def _images(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [part.strip().partition("=") for part in text.split(",")]
    for environment, _, image in pairs:
        if not environment or not image:
            raise ValueError(f"expected ENVIRONMENT=IMAGE, got '{text}'")
    return tuple((environment, image) for environment, _, image in pairs)


def _kubeconfig(text: str) -> str:
    return text if text == IN_CLUSTER else path_text(text)


def _program(text: str) -> str:
    return path_text(text) if os.sep in text else filled(text)


def _secret(text: str) -> str:
    return file_text(text).strip()


# fmt: off
LINE = CommandLine(
    command="charonia platform",
    intro="""\
usage: charonia platform [OPTIONS]

Keep models, environments and deployments, with pages, an API and the commands `charonia models`, `environments`,
`deploy`, `apply`, `rollout` and `people`. It prints a link that signs you in.
""",
    groups={
        "Options": (
            Option("--data", "data", path, "PATH", "Folder for all persistent data"),
            Option("--database", "database", filled, "URL",
                   f"postgresql://USER@HOST/NAME in place of SQLite in the data folder; also as {DATABASE_VARIABLE}"),
            Option("--artifacts", "artifacts", path_text, "PATH|URL",
                   "Store of models' files in place of the data folder: another folder, s3://, gs:// or as://"),
            Option("--host", "host", filled, "ADDRESS", "Address of the pages and the API"),
            Option("--port", "port", integer(0, 65535), "PORT", "Their port, 0 for any free one"),
            Option("--public-url", "public_url", filled, "URL", "URL for browsers, if it is behind a proxy"),
            Option("--ports", "ports", _ports, "FIRST-LAST",
                   "Ports for deployments on this machine: two per deployment, and two per server",
                   default="9000-9999"),
            Option("--store-hosts", "store_hosts", names, "HOSTS",
                   "Servers, besides clouds, from which deployers may add models; separated by commas, * for all"),
            Option("--trusted-backends", "trusted_backends", names, "NAMES",
                   "Backends of installed packages whose records decide which models are data, separated by commas"),
            Option("--isolation", "isolation", filled, "required|available|off",
                   "Whether models must be isolated from the platform's files, or only as far as the kernel can"),
            Option("--readable", "readable", names, "PATHS",
                   "Additional files and folders of this machine that models may read, separated by commas"),
        ),
        "Kubernetes": (
            Option("--kubernetes", "kubernetes.config", _kubeconfig, "KUBECONFIG|in-cluster",
                   "Enable deployments in a cluster: the targets kubernetes and kserve"),
            Option("--kubernetes-context", "kubernetes.context", filled, "NAME", "Context of the kubeconfig"),
            Option("--kubernetes-namespace", "kubernetes.namespace", filled, "NAME",
                   "Namespace of the deployments; default: the context's, or the one of the platform's pod"),
            Option("--kubernetes-owner", "kubernetes.owner", filled, "NAME",
                   "Name of this platform in the namespace; default: generated, stored in the data folder"),
            Option("--kubernetes-image", "kubernetes.image", filled, "IMAGE", "Image of servers"),
            Option("--kubernetes-images", "kubernetes.images", _images, "ENVIRONMENT=IMAGE,...",
                   "Images with the packages of environments; otherwise a pod installs them when it starts",
                   collect=joined),
            Option("--kubernetes-values", "kubernetes.values", path_text, "PATH",
                   "Additional values of the chart, for all deployments"),
            Option("--kubernetes-chart", "kubernetes.chart", path_text, "PATH", "Another folder of the chart"),
            Option("--kubernetes-store-secret", "kubernetes.store_secret", filled, "NAME",
                   "Secret with the credentials for the store of --artifacts, as variables"),
            Option("--kubernetes-claim", "kubernetes.claim", filled, "NAME",
                   "PersistentVolumeClaim whose root is the folder of --artifacts"),
            Option("--kubernetes-proxy", "kubernetes.proxy", filled, "URL",
                   "Address of a `kubectl proxy`, for a platform outside of the cluster"),
            Option("--kserve-mode", "kubernetes.kserve_mode", filled, "standard|knative",
                   "How KServe runs deployments of the target kserve"),
            Option("--helm", "kubernetes.helm", _program, "PATH", "The program that renders the chart"),
        ),
        "Ray": (
            Option("--ray", "ray.dashboard", filled, "URL", "Enable deployments in a Ray cluster: its dashboard"),
            Option("--ray-token-file", "ray.token", _secret, "PATH", "File with the token that the dashboard requires"),
            Option("--ray-http", "ray.http", filled, "URL",
                   "URL of Ray's HTTP proxies for clients; default: the machine of the dashboard"),
            Option("--ray-owner", "ray.owner", filled, "NAME",
                   "Name of this platform in the cluster; default: generated, stored in the data folder"),
            Option("--ray-artifacts", "ray.folder", filled, "PATH",
                   "Path of the folder of --artifacts on the nodes of the cluster"),
        ),
        "Single sign-on": (
            Option("--oidc-issuer", "oidc.issuer", filled, "URL", "Address of an OpenID Connect provider"),
            Option("--oidc-client-id", "oidc.client_id", filled, "ID", "Name of this platform there"),
            Option("--oidc-secret-file", "oidc.client_secret", _secret, "PATH",
                   f"File with its secret; the secret itself may also be in {SECRET_VARIABLE}"),
            Option("--oidc-admins", "oidc.admins", names, "EMAILS",
                   "Administrators of all projects, separated by commas; they assign the roles of other users"),
        ),
    },
    record=PlatformSettings(data=DEFAULT_FOLDER),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class AlertOptions:
    """The options of the verbs of alerts."""

    name: str = ""
    condition: str = ""
    deployment: str = ""
    threshold: float = 0.0
    for_s: int = 60
    url: str = ""
    secret: str = ""
    format: str = "json"
    access: PlatformAccess = THIS_MACHINE


def _alerts(client: PlatformClient, options: AlertOptions) -> int:
    place = ("projects", options.access.project)
    rules: Columns = {
        "Name": "name",
        "Condition": "condition",
        "Deployment": "deployment",
        "Threshold": lambda rule: f"{rule['threshold']:g}",
    }
    events: Columns = {
        "Event": "id",
        "Alert": "alert",
        "Since": at("created"),
        "Ended": at("ended"),
        "Acknowledged by": "acknowledged_by",
        "Message": "message",
    }
    print(table(rules, client.call("GET", path_of(*place, "alerts"))))
    print()
    print(table(events, client.call("GET", path_of(*place, "alert-events"))))
    return 0


def _create_alert(client: PlatformClient, options: AlertOptions) -> int:
    rule = {field.name: getattr(options, field.name) for field in fields(options) if field.name != "access"}
    client.call("POST", path_of("projects", options.access.project, "alerts"), rule)
    return 0


def _on_alert(method: str, *parts: str) -> Callable[[PlatformClient, AlertOptions], int]:
    def act(client: PlatformClient, given: AlertOptions) -> int:
        client.call(method, path_of("projects", given.access.project, parts[0], given.name, *parts[1:]))
        return 0

    return act


_CONDITIONS = ("error_rate", "p99_ms", "not_ready", "job_failed", "disk")

# fmt: off
_NAME = Option("NAME", "name", filled, "NAME", "Name of the alert", default="")
ALERTS = Resource(
    "charonia platform", "Alerts of a project.", AlertOptions(),
    {
        "alerts": Verb("List alerts and their events", _alerts, "List alerts and their latest events."),
        "create-alert": Verb(
            "Create an alert", _create_alert, "Create an alert: a webhook is called while a condition holds.", "NAME",
            (
                _NAME,
                Option("--condition", "condition", one_of(_CONDITIONS), "|".join(_CONDITIONS), "Condition to check"),
                Option("--threshold", "threshold", number(0), "N",
                       "Percent of requests, milliseconds, or percent of free disk space"),
                Option("--for", "for_s", integer(0), "SECONDS", "How long the condition must hold"),
                Option("--deployment", "deployment", filled, "NAME", "Only this deployment; default: all"),
                Option("--url", "url", filled, "URL", "Address of the webhook, unless a secret has it"),
                Option("--secret", "secret", filled, "NAME",
                       "Secret of the project: the webhook's address, or its bearer token"),
                Option("--format", "format", one_of(("json", "slack")), "json|slack", "Form of the message"),
            ),
        ),
        "acknowledge-alert": Verb("Acknowledge an event", _on_alert("POST", "alert-events", "acknowledge"),
                                  "Acknowledge an event, by its number.", "EVENT",
                                  (Option("EVENT", "name", filled, "EVENT", "Number of the event", default=""),)),
        "test-alert": Verb("Send a test", _on_alert("POST", "alerts", "test"),
                           "Send a test to the webhook of an alert.", "NAME", (_NAME,)),
        "remove-alert": Verb("Delete an alert", _on_alert("DELETE", "alerts"),
                             "Delete an alert and its events.", "NAME", (_NAME,)),
    },
)
# fmt: on


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["login-link"]:
        return people.run(["link", "owner", *arguments[1:]])
    if arguments[:1] and arguments[0] in ALERTS.verbs:
        return ALERTS.run(arguments)
    return carry_out(LINE, arguments, _serve)


def _serve(settings: PlatformSettings) -> int:
    missing = [module for module in MODULES if find_spec(module) is None]
    if missing:
        raise unsupported(f"the platform needs {', '.join(missing)}", hint=extra_hint("platform"))
    # Imported late: `--help` does not need the libraries of the extra.
    from charonia.platform.serve import serve

    logs.configure(LogOptions())
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    serve(with_environment(settings, os.environ))
    return 0


def with_environment(settings: PlatformSettings, environment: Mapping[str, str]) -> PlatformSettings:
    """Return settings completed from the environment where the command line sets none."""
    oidc = replace(settings.oidc, client_secret=settings.oidc.client_secret or environment.get(SECRET_VARIABLE, ""))
    return replace(
        settings,
        data=settings.data.expanduser(),
        database=settings.database or environment.get(DATABASE_VARIABLE, ""),
        oidc=oidc,
    )
