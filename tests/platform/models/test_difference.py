"""What differs between versions, and what people write about models."""

import pytest
from pydantic import ValidationError

from charonia.platform.artifacts.manifest import Blob
from charonia.platform.models.records import NeededPackageRecord, TensorRecord, VersionReport
from charonia.platform.models.registry import (
    ChangedValue,
    DetailsBody,
    changed_values,
    compare_files,
    tag_counts,
    tag_text,
)


def test_values_are_compared_to_the_leaves() -> None:
    before = {"max_batch_size": 4, "dynamic_batching": {"delay": 0}, "same": [1, 2], "gone": True}
    after = {"max_batch_size": 8, "dynamic_batching": {"delay": 100}, "same": [1, 2], "new": "x"}

    assert list(changed_values(before, after)) == [
        ChangedValue("dynamic_batching.delay", 0, 100),
        ChangedValue("gone", True, None),
        ChangedValue("max_batch_size", 4, 8),
        ChangedValue("new", None, "x"),
    ]


def test_tensors_are_compared_by_name() -> None:
    before = {"input": [{"name": "a", "dims": [4]}, {"name": "b", "dims": [1]}]}
    after = {"input": [{"name": "b", "dims": [2]}, {"name": "c", "dims": [1]}]}

    assert [change.path for change in changed_values(before, after)] == ["input[a]", "input[b].dims", "input[c]"]


def test_files_are_compared_by_content() -> None:
    one, other = Blob("1" * 64, 1), Blob("2" * 64, 1)

    found = compare_files({"a": one, "b": one, "c": one}, {"b": one, "c": other, "d": one})

    assert found == (["d"], ["a"], ["c"])


def test_a_report_goes_through_the_database() -> None:
    report = VersionReport(
        is_checked=True,
        inputs=[TensorRecord("x", "FP32", [-1, 3])],
        needs=[NeededPackageRecord("torch", "torch", is_here=False)],
        warnings=["slow"],
    )

    assert VersionReport.from_json(report.to_json()) == report
    assert VersionReport.from_json({"of_a_later_release": 1}) == VersionReport()


@pytest.mark.parametrize(
    ("tags", "links"),
    [
        ([""], {}),
        (["x" * 201], {}),
        (["x"] * 51, {}),
        ([], {"card": "javascript:alert(1)"}),
        ([], {"card": "file:///etc/passwd"}),
        ([], {"": "https://example.org"}),
    ],
)
def test_tags_and_links_that_cannot_be_are_refused(tags: list[str], links: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="expected"):
        DetailsBody(tags=tags, links=links)


def test_tags_are_counted() -> None:
    DetailsBody(tags=["vision"], links={"card": "https://example.org"})

    assert tag_counts([["a", "b"], ["b"], []]) == {"b": 2, "a": 1}
    assert list(tag_counts([["a", "b"], ["b"], []])) == ["b", "a"]
    assert tag_text('ü"') == '\\u00fc\\"'
