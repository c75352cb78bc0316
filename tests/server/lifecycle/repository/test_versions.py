from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from charonia.config.model import All, Latest, Specific, VersionPolicy
from charonia.core.errors import Code, ServingError
from charonia.server.lifecycle.repository.model_folder import select, versions
from charonia.server.lifecycle.repository.scan import ModelFolder

MakeFolder = Callable[[Mapping[str, bytes]], ModelFolder]


def test_versions_are_the_folders_with_a_number_for_a_name(make_folder: MakeFolder) -> None:
    folder = make_folder({"1/": b"", "10/": b"", "2/": b"", "configs/": b"", "warmup/": b"", "3": b"a file"})

    assert versions(folder) == (1, 2, 10)


def test_zero_leading_zeros_signs_other_digits_and_huge_numbers_are_no_versions(make_folder: MakeFolder) -> None:
    names = ["0/", "01/", "-1/", "+1/", "1.0/", "1_0/", "٣/", "9223372036854775808/", "99999999999999999999/"]
    folder = make_folder(dict.fromkeys([*names, "9223372036854775807/"], b""))

    assert versions(folder) == (2**63 - 1,)


def test_a_folder_that_is_gone_is_an_error_that_names_the_model() -> None:
    with pytest.raises(ServingError, match="failed to load 'm', failed to poll from model repository"):
        versions(ModelFolder("m", Path("/no"), Path("/no/where")))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, (9,)),
        (VersionPolicy(), (9,)),
        (VersionPolicy(latest=Latest(1)), (9,)),
        (VersionPolicy(latest=Latest(2)), (4, 9)),
        (VersionPolicy(latest=Latest(5)), (1, 4, 9)),
        (VersionPolicy(all=All()), (1, 4, 9)),
        (VersionPolicy(specific=Specific((4, 1, 7))), (1, 4)),
    ],
)
def test_a_policy_selects(policy: VersionPolicy | None, expected: tuple[int, ...]) -> None:
    assert select(policy, [9, 1, 4], model_name="m") == expected


@pytest.mark.parametrize(
    ("policy", "available", "found"),
    [
        (VersionPolicy(specific=Specific((7,))), [9, 1], "found version 1, 9"),
        (VersionPolicy(latest=Latest(0)), [1], "found version 1"),
        (VersionPolicy(all=All()), [], "found none"),
    ],
)
def test_a_policy_that_leaves_no_version_is_an_error(policy: VersionPolicy, available: list[int], found: str) -> None:
    text = f"at least one version must be available under the version policy of model 'm', {found}"

    with pytest.raises(ServingError, match=text) as caught:
        select(policy, available, model_name="m")

    assert caught.value.code is Code.INVALID_ARG
