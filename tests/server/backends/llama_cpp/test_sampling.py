"""Sampling parameters as llama.cpp takes them."""

from typing import Any

import pytest

from charonia.server.backends.llama_cpp.worker.openai_members import SEED_MAX, completion_of


def test_names_and_values_are_those_of_llama_cpp() -> None:
    given = {
        "max_tokens": 5,
        "temperature": 0,
        "repetition_penalty": 1.5,
        "logprobs": 3,
        "stop": "end",
        "logit_bias": {"7": -1},
        "json_schema": {"type": "object"},
        "top_k": -1,
        "seed": SEED_MAX,
        "n": 1,
    }
    assert completion_of(given) == {
        "n_predict": 5,
        "temperature": 0,
        "repeat_penalty": 1.5,
        "n_probs": 3,
        "stop": ["end"],
        "logit_bias": {"7": -1},
        "json_schema": {"type": "object"},
        "top_k": -1,
        "seed": SEED_MAX,
        "n_cmpl": 1,
    }


def test_texts_stand_for_what_they_say_and_none_for_the_default() -> None:
    given = {
        "max_tokens": "5",
        "top_p": "0.5",
        "ignore_eos": "True",
        "stop": '["a", "b"]',
        "grammar": '"a"',
        "json_schema": "{}",
        "seed": None,
    }
    assert completion_of(given) == {
        "n_predict": 5,
        "top_p": 0.5,
        "ignore_eos": True,
        "stop": ["a", "b"],
        "grammar": '"a"',
        "json_schema": {},
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "many"),
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", [1]),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("seed", SEED_MAX + 1),
        ("stop", ["a", 5]),
        ("stop", 5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("logprobs", 101),
        ("logit_bias", [1]),
        ("logit_bias", {"word": 1}),
        ("ignore_eos", 1),
        ("ignore_eos", "maybe"),
        ("json_schema", "no JSON"),
        ("json_schema", [1]),
        ("grammar", 5),
        ("n", 2),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got"):
        completion_of({name: value})


def test_an_unknown_parameter_is_refused_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"^max_token: there is no such parameter; did you mean 'max_tokens'\?"):
        completion_of({"max_token": 1})


def test_bounds_themselves_are_accepted() -> None:
    given = {"top_p": 1, "min_p": 0, "presence_penalty": -2, "frequency_penalty": 2, "logprobs": 0, "top_k": 0}
    assert len(completion_of(given)) == len(given)
