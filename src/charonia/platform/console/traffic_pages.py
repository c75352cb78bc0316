"""The page of a deployment's traffic: versions side by side, weights, the canary plan and its history."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Form, Response

from charonia.core.errors import ServingError
from charonia.platform.console import deployment_figures as shown
from charonia.platform.console.deploy_form import FormFields, number, numeric, text_of
from charonia.platform.console.deployment_pages import page
from charonia.platform.console.pages import INVALID, OnPage, PageContext, Sent, problems_of
from charonia.platform.console.text import figure, percent
from charonia.platform.deployments.figures import Figures
from charonia.platform.deployments.reads import DeploymentView
from charonia.platform.deployments.servers import UNDER_WAY
from charonia.platform.values import Text

router = APIRouter(prefix="/p/{project}/deployments/{name}/traffic", include_in_schema=False)

STICKY = {"": "no: each request goes to any", "key": "by API key", "correlation_id": "by correlation id"}
"""Options to keep a client on its version."""

_PLAN = {
    "steps": "1, 10, 50, 100",
    "step_seconds": 300,
    "samples_min": 200,
    "p99_ratio_max": 1.5,
    "checks_errors": True,
}


Model = Annotated[Text, Form()]


@router.get("")
def show(visit: OnPage, name: Text, model: Text = "") -> Response:
    return _page(visit, name, model)


@router.post("/weights")
def set_weights(visit: OnPage, name: Text, model: Model, sent: Sent) -> Response:
    """Split requests by weights, and copy shares of them to shadow versions."""
    servers = visit.platform.deployments.servers
    try:
        present = servers.traffic(visit.who, visit.project, name, model)["shadow"]
        change = {
            "weights": {version: share or 0 for version, share in _numbers(sent, "weight-")},
            "sticky": text_of(sent, "sticky"),
            "shadow": shadows(_numbers(sent, "copies-"), present) or None,
        }
        servers.set_traffic(visit.who, visit.project, name, model, change)
    except ServingError as error:
        return _page(visit, name, model, block="split", status=INVALID, problems=problems_of(error, other="split"))
    return _page(visit, name, model, block="split", said="The next requests are split this way.", change=change)


def shadows(percents: Iterable[tuple[str, Any]], present: Mapping[str, Any]) -> dict[str, Any]:
    """Return shadow versions in the form of the server's API.

    Args:
        percents: Share of the requests to copy to each version, in percent; 0 or None for none.
        present: The current shadow versions, whose other settings are kept.
    """
    return {
        version: {**present.get(version, {}), "share": percent / 100 if isinstance(percent, int | float) else percent}
        for version, percent in percents
        if percent
    }


@router.post("/canary")
def canary(visit: OnPage, name: Text, model: Model, sent: Sent) -> Response:
    """Start a canary plan, or control the running one."""
    action = text_of(sent, "action")
    try:
        change = {"canary": _plan(sent)} if action == "begin" else {"action": action}
        visit.platform.deployments.servers.set_traffic(visit.who, visit.project, name, model, change)
    except ServingError as error:
        form = {**_PLAN, **{key: text_of(sent, key) for key in sent if key in _PLAN}}
        problems = problems_of(error, other="canary")
        return _page(visit, name, model, block="controls", status=INVALID, form=form, problems=problems)
    return _page(visit, name, model, block="controls")


def _plan(sent: FormFields) -> dict[str, Any]:
    """Return a plan in the form of the server's API; the server itself refuses invalid numbers."""
    steps = [numeric(part) for part in text_of(sent, "steps").replace("%", "").split(",") if part.strip()]
    plan = {key: number(sent, key) for key in ("version", "step_seconds", "samples_min", "p99_ratio_max")}
    return {**plan, "steps": steps, "checks_errors": bool(text_of(sent, "checks_errors"))}


def _numbers(sent: FormFields, prefix: str) -> list[tuple[str, Any]]:
    return [(key.removeprefix(prefix), number(sent, key)) for key in sent if key.startswith(prefix)]


def _page(visit: PageContext, name: str, model: str, *, block: str = "", status: int = 200, **values: Any) -> Response:
    deployments = visit.platform.deployments
    view = deployments.reads.get(visit.who, visit.project, name)
    names = [each["name"] for each in view.spec.get("models", ())]
    chosen = model if model in names else names[0] if names else ""
    context: dict[str, Any] = {"models": names, "model": None, "problem": "", "said": "", "form": _PLAN, "query": ""}
    if len(names) > 1:
        context["query"] = f"?model={chosen}"
    try:
        if view.http and chosen:
            answer = deployments.servers.traffic(visit.who, visit.project, name, chosen)
            context["model"] = traffic_view({**answer, **_foreseen(answer, values.get("change", {}))}, view)
    except ServingError as error:
        context["problem"] = error.message
    if context["model"] is None:
        context["models"] = []
    return page(visit, view, "traffic.html", "traffic", {**context, **values}, block=block, status=status)


