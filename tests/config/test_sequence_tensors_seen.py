"""What a model has beside its inputs and outputs because it works on sequences."""

import pytest

from charonia.config.complete import Signature, SignatureTensor, merge_signature, normalise
from charonia.config.kinds import ControlKind
from charonia.config.pbtxt import parse
from charonia.config.sequence_tensors import added_names, control_type, controls, seen_by_model
from charonia.core.dtypes import DataType

BATCHING = """
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
  state { input_name: "PAST" output_name: "NEXT" data_type: TYPE_FP16 dims: [ 2, -1 ] }
}
"""
TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "NEXT" data_type: TYPE_FP16 dims: [ 2, -1 ] }
"""


def test_a_model_without_sequences_is_seen_as_it_is_configured() -> None:
    config = parse(TENSORS)

    assert seen_by_model(config) is config
    assert added_names(config) == frozenset()
    assert controls(config) == {}


def test_controls_and_states_are_inputs_and_states_outputs() -> None:
    config = parse(TENSORS + BATCHING)

    seen = seen_by_model(config)

    assert [(i.name, i.data_type, i.dims) for i in seen.input] == [
        ("IN", DataType.FP32, (1,)),
        ("START", DataType.FP32, (1,)),
        ("END", DataType.INT32, (1,)),
        ("READY", DataType.BOOL, (1,)),
        ("ID", DataType.BYTES, (1,)),
        ("PAST", DataType.FP16, (2, -1)),
    ]
    assert seen.output == config.output
    assert added_names(config) == {"START", "END", "READY", "ID", "PAST", "NEXT"}


@pytest.mark.parametrize("kind", ControlKind)
def test_every_kind_of_control_is_found(kind: ControlKind) -> None:
    tensor, control = controls(parse(BATCHING))[kind]

    assert control in tensor.control
    assert control_type(control) is not None


def test_what_is_added_is_not_completed_as_an_input_or_output_of_clients() -> None:
    names = ["IN", "START", "END", "READY", "ID", "PAST"]
    signature = Signature(
        tuple(SignatureTensor(name, DataType.FP32, (-1, 1)) for name in names),
        tuple(SignatureTensor(name, DataType.FP32, (-1, 1)) for name in ("OUT", "NEXT")),
    )

    config, notes = merge_signature(parse(BATCHING), signature, default_max_batch_size=4)

    assert [tensor.name for tensor in config.input] == ["IN"]
    assert [tensor.name for tensor in config.output] == ["OUT"]
    assert config.max_batch_size == 4
    assert config.dynamic_batching is None
    assert not any("NEXT" in note or "START" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("max_batch_size: 8 sequence_batching { oldest { } }", (8,)),
        ("max_batch_size: 8 sequence_batching { oldest { preferred_batch_size: 2 } }", (2,)),
        ("sequence_batching { oldest { } }", ()),
    ],
)
def test_the_largest_batch_is_preferred_where_nothing_is(text: str, sizes: tuple[int, ...]) -> None:
    config = normalise(parse(text), name="m", gpu_count=0, default_instance_count=1)

    assert config.sequence_batching is not None
    assert config.sequence_batching.oldest is not None
    assert config.sequence_batching.oldest.preferred_batch_size == sizes
    assert config.sequence_batching.max_sequence_idle_microseconds == 1_000_000
