"""Which routes of OpenAI's API a model can answer, and the list of models.

An engine model answers routes itself: its parameter `openai_routes` names them. A language model has a BYTES input
`text_input` and a BYTES output `text_output`. A model that makes embeddings has one FP32 output besides `text_input`,
or the inputs of a sentence encoder, `input_ids` and `attention_mask`.
"""

from charonia.config.model import ModelConfig
from charonia.config.parameters import (
    ALIASES,
    LORA_ADAPTERS,
    MAX_MODEL_LEN,
    OPENAI_ROUTES,
    TEXT_INPUT,
    is_language_model,
)
from charonia.core.dtypes import DataType

CHAT = "chat/completions"
COMPLETIONS = "completions"
EMBEDDINGS = "embeddings"
RESPONSES = "responses"
MESSAGES = "messages"
TOKENIZE = "tokenize"
DETOKENIZE = "detokenize"
ROUTES = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, "rerank", "score", TOKENIZE, DETOKENIZE)
"""The routes; those from `MESSAGES` on pass to engines that have them."""

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
TOKEN_TYPES = "token_type_ids"

OWNER = "charonia"
"""Owner of each model in the list."""

_IDS = (DataType.INT64, DataType.INT32)


def path_of(route: str) -> str:
    """Return the path of a route."""
    return f"/{route}" if route in (TOKENIZE, DETOKENIZE) else f"/v1/{route}"


def engine_routes(config: ModelConfig) -> tuple[str, ...]:
    """Return the routes that a model answers itself; none for one that is not an engine model."""
    return tuple(route.strip() for route in config.parameters.get(OPENAI_ROUTES, "").split(",") if route.strip())


def is_sentence_encoder(config: ModelConfig) -> bool:
    """Whether a model maps the tokens of sentences to embeddings of the sentences or of the tokens."""
    types = _input_types(config)
    return types.get(INPUT_IDS) in _IDS and types.get(ATTENTION_MASK) in _IDS and bool(float_outputs(config))


def makes_embeddings(config: ModelConfig) -> bool:
    return (
        _input_types(config).get(TEXT_INPUT) is DataType.BYTES and len(float_outputs(config)) == len(config.output) == 1
    )


def float_outputs(config: ModelConfig) -> list[str]:
    return [each.name for each in config.output if each.data_type is DataType.FP32]


def routes_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the routes that a model can answer, some of them with the server's help."""
    routes = set(engine_routes(config))
    if not routes and is_language_model(config):
        routes |= {CHAT, COMPLETIONS}
    if CHAT in routes:
        routes.add(RESPONSES)
    if makes_embeddings(config) or is_sentence_encoder(config):
        routes.add(EMBEDDINGS)
    return tuple(route for route in ROUTES if route in routes)


def adapters_of(config: ModelConfig) -> tuple[str, ...]:
    return _names(config, LORA_ADAPTERS)


def aliases_of(config: ModelConfig) -> tuple[str, ...]:
    return _names(config, ALIASES)


def _names(config: ModelConfig, parameter: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in config.parameters.get(parameter, "").split(",") if name.strip())


def model_ids(config: ModelConfig) -> list[str]:
    """Return the ids by which clients name a model: its name, its aliases, and `NAME:ADAPTER` for each adapter."""
    return [config.name, *aliases_of(config), *(f"{config.name}:{adapter}" for adapter in adapters_of(config))]


def model_object(id: str, config: ModelConfig, created_s: int) -> dict[str, object]:
    """Return the object of a model, by its id and the Unix time from which it was served."""
    known = config.parameters.get(MAX_MODEL_LEN, "")
    length = {"max_model_len": int(known)} if known.isascii() and known.isdigit() else {}
    return {"id": id, "object": "model", "created": created_s, "owned_by": OWNER, **length}


def models_list(configs: list[ModelConfig], created_s: int) -> dict[str, object]:
    """Return the list of the models in `configs` with routes."""
    served = [config for config in configs if routes_of(config)]
    data = [model_object(each, config, created_s) for config in served for each in model_ids(config)]
    return {"object": "list", "data": data}


def _input_types(config: ModelConfig) -> dict[str, DataType | None]:
    return {tensor.name: tensor.data_type for tensor in config.input}
