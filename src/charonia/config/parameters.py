"""Model parameters that the server interprets for every backend; the others belong to the backend."""

import re
from dataclasses import dataclass

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType

PADDING = "PADDING"
"""The model parameter."""

CUSTOM_BATCHING = "TRITON_BATCH_STRATEGY_PATH"
"""Model parameter that names a library with a custom batching strategy."""

PYTHON_STRATEGY = "BATCHING_STRATEGY"
"""Model parameter that names a Python file with one: its path, relative to the model's folder."""

ADAPT_DELAY = "ADAPT_QUEUE_DELAY"
"""Model parameter: "false" makes every lone request wait for the whole queue delay."""

INSTANCES_MIN = "INSTANCES_MIN"
"""Model parameter: the fewest instances of a model whose number of instances follows the load."""

INSTANCES_MAX = "INSTANCES_MAX"
"""Model parameter: the most. Without it, the number is fixed."""

PINNED = "pinned"
"""Model parameter: "true" keeps a model loaded in mode `auto`."""

EXAMPLE = "EXAMPLE"
"""Model parameter with an example request: a JSON object of plain values by input name."""

JSON_SCHEMA = "JSON_SCHEMA"
"""Model parameter of a function: `inputs` and `outputs`, each with a JSON schema by name."""

HTTP_ROUTE = "HTTP_ROUTE"
"""Model parameter: HTTP method and path at which the model answers as over `generate`: "POST /predict"."""

HTTP_REQUEST = "HTTP_REQUEST"
"""Model parameter: "true" if requests over HTTP have their header fields and more in the parameter `RECEIVED`."""

RECEIVED = "triton_http_request"
"""Request parameter with the HTTP request as JSON. Clients cannot set parameters of such names."""

MOUNTED_APP, MOUNTED_AT, MOUNTED_SOCKET = "MOUNTED_APP", "MOUNTED_AT", "MOUNTED_SOCKET"
"""Parameters of an application beside the models: its name in the file, its path, and its socket."""

TRY_EXAMPLE = "TRY_EXAMPLE"
"""Model parameter of a model served from a file: when it is loaded, an example request that it accepts is sought."""

EXAMPLE_REFUSED = "EXAMPLE_REFUSED"
"""Model parameter that replaces it if no example was accepted: the error of the model."""

FRONT_END = "front_end"
"""Model parameter: whether the model runs in the processes of front ends: "yes", "no" or "auto"."""

TRAFFIC = "traffic"
"""Model parameter: how requests without a version are split among versions, as a JSON object."""

OPENAI_ROUTES = "openai_routes"
"""Model parameter of an engine model: the routes of OpenAI's API that it answers itself, separated by commas."""

MAX_MODEL_LEN = "max_model_len"
"""Model parameter: tokens of prompt and answer together that a language model can take."""

REQUESTS_MAX = "max_requests"
"""Model parameter: most requests that an engine of a language model has at a time; more are refused."""

ALIASES = "openai_aliases"
"""Model parameter: other names of a model for clients of OpenAI's API, separated by commas."""

LORA_ADAPTERS = "lora_adapters"
"""Model parameter: names of the LoRA adapters that an engine model has, separated by commas."""

CHAT_TEMPLATE = "chat_template"
"""Model parameter: the chat template, or the name of a file with it in the model's folder."""

TEXT_OUTPUT_KIND = "text_output_kind"
"""Model parameter: whether a response of a language model has new text, "delta", or all so far, "cumulative"."""

EMBEDDING_OUTPUT = "embedding_output"
"""Model parameter of a sentence encoder: the output to take, where there are several."""

EMBEDDING_POOLING = "embedding_pooling"
"""Model parameter of a sentence encoder with an embedding for each token: "mean" or "cls"."""

EMBEDDING_NORMALIZE = "embedding_normalize"
"""Model parameter of a sentence encoder: "false" does not normalize embeddings."""

