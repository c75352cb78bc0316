"""The target `ray`: for each deployment, an application of Ray Serve.

Each revision is a separate application, `OWNER:PROJECT:NAME:REVISION`. It has no route until it runs; then it takes
over the route of the deployment. State is kept in Ray: the application with the route serves. The reason of a failed
revision is kept here, and by the caller.

Ray Serve's REST API is on the dashboard of the cluster. A change declares all applications of the cluster: applications
of other owners are passed on unchanged. Ray cannot refuse a change of an outdated state, so the state is read again
right before each write.
"""

import hmac
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from charonia.core.errors import ServingError, invalid, unavailable
from charonia.http_call import NO_ANSWER, http_call, no_answer_reason
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.data_folder import private_text
from charonia.platform.settings import RaySettings
from charonia.platform.targets.api import Observed, Replica, RevisionPhase, Workload, key_file, key_files
from charonia.platform.targets.kubernetes.repositories import (
    FOLDER,
    ClaimRepositories,
    ModelRepositories,
    open_repositories,
)

IMPORT_PATH = "charonia.ray:app"

CORES = 1
"""Cores of a server if the specification names none, because Ray reserves exactly the requested number."""

Plain = Mapping[str, Any]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_OWN_ERROR = "charonia.core.errors.ServingError: "
_DOING = {"STARTING": "it starts", "UPDATING": "it is changed", "RECOVERING": "Ray finds it again"}


@dataclass(frozen=True, slots=True)
class Revisions:
    """The applications of a deployment by revision, as the API shows them.

    Attributes:
        serving: The application with the route, {} for none.
        applying: The application without a route yet, {} for none.
    """

    serving: Mapping[int, Plain]
    applying: Mapping[int, Plain]
    ending: Mapping[int, Plain]


def application_name(owner: str, deployment: str, revision: int) -> str:
    return f"{owner}:{deployment.replace('/', ':')}:{revision}"


def deployment_of(owner: str, application: str) -> tuple[str, int]:
    """Return deployment and revision of an application, ("", 0) for one of another owner."""
    parts = application.split(":")
    if len(parts) != len(("owner", "project", "name", "revision")) or parts[0] != owner or not parts[3].isdecimal():
        return "", 0
    return f"{parts[1]}/{parts[2]}", int(parts[3])


def route(deployment: str) -> str:
    return f"/{deployment}"


def application(owner: str, workload: Workload, repository: str, key: str, replicas: int = 0) -> dict[str, Any]:
    """Return the application of a workload, without a route.

    Args:
        owner: Name of the platform in the cluster.
        repository: Address of its models on the nodes of the cluster.
        key: The API key of the platform; Ray receives only its digest.
        replicas: Number of servers of the previous revision, 0 for none.
    """
    spec = workload.spec
    args: dict[str, Any] = {
        "repository": repository,
        "num_cpus": spec.device.cpu_cores or CORES,
        "num_gpus": len(spec.device.gpus),
        "min_replicas": spec.replicas.min,
        "max_replicas": spec.replicas.max,
        "keys": key_files(key, ())[key_file(spec)].splitlines(),
    }
    if spec.idle_unload_s:
        args["options"] = [f"--model-idle-unload={spec.idle_unload_s}"]
    if spec.replicas.max > spec.replicas.min and replicas:
        args["autoscaling"] = {"initial_replicas": min(max(replicas, spec.replicas.min), spec.replicas.max)}
    found: dict[str, Any] = {
        "name": application_name(owner, workload.deployment, workload.revision),
        "route_prefix": None,
        "import_path": IMPORT_PATH,
        "args": args,
    }
    if workload.packages:
        found["runtime_env"] = {"pip": list(workload.packages)}
    return found


