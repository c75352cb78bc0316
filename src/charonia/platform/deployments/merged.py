"""One answer from those of several servers of a deployment. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

_COUNTS = ("requests", "errors", "in_flight")
_SHADOW_COUNTS = ("sent", "compared", "different", "failed", "dropped")
_STATES = ("rolled_back", "aborted", "running", "paused", "finished")
"""States of a canary plan: the first that a server has is that of all. One server that rolls back decides for all."""


def merged_traffic(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how the requests of a model are split, from the answers of all servers.

    Counts are summed; a percentile is that of the slowest server; settings are those of the first.
    """
    first = dict(answers[0])
    if len(answers) == 1:
        return first
    of_all = [{each["version"]: each for each in answer["versions"]} for answer in answers]
    first["versions"] = [
        _version([versions[number] for versions in of_all if number in versions])
        for number in dict.fromkeys(number for versions in of_all for number in versions)
    ]
    plans = [answer["canary"] for answer in answers if answer.get("canary")]
    first["canary"] = min(plans, key=lambda plan: _STATES.index(plan["state"]), default=None)
    deciding = next((answer for answer in answers if answer.get("canary") is first["canary"]), answers[0])
    entries = {(entry["time"], entry["text"]): entry for answer in answers for entry in answer["history"]}
    return {**first, "weights": deciding["weights"], "history": [entries[key] for key in sorted(entries)]}


def _version(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    version: dict[str, Any] = {**found[0], "is_ready": all(each["is_ready"] for each in found)}
    version.update({name: sum(each[name] for each in found) for name in _COUNTS})
    version["latency_us"] = _slowest([each["latency_us"] for each in found])
    shadows = [each["shadow"] for each in found if each["shadow"]]
    if shadows:
        counts = {name: sum(each[name] for each in shadows) for name in _SHADOW_COUNTS}
        rate = counts["different"] / counts["compared"] if counts["compared"] else 0.0
        slowest = _slowest([each["latency_us"] for each in shadows])
        version["shadow"] = {**shadows[0], **counts, "difference_rate": rate, "latency_us": slowest}
    return version


def _slowest(latencies: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        key: max(each.get(key, 0.0) for each in latencies)
        for key in dict.fromkeys(k for each in latencies for k in each)
    }
