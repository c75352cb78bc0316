"""Sampling parameters of a request, as Triton's vLLM backend takes them: members of vLLM's own parameters by name."""

from __future__ import annotations

import json
import re
from typing import Any

from ...language.worker.members import near

_INTERNAL = {"output_kind", "skip_clone", "output_text_buffer_length"}
"""Members of vLLM's parameters that a request may not set."""

_TYPE_ERROR = re.compile(r"(.*) - at `\$\.?([a-z_0-9]*).*`")


def sampling_params(given: dict[str, Any], kind: str) -> Any:
    """Return vLLM's sampling parameters.

    Args:
        given: Members by name; numbers may be text, and null is vLLM's default. `guided_decoding` is Triton's name of
            `structured_outputs`.
        kind: Which outputs the engine returns: "DELTA" or "FINAL_ONLY".

    Raises:
        ValueError: One of them is unknown, or has a wrong type; vLLM's own error for a wrong value.
    """
    import msgspec
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    members = {name: value for name, value in given.items() if value is not None}
    guided = members.pop("guided_decoding", None)
    structured = members.pop("structured_outputs", guided)
    known = [name for name in SamplingParams.__struct_fields__ if name[0] != "_" and name not in _INTERNAL]
    for name in members:
        if name not in known:
            raise ValueError(f"{name}: vLLM has no such sampling parameter{near(name, known)}")
    try:
        made = msgspec.convert(members, SamplingParams, strict=False)
    except msgspec.ValidationError as error:
        match = _TYPE_ERROR.fullmatch(str(error))
        raise ValueError(f"{match[2]}: {match[1]}" if match else str(error)) from None
    if structured is not None:
        made.structured_outputs = _structured(structured, StructuredOutputsParams)
    made.output_kind = RequestOutputKind[kind]
    return made


def _structured(given: Any, cls: Any) -> Any:
    try:
        members = json.loads(given) if isinstance(given, str) else dict(given)
        members.pop("backend", None)  # one of the engine, no longer of a request
        return cls(**members)
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs: {error}") from None
