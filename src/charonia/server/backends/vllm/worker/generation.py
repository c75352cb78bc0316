"""Requests that follow the contract of Triton's vLLM backend: a prompt, and what of the outputs is wanted."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import re
import uuid
from typing import TYPE_CHECKING, Any

from ...language.worker.members import closest_hint
from ...language.worker.text_stream import returned, usage_of
from .streams import run_request

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
            raise ValueError(f"{name}: vLLM has no such sampling parameter{closest_hint(name, known)}")
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


if TYPE_CHECKING:
    from typing import Any


async def answer_generation(engine: Any, request: Any, tasks: frozenset[str], lora: Any) -> None:
    """Answer a request: one response, or with `stream` one for each output of the engine.

    Args:
        tasks: What the model can do, in vLLM's names.
        lora: The adapter, None for none.
    """
    request_id = uuid.uuid4().hex
    embedding = request.sampling.pop("embedding_request", None)
    if embedding is not None:
        await _embed(engine, request, request_id, embedding)
        return
    if tasks and "generate" not in tasks:
        raise ValueError("the model generates no text; it makes embeddings, for example (input embedding_request)")
    params = sampling_params(request.sampling, "DELTA" if request.stream else "FINAL_ONLY")
    if "cumulative_logprob" in request.returns and params.logprobs is None:
        params.logprobs = 0  # else there is none
    prompt: dict[str, Any] = {"prompt": request.text}
    if request.images:
        images = await asyncio.to_thread(lambda: [_image(image) for image in request.images])
        prompt["multi_modal_data"] = {"image": images}
    answer = GenerationAnswer(request)
    options = {"lora_request": lora} if lora is not None else {}
    await run_request(engine, request_id, prompt, params, answer.take, **options)


class GenerationAnswer:
    """Turns the outputs of one request into responses."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._counts: dict[int, int] = {}

    def take(self, output: Any) -> bool:
        """Take an output of the engine; return whether it was the last."""
        request, choices = self._request, output.outputs
        for choice in choices:
            if choice.finish_reason == "error":
                raise RuntimeError("the engine failed while it worked on the request")
            self._counts[choice.index] = self._counts.get(choice.index, 0) + len(choice.token_ids)
        prompt = "" if request.excludes_input else request.text
        outputs: dict[str, Any] = {
            "text_output": [(prompt + choice.text).encode("utf-8", "replace") for choice in choices]
        }
        prompt_tokens, cached = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
        counts = [len(choice.token_ids) for choice in choices]
        outputs.update(returned(request.returns, choices, prompt_tokens, counts))
        if not output.finished:
            request.send(outputs)
            return False
        request.send(outputs, usage_of(prompt_tokens, sum(self._counts.values()), cached), final=True)
        return True


def _image(text: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(base64.b64decode(text, validate=True))).convert("RGB")
    except UnidentifiedImageError:
        raise ValueError("image: expected an image file in base64, got a file that Pillow does not know") from None
    except (binascii.Error, Image.DecompressionBombError, OSError) as error:
        raise ValueError(f"image: expected an image file in base64: {error}") from None


async def _embed(engine: Any, request: Any, request_id: str, text: Any) -> None:
    """Answer the request of a Triton OpenAI front end for an embedding, which is a list of numbers as JSON text."""
    from vllm import PoolingParams

    try:
        asked = json.loads(text)
        prompt = asked["input"]
        dimensions = (asked.get("pooling_params") or {}).get("dimensions")
        if isinstance(dimensions, list):
            dimensions = dimensions[0]
    except (AttributeError, LookupError, TypeError, ValueError):
        raise ValueError(
            f"embedding_request: expected a JSON object with `input` and perhaps `pooling_params`, got {text!r:.100}"
        ) from None
    params = PoolingParams(task="embed", dimensions=dimensions)
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        prompt = {"prompt_token_ids": prompt}
    async for output in engine.encode(prompt, params, request_id):
        if output.finished:
            count = len(output.prompt_token_ids or ())
            outputs: dict[str, Any] = {"text_output": json.dumps(output.outputs.data.tolist())}
            more = {"num_input_tokens": count, "num_output_tokens": 0}
            outputs.update({name: more[name] for name in more if name in request.returns})
            request.send(outputs, usage_of(count), final=True)
