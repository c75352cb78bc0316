"""Which cores the instances of a model run on."""

import pytest

from charonia.config.kinds import InstanceKind
from charonia.core.errors import ServingError
from charonia.server.machine.cores import HostPolicy, check_cores, parse_cores, policy_name, read_policies


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3", (0, 1, 2, 3)), ("5", (5,)), ("8-9,0-1", (0, 1, 8, 9)), (" 1 , 2 ", (1, 2)), ("0-1,1", (0, 1))],
)
def test_cores_are_ranges(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "0-4096", "1,,2", "\u0661"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected cores such as"):
        parse_cores(text)


def test_settings_of_a_policy_add_up_and_the_last_of_a_kind_counts() -> None:
    settings = [("a", "cpu-cores", "0-1"), ("a", "numa-node", "1"), ("b", "cpu-cores", "0"), ("b", "cpu-cores", "2")]

    assert read_policies(settings) == {"a": HostPolicy((0, 1), 1), "b": HostPolicy((2,))}


@pytest.mark.parametrize(
    "setting",
    [
        ("", "cpu-cores", "0"),
        ("a", "gpu", "0"),
        ("a", "numa-node", "x"),
        ("a", "numa-node", "1024"),
        ("a", "cpu-cores", "x"),
    ],
)
def test_other_settings_are_refused(setting: tuple[str, str, str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        read_policies([setting])


def test_an_instance_without_a_policy_has_that_of_its_kind() -> None:
    assert policy_name("own", InstanceKind.KIND_CPU, 0) == "own"
    assert policy_name("", InstanceKind.KIND_CPU, 0) == "cpu"
    assert policy_name("", InstanceKind.KIND_GPU, 3) == "gpu_3"
    assert policy_name("", InstanceKind.KIND_MODEL, 0) == "model"


def test_cores_and_nodes_must_be_there() -> None:
    usable, nodes = frozenset({0, 1}), {0: (0, 1)}

    check_cores("a", HostPolicy((0, 1), 0), usable, nodes)
    with pytest.raises(ServingError, match="may not use core 2, 3"):
        check_cores("a", HostPolicy((1, 2, 3)), usable, nodes)
    with pytest.raises(ServingError, match="this memory node does not exist"):
        check_cores("a", HostPolicy(node=1), usable, nodes)
