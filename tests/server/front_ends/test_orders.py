"""What a new engine is told: which arguments it may have, and whether it understands the front ends."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from charonia.cli.serve_process import parse_command
from charonia.core.errors import Code, ServingError
from charonia.server.front_ends.children import (
    NewEngine,
    ServeCommand,
    new_engine_path,
    options_of,
    read_new_engine,
    write_new_engine,
)
from charonia.server.front_ends.messages import PROTOCOL
from charonia.server.options import ServerOptions

BEFORE = ("/models", "--front-ends=2", "--http-port=0", "--metrics-port=0")


def order(*arguments: str) -> NewEngine:
    commands = ServeCommand(arguments), ServeCommand(BEFORE)
    return NewEngine(PROTOCOL, *commands, ("/models", "/made/for/files"), cpu_cores=3, front_ends=2)


def options(*arguments: str) -> ServerOptions:
    return options_of(order(*arguments), parse_command)


def test_the_same_arguments_have_the_repositories_and_cores_of_the_server() -> None:
    same = options(*BEFORE)

    assert same.models.repositories == ("/models", "/made/for/files")
    assert same.cpu_cores == 3


def test_other_repositories_and_backends_are_those_of_the_new_arguments() -> None:
    changed = options("/other", *BEFORE[1:], "--cpu-cores=1", "--exit-on-error=false")

    assert (changed.models.repositories, changed.cpu_cores, changed.exit_on_error) == (("/other",), 1, False)


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--http-port=9", "http.port"),
        ("--grpc-port=9", "grpc.port"),
        ("--allow-grpc=false", "grpc.enabled"),
        ("--front-ends=3", "front_ends"),
        ("--metrics-port=9", "metrics.port"),
        ("--metrics-address=127.0.0.1", "metrics_address"),
    ],
)
def test_where_the_server_listens_cannot_be_changed(argument: str, name: str) -> None:
    with pytest.raises(ServingError, match=f"where they listen: {name}"):
        options(*BEFORE, argument)


def test_what_front_ends_do_can_be_changed() -> None:
    changed = options(*BEFORE, "--allow-client-shm=true", "--allow-page=false", "--access-log=json")

    assert (changed.client_shm, changed.http.page) == (True, False)


def test_relative_paths_begin_at_the_folder_of_the_command(tmp_path: Path) -> None:
    here = Path.cwd()
    given = replace(order(), command=ServeCommand(("models", "--api-keys=keys", *BEFORE[1:]), str(tmp_path)))

    made = options_of(given, parse_command)

    assert made.models.repositories == (f"{tmp_path}/models",)
    assert made.api_keys == f"{tmp_path}/keys"
    assert Path.cwd() == here


def test_the_same_repository_in_another_folder_is_another_one(tmp_path: Path) -> None:
    arguments = ("models", *BEFORE[1:])
    here, there = ServeCommand(arguments), ServeCommand(arguments, str(tmp_path))

    same = options_of(replace(order(), command=here, command_before=here), parse_command)
    other = options_of(replace(order(), command=there, command_before=here), parse_command)

    assert same.models.repositories == ("/models", "/made/for/files")
    assert other.models.repositories == (f"{tmp_path}/models",)


def test_a_folder_that_cannot_be_entered_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"cannot enter the folder of the command, '.*/gone': No such file"):
        parse_command(ServeCommand(("models",), f"{tmp_path}/gone"))


@pytest.mark.parametrize("words", [("auto", "auto"), ("2", "auto"), ("auto", "2")])
def test_a_number_that_was_chosen_stays_and_may_be_given(words: tuple[str, str]) -> None:
    before, after = (("/models", f"--front-ends={word}") for word in words)
    made = options_of(replace(order(*after), command_before=ServeCommand(before)), parse_command)

    assert made.front_ends == 2
    with pytest.raises(ServingError, match="where they listen: front_ends"):
        options_of(replace(order("/models", "--front-ends=3"), command_before=ServeCommand(before)), parse_command)


def test_an_order_of_another_protocol_is_refused_and_no_order_is_none(tmp_path: Path) -> None:
    assert read_new_engine(tmp_path, "engine_2") is None
    write_new_engine(tmp_path, "engine_2", replace(order(), command=ServeCommand(["a", "b"], "/folder")))
    read = read_new_engine(tmp_path, "engine_2")
    assert read is not None
    assert (read.command, read.command_before) == (ServeCommand(["a", "b"], "/folder"), ServeCommand(list(BEFORE)))

    path = new_engine_path(tmp_path, "engine_2")
    path.write_text(json.dumps({**json.loads(path.read_text()), "protocol": PROTOCOL + 1, "later": 1}))
    with pytest.raises(ServingError, match="does not go with the running front ends") as refused:
        read_new_engine(tmp_path, "engine_2")
    assert refused.value.code is Code.UNSUPPORTED
