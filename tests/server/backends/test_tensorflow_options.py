import pytest

from charonia.config.model import (
    Accelerator,
    ExecutionAccelerators,
    Graph,
    ModelConfig,
    ModelInput,
    ModelOperations,
    ModelOutput,
    Optimization,
)
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.server.backends.tensorflow.backend import (
    CALLER,
    DescribedModel,
    TensorFlowPlan,
    read_plan,
    remarks,
    signature_problems,
)

ANSWER = {
    "folder": "f",
    "tags": ["serve"],
    "signature": "serving_default",
    "inputs": [{"name": "X", "dtype": "float32", "dims": [-1, 4]}],
    "outputs": [{"name": "Y", "dtype": "string", "dims": None}, {"name": "Z", "dtype": "bfloat16", "dims": [2]}],
}


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(name="m", parameters=parameters)


def test_without_parameters_operators_run_in_the_calling_thread_with_the_share_of_the_instance() -> None:
    assert read_plan(config(), {}) == (TensorFlowPlan("", "", 0, CALLER, "", True), [])


def test_parameters_and_settings_make_the_plan() -> None:
    given = config(
        TF_GRAPH_TAG="train",
        TF_SIGNATURE_DEF="predict",
        TF_NUM_INTRA_THREADS="3",
        TF_NUM_INTER_THREADS="2",
        TF_INIT_OPS_FILE="init.json",
        TF_USE_PER_SESSION_THREADS="true",
        MAX_SESSION_SHARE_COUNT="2",
    )

    plan, problems = read_plan(given, {"allow-soft-placement": "false", "version": "2"})

    assert plan == TensorFlowPlan("train", "predict", 3, 2, "init.json", False)
    assert problems == []


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("TF_NUM_INTRA_THREADS", "-1", "a whole number of at least 0, got '-1'"),
        ("TF_NUM_INTER_THREADS", "two", "a whole number of at least 0, got 'two'"),
        ("MAX_SESSION_SHARE_COUNT", "0", "a whole number of at least 1, got '0'"),
        ("TF_USE_PER_SESSION_THREADS", "maybe", "true or false, got 'maybe'"),
    ],
)
def test_a_parameter_of_another_form_is_a_problem(key: str, text: str, expected: str) -> None:
    _, (problem,) = read_plan(config(**{key: text}), {})

    assert problem.path == f"parameters['{key}']"
    assert problem.message == f"expected {expected}"


@pytest.mark.parametrize(("key", "text"), [("version", "1"), ("allow-soft-placement", "perhaps")])
def test_a_setting_of_another_form_is_a_problem(key: str, text: str) -> None:
    _, (problem,) = read_plan(config(), {key: text})

    assert problem.path == f"--backend-config tensorflow,{key}"


@pytest.mark.parametrize(
    "given",
    [
        ModelConfig(optimization=Optimization(graph=Graph(level=1))),
        ModelConfig(
            optimization=Optimization(
                execution_accelerators=ExecutionAccelerators(gpu_execution_accelerator=(Accelerator("tensorrt"),))
            )
        ),
        ModelConfig(model_operations=ModelOperations(("libmine.so",))),
    ],
)
def test_what_is_not_there_is_a_problem(given: ModelConfig) -> None:
    _, problems = read_plan(given, {})

    assert len(problems) == 1


def test_a_setting_for_gpus_and_an_unknown_parameter_are_warned_of() -> None:
    sentences = list(
        remarks(config(TF_GRAPH_TAGS="serve", INITIALIZE_TIMEOUT_SECONDS="9"), {"gpu-memory-fraction": "1"})
    )

    assert len(sentences) == 2


def test_a_rank_that_the_model_does_not_tell_is_that_of_the_configuration() -> None:
    saved = DescribedModel.of("m", ANSWER)
    given = ModelConfig(
        name="m",
        max_batch_size=4,
        input=(ModelInput("X", DataType.FP32, dims=(4,)),),
        output=(ModelOutput("Y", DataType.BYTES, (3, -1)),),
    )

    assert list(signature_problems(given, saved)) == []


def test_a_tensor_that_cannot_be_sent_is_refused_only_if_it_is_served() -> None:
    with pytest.raises(ServingError, match="output 'Y' has no rank in the model"):
        DescribedModel.of("m", ANSWER).for_config(ModelConfig(name="m"))
    with pytest.raises(ServingError, match="output 'Z' is bfloat16, a datatype that requests cannot have"):
        DescribedModel.of("m", ANSWER).for_config(
            ModelConfig(name="m", output=(ModelOutput("Z", DataType.FP32, (2,)),))
        )


def test_a_refusal_of_the_worker_is_an_error_with_its_hint() -> None:
    with pytest.raises(ServingError) as caught:
        DescribedModel.of("m", {"refused": "it is broken", "hint": "mend it"})

    assert str(caught.value) == "model 'm': it is broken (hint: mend it)"
