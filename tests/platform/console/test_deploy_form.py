"""The form of a deployment: what a browser sends becomes a specification, and a specification fills the form."""

from typing import Any

import pytest

from charonia.core.errors import ServingError
from charonia.platform.console.deploy_form import by_field, document, form_of, merged, sent_of
from charonia.platform.deployments.spec import read_spec

SPEC: dict[str, Any] = {
    "name": "reader",
    "target": "local",
    "environment": "pytorch",
    "models": [
        {
            "name": "detection",
            "versions": [1, 2],
            "traffic": {"weights": {"1": 90, "2": 10}, "sticky": "key"},
            "instances": {"min": 1, "max": 4},
            "batching": {"max_batch_size": 8, "max_queue_delay_microseconds": 100},
            "config": {"response_cache": {"enable": True}},
        },
        {"name": "recognition", "versions": "latest"},
    ],
    "device": {"cpu_cores": 2, "gpus": [0, 1], "memory_mib": 2048},
    "replicas": {"min": 1, "max": 2},
    "keys": True,
    "ready_within_s": 300,
    "idle_unload_s": 900,
}


def fields(*pairs: tuple[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def test_changes_of_two_editors_are_merged_and_the_field_of_both_is_named() -> None:
    base = {"name": "a", "models": [{"name": "m", "versions": [1]}], "device": {"cpu_cores": 1}}
    theirs = {**base, "models": [{"name": "m", "versions": [1, 2]}, {"name": "n"}], "device": {"cpu_cores": 3}}
    mine = {**base, "environment": "torch", "device": {"cpu_cores": 2}}

    form, conflicts = merged(*(form_of(each) for each in (base, theirs, mine)))

    assert [(each["name"], each["chosen"]) for each in form["models"]] == [("m", [1, 2]), ("n", [])]
    assert (form["environment"], form["cpu_cores"]) == ("torch", 2)
    assert conflicts == {"cpu_cores": "the other editor has entered '3'"}


def test_a_specification_survives_the_form() -> None:
    there_and_back = document(sent_of(form_of(SPEC)))

    assert read_spec(there_and_back) == read_spec(SPEC)


def test_an_empty_form_asks_for_the_defaults() -> None:
    assert document(fields(("name", " reader "), ("model", "detection"), ("cpu_cores", ""))) == {
        "name": "reader",
        "target": "local",
        "environment": "",
        "models": [{"name": "detection", "versions": "latest"}],
        "replicas": 1,
        "keys": False,
    }


def test_texts_that_cannot_be_read_are_all_said_by_field() -> None:
    form = fields(("model", "a"), ("0.weights", "1=90, two"), ("0.config", "{"), ("model", "b"), ("1.config", "3"))

    with pytest.raises(ServingError) as caught:
        document(form)

    assert by_field(caught.value.message).keys() == {"0.weights", "0.config", "1.config"}


def test_what_the_specification_refuses_is_said_at_its_field() -> None:
    form = fields(("name", "Reader!"), ("model", "a"), ("0.max_batch_size", "many"), ("cpu_cores", "-1"), ("gpus", "x"))
    with pytest.raises(ServingError) as caught:
        read_spec(document(form))

    assert by_field(caught.value.message).keys() == {"name", "0.max_batch_size", "cpu_cores", "gpus"}


def test_a_sentence_about_no_field_is_one_of_the_form() -> None:
    assert by_field("memory: 4 GiB are needed, 2 GiB are free\nno port is free") == {
        "memory": "memory: 4 GiB are needed, 2 GiB are free",
        "": "no port is free",
    }


def test_weights_are_sent_where_versions_replace_others_only() -> None:
    form = form_of(
        {"name": "a", "models": [{"name": "m", "versions": [2], "traffic": {"weights": {"1": 90, "2": 10}}}]}
    )

    (replaced,) = document(sent_of({**form, "strategy": "replace"}))["models"]
    (beside,) = document(sent_of({**form, "strategy": "beside"}))["models"]

    assert (replaced["traffic"], "traffic" in beside) == ({"weights": {"1": 90, "2": 10}}, False)
