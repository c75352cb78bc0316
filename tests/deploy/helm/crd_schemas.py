"""Schemas of the objects that the chart makes for other projects' controllers, as far as the chart uses them."""

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"type": "array", "items": _TEXT, "minItems": 1}
_NAMES: Schema = {"type": "object", "additionalProperties": _TEXT}
_NUMBER: Schema = {"type": "integer", "minimum": 0}


def _record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def _object(version: str, kind: str, spec: Schema) -> Schema:
    metadata = _record({"name": _TEXT, "namespace": _TEXT, "labels": _NAMES}, {"annotations": _NAMES})
    return _record(
        {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec},
    )


_POLICY = _record({"type": {"enum": ["Pods", "Percent"]}, "value": _NUMBER, "periodSeconds": _NUMBER})
_SCALING = _record({"stabilizationWindowSeconds": _NUMBER, "policies": _list(_POLICY)})
_POOL = "inference.networking.k8s.io"
_BACKEND: Schema = {
    "anyOf": [
        _record({"name": _TEXT, "port": {"type": "integer"}}, {"weight": _NUMBER}),
        _record({"name": _TEXT, "group": {"const": _POOL}, "kind": {"const": "InferencePool"}}),
    ]
}
_HEADERS = _record({}, {"set": {"type": "array"}, "add": {"type": "array"}, "remove": _TEXTS})
_FILTER = _record({"type": _TEXT}, {"requestHeaderModifier": _HEADERS, "responseHeaderModifier": _HEADERS})
_PARENT = _record({"name": _TEXT}, {"namespace": _TEXT, "sectionName": _TEXT, "kind": _TEXT, "port": _NUMBER})
_ROUTE = {"parentRefs": _list(_PARENT)}
_RULE = _record({"alert": _TEXT, "expr": _TEXT, "labels": _NAMES, "annotations": _NAMES}, {"for": _TEXT})

SCHEMAS: dict[str, Schema] = {
    "ScaledObject": _object(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _record(
            {
                "scaleTargetRef": _record({"apiVersion": {"const": "apps/v1"}, "kind": _TEXT, "name": _TEXT}),
                "minReplicaCount": _NUMBER,
                "maxReplicaCount": {"type": "integer", "minimum": 1},
                "pollingInterval": _NUMBER,
                "cooldownPeriod": _NUMBER,
                "advanced": _record(
                    {
                        "horizontalPodAutoscalerConfig": _record(
                            {"behavior": _record({"scaleUp": _SCALING, "scaleDown": _SCALING})}
                        )
                    }
                ),
                # KEDA's metadata are strings, numbers too.
                "triggers": _list(
                    _record(
                        {"type": _TEXT, "metadata": _NAMES},
                        {
                            "metricType": {"enum": ["AverageValue", "Utilization"]},
                            "authenticationRef": _record({"name": _TEXT}, {"kind": _TEXT}),
                        },
                    )
                ),
            }
        ),
    ),
    "PodMonitor": _object(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _record(
            {
                "selector": _record({"matchLabels": _NAMES}),
                "podMetricsEndpoints": _list(_record({"port": _TEXT, "path": _TEXT, "interval": _TEXT})),
            }
        ),
    ),
    "PrometheusRule": _object(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        _record({"groups": _list(_record({"name": _TEXT, "rules": _list(_RULE)}))}),
    ),
    "InferencePool": _object(
        f"{_POOL}/v1",
        "InferencePool",
        _record(
            {
                "selector": _record({"matchLabels": _NAMES}),
                "targetPorts": _list(_record({"number": _NUMBER})),
                "endpointPickerRef": _record(
                    {"name": _TEXT, "port": _record({"number": _NUMBER})},
                    {"failureMode": {"enum": ["FailOpen", "FailClosed"]}},
                ),
            }
        ),
    ),
    "HTTPRoute": _object(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        _record(
            {
                **_ROUTE,
                "rules": _list(
                    _record(
                        {"backendRefs": _list(_BACKEND)},
                        {"timeouts": _record({"request": _TEXT}), "filters": _list(_FILTER)},
                    )
                ),
            },
            {"hostnames": _TEXTS},
        ),
    ),
    "GRPCRoute": _object(
        "gateway.networking.k8s.io/v1",
        "GRPCRoute",
        _record(
            {**_ROUTE, "rules": _list(_record({"backendRefs": _list(_BACKEND)}, {"filters": _list(_FILTER)}))},
            {"hostnames": _TEXTS},
        ),
    ),
}
"""By kind."""
