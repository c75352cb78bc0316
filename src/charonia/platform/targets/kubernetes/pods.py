"""Why pods do not answer: what is asked about them, and remembered for a while."""

import contextlib
import threading
import time
from collections.abc import Callable

from charonia.core.errors import ServingError
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.marks import EVENT, Plain
from charonia.platform.targets.kubernetes.reasons import LOG_LINES, is_ready, needs_log, pod_reason, restarts

ASKED_S = 3.0
"""Pause between two questions about a pod that is as it was."""

PODS_MAX = 2000
"""Most pods that something is remembered of."""


class PodReasons:
    """Says why pods do not answer. Any thread may ask.

    Args:
        cluster: Where they are.
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._known: dict[tuple[object, object], tuple[float, str]] = {}
        self._lock = threading.Lock()

    def reason(self, pod: Plain) -> str:
        """Return why a pod does not answer, "" where nothing is wrong with it."""
        if is_ready(pod):
            return ""
        state, now_s = (pod["metadata"].get("uid"), pod["metadata"].get("resourceVersion")), self._clock()
        with self._lock:
            asked_s, text = self._known.get(state, (-ASKED_S, ""))
            if now_s - asked_s < ASKED_S:
                return text
            if len(self._known) >= PODS_MAX:
                self._known.clear()
        text = self._ask(pod)
        with self._lock:
            self._known[state] = (now_s, text)
        return text

    def _ask(self, pod: Plain) -> str:
        """Return the reason, with what the log and the events say where they can be read."""
        name, log = pod["metadata"]["name"], ""
        container = needs_log(pod)
        if container:
            with contextlib.suppress(ServingError):
                log = self._cluster.log(name, container, LOG_LINES, previous=restarts(pod) > 0)
        found = pod_reason(pod, log=log)
        if found:
            return found
        with contextlib.suppress(ServingError):
            fields = f"involvedObject.name={name},type=Warning"
            events = sorted(self._cluster.list(EVENT, fields=fields)[0], key=_time)
            return pod_reason(pod, events)
        return ""


def _time(event: Plain) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")
