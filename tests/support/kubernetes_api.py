"""An API server of Kubernetes for tests, over real HTTP, in one namespace: objects with uid, resourceVersion and
generation, server-side apply with field managers and conflicts, lists, logs, the
proxy to pods; and faults on demand.

What controllers would do is in `kubernetes_controllers.py`. The package kmock (0.8) has no server-side apply, no
selectors and no versions of objects.
"""

import asyncio
import contextlib
import copy
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Plain = dict[str, Any]
Path = tuple[Any, ...]

NAMESPACE = "models"
KINDS = {
    "configmaps": "ConfigMap",
    "deployments": "Deployment",
    "events": "Event",
    "horizontalpodautoscalers": "HorizontalPodAutoscaler",
    "inferenceservices": "InferenceService",
    "networkpolicies": "NetworkPolicy",
    "nodes": "Node",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "poddisruptionbudgets": "PodDisruptionBudget",
    "pods": "Pod",
    "resourcequotas": "ResourceQuota",
    "secrets": "Secret",
    "serviceaccounts": "ServiceAccount",
    "services": "Service",
    "servingruntimes": "ServingRuntime",
}
LIST_KEYS = ("name", "containerPort", "port", "topologyKey", "mountPath")
TICK_S = 0.01


@dataclass
class Fault:
    """What goes wrong with requests.

    Attributes:
        path: Part of their path; with "dryRun" in it, those that only try.
        status: What is answered; 0: the connection is cut off.
        body: The `Status` that is answered.
        is_done: Whether the request is carried out all the same.
    """

    method: str
    path: str
    status: int = 500
    times: int = 1
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    is_done: bool = False


@dataclass
class Kept:
    """An object: what managers have said about it, by path, and what the cluster says.

    An owner is a manager and its operation: what it applies and what it updates are two, as in Kubernetes.
    """

    plural: str
    fields: dict[Path, Any]
    meta: Plain
    status: Plain = field(default_factory=dict)
    owners: dict[tuple[str, str], set[Path]] = field(default_factory=dict)

    def plain(self) -> Plain:
        found = _built(self.fields)
        found["metadata"] = {**found.get("metadata", {}), **self.meta, "managedFields": self._managed()}
        if self.status:
            found["status"] = copy.deepcopy(self.status)
        return found

    def _managed(self) -> list[Plain]:
        entries = []
        for (manager, operation), paths in self.owners.items():
            tree: Plain = {}
            for path in paths:
                node = tree
                for part in path:
                    node = node.setdefault(f"f:{part}" if isinstance(part, str) else f"k:{part}", {})
            entries.append({"manager": manager, "operation": operation, "fieldsV1": tree})
        return entries


