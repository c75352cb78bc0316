"""The explanation of a model version, as a record and as JSON. Pure."""

from dataclasses import dataclass

from charonia.server.explain.rules import Facts, Finding, explain

_QUANTILES = ((0.5, "p50"), (0.99, "p99"))


@dataclass(frozen=True, slots=True)
class ProcessHistory:
    """A process of the server.

    Attributes:
        uptime_s: How long it has been running, in seconds; 0 while it does not run.
        restarts: How often it was started again.
        last_exit: Why it ended the last time, "" if it has never ended.
    """

    name: str
    uptime_s: float
    restarts: int
    last_exit: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explained model version.

    Attributes:
        facts: The facts that the rules judged.
        findings: The findings, the strongest limit first.
        steps: The explanations of the models of an ensemble.
        processes: The processes of the server; none for a server of one process.
        traffic: Where requests without a version go, in sentences; none for the default, the latest version.
    """

    facts: Facts
    findings: tuple[Finding, ...]
    steps: tuple["Explanation", ...] = ()
    processes: tuple[ProcessHistory, ...] = ()
    traffic: tuple[str, ...] = ()

    @classmethod
    def of(cls, facts: Facts, steps: tuple["Explanation", ...] = ()) -> "Explanation":
        return cls(facts, explain(facts), steps)


def explanation_json(explanation: Explanation) -> dict[str, object]:
    """Return an explanation as a JSON document; times are microseconds, shares lie between 0 and 1."""
    facts = explanation.facts
    setup, activity, counts = facts.setup, facts.activity, facts.activity.counts
    return {
        "model_name": setup.model,
        "model_version": setup.version,
        "seconds": round(activity.seconds, 1),
        "active_seconds": round(activity.active_seconds, 1),
        "findings": [{"kind": each.kind, "says": each.says, "change": each.change} for each in explanation.findings],
        "requests": {
            "success": counts.success,
            "per_second": round(counts.success / activity.active_seconds, 1) if activity.active_seconds else 0.0,
            "failed": {reason.value.lower(): count for reason, count in counts.failed.items()},
            "from_cache": counts.hits,
            "waiting": activity.queued[-1] if activity.queued else 0,
            "waiting_max": max(activity.queued, default=0),
        },
        "batches": {
            "count": activity.batch_count,
            "mean_size": round(activity.mean_batch, 2),
            "sizes": {str(size): counts.batches[size] for size in sorted(counts.batches)},
            "closed": {reason.value: count for reason, count in counts.closes.items()},
        },
        "time_us": {
            "request": _us(counts.request_ns, counts.success),
            "queue": _us(counts.queue_ns, counts.success),
            **{f"queue_{name}": _rounded_us(activity.wait_ns(share)) for share, name in _QUANTILES},
            "batch_infer": _us(counts.infer_ns, activity.batch_count),
            "batch_moving": _us(counts.moving_ns, activity.batch_count),
        },
        "instances": _instances(facts),
        "rate_limiter": {
            "waiting": round(activity.short, 3),
            "resources": list(activity.resources),
            "holders": list(activity.holders),
        },
        "cores": {
            "count": setup.cores,
            "idle": round(activity.idle_cores, 1),
            "taken": round(activity.taken_cores, 1),
        },
        "configuration": {
            "max_batch_size": setup.batch_max,
            "dynamic_batching": setup.batches,
            "max_queue_delay_microseconds": setup.delay_us,
            "preferred_batch_size": list(setup.preferred),
        },
        "runs_in": None
        if setup.where is None
        else {"front_ends": setup.where.front_ends, "only_in_engine_because": setup.where.reason},
        "steps": [explanation_json(step) for step in explanation.steps],
        "processes": [
            {
                "name": each.name,
                "uptime_seconds": round(each.uptime_s, 1),
                "restarts": each.restarts,
                "last_exit": each.last_exit,
            }
            for each in explanation.processes
        ],
        "traffic": list(explanation.traffic),
    }


def _instances(facts: Facts) -> dict[str, object]:
    setup = facts.setup
    return {
        "count": setup.instances,
        "kind": "KIND_GPU" if setup.on_gpu else "KIND_CPU",
        "busy": round(facts.busy, 3),
        "batches_at_once": round(facts.activity.occupancy(setup.instances), 2),
        "threads": setup.threads,
        "min": setup.bounds.least if setup.bounds is not None else setup.instances,
        "max": setup.bounds.most if setup.bounds is not None else setup.instances,
        "scaling": setup.scaling,
    }


def _rounded_us(ns: float | None) -> int | None:
    return None if ns is None else round(ns / 1e3)


def _us(ns: int, count: int) -> float:
    return round(ns / count / 1e3, 1) if count else 0.0
