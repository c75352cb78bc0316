"""Hints for paths that are not served: what clients of other servers mean by theirs. Pure."""

import re

_INFER = "POST /v2/models/{0}/infer takes tensors and /v2/models/{0}/generate plain JSON, as KServe v2 and Triton do"
_LIST = "POST /v2/repository/index lists the models"
_OWN = (
    "a model's routes end with infer, generate, generate_stream, ready, config, stats or explain: /v2/models/{0}/infer"
)

_HINTS = tuple(
    (re.compile(pattern), hint)
    for pattern, hint in (
        (r"/v1/models/([^/:]+)(?:/versions/\d+)?(?::.*)?", _INFER),  # TensorFlow Serving and KServe v1
        (r"/(?:predictions|explanations)/([^/]+)(?:/.*)?", _INFER),  # TorchServe
        (r"/(?:predict|invocations|infer|generate)", _INFER),  # LitServe, BentoML, SageMaker, text-generation-inference
        (r"/(?:v1/)?models", _LIST),
        (r"/v2/models", _LIST),
        (r"/v1/(?:chat/completions|completions|responses|embeddings)", f"--openai=true serves OpenAI's API; {_INFER}"),
        (r"/(?:ping|health|healthz|livez|live)", "GET /v2/health/live, GET /v2/health/ready"),
        (r"/(?:ready|readyz|readiness)", "GET /v2/health/ready"),
        (r"/(?:docs|redoc|swagger|openapi\.ya?ml)", "GET / is a page on the models, GET /openapi.json their document"),
        (r"/metrics", "metrics have a port of their own: --metrics-port"),
        (r"/v2/models?/([^/]+)/.*", _OWN),
    )
)


def route_hint(path: str) -> str:
    """Return the hint of the error for a path that is not served."""
    for pattern, hint in _HINTS:
        match = pattern.fullmatch(path.rstrip("/"))
        if match is not None:
            return hint.format(*(match.groups() or ("MODEL",)))
    return "GET /v2 describes the server; metrics have a port of their own"
