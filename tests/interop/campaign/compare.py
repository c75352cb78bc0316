"""Which answers are the same: all that a program can tell, but for what naturally differs. Pure."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.interop.campaign.calls import Call, Counted, Grpc, Http, Scenario, Stream, Together

MEASURED = {"ns", "last_inference", "memory_usage"}
"""Keys of times and memory: that they are there is compared, not their values."""
NEWER = {"max_inflight_requests"}
"""Keys that releases after Triton 2.51 have."""
ERRORS = ("error", "error_message", "reason")
COUNTERS = re.compile(r"^(nv_inference_(?:request_success|request_failure|count|exec_count)\{.*\}) (\S+)$", re.M)
FIXED_BEGINNINGS = ("[request id: ", "Request for unknown model: ", "failed to load '")
"""Beginnings of errors that programs look for."""


@dataclass(frozen=True)
class Difference:
    """What both said to the same call.

    Attributes:
        call: The call; of a stream one of its requests.
        ours: Charonia's answer, in comparable form.
        theirs: Triton's.
        our_errors: Sentences of errors in Charonia's answer.
        their_errors: The same of Triton.
    """

    call: Call
    ours: Any
    theirs: Any
    our_errors: str
    their_errors: str

    @property
    def rule(self) -> str | None:
        """What explains it: a row of docs/compatibility.md, None if there is none."""
        return next((row for row, covers in RULES.items() if covers(self)), None)

    def __str__(self) -> str:
        lines = [_shortened(self.call)]
        for path, ours, theirs in _parts("", self.ours, self.theirs):
            lines.append(f"  {path or 'answer'}\n    Charonia {_shortened(ours)}\n    Triton   {_shortened(theirs)}")
        if self.our_errors or self.their_errors:
            lines += [f"  Charonia: {_shortened(self.our_errors)}", f"  Triton: {_shortened(self.their_errors)}"]
        return "\n".join(lines)


def differences(scenario: Scenario, call: Call, ours: Any, theirs: Any) -> list[Difference]:
    """Return where the answers of both to a call differ so that a program can tell."""
    if isinstance(call, Counted):
        return differences(scenario, call.call, ours, theirs)
    if isinstance(call, Together):
        parts = zip(call.calls, ours, theirs, strict=True)
        return [found for part in parts for found in differences(scenario, *part)]
    if isinstance(call, Stream) and len(call.messages) > 1:
        each = [(Stream((one,)), _of(one.id, ours), _of(one.id, theirs)) for one in call.messages]
        return [found for part in each for found in differences(scenario, *part)]
    errors = ["; ".join(_errors(answer)) for answer in (ours, theirs)]
    ours, theirs = (comparable(scenario, call, answer) for answer in (ours, theirs))
    # Only one of them has run it, though the statuses may be the same.
    is_run_by_one = "already exists in request" in errors[0] or "decoupled transaction policy" in errors[1]
    is_same = _text(ours) == _text(theirs) and not is_run_by_one
    return [] if is_same else [Difference(call, ours, theirs, *errors)]


def _is_counted(call: Call) -> bool:
    """Return whether a call reads statistics or metrics."""
    return (isinstance(call, Http) and (call.metrics or call.path.endswith("/stats"))) or (
        isinstance(call, Grpc) and call.method == "ModelStatistics"
    )


def _counted(answer: Any, outcome: str) -> float:
    """Return how many requests ended as "success" or "fail" by statistics or metrics, over all versions."""
    if isinstance(answer, list):
        return float(sum(count for name, count in answer if f"request_{outcome}" in name))
    models = answer.get("body", answer).get("model_stats", [])
    return float(sum(int(model["inference_stats"][outcome]["count"]) for model in models))


def _status(answer: Any) -> Any:
    return answer.get("status") if isinstance(answer, dict) else None


RULES: Mapping[str, Callable[[Difference], bool]] = {
    "decoupled models over HTTP and `ModelInfer`": lambda d: "decoupled transaction policy" in d.their_errors,
    "a model that could not be loaded": lambda d: (
        all("Request for unknown model: " in errors for errors in (d.our_errors, d.their_errors))
        and {_status(d.ours), _status(d.theirs)} in ({404, 503}, {"NOT_FOUND", "UNAVAILABLE"})
    ),
    "a faulty request to a model that is not there": lambda d: (
        d.their_errors.startswith("Request for unknown model: ") and _status(d.ours) in (400, "INVALID_ARGUMENT")
    ),
    "body of a request that violates the protocol": lambda d: (
        _status(d.ours) == 400 and _status(d.theirs) == 500 and "nable to parse" in d.their_errors
    ),
    "a required input that is missing": lambda d: "expected number of inputs between" in d.our_errors,
    "outputs that do not fit the configuration": lambda d: (
        "output differs from its configuration" in f"{d.ours} {d.our_errors}"
    ),
    "parameters `triton_*` of `generate`": lambda d: (
        "/generate" in _shortened(d.call) and "are reserved for Triton usage" in d.our_errors
    ),
    "ensembles: outputs of a decoupled step together with tensors of the request": (
        lambda d: "receives inputs originated from different decoupled models" in d.their_errors
    ),
    "an output requested twice": lambda d: bool(re.search("output '.*' already exists in request", d.our_errors)),
    "errors of `generate` and `generate_stream`": lambda d: (
        isinstance(d.call, Http)
        and "/generate" in d.call.path
        and (_status(d.theirs) == 400 <= _status(d.ours) or "exactly 1 response" in d.their_errors)
    ),
    "errors of requests that cannot be read": lambda d: _text(d.ours) == _text(d.theirs).replace("[request id: ", ""),
    "body of a health answer": lambda d: (
        isinstance(d.call, Http) and d.call.path.endswith("/ready") and d.theirs == {"status": 200, "body": ""}
    ),
    "sequence ids that are texts": lambda d: "for inference input 'CORRID'" in d.their_errors,
    "requests of a sequence that name no version": lambda d: (
        "must specify the START flag" in d.their_errors
        and not d.our_errors
        and re.search('model_version: "|/versions/', _shortened(d.call)) is None
    ),
    "another load of an ensemble that failed": lambda d: "no version is available" in d.their_errors,
    "an ensemble with a step that has a response cache and decoupled responses": lambda d: (
        "failed to poll from model repository" in d.their_errors and "does not currently support model" in d.our_errors
    ),
    "classification: order of equal values": lambda d: (
        "classification" in _shortened(d.call) and _without_texts(d.ours) == _without_texts(d.theirs)
    ),
    "`platform` and `backend` that contradict": lambda d: "unexpected 'platform' and 'backend' pair" in d.our_errors,
    "classification of FP16": lambda d: "due to unsupported type 'FP16'" in d.their_errors,
    "requests that Triton does not answer": lambda d: (
        _status(d.theirs) == "no answer"
        or "Deadline Exceeded" in d.their_errors
        or "Socket closed" in d.their_errors
        or "unexpected deadlock" in d.their_errors
        or (isinstance(d.call, Stream) and d.theirs == [] and 'key: "count"' not in _shortened(d.call))
    ),
    "names that are given twice": lambda d: "is given more than once" in d.our_errors,
    "numbers in JSON": lambda d: isinstance(d.call, Http) and _rounded(d.ours) == _rounded(d.theirs),
    "failed requests in the statistics": lambda d: _without_failures(d.ours) == _without_failures(d.theirs),
    "instance groups that do not fit their kind": lambda d: (
        "is at UNAVAILABLE state: " in d.their_errors
        and re.search("but (specifies one or more GPUs|no GPUs are available)", d.their_errors) is not None
        and (_status(d.ours), _status(d.theirs)) in ((500, 400), ("INTERNAL", "INVALID_ARGUMENT"))
    ),
    "metrics of a model that is unloaded": lambda d: (
        isinstance(d.call, Http) and d.call.metrics and not d.ours and "request_success" in str(d.theirs)
    ),
    "ensembles: responses without one of the outputs": lambda d: (
        _is_counted(d.call)
        and re.search(r"s\d+_e\d", _shortened(d.call)) is not None
        and _counted(d.ours, "success") > _counted(d.theirs, "success")
    ),
    "response of a Python model with an error": lambda d: (
        _is_counted(d.call)
        and 0 < _counted(d.theirs, "success") - _counted(d.ours, "success") <= _counted(d.ours, "fail")
    ),
}
"""Differences that are on purpose, by row of docs/compatibility.md."""


def comparable(scenario: Scenario, call: Call, answer: Any) -> Any:
    """Return the answer without what naturally differs."""
    if isinstance(call, Http) and call.metrics:
        model = call.path.split("?")[1]
        own = [found for found in COUNTERS.findall(answer["body"]) if f'model="{model}"' in found[0]]
        return sorted([name, float(count)] for name, count in own if float(count))
    if isinstance(call, Http) and call.path.endswith("/index"):
        own = [entry for entry in answer["body"] or [] if entry["name"].startswith(f"s{scenario.seed}_")]
        # Some of the models that did not load Triton forgets.
        loaded = [entry for entry in own if "state" in entry and entry.get("reason", "unloaded") == "unloaded"]
        return sorted(map(_bare, loaded), key=_text)
    if isinstance(call, Http) and call.path.endswith("generate_stream") and answer["status"] == 200:
        return [_bare(json.loads(frame.removeprefix("data: "))) for frame in answer["body"].split("\n\n")[:-1]]
    if isinstance(call, Http) and (answer["status"] != 200 or not answer["body"]):
        return {"status": answer["status"], "body": _bare(answer["body"])}
    if isinstance(call, Stream):
        responses = [_streamed(scenario, one) for one in answer]
        return _without_finals(responses) if scenario.has_decoupled_steps(call.messages[0].model_name) else responses
    if isinstance(call, Http) and "model_name" in answer["body"] and "outputs" in answer["body"]:
        answer = {"status": 200, "type": answer["type"], "body": _arranged(scenario, answer["body"], answer["binary"])}
    return _bare(_arranged(scenario, answer) if "model_name" in answer else answer)


def _streamed(scenario: Scenario, answer: Any) -> Any:
    """Return an answer of a stream; Triton does not say of errors and of empty ones which version they are of."""
    if answer.get("error_message") or "status" in answer:
        return _bare({"error": answer.get("error_message") or answer["error"]})
    response = _arranged(scenario, answer["infer_response"])
    return _bare(response if response["outputs"] else {**response, "model_version": "..."})


def _without_finals(responses: Sequence[Any]) -> Sequence[Any]:
    """Return the responses of an ensemble without its final flags.

    Whether the last response has it, or an empty one behind it, depends on which step is over first.
    """
    bare = [{**one, "parameters": _without_final(one.get("parameters", {}))} for one in responses]
    return bare[:-1] if len(bare) > 1 and bare[-1].get("outputs") == [] else bare


def _without_final(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in parameters.items() if key != "triton_final_response"}


def _arranged(scenario: Scenario, response: Any, binary: str = "") -> Any:
    """Return a response with its data in its outputs; those of an ensemble Triton gives in any order."""
    outputs = [dict(output) for output in response["outputs"]]
    for output, raw in zip(outputs, response.get("raw_output_contents", ()), strict=False):
        output["raw"] = raw
    for output in outputs:
        size = 2 * output.get("parameters", {}).get("binary_data_size", 0)
        if size:
            output["raw"], binary = binary[:size], binary[size:]
    if any(entry.is_ensemble for entry in scenario.models if entry.name == response["model_name"]):
        outputs.sort(key=_text)
    rest = {key: value for key, value in response.items() if key != "raw_output_contents"}
    return {**rest, "outputs": outputs, "left over": binary}


def _parts(path: str, ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield where two answers differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        for key in ours:
            yield from _parts(f"{path}.{key}", ours[key], theirs[key])
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _parts(f"{path}[{index}]", *pair)
    elif _text(ours) != _text(theirs):
        yield path, ours, theirs


def _shortened(value: Any) -> str:
    return re.sub(r"x{9,}|(?:78){9,}", "x…", re.sub(r"\s+", " ", str(value)))[:1500]


def _errors(answer: Any) -> Iterator[str]:
    if isinstance(answer, dict):
        for key, value in answer.items():
            if key in ERRORS and value:
                yield str(value)
            yield from _errors(value)
    elif isinstance(answer, list):
        for value in answer:
            yield from _errors(value)


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare_value(key, item) for key, item in value.items() if key not in NEWER}
    if isinstance(value, float):  # Charonia writes FP32 as short as possible; 1 and 1.0 are the same
        return int(value) if value.is_integer() and abs(value) < 1e9 else float(np.float32(value))
    return [_bare(item) for item in value] if isinstance(value, list) else value


def _bare_value(key: str, value: Any) -> Any:
    if key in MEASURED:
        return "..."
    if key in ERRORS and value:
        return _begin(str(value))
    return _bare(value)


def _begin(sentence: str) -> str:
    return next((begin for begin in FIXED_BEGINNINGS if sentence.startswith(begin)), "") + "..."


def _of(request_id: str, answers: Any) -> list[Any]:
    """Return the answers of a stream to one request; a stream that broke off belongs to all of them."""
    return [one for one in answers if "status" in one or one["infer_response"]["id"] == request_id]


def _without_texts(value: Any) -> Any:
    """Return a response without the elements of BYTES outputs, of which the classes are."""
    if isinstance(value, dict):
        bare = value.get("datatype") == "BYTES"
        return {key: _without_texts(item) for key, item in value.items() if not bare or key not in ("raw", "data")}
    return [_without_texts(item) for item in value] if isinstance(value, list) else value


def _without_failures(value: Any) -> Any:
    """Return statistics or metrics without what counts failures; Triton has no `response_stats` of Python models."""
    if isinstance(value, dict):
        return {key: _without_failures(item) for key, item in value.items() if key not in ("fail", "response_stats")}
    if isinstance(value, list):
        return [_without_failures(item) for item in value if "nv_inference_request_failure" not in str(item)]
    return value


def _rounded(value: Any) -> str:
    """Return the value as text, in which doubles whose last digits differ are the same."""
    return re.sub(r"\d+\.\d+(?:e[+-]?\d+)?", lambda number: f"{float(number[0]):.14g}", _text(value))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
