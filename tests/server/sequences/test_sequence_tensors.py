"""Controls of sequences: what a model is told about the sequence of a request."""

import numpy as np
import pytest

from charonia.config.pbtxt import parse
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.sequences.tensors import SequenceTensors, initial_states

CONFIG = """
name: "m"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching { control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: %s } } }
"""


@pytest.mark.parametrize(
    ("datatype", "sequence", "told"),
    [
        ("TYPE_UINT64", 2**64 - 5, 2**64 - 5),
        ("TYPE_INT64", 2**64 - 5, -5),
        ("TYPE_INT64", -5, -5),
        ("TYPE_INT64", 2**63 - 1, 2**63 - 1),
        ("TYPE_STRING", 2**64 - 5, b"18446744073709551611"),
    ],
)
def test_a_model_is_told_the_id_in_its_datatype(datatype: str, sequence: int, told: object) -> None:
    config = parse(CONFIG % datatype)
    request = InferRequest("m", {"IN": Tensor("IN", DataType.INT32, np.zeros(1, "<i4"))}, correlation_id=sequence)

    completed = SequenceTensors(config, initial_states(config, {})).complete(request, 0, {})

    assert completed.inputs["ID"].array.tolist() == [told]