def unsupported_requests(workload: Workload) -> Iterator[str]:
    """Yield which requests of a workload Ray cannot meet."""
    spec = workload.spec
    if spec.keys:
        yield (
            "keys: servers in Ray have no keys of the platform: expected false, and a proxy in front of Ray that "
            "asks for them, or the target local or kubernetes"
        )
    if spec.device.memory_mib:
        yield "device.memory_mib: Ray does not limit the memory of a server: expected 0"
    if spec.device.gpu_memory_mib:
        yield "device.gpu_memory_mib: Ray does not limit the memory of a GPU: expected 0"
    if workload.variables:
        yield "variables, secrets: expected none at this target: servers have the variables of their node"


def revisions(owner: str, deployment: str, applications: Plain) -> Revisions:
    """Return the revisions of a deployment among all applications."""
    found = Revisions({}, {}, {})
    for name, details in applications.items():
        whose, number = deployment_of(owner, name)
        if whose != deployment:
            continue
        config = details.get("deployed_app_config")
        if config is None or details["status"] == "DELETING":
            group = found.ending
        else:
            group = found.serving if config.get("route_prefix") == route(deployment) else found.applying
        assert isinstance(group, dict)
        group[number] = details
    return found


def route_holder(owner: str, deployment: str, applications: Plain) -> str:
    """Return the application of another owner that has the route of a deployment, "" for none."""
    taken = (
        name
        for name, details in applications.items()
        if details.get("route_prefix") == route(deployment) and deployment_of(owner, name)[0] != deployment
    )
    return next(taken, "")


def message(details: Plain) -> str:
    """Return all messages of Ray about an application."""
    said = [str(each.get("message", "")) for each in details.get("deployments", {}).values()]
    return _ANSI.sub("", "\n".join(filter(None, said)) or str(details.get("message", ""))).strip()


def reason(details: Plain) -> str:
    """Return why an application is unhealthy: the server's own message, or the last line of Ray's."""
    text = message(details)
    _, _, own = text.rpartition(_OWN_ERROR)
    if _OWN_ERROR in text:
        return " ".join(own.split())
    last = text.splitlines()[-1].strip() if text else ""
    return f"Ray: {last or details['status']}"


def doing(details: Plain) -> str:
    """Return the current step of an application that is not ready."""
    text = message(details)
    if _OWN_ERROR in text:
        return f"it is started again: {reason(details)}"
    if text:
        return f"Ray: {' '.join(text.split())}"
    up = sum(each.is_ready for each in replicas(details))
    return f"{up} of {wanted_replicas(details)} servers run" if details.get("deployments") else "Ray builds it"


def wanted_replicas(details: Plain) -> int:
    return sum(int(each["target_num_replicas"]) for each in details.get("deployments", {}).values())


def replicas(details: Plain) -> tuple[Replica, ...]:
    """Return the servers of an application that are not stopping."""
    wrong = reason(details) if details["status"] == "UNHEALTHY" else ""
    found = []
    for each in details.get("deployments", {}).values():
        for one in each["replicas"]:
            state = one["state"]
            if state == "STOPPING":
                continue
            is_ready = state in ("RUNNING", "PENDING_MIGRATION")
            found.append(
                Replica(
                    name=one["replica_id"],
                    is_ready=is_ready,
                    reason="" if is_ready else wrong,
                    doing="" if is_ready or wrong else _DOING.get(state, state),
                )
            )
    if wrong and not found:
        return (Replica("no server", is_ready=False, reason=wrong),)
    return tuple(found)


APPLICATIONS = "/api/serve/applications/"
LOG = "/api/v0/logs/file"

CHANGE_TRIES = 5
"""How often a change is retried because another client has changed applications in between."""

ANSWER_S_MAX = 30.0
"""Longest wait for an answer: a change may start Serve."""

ANSWER_BYTES_MAX = 64 * 2**20

KEPT_SETTINGS = ("proxy_location", "http_options", "grpc_options", "target_capacity")
"""Settings of Serve that are passed on with each change."""

Configs = Mapping[str, Plain]
"""Declared applications by name."""


