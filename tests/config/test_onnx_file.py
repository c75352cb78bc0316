"""What an ONNX file says about other files, whatever way it is written."""

import io

import onnx
import pytest
from onnx import TensorProto, helper

from charonia.config.onnx_file import PARTS, OnnxFile


def tensor(location: str) -> TensorProto:
    made = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    made.external_data.add(key="offset", value="0")
    made.external_data.add(key="location", value=location)
    return made


def examined(model: bytes | onnx.ModelProto) -> tuple[frozenset[str], frozenset[str]]:
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return OnnxFile(io.BytesIO(content)).examined()


def test_every_path_to_a_tensor_is_walked() -> None:
    kinds = {"ModelProto": onnx.ModelProto.DESCRIPTOR}
    waiting = list(kinds.values())
    while waiting:
        for field in waiting.pop().fields:
            if field.message_type is not None and field.message_type.name not in kinds:
                kinds[field.message_type.name] = field.message_type
                waiting.append(field.message_type)
    reaching = {"TensorProto"}
    while more := {
        name
        for name, kind in kinds.items()
        if name not in reaching
        and any(f.message_type is not None and f.message_type.name in reaching for f in kind.fields)
    }:
        reaching |= more
    expected = {
        name: {
            field.number: field.message_type.name
            for field in kinds[name].fields
            if field.message_type is not None and field.message_type.name in reaching
        }
        for name in reaching - {"TensorProto"}
    }

    assert expected == PARTS


def test_files_of_tensors_are_found_wherever_they_are() -> None:
    inner = helper.make_graph([], "inner", [], [], [tensor("of_a_subgraph")])
    nodes = [
        helper.make_node("Constant", [], ["c"], value=tensor("of_a_constant")),
        helper.make_node("If", ["c"], ["y"], then_branch=inner),
    ]
    graph = helper.make_graph(nodes, "g", [], [], [tensor("of_the_graph")])
    sparse = graph.sparse_initializer.add()
    sparse.values.CopyFrom(tensor("of_values"))
    sparse.indices.CopyFrom(tensor("of_indices"))
    function = helper.make_function(
        "d", "F", [], ["z"], [helper.make_node("EPContext", [], ["z"], v=tensor("of_a_function"))], []
    )
    model = helper.make_model(graph, functions=[function])
    model.training_info.add().initialization.initializer.append(tensor("of_training"))

    files, operators = examined(model)

    assert files == {
        *("of_a_subgraph", "of_a_constant", "of_the_graph", "of_values", "of_indices", "of_a_function", "of_training")
    }
    assert operators == {"Constant", "If", "EPContext"}


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content) & 0x7F | 0x80, len(content) >> 7]) + content


def test_of_repeated_keys_and_values_all_count() -> None:
    entry = field(1, b"offset") + field(1, b"location") + field(2, b"harmless") + field(2, b"/etc/passwd")
    model = field(7, field(5, field(13, entry)))

    assert examined(model)[0] == {"harmless", "/etc/passwd"}


def test_fields_of_other_kinds_are_passed_over() -> None:
    others = b"\x08\xff\x01" + b"\x09" + b"\x3a" * 8 + b"\x0d" + b"\x3a" * 4 + field(6, b"\x3a\x3a")
    entry = others + field(1, b"location") + others + field(2, b"w" * 128)

    assert examined(others + field(7, others + field(5, others + field(13, entry))))[0] == {"w" * 128}


def test_external_weights_are_named_one_time_in_the_order_of_the_model() -> None:
    tensors = [tensor(name) for name in ("c", "a", "c", "b")]
    graph = helper.make_graph([helper.make_node("Constant", [], ["c"], value=tensor("d"))], "g", [], [], tensors)

    assert OnnxFile(io.BytesIO(helper.make_model(graph).SerializeToString())).weight_files() == ("c", "a", "b")


def test_inputs_and_outputs_without_even_a_rank_are_named() -> None:
    values = [
        helper.make_tensor_value_info(f"rank_{shape}", TensorProto.FLOAT, shape) for shape in (None, [], [None], [2, 3])
    ]
    outputs = [helper.make_tensor_value_info("out", TensorProto.INT64, None), onnx.ValueInfoProto(name="of no type")]
    graph = helper.make_graph([], "g", values, outputs, value_info=[helper.make_tensor_value_info("in", 1, None)])

    assert OnnxFile(io.BytesIO(helper.make_model(graph).SerializeToString())).without_shape() == {"rank_None", "out"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xba\x80\x80\x80\x10\x00", "no tag of a field: 4294967354"),
        (bytes(5_000_000), "no tag of a field: 0"),
        (b"\x3b", "no wire type 3"),
        (b"\x3a\x05ab", "a part is longer than the whole"),
        (b"\x3a", "no number"),
        (b"\x3a" + b"\xff" * 10 + b"\x00", "no number"),
        (b"\x3a\xff\xff\xff\xff\x0f", "a part is longer than the whole"),
        (b"\x06", "no tag of a field: 6"),
        (b"\x0e", "no wire type 6"),
    ],
)
def test_what_parsers_may_read_in_another_way_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        examined(content)


def test_a_file_with_too_many_fields_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.config.onnx_file.PARTS_MAX", 10)

    with pytest.raises(ValueError, match="more than 10 fields"):
        examined(b"\x08\x01" * 11)
