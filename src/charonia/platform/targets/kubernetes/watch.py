"""What there is of one kind in a cluster, kept up to date by a watch."""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

from charonia.core.errors import ServingError, unavailable
from charonia.platform.targets.kubernetes.api import OPENED, Cluster, ExpiredError
from charonia.platform.targets.kubernetes.marks import ObjectKind, Plain

_log = logging.getLogger(__name__)

RECONNECT_S = 0.2
"""Pause before a watch that was cut off is begun again; it doubles each time."""

RECONNECT_S_MAX = 15.0

STALE_S_MAX = 30.0
"""What was seen counts for so long after the watch has failed."""

FIRST_S_MAX = 20.0
"""Time for the first list."""


class WatchedObjects:
    """The objects of a kind with a label. Any thread may ask.

    Args:
        cluster: Where they are.
        kind: Their kind.
        labels: Selector of their labels.
    """

    def __init__(self, cluster: Cluster, kind: ObjectKind, labels: str) -> None:
        self._cluster = cluster
        self._kind = kind
        self._labels = labels
        self._objects: dict[str, Plain] = {}
        self._version = 0
        self._lock = threading.Lock()
        self._is_tried = threading.Event()
        self._is_listed = False
        self._failed_s = 0.0
        self._failure: ServingError | None = None
        cluster.begin(self._follow())

    def all(self) -> Sequence[Plain]:
        """Return the objects.

        Raises:
            ServingError: UNAVAILABLE when it has not been known for a while what there is.
        """
        is_tried, failure = self._is_tried.wait(FIRST_S_MAX), self._failure
        if failure is not None and (not self._is_listed or time.monotonic() - self._failed_s > STALE_S_MAX):
            raise unavailable(failure.message, hint=failure.hint)
        if not is_tried:
            raise unavailable(f"the cluster has not said within {FIRST_S_MAX:g} s which {self._kind.plural} it has")
        with self._lock:
            return list(self._objects.values())

    def put(self, found: Plain) -> None:
        """Note what a call has returned, if the watch does not know more."""
        with self._lock:
            if _version(found) > self._version:
                self._keep(found)

    def put_all(self, found: Sequence[Plain], version: str, label: tuple[str, str]) -> None:
        """Note all objects that have a further label, from a list of that version."""
        listed = int(version) if version.isdecimal() else 0
        with self._lock:
            if listed < self._version:
                return
            names = {each["metadata"]["name"] for each in found}
            for name, known in list(self._objects.items()):
                is_one = (known["metadata"].get("labels") or {}).get(label[0]) == label[1]
                if is_one and name not in names and _version(known) <= listed:
                    del self._objects[name]
            for each in found:
                self._keep(each)

    def _keep(self, found: Plain) -> None:
        known = self._objects.get(found["metadata"]["name"])
        if known is None or _version(known) <= _version(found):
            self._objects[found["metadata"]["name"]] = found

    async def _follow(self) -> None:
        pause_s = RECONNECT_S
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                begun_s = time.monotonic()
                async for kind, found in self._cluster.watched(self._kind, self._labels, version):
                    self._failure = None
                    if kind == OPENED:
                        continue
                    version = str(found["metadata"].get("resourceVersion", version))
                    self._note(kind, found)
                    pause_s = RECONNECT_S
                if time.monotonic() - begun_s >= RECONNECT_S_MAX:
                    continue  # the server has ended it in its time
            except ExpiredError:
                version = ""
            except ServingError as error:
                self._fail(error)
            except Exception as error:
                _log.exception("watch of %s: it has failed", self._kind.plural)
                version = ""
                self._fail(unavailable(f"the watch of {self._kind.plural} has failed: {error}"))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_S_MAX)

    async def _list(self) -> str:
        found, version = await self._cluster.listed(self._kind, labels=self._labels)
        with self._lock:
            self._objects = {each["metadata"]["name"]: each for each in found}
            self._version = int(version) if version.isdecimal() else 0
        self._failure, self._is_listed = None, True
        self._is_tried.set()
        return version

    def _note(self, kind: str, found: Plain) -> None:
        with self._lock:
            self._version = max(self._version, _version(found))
            if kind == "DELETED":
                known = self._objects.get(found["metadata"]["name"])
                if known is not None and known["metadata"].get("uid") == found["metadata"].get("uid"):
                    del self._objects[found["metadata"]["name"]]
            elif kind != "BOOKMARK":
                self._keep({**found, "apiVersion": self._kind.api, "kind": self._kind.kind})

    def _fail(self, error: ServingError) -> None:
        if self._failure is None:
            self._failed_s = time.monotonic()
        self._failure = error
        self._is_tried.set()


def _version(found: Plain) -> int:
    text = str(found["metadata"].get("resourceVersion", "0"))
    return int(text) if text.isdecimal() else 0
