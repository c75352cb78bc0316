"""Parameters of llama.cpp in `model.json` and in configurations."""

import json
import os
from pathlib import Path

import pytest

from charonia.config.model import ModelConfig
from charonia.server.backends.llama_cpp.backend import PARAMETERS, read_parameters


def config(**parameters: str) -> ModelConfig:
    return ModelConfig(name="m", parameters=parameters)


def problems(given: ModelConfig, file: object) -> list[str]:
    _, found = read_parameters(given, json.dumps(file).encode())
    return [str(problem) for problem in found]


def test_parameters_come_from_the_file_and_the_configuration_which_takes_precedence() -> None:
    file = {"n_ctx": 512, "kv_unified": True, "cache_type_k": "Q8_0", "rope_freq_base": 1, "chat_template": "x"}
    read, found = read_parameters(config(n_ctx="1024", n_parallel="2", embedding="true"), json.dumps(file).encode())
    assert found == []
    assert read == {
        "n_ctx": 1024,
        "kv_unified": True,
        "cache_type_k": "q8_0",
        "rope_freq_base": 1.0,
        "chat_template": "x",
        "n_parallel": 2,
        "embedding": True,
    }


def test_nothing_is_needed() -> None:
    assert read_parameters(config(), None) == ({}, [])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("n_ctx", -1, "a whole number of at least 0"),
        ("n_ctx", 1.5, "a whole number of at least 0"),
        ("n_ctx", True, "a whole number of at least 0"),
        ("n_threads", 0, "a whole number of at least 1"),
        ("n_gpu_layers", "all", "a whole number of at least -1"),
        ("embedding", 2, "true or false"),
        ("rope_freq_base", -1, "a number of at least 0"),
        ("cache_type_k", "q2", "one of f32, f16"),
        ("cache_type_k", 8, "one of f32, f16"),
    ],
)
def test_a_value_that_does_not_fit_is_named(name: str, value: object, words: str) -> None:
    (problem,) = problems(config(), {name: value})
    assert f"model.json: {name}" in problem
    assert f"expected {words}" in problem
    assert f"got '{value if isinstance(value, str) else json.dumps(value)}'" in problem


def test_a_bad_value_of_the_configuration_is_named_as_its_parameter() -> None:
    (problem,) = problems(config(n_ctx="much"), {})
    assert "parameters['n_ctx']" in problem


def test_an_unknown_name_in_the_file_is_refused_and_one_of_the_configuration_is_remarked() -> None:
    (problem,) = problems(config(), {"n_context": 5})
    assert "did you mean 'n_ctx'?" in problem
    (remark,) = PARAMETERS.remarks(config(n_contxt="5", openai_routes="completions", EXAMPLE="{}", n_ctx="5"))
    assert "has no parameter 'n_contxt'" in remark
    assert "did you mean 'n_ctx'?" in remark


@pytest.mark.parametrize("content", [b"{", b"[1]"])
def test_a_file_that_holds_no_object_is_refused(content: bytes) -> None:
    _, (problem,) = read_parameters(config(), content)
    assert "model.json: expected a JSON object" in str(problem)


@pytest.mark.parametrize(
    ("share", "load", "threads"), [(8, 0.1, 3), (2, 0.1, 2), (8, 5.0, 3), (8, 6.2, 2), (8, 40.0, 1), (1, 0.0, 1)]
)
def test_threads_are_for_physical_cores_that_are_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: int, load: float, threads: int
) -> None:
    pytest.importorskip("xllamacpp")
    from charonia.server.backends.llama_cpp.worker import engine

    for core in range(8):  # 4 with two threads each
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))

    assert engine.idle_threads(share, str(tmp_path)) == threads
