"""Whatever text a configuration has, it is read to a record that reads back as itself, or refused with a ServingError.

A seeded mutation fuzzer of config.pbtxt and of the configuration's JSON. Each case starts from texts that use every
field, mutated by characters, by lines and by words of the format. What is read must survive everything that follows
reading: writing it as text and as JSON and reading those back, completing, validating and comparing with a signature.
A refusal must be short and printable.
"""

import json
import random
from collections.abc import Callable
from contextlib import suppress

from charonia.config.complete import (
    Signature,
    SignatureTensor,
    check_signature,
    derive_backend,
    merge_signature,
    normalise,
)
from charonia.config.json_form import from_json, to_json
from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse, render
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.server.lifecycle.validation import unsupported, validate

MUTATIONS_MAX = 5
ERROR_CHARS_MAX = 1500

SEEDS = (
    """
    name: "m" platform: "onnxruntime_onnx" backend: "onnxruntime" max_batch_size: 8  # a comment
    version_policy { specific { versions: [1, 3] } }
    input [{ name: "x", data_type: TYPE_FP32, dims: [3, -1], reshape { shape: [-1, 3] }, optional: true },
           { name: "i" data_type: TYPE_STRING dims: 1 format: FORMAT_NCHW allow_ragged_batch: true }]
    output { name: "y" data_type: TYPE_INT64 dims: [ 10 ] label_filename: "labels.txt" reshape { shape: [] } }
    batch_input { kind: BATCH_ITEM_SHAPE target_name: ["a", "b"] data_type: TYPE_FP32 source_input: "i" }
    batch_output { target_name: "y" source_input: "i" }
    dynamic_batching {
      preferred_batch_size: [2, 8] max_queue_delay_microseconds: 100 preserve_ordering: true priority_levels: 2
      default_priority_level: 1 default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1000 }
      priority_queue_policy { key: 2 value { allow_timeout_override: true max_queue_size: 3 } }
    }
    instance_group [{ kind: KIND_GPU count: 2 gpus: [0, 1] rate_limiter { resources { name: "R" global: true } } },
                    { kind: KIND_CPU passive: true host_policy: "h" profile: "0" secondary_devices { device_id: 1 } }]
    default_model_filename: "model.onnx" cc_model_filenames { key: "7.5" value: "t4.plan" }
    metric_tags { key: "a" value: "b" } parameters { key: "k" value: { string_value: "v" } }
    """,
    """
    backend: "python"
    sequence_batching {
      max_sequence_idle_microseconds: 5 direct { minimum_slot_utilization: 0.5 } iterative_sequence: true
      control_input [{ name: "S" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1.5] } },
                     { name: "C" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }]
      state { input_name: "a" output_name: "b" data_type: TYPE_FP32 dims: -1 initial_state { zero_data: true } }
    }
    model_transaction_policy { decoupled: True } response_cache { enable: true }
    model_warmup { name: "w" batch_size: 1 count: 2
                   inputs { key: "x" value { data_type: TYPE_FP32 dims: [4] random_data: true } } }
    model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { buckets: [0.1, 1, inf] } } }
    optimization {
      graph { level: -1 } priority: PRIORITY_MAX eager_batching: true input_pinned_memory { enable: true }
      cuda { graphs: true graph_spec { batch_size: 1 input { key: "x" value { dim: [1, 2] } } } }
      execution_accelerators { gpu_execution_accelerator { name: "t" parameters { key: "p" value: "q" } } }
    }
    """,
    """
    platform: "ensemble" input { name: "in" data_type: TYPE_FP32 dims: 1 } output { name: "out" data_type: 11 dims: 1 }
    ensemble_scheduling {
      step [{ model_name: "a" input_map { key: "X" value: "in" } output_map { key: "Y" value: "mid" } },
            { model_name: "b" model_version: -1 input_map { key: "X" value: "mid" }
              output_map { key: "Y" value: "out" } }]
      max_inflight_requests: 4
    }
    model_operations { op_library_filename: "a.so" } model_repository_agents { agents { name: "checksum" } }
    """,
)

WORDS = (
    *(
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
        ":",
        ",",
        ";",
        "#",
        '"',
        "'",
        "\\",
        "-",
        "\n",
        "\0",
        "\ufeff",
        "\ud800",
        "é",
        "null",
    ),
    *("nan", "inf", "-1", "0", "0x1F", "07", "1e400", "99999999999999999999", "true", "t", "TYPE_BF16", "TYPE_BYTES"),
    *("name", "dims", "value", "key", "input", "[a.b]", "[type.googleapis.com/inference.ModelConfig]", "17", "{" * 300),
)

SIGNATURE = Signature(
    (SignatureTensor("x", DataType.FP32, (-1, -1, 3)),),
    (SignatureTensor("y", DataType.INT64, (-1, 10)),),
)


def mutated(text: str, rng: random.Random) -> str:
    """Return the text with some of it changed, removed, added, repeated or moved."""
    for _ in range(rng.choice([0, 1, 1, 2, MUTATIONS_MAX])):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([1, 1, 5, 40]))
        match rng.randrange(5):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:start] + rng.choice(WORDS) + text[start:]
            case 2:
                text = text[:start] + rng.choice(WORDS) + text[end:]
            case 3:
                text = text[:end] + text[start:end] + text[end:]
            case _:
                target = rng.randrange(len(text) + 1)
                text = text[:target] + text[start:end] + text[target:]
    return text


def read(reader: Callable[[str], ModelConfig], text: str) -> ModelConfig | None:
    """Return the record, or None for a text that was refused as it should be."""
    try:
        return reader(text)
    except ServingError as error:
        refusal = error
    assert refusal.code is Code.INVALID_ARG
    assert str(refusal).isprintable()
    assert len(str(refusal)) <= ERROR_CHARS_MAX
    return None


def check(config: ModelConfig) -> None:
    """Do with a record everything that is done with one that was read."""
    # Two NaN are never equal: texts are compared instead of records.
    text = render(config)
    assert render(parse(text)) == text
    assert render(from_json(json.dumps(to_json(config)))) == text
    unsupported(config)
    with suppress(ServingError):  # a clean refusal
        config, _ = derive_backend(config, "m.own", ["model.own", "model.onnx"])
        config, _ = merge_signature(config, SIGNATURE, default_max_batch_size=4)
    config = normalise(config, name="m", gpu_count=1, default_instance_count=1)
    assert normalise(config, name="m", gpu_count=1, default_instance_count=1) == config or "nan" in text
    validate(config, gpu_count=1)
    check_signature(config, SIGNATURE)


ORIGINALS = [(parse, text) for text in SEEDS] + [(from_json, json.dumps(to_json(parse(text)))) for text in SEEDS]


def check_mutated(rng: random.Random) -> None:
    """Read a mutated configuration and check it."""
    reader, original = rng.choice(ORIGINALS)
    config = read(reader, mutated(original, rng))
    if config is not None:
        check(config)
