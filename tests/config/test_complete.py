from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.config.complete import (
    Signature,
    SignatureTensor,
    check_signature,
    derive_backend,
    merge_signature,
    normalise,
)
from charonia.config.kinds import InstanceKind
from charonia.config.model import (
    DynamicBatching,
    InstanceGroup,
    Latest,
    ModelConfig,
    ModelInput,
    ModelOutput,
    Optimization,
    PinnedMemoryBuffer,
    Reshape,
    VersionPolicy,
)
from charonia.config.pbtxt import parse
from charonia.config.problems import Problem
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.server.lifecycle.validation import validate


def derived(text: str, *files: str, name: str = "m") -> tuple[str, str, str]:
    config, _ = derive_backend(parse(text), name, files)
    return config.backend, config.platform, config.default_model_filename


@pytest.mark.parametrize(
    ("text", "files", "expected"),
    [
        ("", ["model.onnx"], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ("", ["model.savedmodel"], ("tensorflow", "tensorflow_savedmodel", "model.savedmodel")),
        ("", ["model.graphdef"], ("tensorflow", "tensorflow_graphdef", "model.graphdef")),
        ("", ["model.keras"], ("tensorflow", "", "model.keras")),
        ("", ["model.plan"], ("tensorrt", "tensorrt_plan", "model.plan")),
        ("", ["model.bin", "model.xml"], ("openvino", "", "model.xml")),
        ("", ["model.pt"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ("", ["model.pt2"], ("pytorch", "torch_aoti", "model.pt2")),
        ("", ["helper.py", "model.py"], ("python", "", "model.py")),
        ("", ["model.py", "model.onnx"], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ("", ["resnet.onnx", "labels.txt"], ("onnxruntime", "onnxruntime_onnx", "resnet.onnx")),
        ('backend: "onnxruntime"', [], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ('backend: "onnxruntime"', ["a.onnx", "b.onnx"], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ('backend: "python"', ["util.py"], ("python", "", "model.py")),
        ('backend: "pytorch"', ["model.pt2"], ("pytorch", "torch_aoti", "model.pt2")),
        ('backend: "pytorch"', ["model.pt"], ("pytorch", "pytorch_libtorch", "model.pt")),
        ('backend: "identity"', ["model.onnx"], ("identity", "", "")),
        ('platform: "onnxruntime_onnx"', [], ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ('platform: "torch_aoti"', ["model.pt"], ("pytorch", "torch_aoti", "model.pt2")),
        ('default_model_filename: "v2.onnx"', ["v2.onnx"], ("onnxruntime", "onnxruntime_onnx", "v2.onnx")),
        ('default_model_filename: "main.py"', ["main.py"], ("python", "", "main.py")),
        (
            'backend: "onnxruntime" default_model_filename: "w.bin"',
            ["w.bin"],
            ("onnxruntime", "onnxruntime_onnx", "w.bin"),
        ),
        ('backend: "own" platform: "own_fast"', [], ("own", "own_fast", "")),
        ('platform: "ensemble" ensemble_scheduling { }', [], ("", "ensemble", "")),
        ("ensemble_scheduling { }", [], ("", "ensemble", "")),
    ],
)
def test_platform_backend_and_file_follow_from_one_another(
    text: str, files: list[str], expected: tuple[str, str, str]
) -> None:
    assert derived(text, *files) == expected


def test_the_name_of_the_folder_tells_a_backend_of_any_name() -> None:
    config, notes = derive_backend(ModelConfig(), "net.mine", ["model.mine"])

    assert (config.backend, config.default_model_filename) == ("mine", "model.mine")
    assert notes == ["backend: mine, from the name of the model's folder"]


def test_the_name_of_the_folder_tells_an_installed_backend_without_a_file() -> None:
    config, notes = derive_backend(ModelConfig(), "net.identity", [], {"identity"})

    assert (config.backend, config.default_model_filename) == ("identity", "")
    assert notes == ["backend: identity, from the name of the model's folder"]


def test_what_the_files_decided_is_said() -> None:
    _, notes = derive_backend(ModelConfig(), "m", ["resnet.onnx"])

    assert notes == [
        "backend: onnxruntime, from the file 'resnet.onnx'",
        "default_model_filename: 'resnet.onnx', the only .onnx file of the version",
    ]


def test_what_the_configuration_decided_needs_no_note() -> None:
    assert derive_backend(parse('backend: "onnxruntime"'), "m", ["model.onnx"])[1] == []


@pytest.mark.parametrize(
    ("name", "files"), [("m", []), ("m", ["notes.txt"]), ("m.mine", ["other.mine"]), ("m.", ["model."])]
)
def test_a_backend_that_nothing_tells_is_an_error(name: str, files: list[str]) -> None:
    with pytest.raises(ServingError, match=f"Could not determine backend for model '{name}' with no backend") as caught:
        derive_backend(ModelConfig(), name, files)

    assert "model.onnx" in caught.value.hint


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (
            [],
            "the version's folder is empty; the model belongs there, as one of model.savedmodel, model.keras",
        ),
        (
            ["Model.ONNX"],
            "the version's folder holds Model.ONNX; expected one of model.savedmodel, model.keras, model.plan",
        ),
        (["b.onnx", "a.onnx", "c"], "the version's folder holds a.onnx, b.onnx: `default_model_filename` says which"),
    ],
)
def test_the_hint_about_an_unknown_backend_says_what_is_there(files: list[str], hint: str) -> None:
    with pytest.raises(ServingError) as caught:
        derive_backend(ModelConfig(), "m", files)

    assert caught.value.hint.startswith(hint)
    assert "graphdef" not in caught.value.hint


def test_an_unknown_platform_alone_is_an_error() -> None:
    with pytest.raises(ServingError, match="unexpected platform type 'onnx' for m") as caught:
        derive_backend(ModelConfig(platform="onnx"), "m", ["model.onnx"])

    assert "onnxruntime_onnx" in caught.value.hint


def normal(config: ModelConfig, *, gpu_count: int = 0, default_instance_count: int = 1) -> ModelConfig:
    return normalise(config, name="m", gpu_count=gpu_count, default_instance_count=default_instance_count)


def test_an_empty_configuration_gets_all_defaults() -> None:
    on = PinnedMemoryBuffer(True)

    assert normal(ModelConfig(backend="identity")) == ModelConfig(
        name="m",
        backend="identity",
        version_policy=VersionPolicy(latest=Latest(1)),
        optimization=Optimization(input_pinned_memory=on, output_pinned_memory=on),
        instance_group=(InstanceGroup("m", InstanceKind.KIND_CPU, 1),),
    )


def test_what_is_given_stays() -> None:
    config = parse("""
        name: "own" backend: "identity" max_batch_size: 8
        version_policy { all { } }
        dynamic_batching { preferred_batch_size: 2 }
        optimization { priority: PRIORITY_MAX input_pinned_memory { } output_pinned_memory { enable: true } }
        instance_group { name: "g" kind: KIND_CPU count: 3 }
    """)

    assert normal(config, default_instance_count=2) == config


def test_the_default_scheduler_settings_are_written_out() -> None:
    dynamic = normal(ModelConfig(max_batch_size=8, dynamic_batching=DynamicBatching()))
    unbatched = normal(ModelConfig(dynamic_batching=DynamicBatching()))
    sequence = normal(parse("sequence_batching { }"))
    patient = normal(parse("sequence_batching { max_sequence_idle_microseconds: 5 }"))

    assert dynamic.dynamic_batching == DynamicBatching(preferred_batch_size=(8,))
    assert unbatched.dynamic_batching == DynamicBatching()
    assert sequence.sequence_batching is not None
    assert sequence.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert patient.sequence_batching is not None
    assert patient.sequence_batching.max_sequence_idle_microseconds == 5


@pytest.mark.parametrize(
    ("group", "gpu_count", "expected"),
    [
        ("", 0, InstanceGroup("m_0", InstanceKind.KIND_CPU, 2)),
        ("", 2, InstanceGroup("m_0", InstanceKind.KIND_GPU, 1, gpus=(0, 1))),
        ("gpus: 1", 2, InstanceGroup("m_0", InstanceKind.KIND_GPU, 1, gpus=(1,))),
        ("gpus: 1", 0, InstanceGroup("m_0", InstanceKind.KIND_GPU, 1, gpus=(1,))),
        ("kind: KIND_GPU", 1, InstanceGroup("m_0", InstanceKind.KIND_GPU, 1, gpus=(0,))),
        ("kind: KIND_GPU", 0, InstanceGroup("m_0", InstanceKind.KIND_GPU, 1)),
        ("kind: KIND_CPU", 2, InstanceGroup("m_0", InstanceKind.KIND_CPU, 2)),
        ("kind: KIND_MODEL", 2, InstanceGroup("m_0", InstanceKind.KIND_MODEL, 1)),
        ("kind: KIND_CPU count: 5", 0, InstanceGroup("m_0", InstanceKind.KIND_CPU, 5)),
    ],
)
def test_kind_count_and_gpus_of_a_group_are_decided(group: str, gpu_count: int, expected: InstanceGroup) -> None:
    config = normal(parse(f"instance_group {{ {group} }}"), gpu_count=gpu_count, default_instance_count=2)

    assert config.instance_group == (expected,)


def test_unnamed_groups_are_numbered() -> None:
    config = normal(parse('instance_group [{ count: 1 }, { name: "own" }, { count: 2 }]'))

    assert [group.name for group in config.instance_group] == ["m_0", "own", "m_2"]


def test_an_ensemble_has_no_instances_and_nothing_to_optimise() -> None:
    config = normal(parse('platform: "ensemble" ensemble_scheduling { }'))

    assert (config.name, config.instance_group, config.optimization) == ("m", (), None)


def test_an_empty_version_policy_is_the_latest_version() -> None:
    assert normal(parse("version_policy { }")).version_policy == VersionPolicy(latest=Latest(1))


IMAGE = SignatureTensor("image", DataType.FP32, (-1, 3, 224, -1))
SCORES = SignatureTensor("scores", DataType.FP32, (-1, 10))
BATCHING = Signature((IMAGE,), (SCORES,))
FIXED = Signature((SignatureTensor("x", DataType.INT64, (1, 3)),), (SignatureTensor("y", DataType.FP16, ()),))


def merged(text: str, signature: Signature, *, batch: int = 4) -> tuple[ModelConfig, list[str]]:
    return merge_signature(parse(text), signature, default_max_batch_size=batch)


def test_a_model_with_a_variable_first_dimension_batches() -> None:
    config, notes = merged("", BATCHING)

    assert config == ModelConfig(
        max_batch_size=4,
        input=(ModelInput("image", DataType.FP32, dims=(3, 224, -1)),),
        output=(ModelOutput("scores", DataType.FP32, (10,)),),
        dynamic_batching=DynamicBatching(),
    )
    assert notes == [
        "max_batch_size: 4, as the first dimension of every tensor is variable",
        "dynamic_batching: on, as the model batches and no other scheduler is given",
        "input 'image': FP32 [3, 224, -1], from the model",
        "output 'scores': FP32 [10], from the model",
    ]


def test_a_model_with_fixed_dimensions_does_not_batch() -> None:
    config, _ = merged("", FIXED)

    assert config == ModelConfig(
        input=(ModelInput("x", DataType.INT64, dims=(1, 3)),),
        output=(ModelOutput("y", DataType.FP16, (1,), reshape=Reshape()),),
    )


def test_one_number_an_element_becomes_one_dimension() -> None:
    ids = SignatureTensor("ids", DataType.INT64, (-1,))

    config, _ = merged("", Signature((ids,), (ids,)))

    assert config.input[0] == ModelInput("ids", DataType.INT64, dims=(1,), reshape=Reshape())
    assert config.output[0] == ModelOutput("ids", DataType.INT64, (1,), reshape=Reshape())


def test_where_inputs_and_outputs_are_given_nothing_is_inferred() -> None:
    text = 'input { name: "a" } output { name: "b" } max_batch_size: 8'

    assert merged(text, FIXED) == (parse(text), [])


@pytest.mark.parametrize(
    ("text", "batch", "max_batch_size", "has_batcher"),
    [
        ("", 4, 4, True),
        ("", 1, 1, False),
        ("", 0, 0, False),
        ("max_batch_size: 16", 4, 16, True),
        ("max_batch_size: 1", 4, 1, False),
        ("sequence_batching { }", 4, 4, False),
    ],
)
def test_batch_size_and_batcher_are_filled_in_unless_given(
    text: str, batch: int, max_batch_size: int, has_batcher: bool
) -> None:
    config, _ = merged(text, BATCHING, batch=batch)

    assert config.max_batch_size == max_batch_size
    assert (config.dynamic_batching is not None) == has_batcher
    assert len(config.input[0].dims) == (4 if max_batch_size == 0 else 3)


def test_a_batcher_that_is_given_stays() -> None:
    config, _ = merged("dynamic_batching { max_queue_delay_microseconds: 5 }", BATCHING)

    assert config.dynamic_batching == DynamicBatching(max_queue_delay_microseconds=5)


@pytest.mark.parametrize(
    ("given", "max_batch_size"),
    [
        ('input { name: "image" data_type: TYPE_FP32 dims: [3, 224, 224] }', 4),
        ('input { name: "image" data_type: TYPE_FP32 dims: [-1, 3, 224, 224] }', 0),
        ('output { name: "scores" data_type: TYPE_FP32 dims: [10] }', 4),
        ('output { name: "scores" data_type: TYPE_FP32 dims: [-1, 10] }', 0),
        ('output { name: "scores" dims: [5, 2] reshape { shape: [10] } }', 4),
        ('input { name: "unknown" dims: [1] }', 4),
    ],
)
def test_given_tensors_tell_whether_their_dims_have_the_batch(given: str, max_batch_size: int) -> None:
    config, _ = merged(given, BATCHING)

    assert config.max_batch_size == max_batch_size
    assert config.input
    assert config.output


def test_batches_that_the_model_cannot_have_are_refused() -> None:
    with pytest.raises(ServingError, match="model does not support batching while non-zero max_batch_size") as caught:
        merged("name: 'm' max_batch_size: 8", FIXED)

    assert caught.value.message.startswith("autofill failed for model 'm'")
    assert "'x' [1, 3], 'y' []" in caught.value.message


def test_optional_inputs_are_left_out_and_do_not_stop_batching() -> None:
    weight = SignatureTensor("weight", DataType.FP32, (3, 3), optional=True)

    config, _ = merged("", Signature((IMAGE, weight), (SCORES,)))

    assert [tensor.name for tensor in config.input] == ["image"]
    assert config.max_batch_size == 4


def test_a_model_without_tensors_does_not_batch() -> None:
    assert merged("", Signature((), ())) == (ModelConfig(), [])


def differences(text: str, signature: Signature) -> list[Problem]:
    return check_signature(replace(parse(text), name="m"), signature)


@pytest.mark.parametrize(
    "text",
    [
        "max_batch_size: 4 input { name: 'image' data_type: TYPE_FP32 dims: [3, 224, -1] }"
        "output { name: 'scores' data_type: TYPE_FP32 dims: 10 }",
        "max_batch_size: 4 input { name: 'image' data_type: TYPE_FP32 dims: [3, 224, 64] }",
        "input { name: 'image' data_type: TYPE_FP32 dims: [2, 3, 224, 64] }",
        "max_batch_size: 4 input { name: 'image' data_type: 11 dims: [672, -1] reshape { shape: [3, 224, -1] } }",
    ],
)
def test_a_configuration_that_fits_has_no_differences(text: str) -> None:
    assert differences(text, BATCHING) == []


def test_every_difference_is_reported_at_once() -> None:
    text = """
        max_batch_size: 4
        input { name: 'other' data_type: TYPE_FP32 dims: [3] }
        output { name: 'scores' data_type: TYPE_INT8 dims: [10, 2] }
        output { name: 'none' }
    """

    assert differences(text, BATCHING) == [
        Problem("input[0].name", "unexpected inference input 'other', allowed inputs are: image"),
        Problem(
            "output[0].data_type",
            "configuration expects datatype TYPE_INT8 for output 'scores', model provides TYPE_FP32",
        ),
        Problem(
            "output[0].dims",
            "model 'm', tensor 'scores': the model expects 2 dimensions (shape [-1, 10]) but the model configuration "
            "specifies 3 dimensions (shape [-1, 10, 2]), where the first dimension is the batch",
        ),
        Problem("output[1].name", "unexpected inference output 'none', allowed outputs are: scores"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "input { name: 'x' data_type: TYPE_INT64 dims: [1, -1] }",
        "input { name: 'x' data_type: TYPE_INT64 dims: [2, 3] }",
        "input { name: 'x' data_type: TYPE_INT64 dims: [3] }",
        "max_batch_size: 1 input { name: 'x' data_type: TYPE_INT64 dims: [3] }",
    ],
)
def test_fixed_dimensions_of_the_model_must_be_configured_as_they_are(text: str) -> None:
    (problem,) = differences(text, FIXED)

    assert problem.path == "input[0].dims"


def test_an_unnamed_datatype_differs() -> None:
    (problem,) = differences("input { name: 'x' dims: [1, 3] }", FIXED)

    assert problem.message == "configuration expects datatype none for input 'x', model provides TYPE_INT64"


def test_an_input_is_optional_only_if_the_model_has_a_value_for_it() -> None:
    optional = Signature((SignatureTensor("w", DataType.FP32, (-1, 2), optional=True),), ())
    required = Signature((SignatureTensor("w", DataType.FP32, (-1, 2)),), ())
    text = "input { name: 'w' data_type: TYPE_FP32 dims: [-1, 2] optional: true }"
    batching = "max_batch_size: 2 input { name: 'w' data_type: TYPE_FP32 dims: 2 optional: true }"

    assert differences(text, optional) == []
    assert [problem.path for problem in differences(text, required)] == ["input[0].optional"]
    assert [problem.path for problem in differences(batching, optional)] == ["input[0].name"]


def tensors(prefix: str) -> st.SearchStrategy[tuple[SignatureTensor, ...]]:
    shapes = st.lists(st.just(-1) | st.integers(1, 5), max_size=4).map(tuple)
    made = st.lists(st.tuples(st.sampled_from(list(DataType)), shapes, st.booleans()), max_size=3)
    return made.map(lambda parts: tuple(SignatureTensor(f"{prefix}{i}", *part) for i, part in enumerate(parts)))


@settings(max_examples=150, deadline=None)
@given(tensors("i"), tensors("o"), st.integers(0, 4))
def test_a_completed_configuration_is_valid_and_fits_its_model(
    inputs: tuple[SignatureTensor, ...], outputs: tuple[SignatureTensor, ...], batch: int
) -> None:
    signature = Signature(inputs, outputs)
    config, _ = derive_backend(ModelConfig(), "m", ["model.onnx"])

    config, _ = merge_signature(config, signature, default_max_batch_size=batch)
    config = normal(config)

    assert validate(config, gpu_count=0) == []
    assert check_signature(config, signature) == []
