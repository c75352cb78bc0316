"""The API server of a cluster, through `kubernetes-asyncio`, which no other module uses. Calls block.

Objects are applied with server-side apply under our field manager. Fields that another manager has changed are not
overwritten: the call fails with an error that names the manager and the fields.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from charonia.core.errors import Code, ServingError, conflict, invalid, not_found, unavailable, unsupported
from charonia.install_hint import extra_hint
from charonia.platform.settings import IN_CLUSTER, KubernetesSettings
from charonia.platform.targets.kubernetes.objects import MANAGER, ObjectKind, Plain, Reference, reference

_log = logging.getLogger(__name__)

CALL_S_MAX = 30.0
"""Longest time of one request."""

RETRIES_MAX = 4
"""Retries of a request that found the API server busy or unreachable, or conflicted with another change."""

RETRY_S = 0.25
"""Pause before the first retry; it doubles each time."""

RETRY_S_MAX = 8.0
"""Longest pause, also where the API server asks for a longer one."""

PAGE = 500
"""Page size of a list."""

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_T = TypeVar("_T")
_BUSY = (429, 500, 502, 503, 504)
_UNKNOWN = 401
_CONFLICT = 409


class Cluster:
    """A namespace of a cluster. Any thread may call."""

    def __init__(self, settings: KubernetesSettings) -> None:
        try:
            from kubernetes_asyncio import client, config
        except ImportError:
            raise unsupported(
                "the target 'kubernetes' needs kubernetes-asyncio", hint=extra_hint("kubernetes")
            ) from None
        import aiohttp  # of kubernetes-asyncio

        self._faults: tuple[type[Exception], ...] = (OSError, asyncio.TimeoutError, aiohttp.ClientError)
        self._client = client
        self._config: Any = config
        self._settings = settings
        self._configuration = client.Configuration()
        self._config_faults = (config.ConfigException, OSError, ValueError, yaml.YAMLError)
        self._signing_in = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kubernetes", daemon=True)
        self._thread.start()
        self._api: Any = None
        try:
            found = self.run(self._load())
            self.namespace = settings.namespace or found or "default"
        except self._config_faults as error:
            self.close()
            reason = " ".join(str(error).split())
            raise invalid(f"--kubernetes: '{settings.config}' cannot be used: {reason}") from None

    def close(self) -> None:
        """Stop all work. The object cannot be used afterwards."""
        if self._loop.is_closed():
            return
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def get(self, wanted: Reference) -> Plain | None:
        """Return an object, None where there is none."""
        path = f"{self._path(wanted.kind)}/{wanted.name}"
        try:
            return self.run(self._asked("GET", path, [], None, str(wanted)))
        except ServingError as error:
            if error.code is Code.NOT_FOUND:
                return None
            raise

    def list(self, kind: ObjectKind, *, labels: str = "", fields: str = "") -> Sequence[Plain]:
        """Return the objects of a kind in the namespace. See `get`."""
        return self.run(self._listed(kind, self._path(kind), labels, fields))

    def nodes(self, kind: ObjectKind) -> Sequence[Plain]:
        """Return the cluster-scoped objects of a kind. See `get`."""
        return self.run(self._listed(kind, f"/api/{kind.api}/{kind.plural}"))

    def apply(self, wanted: Plain, *, force: bool = False, is_trial: bool = False) -> Plain:
        """Apply an object, and return it.

        Args:
            force: Take over fields from other field managers.
            is_trial: Only check whether it would be refused.
        """
        which = reference(wanted)
        query = [("dryRun", "All")] if is_trial else []
        query += [("fieldManager", MANAGER), ("fieldValidation", "Strict"), *([("force", "true")] if force else [])]
        path = f"{self._path(which.kind)}/{which.name}"
        return self.run(self._asked("PATCH", path, query, wanted, f"{which}", "application/apply-patch+yaml"))

    def set_replicas(self, which: Reference, count: int) -> None:
        """Set the number of replicas of an object, regardless of the field manager that owns it. See `get`."""
        path, body = f"{self._path(which.kind)}/{which.name}", {"spec": {"replicas": count}}
        query = [("fieldManager", MANAGER)]
        self.run(self._asked("PATCH", path, query, body, str(which), "application/merge-patch+json"))

    def delete(self, found: Plain, kind: ObjectKind) -> None:
        """Begin to delete an object, if it is still the same one, and its dependents. See `get`."""
        which = Reference(kind, found["metadata"]["name"])
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": found["metadata"]["uid"]},
        }
        try:
            self.run(self._asked("DELETE", f"{self._path(kind)}/{which.name}", [], body, str(which)))
        except ServingError as error:
            if error.code not in (Code.NOT_FOUND, Code.ALREADY_EXISTS):  # it is gone, or another object has its name
                raise

    def log(self, pod: str, container: str, lines: int, *, previous: bool = False) -> str:
        """Return the last log lines of a container; "" if there are none yet. See `get`."""
        query = [("container", container), ("tailLines", str(lines)), ("limitBytes", str(2**20))]
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        try:
            query += [("previous", "true")] if previous else []
            return self.run(self._answer("GET", path, query, None, f"Pod '{pod}'")).decode(errors="replace")
        except ServingError as error:
            if error.code in (Code.NOT_FOUND, Code.INVALID_ARG):  # it has not started, or its log is not kept
                return ""
            raise

    async def _listed(self, kind: ObjectKind, path: str, labels: str = "", fields: str = "") -> Sequence[Plain]:
        query = [("limit", str(PAGE))]
        query += [("labelSelector", labels)] if labels else []
        query += [("fieldSelector", fields)] if fields else []
        found: list[Plain] = []
        token = ""
        while True:
            page = await self._asked(
                "GET", path, [*query, *([("continue", token)] if token else [])], None, kind.plural
            )
            found += [{**item, "apiVersion": kind.api, "kind": kind.kind} for item in page.get("items") or ()]
            token = page["metadata"].get("continue", "")
            if not token:
                return found

    async def _asked(
        self, method: str, path: str, query: Sequence[tuple[str, str]], body: object, what: str, kind: str = ""
    ) -> Plain:
        answer = await self._answer(method, path, query, body, what, kind)
        found: Plain = json.loads(answer)
        return found

    async def _answer(
        self, method: str, path: str, query: Sequence[tuple[str, str]], body: object, what: str, kind: str = ""
    ) -> bytes:
        """Retry until an answer is final. Every request may be repeated: see `apply` and `delete`."""
        pause_s = RETRY_S
        for attempt in range(RETRIES_MAX + 1):
            try:
                response = await self._open(method, path, query, body, kind)
                answer: bytes = await response.read()
            except ServingError:
                if attempt == RETRIES_MAX:
                    raise
            except self._faults as error:
                if attempt == RETRIES_MAX:
                    raise self._unreachable(error) from None
            else:
                if response.status < 300:
                    return answer
                is_contended = method == "PATCH" and response.status == _CONFLICT and not _conflicts(_status(answer))
                if not (response.status in _BUSY or is_contended) or attempt == RETRIES_MAX:
                    raise refusal(response.status, answer, what)
                asked_s = response.headers.get("Retry-After", "")
                pause_s = max(pause_s, float(asked_s) if asked_s.isdecimal() else 0.0)
            await asyncio.sleep(min(pause_s, RETRY_S_MAX))
            pause_s *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _open(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        body: object,
        kind: str = "",
    ) -> Any:
        """Send a request and return the response, whose body has not been read."""
        if self._api is None:
            self._api = self._client.ApiClient(self._configuration)
        headers = {"Accept": "application/json", "User-Agent": MANAGER}
        headers |= {"Content-Type": kind or "application/json"} if body is not None else {}
        for is_again in (False, True):
            token = self._token()
            try:
                await self._api.update_params_for_auth(headers, [], ["BearerToken"])
                response = await self._api.request(
                    method,
                    f"{self._configuration.host}{path}",
                    query_params=list(query),
                    headers=headers,
                    body=body,
                    _preload_content=False,
                    _request_timeout=CALL_S_MAX,
                )
            except self._faults as error:
                raise self._unreachable(error) from None
            if response.status != _UNKNOWN or is_again or not await self._sign_in(token):
                return response
            response.close()
        raise AssertionError("the second answer is returned")

    async def _sign_in(self, refused: object) -> bool:
        """Read the kubeconfig again after its token was refused, and return whether the token has changed.

        Tokens of clouds live for minutes; a program named in the kubeconfig creates them. In a pod, the library reads
        the token's file again.
        """
        async with self._signing_in:
            if self._settings.config != IN_CLUSTER and self._token() == refused:
                try:
                    await asyncio.wait_for(self._load(), CALL_S_MAX)
                except self._config_faults as error:
                    _log.warning("'%s' cannot be read again: %s", self._settings.config, " ".join(str(error).split()))
            return self._token() != refused

    def _token(self) -> object:
        return self._configuration.api_key.get("BearerToken")

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._api is not None:
            await self._api.close()

    def _path(self, kind: ObjectKind) -> str:
        root = f"/apis/{kind.api}" if kind.group else f"/api/{kind.api}"
        return f"{root}/namespaces/{self.namespace}/{kind.plural}"

    async def _load(self) -> str:
        """Read the address and credentials of the cluster, and return its default namespace."""
        if self._settings.config == IN_CLUSTER:
            self._config.load_incluster_config(client_configuration=self._configuration)
            return NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.exists() else ""
        loader = await self._config.load_kube_config(
            config_file=str(Path(self._settings.config).expanduser()),
            context=self._settings.context or None,
            client_configuration=self._configuration,
            persist_config=False,
        )
        found: Mapping[str, Any] = loader.current_context.get("context", {})
        return str(found.get("namespace", ""))

    def _unreachable(self, error: Exception) -> ServingError:
        reason = str(error) or type(error).__name__
        return unavailable(f"the API server at {self._configuration.host} cannot be reached: {reason}")


def refusal(status: int, answer: bytes | str, what: str) -> ServingError:
    """Return the error that an answer of the API server means.

    Args:
        answer: Its body: a `Status` of Kubernetes.
    """
    found = _status(answer)
    said = str(found.get("message", "")) or f"it answers {status}"
    conflicts = _conflicts(found)
    if conflicts:
        fields = "; ".join(f"{each['field']} ({each['message']})" for each in conflicts)
        return conflict(
            f"{what} was changed by another field manager: {fields}",
            hint="undo that change, or delete the object: the platform creates it again",
        )
    if status == 404:
        return not_found(f"{what}: {said}", hint="does the namespace exist, and are the required CRDs installed?")
    if status == _UNKNOWN:
        return unavailable(f"{what}: the cluster does not know who asks: {said}", hint="sign in again")
    if (
        status == 403 and " cannot " in said
    ):  # 'User "..." cannot patch resource "..."'; admission and quotas say 403, too
        return invalid(f"{what}: {said}", hint="docs/platform_kubernetes.md has the Role that the platform needs")
    if status == _CONFLICT:
        return conflict(f"{what}: {said}")
    if status in _BUSY:
        return unavailable(f"{what}: the API server is unavailable: {said}")
    return invalid(f"{what}: Kubernetes refuses it: {said}")


def _status(answer: bytes | str) -> Plain:
    try:
        found: Plain = json.loads(answer)
    except ValueError:
        return {}
    return found


def _conflicts(status: Plain) -> list[Plain]:
    causes = (status.get("details") or {}).get("causes") or ()
    return [each for each in causes if each.get("reason") == "FieldManagerConflict"]