EMBEDDING_TOKENS_MAX = "embedding_tokens_max"
"""Model parameter of a sentence encoder: tokens of a text that count; the rest is cut off."""

SERVER_PARAMETERS = frozenset(
    {
        CHAT_TEMPLATE, EMBEDDING_NORMALIZE, EMBEDDING_OUTPUT, EMBEDDING_POOLING, EMBEDDING_TOKENS_MAX,
        ALIASES, LORA_ADAPTERS, OPENAI_ROUTES, REQUESTS_MAX, TEXT_OUTPUT_KIND,
        ADAPT_DELAY, CUSTOM_BATCHING, EXAMPLE, EXAMPLE_REFUSED, FRONT_END, PADDING, PINNED, PYTHON_STRATEGY,
        HTTP_REQUEST, HTTP_ROUTE, INSTANCES_MAX, INSTANCES_MIN, JSON_SCHEMA, TRAFFIC, TRY_EXAMPLE,
    }
)  # fmt: skip
"""All of them."""

TEXT_INPUT = "text_input"
TEXT_OUTPUT = "text_output"
INPUT_TOKENS = "num_input_tokens"
OUTPUT_TOKENS = "num_output_tokens"
"""Names of inputs and outputs. Source: Triton's vLLM backend."""

CUMULATIVE = "cumulative"
"""Value of the parameter `text_output_kind`: each response has all text so far."""


@dataclass(frozen=True, slots=True)
class InstanceBounds:
    """The bounds of the number of a model's instances.

    Attributes:
        least: The fewest; the model is loaded with so many.
        most: The most.
    """

    least: int
    most: int


def bounds_of(config: ModelConfig) -> InstanceBounds | None:
    """Return the bounds of a normalised configuration; None where the number is fixed."""
    most = _number(config, INSTANCES_MAX)
    least = config.instance_group[0].count if config.instance_group else most
    return InstanceBounds(least, most) if least < most else None


def least_of(config: ModelConfig) -> int:
    """Return the lower bound as the parameter gives it; 0 where it is not given, or no number of instances."""
    return _number(config, INSTANCES_MIN)


def _number(config: ModelConfig, parameter: str) -> int:
    """Return the number that a parameter gives, 0 where it gives none."""
    text = config.parameters.get(parameter, "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0


_ROUTE = re.compile(r"(GET|POST|PUT|PATCH|DELETE) ((?:/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+)")
_TAKEN = frozenset(
    {
        "v1", "v2", "samples", "openapi.json", "page.css", "page.js", "health", "version", "tokenize", "detokenize",
    }
)  # fmt: skip


def is_free_path(path: str) -> bool:
    """Whether a path may be that of a model or an application: it has plain segments, and the server has none there."""
    return _ROUTE.fullmatch(f"GET {path}") is not None and path.split("/")[1] not in _TAKEN


def route_of(config: ModelConfig) -> tuple[str, str] | None:
    """Return method and path of the model's own route, None where it has none.

    Raises:
        ValueError: The parameter has another form, or the server itself has the path.
    """
    text = config.parameters.get(HTTP_ROUTE)
    if text is None:
        return None
    match = _ROUTE.fullmatch(text)
    if match is None or not is_free_path(match[2]):
        raise ValueError(
            f"expected a method and a path of plain text that the server itself does not have, such as 'POST /predict',"
            f" got '{text}'"
        )
    return match[1], match[2]


def is_language_model(config: ModelConfig) -> bool:
    """Whether a model takes and returns text."""
    takes = any(each.name == TEXT_INPUT and each.data_type is DataType.BYTES for each in config.input)
    return takes and any(each.name == TEXT_OUTPUT and each.data_type is DataType.BYTES for each in config.output)


def repeats_text(config: ModelConfig) -> bool:
    """Whether each response of a language model has all text so far, and the number of all its tokens."""
    return config.parameters.get(TEXT_OUTPUT_KIND) == CUMULATIVE
