import pytest

from charonia.config.model import ModelConfig
from charonia.server.backends.fil.options import AUTO, LIBRARY, TREELITE, WITHOUT_EFFECT, ForestPlan, read_plan, remarks


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(name="m", parameters=parameters)


def plan(**parameters: str) -> ForestPlan:
    found, problems = read_plan(config(**parameters), {})
    assert problems == []
    return found


def problems(**parameters: str) -> list[str]:
    return [str(problem) for problem in read_plan(config(**parameters), {})[1]]


def test_without_parameters_the_scores_are_answered_and_the_file_says_what_it_is() -> None:
    assert plan() == ForestPlan("", False, False, 0.5, False, AUTO, 0)


def test_every_parameter_is_read() -> None:
    found = plan(
        model_type="lightgbm",
        is_classifier="true",
        predict_proba="true",
        threshold="0.25",
        xgboost_allow_unknown_field="true",
        predictor="library",
        cpu_nthread="3",
    )

    assert found == ForestPlan("lightgbm", True, True, 0.25, True, LIBRARY, 3)
    assert plan(predictor="treelite").predictor == TREELITE


def test_output_class_is_the_older_name_of_is_classifier() -> None:
    assert plan(output_class="true").is_classifier
    assert not plan(output_class="false").is_classifier
    assert plan(output_class="true", is_classifier="true").is_classifier
    assert "newer name" in problems(output_class="true", is_classifier="false")[0]


def test_all_threads_of_the_machine_mean_the_share_of_the_instance() -> None:
    assert plan(cpu_nthread="-1").threads == 0


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("model_type", "catboost", "expected one of xgboost_json, xgboost_ubj, lightgbm, treelite_checkpoint, xgboost"),
        ("is_classifier", "maybe", "expected true or false, got 'maybe'"),
        ("threshold", "half", "expected a number, got 'half'"),
        ("threshold", "nan", "expected a number, got 'nan'"),
        ("predictor", "fastest", "expected one of auto, treelite, library, got 'fastest'"),
    ],
)
def test_a_wrong_value_is_a_problem_of_its_parameter(key: str, text: str, expected: str) -> None:
    [problem] = problems(**{key: text})

    assert problem.startswith(f"parameters['{key}']: ")
    assert expected in problem


def test_parameters_that_tune_other_code_are_accepted_and_named() -> None:
    given = dict.fromkeys(WITHOUT_EFFECT, "1")

    assert plan(**given) == plan()
    assert len(list(remarks(config(**given), {}))) == len(WITHOUT_EFFECT)
    assert "'chunk_size' has no effect" in next(iter(remarks(config(chunk_size="4"), {})))


def test_an_unknown_parameter_is_named_with_one_that_is_like_it() -> None:
    [sentence] = remarks(config(treshold="0.3", model_type="lightgbm", EXAMPLE="{}"), {})

    assert "no parameter 'treshold'" in sentence
    assert "did you mean 'threshold'?" in sentence