def _foreseen(answer: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a server's report that a change will have changed when the server has it."""
    if not change:
        return {}
    versions = [{**each, "weight": change["weights"].get(each["version"], 0)} for each in answer["versions"]]
    return {"versions": versions, "sticky": change["sticky"], "shadow": change["shadow"] or {}}


def traffic_view(answer: Mapping[str, Any], view: DeploymentView) -> dict[str, Any]:
    """Return the server's report about a model's traffic in the form of the page."""
    figures = view.figures.versions if view.figures is not None else {}
    versions = sorted(answer["versions"], key=lambda each: int(each["version"]))
    total = sum(each["weight"] for each in versions)
    for place, each in enumerate(versions):
        each["series"] = place % shown.SERIES_MAX + 1
        each["percent"] = round(100 * each["share"], 1)
        weight = 100 * each["weight"] / total if total else 100 * each["share"]
        each["weight_percent"] = f"{weight:.4g}"
        each["copies_percent"] = f"{100 * answer['shadow'].get(each['version'], {}).get('share', 0):.4g}"
        each["now"] = figures.get(f"{answer['model']}/{each['version']}", Figures())
    canary, sticky = answer.get("canary"), answer.get("sticky", "")
    least_first = sorted(versions, key=lambda each: (each["percent"], -int(each["version"])))
    candidates = [(each["version"], f"version {each['version']}") for each in least_first if each["percent"] < 100]
    shares = ", ".join(f"version {each['version']} gets {figure(each['percent'])} %" for each in versions)
    return {
        "name": answer["model"],
        "versions": versions,
        "rows": _rows(versions),
        "shares_text": shares,
        "sticky": sticky,
        "stickies": [*(STICKY | ({} if sticky in STICKY else {sticky: sticky})).items()],
        "has_shadow": bool(answer["shadow"]),
        "canary": _canary(canary) if canary else None,
        "canary_open": canary is not None and canary["state"] in UNDER_WAY,
        "candidates": candidates,
        "shares": {each["version"]: each["percent"] for each in versions},
        "history": [
            {"time": entry["time"].replace("T", " ").removesuffix("Z")[5:16], "text": entry["text"]}
            for entry in reversed(answer.get("history", ()))
        ],
    }


def _rows(versions: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    has_copies = any(each.get("shadow") for each in versions)
    rate = "Requests a second, copies included" if has_copies else "Requests a second"
    rows = [
        ("Share of requests", [f"{figure(each['percent'])} %" for each in versions]),
        (rate, [figure(each["now"].requests_per_s) for each in versions]),
        ("Requests so far", [f"{each['requests']:,}" for each in versions]),
        ("Errors", [_errors(each) for each in versions]),
        ("p50", [_latency(each, "p50") for each in versions]),
        ("p99", [_latency(each, "p99") for each in versions]),
    ]
    if has_copies:
        copies = [each.get("shadow") or {} for each in versions]
        rows += [
            ("Copies compared", [f"{copy['compared']:,}" if copy else shown.NONE for copy in copies]),
            ("Answers that differ", [_differing(copy) for copy in copies]),
            ("Copies that failed", [f"{copy['failed']:,}" if copy else shown.NONE for copy in copies]),
            ("Copies left out", [f"{copy['dropped']:,}" if copy else shown.NONE for copy in copies]),
            ("p99 of copies", [_latency(copy, "p99") if copy else shown.NONE for copy in copies]),
        ]
    return rows


def _errors(version: Mapping[str, Any]) -> str:
    share = version["errors"] / version["requests"] if version["requests"] else 0.0
    return f"{version['errors']:,} ({percent(share)})" if version["errors"] else "0"


def _latency(version: Mapping[str, Any], key: str) -> str:
    value = version["latency_us"].get(key)
    return shown.ms_text(None if value is None else value / 1e3)


def _differing(copies: Mapping[str, Any]) -> str:
    if not copies:
        return shown.NONE
    return f"{copies['different']:,} ({percent(copies['difference_rate'])})" if copies["different"] else "0"


def _canary(canary: Mapping[str, Any]) -> dict[str, Any]:
    plan, state, at = canary["plan"], canary["state"], canary["step"]
    broken = state in ("rolled_back", "aborted")
    steps = []
    for place, share in enumerate(plan.get("steps") or [canary["percent"]]):
        kind = "done" if place < at or state == "finished" else ""
        if place == at and state != "finished":
            kind = "broken" if broken else "now"
        steps.append({"percent": figure(share), "kind": kind})
    return {
        "state": state.replace("_", " "),
        "version": plan["version"],
        "stable": plan.get("stable"),
        "steps": steps,
        "reason": canary["reason"],
        "waits_for": canary.get("waits_for", ""),
        "checks": list(canary.get("checks", {}).values()),
    }