class KubernetesApi:
    """The API server. Use `kubernetes_api`.

    Attributes:
        requests: Verb and resource of what was asked, as Roles have them.
        token: The only one that it knows, "" for any.
        served: What pods were asked through the proxy: name of the pod, method, path, body.
        answer: Returns what a pod answers: from its name, method, path and body.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Kept] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.served: list[tuple[str, str, str, Any]] = []
        self.answer: Callable[[str, str, str, Any], Any] = lambda pod, method, path, body: {}
        self.logs: dict[str, str] = {}
        self.url = self.token = ""
        self.lock = threading.RLock()
        self._version = 1000
        self._uids = itertools.count(1)

    def start(self) -> None:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def run() -> None:
            app = web.Application(client_max_size=2**24)
            app.router.add_route("*", "/{tail:.*}", self._handle)
            self._runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
            started.set()

        def main() -> None:
            self._loop.run_until_complete(run())
            self._loop.run_forever()

        self._thread = threading.Thread(target=main, name="kubernetes api")
        self._thread.start()
        assert started.wait(200)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(200)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def get(self, plural: str, name: str) -> Plain | None:
        with self.lock:
            found = self.objects.get((plural, name))
            return found.plain() if found else None

    def all(self, plural: str) -> list[Plain]:
        with self.lock:
            return [kept.plain() for (kind, _), kept in self.objects.items() if kind == plural]

    def names(self, plural: str) -> list[str]:
        return sorted(each["metadata"]["name"] for each in self.all(plural))

    def put(self, plural: str, found: Plain, status: Plain | None = None, manager: str = "tests") -> Plain:
        """Make or replace an object, as somebody else."""
        with self.lock:
            self._write(plural, found["metadata"]["name"], {}, manager, _flat(found))
            return self.set_status(plural, found["metadata"]["name"], status or {})

    def change(self, plural: str, name: str, path: Path, value: Any, manager: str = "kubectl-edit") -> None:
        """Let somebody else change a field: it is theirs then."""
        with self.lock:
            kept = self.objects[plural, name]
            for paths in kept.owners.values():
                paths.discard(path)
            kept.owners.setdefault((manager, "Update"), set()).add(path)
            kept.fields[path] = value
            self._changed(kept, is_spec=path[0] == "spec")

    def set_status(self, plural: str, name: str, status: Plain) -> Plain:
        with self.lock:
            kept = self.objects[plural, name]
            if kept.status != status:
                kept.status = status
                self._changed(kept, is_spec=False)
            return kept.plain()

    def set_meta(self, plural: str, name: str, **values: Any) -> None:
        with self.lock:
            kept = self.objects[plural, name]
            kept.meta.update(values)
            self._changed(kept, is_spec=False)

    def delete(self, plural: str, name: str) -> None:
        with self.lock:
            self.objects.pop((plural, name), None)

    def apply(
        self, plural: str, name: str, wanted: Plain, manager: str, *, force: bool, is_trial: bool = False
    ) -> Plain | web.Response:
        """Apply an object, or return the conflict."""
        with self.lock:
            said, own = _flat(wanted), (manager, "Apply")
            kept = self.objects.get((plural, name))
            if kept is not None:
                conflicts = [
                    (other[0], path)
                    for other, paths in kept.owners.items()
                    for path in (paths & said.keys() if other != own and not force else ())
                    if kept.fields.get(path) != said[path]
                ]
                if conflicts:
                    return _conflict(name, conflicts)
            if is_trial:
                return wanted
            if kept is not None:
                for paths in (paths for other, paths in kept.owners.items() if other != own):
                    paths -= {path for path in paths & said.keys() if kept.fields.get(path) != said[path]}
            before = kept.owners.get(own, set()) if kept else set()
            dropped = before - said.keys()
            if kept is not None:
                dropped -= set[Path]().union(*(paths for other, paths in kept.owners.items() if other != own))
            self._write(plural, name, dict.fromkeys(dropped), manager, said)
            return self.objects[plural, name].plain()

    def _write(self, plural: str, name: str, dropped: Mapping[Path, Any], manager: str, said: dict[Path, Any]) -> None:
        kept = self.objects.get((plural, name))
        is_new = kept is None
        if kept is None:
            meta = {"name": name, "uid": f"uid-{next(self._uids)}", "generation": 0}
            meta["creationTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            kept = self.objects[plural, name] = Kept(plural, {}, meta)
        before = dict(kept.fields)
        for path in dropped:
            kept.fields.pop(path, None)
        kept.fields.update(said)
        kept.fields[("kind",)] = KINDS[plural]
        if plural == "deployments":
            kept.fields.setdefault(("spec", "replicas"), 1)
        kept.owners[manager, "Apply"] = set(said)
        if kept.fields != before:
            is_spec = is_new or any(
                path[0] == "spec"
                for path in kept.fields.keys() | before.keys()
                if kept.fields.get(path) != before.get(path)
            )
            self._changed(kept, is_spec=is_spec)

    def _changed(self, kept: Kept, *, is_spec: bool) -> None:
        self._version += 1
        kept.meta["resourceVersion"] = str(self._version)
        kept.meta["generation"] = kept.meta.get("generation", 0) + int(is_spec)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        body = await request.read()
        url, is_trial = str(request.rel_url), "dryRun" in request.query
        fault = next(
            (
                each
                for each in self.faults
                if each.method == request.method and each.path in url and is_trial == ("dryRun" in each.path)
            ),
            None,
        )
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if fault is not None:
            fault.times -= 1
            if fault.times <= 0:
                self.faults.remove(fault)
            if fault.is_done:
                await self._answered(request, parts, body)
            if not fault.status:
                assert request.transport is not None
                request.transport.abort()
            return web.json_response(dict(fault.body), status=fault.status or 500, headers=dict(fault.headers))
        return await self._answered(request, parts, body)

    async def _answered(self, request: web.Request, parts: list[str], body: bytes) -> web.StreamResponse:
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if rest[:1] == ["namespaces"]:
            if rest[1] != NAMESPACE and (request.method != "GET" or len(rest) > 3):  # lists are empty
                return _status(404, f'namespaces "{rest[1]}" not found')
            rest = rest[2:]
        plural, name, sub = rest[0], rest[1] if len(rest) > 1 else "", rest[2] if len(rest) > 2 else ""
        if sub == "proxy":
            return self._proxied(request, name.partition(":")[0], "/" + "/".join(rest[3:]), body)
        if plural not in KINDS:
            return _status(404, "the server could not find the requested resource")
        self._note(request, plural, name, sub)
        with self.lock:
            return self._plain_answer(request, plural, name, sub, json.loads(body) if body else {})

    def _plain_answer(self, request: web.Request, plural: str, name: str, sub: str, body: Plain) -> web.StreamResponse:
        kept = self.objects.get((plural, name))
        if request.method == "PATCH" and request.headers["Content-Type"] == "application/merge-patch+json":
            self.change(plural, name, ("spec", "replicas"), body["spec"]["replicas"], request.query["fieldManager"])
            return web.json_response(self.objects[plural, name].plain())
        if request.method == "PATCH":
            assert request.headers["Content-Type"] == "application/apply-patch+yaml"
            is_forced = request.query.get("force") == "true"
            is_trial = request.query.get("dryRun") == "All"
            made = self.apply(plural, name, body, request.query["fieldManager"], force=is_forced, is_trial=is_trial)
            return made if isinstance(made, web.Response) else web.json_response(made)
        if not name:
            return self._list(request, plural)
        if kept is None:
            return _status(404, f'{plural} "{name}" not found')
        if sub == "log":
            which = f"{name}.previous" if request.query.get("previous") else name
            lines = self.logs.get(which, "").splitlines(keepends=True)
            return web.Response(text="".join(lines[-int(request.query["tailLines"]) :]))
        if request.method == "DELETE":
            uid = (body.get("preconditions") or {}).get("uid")
            if uid != kept.meta["uid"]:
                return _status(409, "the UID in the precondition does not match", reason="Conflict")
            self.delete(plural, name)
            return web.json_response({"kind": "Status", "status": "Success"})
        return web.json_response(kept.plain())

    def _list(self, request: web.Request, plural: str) -> web.Response:
        found = [each for each in self.all(plural) if _is_chosen(each, request.query)]
        start, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "500"))
        more = str(start + limit) if len(found) > start + limit else ""
        meta = {"resourceVersion": str(self._version), **({"continue": more} if more else {})}
        return web.json_response({"metadata": meta, "items": found[start : start + limit]})

    def _proxied(self, request: web.Request, name: str, path: str, body: bytes) -> web.Response:
        said = json.loads(body) if body else None
        self.served.append((name, request.method, path, said))
        answer = self.answer(name, request.method, path, said)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    def _note(self, request: web.Request, plural: str, name: str, sub: str) -> None:
        verb = {"GET": "get" if name else "list", "PATCH": "patch", "DELETE": "delete"}[request.method]
        self.requests.append((verb, f"{plural}/{sub}" if sub else plural))
        if verb == "patch" and (plural, name) not in self.objects:
            self.requests.append(("create", plural))


@contextlib.contextmanager
def kubernetes_api() -> Iterator[KubernetesApi]:
    server = KubernetesApi()
    server.start()
    try:
        yield server
    finally:
        server.stop()


def kubeconfig(server: KubernetesApi) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": server.url}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "current-context": "x",
        }
    )


def _flat(found: Any, path: Path = ()) -> dict[Path, Any]:
    """Return the leaves of an object by path; lists of objects with a key are by that key."""
    if isinstance(found, dict) and found and path != ("data",):
        leaves: dict[Path, Any] = {}
        for key, value in found.items():
            if (*path, key) not in (("metadata", "name"), ("metadata", "namespace"), ("status",)):
                leaves |= _flat(value, (*path, key))
        return leaves
    if isinstance(found, list) and found and all(isinstance(each, dict) for each in found):
        key = next((key for key in LIST_KEYS if all(key in each for each in found)), None)
        if key is not None and len({str(each[key]) for each in found}) == len(found):
            return {
                leaf: value for each in found for leaf, value in _flat(each, (*path, (key, str(each[key])))).items()
            }
    return {path: found}


def _built(leaves: Mapping[Path, Any]) -> Plain:
    root: Plain = {}
    for path, value in leaves.items():
        node: Any = root
        for part, after in zip(path, [*path[1:], None], strict=True):
            if after is None:
                node[part] = copy.deepcopy(value)
            elif isinstance(part, str):
                node = node.setdefault(part, [] if isinstance(after, tuple) else {})
            else:
                item = next((each for each in node if str(each.get(part[0])) == part[1]), None)
                if item is None:
                    item = {part[0]: value} if after == part[0] else {part[0]: part[1]}
                    node.append(item)
                node = item
    return root


def _is_chosen(found: Plain, query: Mapping[str, str]) -> bool:
    labels = found["metadata"].get("labels") or {}
    for part in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = part.partition("=")
        if labels.get(key) != value:
            return False
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = part.partition("=")
        node: Any = found
        for step in key.split("."):
            node = (node or {}).get(step)
        if node != value:
            return False
    return True


def _conflict(name: str, conflicts: list[tuple[str, Path]]) -> web.Response:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{other}"',
            "field": "." + ".".join(map(str, path)),
        }
        for other, path in conflicts
    ]
    message = f"Apply failed with {len(causes)} conflict(s) on {name}"
    return web.json_response(
        {"kind": "Status", "code": 409, "reason": "Conflict", "message": message, "details": {"causes": causes}},
        status=409,
    )


def _status(code: int, message: str, reason: str = "") -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "reason": reason, "message": message}, status=code)
