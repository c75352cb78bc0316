"""Applications of Ray Serve for workloads, and what their details say. Pure.

Each revision is a separate application, `OWNER:PROJECT:NAME:REVISION`. It has no route until it runs; then it takes
over the route of the deployment.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from charonia.platform.targets.api import Replica, Workload, key_file, key_files

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
        "num_cpus": spec.cpu_cores or CORES,
        "num_gpus": len(spec.gpus),
        "min_replicas": spec.replicas_min,
        "max_replicas": spec.replicas_max,
        "keys": key_files(key, ())[key_file(spec)].splitlines(),
    }
    if spec.replicas_max > spec.replicas_min and replicas:
        args["autoscaling"] = {"initial_replicas": min(max(replicas, spec.replicas_min), spec.replicas_max)}
    found: dict[str, Any] = {
        "name": application_name(owner, workload.deployment, workload.revision),
        "route_prefix": None,
        "import_path": IMPORT_PATH,
        "args": args,
    }
    if workload.packages:
        found["runtime_env"] = {"pip": list(workload.packages)}
    return found


def asked_in_vain(workload: Workload) -> Iterator[str]:
    """Yield which requests of a workload Ray cannot meet."""
    spec = workload.spec
    if spec.keys:
        yield (
            "keys: servers in Ray have no keys of the platform: expected false, and a proxy in front of Ray that "
            "asks for them, or the target local or kubernetes"
        )
    if spec.memory_mib:
        yield "device.memory_mib: Ray does not limit the memory of a server: expected 0"
    if spec.gpu_memory_mib:
        yield "device.gpu_memory_mib: Ray does not limit the memory of a GPU: expected 0"


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