class Dashboard:
    """The dashboard of a Ray cluster.

    Args:
        token: The token, "" if the cluster requires none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._lock = threading.Lock()

    def fetch_state(self) -> Plain:
        """Return the state of Serve and of all applications."""
        try:
            found: Plain = json.loads(self._call(APPLICATIONS))
        except ValueError as error:
            raise unavailable(f"the dashboard of Ray at {self.url} does not answer with JSON: {error}") from None
        return found

    def change(self, make: Callable[[Configs], Configs]) -> None:
        """Change the declared applications.

        Args:
            make: Returns the applications to declare, given the declared ones.
        """
        with self._lock:
            for _ in range(CHANGE_TRIES):
                seen = self.fetch_state()
                declared = declared_in(seen)
                wanted = make(declared)
                if wanted == declared:
                    return
                if declared_in(self.fetch_state()) == declared:
                    kept = {name: seen[name] for name in KEPT_SETTINGS if seen.get(name) is not None}
                    self._call(APPLICATIONS, {**kept, "applications": list(wanted.values())})
                    return
        raise unavailable(f"other clients changed the applications of Ray {CHANGE_TRIES} times", hint="try again")

    def log(self, node: str, path: str, lines: int) -> str:
        """Return the last lines of a log file of a node. Raises as `fetch_state`."""
        query = urlencode({"node_id": node, "filename": path.lstrip("/"), "lines": lines})
        return self._call(f"{LOG}?{query}").decode("utf-8", "replace")

    def _call(self, path: str, body: Plain | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        method, data = ("GET", None) if body is None else ("PUT", json.dumps(body).encode())
        try:
            url = f"{self.url}{path}"
            answer = http_call(method, url, headers, data, timeout_s=ANSWER_S_MAX, bytes_max=ANSWER_BYTES_MAX)
        except NO_ANSWER as error:
            reason = no_answer_reason(error)
            raise unavailable(f"the dashboard of Ray at {self.url} does not answer: {reason}") from None
        text = answer.body.decode("utf-8", "replace").strip()
        if answer.status == HTTPStatus.BAD_REQUEST:
            raise invalid(f"Ray refuses it: {text}")
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise unavailable(f"the dashboard of Ray at {self.url} answers {answer.status}: {text}")
        return answer.body


def declared_in(seen: Plain) -> dict[str, Any]:
    """Return the declared applications. Those started by `serve.run` are not declared, and stay in any case."""
    found = {}
    for name, details in seen["applications"].items():
        if details.get("source") != "declarative" or details["status"] == "DELETING":
            continue
        if details.get("deployed_app_config") is None:
            raise unavailable(f"Ray does not say how its application '{name}' is declared: a change would end it")
        found[name] = details["deployed_app_config"]
    return found


LOG_REPLICAS_MAX = 10
"""Most servers whose logs are shown together."""

HTTP_PORT = 8000
"""Port of Ray's proxies where Ray does not say."""

FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class RayTarget:
    """Deployments in a Ray cluster. See `DeploymentTarget`.

    Args:
        owner: Name of this platform among all that use the cluster.
        repositories: Where the nodes of the cluster find models.
        secret: From which the platform derives its API key of each deployment.
    """

    name = "ray"

    def __init__(
        self, dashboard: Dashboard, owner: str, repositories: ModelRepositories, settings: RaySettings, secret: str
    ) -> None:
        self._dashboard = dashboard
        self._owner = owner
        self._repositories = repositories
        self._settings = settings
        self._secret = secret
        self._failures: dict[str, tuple[int, str]] = {}  # by deployment: the revision, and why it has failed
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def problems(self, workload: Workload) -> Sequence[str]:
        return [
            *self._cannot_be_declared(workload, self._dashboard.fetch_state()),
            *unsupported_requests(workload),
        ]

    def apply(self, workload: Workload) -> None:
        name, number = workload.deployment, workload.revision
        with self._locks[name]:
            seen = self._dashboard.fetch_state()
            there = revisions(self._owner, name, seen["applications"])
            if number in there.applying or (number in there.serving and not there.applying):
                return
            if there.applying:
                raise unavailable(f"revision {next(iter(there.applying))} of '{name}' is still being applied")
            if number in there.ending:
                raise unavailable(f"revision {number} of '{name}' is stopping", hint="wait until it has stopped")
            if problems := self._cannot_be_declared(workload, seen):
                raise invalid(problems[0])
            # A folder for each revision: its configurations are unaffected while others are tried.
            own = replace(workload, deployment=f"{name}/{number}")
            address = self._repositories.address(own)
            self._repositories.publish(own)
            self._repositories.configure(address, {model.name: model.config for model in workload.models})
            if self._settings.folder:
                address = f"{self._settings.folder.rstrip('/')}/{address}"
            before = sum(map(wanted_replicas, there.serving.values()))
            config = application(self._owner, workload, address, self._key(name), before)
            self._dashboard.change(lambda configs: {**configs, config["name"]: config})
            self._failures.pop(name, None)

    def scale(self, deployment: str, replicas: int) -> str:
        """Do nothing: Ray decides between the bounds of the revision. See `DeploymentTarget`."""
        return ""

    def abandon(self, deployment: str) -> None:
        with self._locks[deployment]:
            there = self._revisions(deployment)
            for number in there.applying:
                self._drop(deployment, number)

    def observe(self, deployment: str) -> Observed:
        """Give a running revision the route, delete a failed one, and return the state. See `DeploymentTarget`."""
        seen = self._dashboard.fetch_state()
        there = revisions(self._owner, deployment, seen["applications"])
        is_over = any(each["status"] in ("RUNNING", *FAILED) for each in there.applying.values())
        if is_over and self._locks[deployment].acquire(blocking=False):
            try:
                self._conclude(deployment)  # visible in the next observation: by then Ray's proxies know the route
            finally:
                self._locks[deployment].release()
        serving, up = next(iter(there.serving.items()), (0, None))
        applying, next_up = next(iter(there.applying.items()), (0, None))
        failure = self._failures.get(deployment)
        if next_up is not None:
            phase = RevisionPhase.STARTING
        elif failure is not None:
            phase, applying = RevisionPhase.FAILED, failure[0]
        elif up is not None:
            phase = RevisionPhase.READY
        elif there.ending:
            return Observed(phase=RevisionPhase.ENDING, doing="Ray ends its servers")
        else:
            return Observed()
        shown = up if up is not None else next_up
        return Observed(
            serving=serving,
            applying=applying,
            phase=phase,
            doing=doing(next_up) if next_up is not None else "",
            reason=failure[1] if failure is not None and next_up is None else "",
            http=self._address(seen) + route(deployment) if up is not None else "",
            key=self._key(deployment),
            replicas=replicas(shown) if shown is not None else (),
            wanted_replicas=wanted_replicas(shown) if shown is not None else 0,
            scaled_by="Ray Serve" if shown is not None and _is_scaled(shown) else "",
        )

    def stop(self, deployment: str) -> None:
        with self._locks[deployment]:
            self._failures.pop(deployment, None)
            self._dashboard.change(lambda configs: self._without(configs, deployment))

    def remove(self, deployment: str) -> None:
        with self._locks[deployment]:
            there = self._revisions(deployment)
            if there.serving or there.applying or there.ending:
                raise unavailable(f"the servers of '{deployment}' still run")
            self._failures.pop(deployment, None)
            self._repositories.remove_except(deployment, ())

    def set_keys(self, deployment: str, keys: Sequence[str]) -> None:
        """Do nothing: deployments with keys are refused. See `DeploymentTarget`."""

    def deployments(self) -> Sequence[str]:
        found = {deployment_of(self._owner, name)[0] for name in self._dashboard.fetch_state()["applications"]}
        return sorted((found | self._failures.keys()) - {""})

    def log(self, deployment: str, lines: int) -> str:
        there, texts = self._revisions(deployment), []
        for details in (*there.serving.values(), *there.applying.values()):
            for each in details["deployments"].values():
                for one in (each["replicas"] or each.get("recent_dead_replicas", []))[-LOG_REPLICAS_MAX:]:
                    if one.get("log_file_path"):
                        try:
                            text = self._dashboard.log(one["node_id"], one["log_file_path"], lines)
                        except ServingError as error:  # the node is gone
                            text = f"{error}\n"
                        texts.append(f"==> {one['replica_id']} <==\n{text}")
        return "\n".join(texts)

    def _key(self, deployment: str) -> str:
        return hmac.new(self._secret.encode(), deployment.encode(), "sha256").hexdigest()

    def _revisions(self, deployment: str) -> Revisions:
        return revisions(self._owner, deployment, self._dashboard.fetch_state()["applications"])

    def _cannot_be_declared(self, workload: Workload, seen: Plain) -> Sequence[str]:
        problems = [_NO_STORE] if self._repositories.problem() else []
        if holder := route_holder(self._owner, workload.deployment, seen["applications"]):
            taken = route(workload.deployment)
            problems.append(f"name: the application '{holder}' of the Ray cluster has the route '{taken}' already")
        return problems

    def _conclude(self, deployment: str) -> None:
        """Give a revision that runs the route, or end one that has failed."""
        there = self._revisions(deployment)
        for number, details in there.applying.items():
            if details["status"] == "RUNNING":
                config = {**details["deployed_app_config"], "route_prefix": route(deployment)}

                def with_route(configs: Configs, config: Plain = config) -> Configs:
                    return {**self._without(configs, deployment), config["name"]: config}

                self._dashboard.change(with_route)
                self._discard(deployment, [number])
            elif details["status"] in FAILED:
                self._failures[deployment] = (number, reason(details))
                self._drop(deployment, number)
                self._discard(deployment, list(there.serving))

    def _drop(self, deployment: str, number: int) -> None:
        name = application_name(self._owner, deployment, number)
        self._dashboard.change(lambda configs: {key: each for key, each in configs.items() if key != name})

    def _without(self, configs: Configs, deployment: str) -> Configs:
        return {name: each for name, each in configs.items() if deployment_of(self._owner, name)[0] != deployment}

    def _discard(self, deployment: str, kept: Sequence[int]) -> None:
        self._repositories.remove_except(deployment, [f"{FOLDER}/{deployment}/{number}" for number in kept])

    def _address(self, seen: Plain) -> str:
        """Return the address of Ray's proxies for clients: from the settings, or on the machine of the dashboard."""
        if self._settings.http:
            return self._settings.http.rstrip("/")
        options = seen.get("http_options") or {}
        host = urlsplit(self._dashboard.url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{options.get('port', HTTP_PORT)}{options.get('root_path', '')}"


_NO_STORE = (
    "artifact store: the nodes of Ray cannot read a folder of this machine: expected an object store "
    "(--artifacts s3://..., gs://... or as://...), or a folder that they mount, too (--ray-artifacts)"
)


def _is_scaled(details: Plain) -> bool:
    args = details["deployed_app_config"]["args"]
    return bool(args["max_replicas"] > args["min_replicas"])


OWNER_FILE = "ray-owner"
"""File of the data folder with the name of this platform, if no setting has it."""

SECRET_FILE = "ray-secret"
"""File of the data folder from which the API keys of the platform in servers are derived."""


def open_ray(settings: RaySettings, store: ArtifactStore, data: Path) -> RayTarget:
    """Return the target, without contacting the cluster."""
    repositories = ClaimRepositories(store.local.folder) if settings.folder else open_repositories(store, "")
    owner = settings.owner or private_text(data / OWNER_FILE, 8)
    secret = private_text(data / SECRET_FILE, 32)
    return RayTarget(Dashboard(settings.dashboard, settings.token), owner, repositories, settings, secret)
