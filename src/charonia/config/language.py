"""Language models: those that take and return text."""

from charonia.config.model import ModelConfig
from charonia.config.parameters import TEXT_OUTPUT_KIND
from charonia.core.dtypes import DataType

TEXT_INPUT = "text_input"
TEXT_OUTPUT = "text_output"
INPUT_TOKENS = "num_input_tokens"
OUTPUT_TOKENS = "num_output_tokens"
"""Names of inputs and outputs. Source: Triton's vLLM backend."""

CUMULATIVE = "cumulative"
"""Value of the parameter `text_output_kind`: each response has all text so far."""


def is_language_model(config: ModelConfig) -> bool:
    """Whether a model takes and returns text."""
    takes = any(each.name == TEXT_INPUT and each.data_type is DataType.BYTES for each in config.input)
    return takes and any(each.name == TEXT_OUTPUT and each.data_type is DataType.BYTES for each in config.output)


def repeats_text(config: ModelConfig) -> bool:
    """Whether each response of a language model has all text so far, and the number of all its tokens."""
    return config.parameters.get(TEXT_OUTPUT_KIND) == CUMULATIVE
