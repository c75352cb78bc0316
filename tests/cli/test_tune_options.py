"""The forms in which people ask for a run: command lines and YAML files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.cli.tune import PROFILE, Subcommand, parse_profile, parse_report, subcommand
from charonia.cli.values import integers, seconds
from charonia.core.errors import ServingError
from charonia.tools.perf.options import WireProtocol
from charonia.tools.tune.api import Constraint, Metric, Objective, SearchMode
from charonia.tools.tune.options import LaunchMode, TuneOptions, UseCase

BASE = ["-m", "R", "--profile-models", "add_sub"]
QUICK_START = (
    "--model-repository R --profile-models add_sub --output-model-repository-path OUT --export-path RES "
    "--override-output-model-repository --run-config-search-max-concurrency 2 "
    "--run-config-search-max-model-batch-size 2 --run-config-search-max-instance-count 2"
)


def from_yaml(folder: Path, text: str, *arguments: str) -> TuneOptions:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return parse_profile(["-f", str(path), *arguments]).options


def problems(*arguments: str) -> str:
    with pytest.raises(ServingError) as error:
        parse_profile(arguments)
    return str(error.value)


def test_the_quick_start_line_is_understood() -> None:
    options = parse_profile(QUICK_START.split()).options

    assert options.launch.repository == Path.cwd() / "R"
    assert [model.name for model in options.models.profile] == ["add_sub"]
    assert options.output.repository == Path.cwd() / "OUT"
    assert options.output.export == Path.cwd() / "RES"
    assert options.output.override
    assert (options.search.concurrency_max, options.search.batch_size_max, options.search.instances_max) == (2, 2, 2)
    assert options.search.mode is SearchMode.RACE


def test_the_defaults_are_those_of_model_analyzer() -> None:
    options = parse_profile(BASE).options

    assert (options.search.concurrency_max, options.search.instances_max, options.search.batch_size_max) == (
        1024,
        5,
        128,
    )
    assert (options.search.rate_min, options.search.rate_max) == (16, 8192)
    assert options.measure.protocol is WireProtocol.GRPC
    assert options.measure.batch_sizes == (1,)
    assert options.output.inference_file == "metrics-model-inference.csv"
    assert options.output.configs_per_model == 3


def test_a_container_is_not_needed_and_the_run_goes_on_locally() -> None:
    merged = parse_profile([*BASE, "--triton-launch-mode=docker"])

    assert merged.options.launch.mode is LaunchMode.LOCAL
    assert "without a container" in merged.notes[-1]


def test_loading_the_server_into_this_process_is_refused_with_what_to_do_instead() -> None:
    assert "local starts a server" in problems(*BASE, "--triton-launch-mode", "c_api")


def test_options_without_a_meaning_here_are_accepted_with_a_note() -> None:
    merged = parse_profile([*BASE, "--dcgm-disable", "--perf-analyzer-timeout", "300", "--gpus", "all"])

    assert [note.partition(" ")[0] for note in merged.notes] == ["--gpus", "--dcgm-disable", "--perf-analyzer-timeout"]


@pytest.mark.parametrize("text", ["1,2,4", "4,2,1", "1,2,4,4"])
def test_a_list_with_commas_is_sorted_and_has_nothing_twice(text: str) -> None:
    assert parse_profile([*BASE, "-c", text]).options.measure.concurrency == (1, 2, 4)


@pytest.mark.parametrize(
    "text",
    [
        "concurrency: 2:6:2",
        "concurrency: {start: 2, stop: 6, step: 2}",
        "concurrency: [2, 4, 6]",
        "concurrency: '2,4,6'",
    ],
)
def test_a_range_may_be_written_in_every_form(tmp_path: Path, text: str) -> None:
    assert from_yaml(tmp_path, f"model_repository: R\nprofile_models: add_sub\n{text}\n").measure.concurrency == (
        2,
        4,
        6,
    )


@given(start=st.integers(1, 50), count=st.integers(1, 20), step=st.integers(1, 9))
def test_both_ends_of_a_range_count(start: int, count: int, step: int) -> None:
    stop = start + (count - 1) * step

    assert integers(1)(f"{start}:{stop}:{step}") == tuple(range(start, stop + 1, step))


@pytest.mark.parametrize("text", ["0", "4:2:1", "1:2:3:4", "x", "", "1:1000000000:1", "1.5"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        integers(1)(text)


@pytest.mark.parametrize(("text", "expected"), [("90", 90), ("90s", 90), ("1.5m", 90), ("1h", 3600), (30, 30)])
def test_a_time_budget_has_units(text: object, expected: float) -> None:
    assert seconds(text) == expected


def test_the_command_line_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    text = "model_repository: R\nprofile_models: [a]\nrun_config_search_max_instance_count: 3\nbatch_sizes: 4\n"

    options = from_yaml(tmp_path, text, "--run-config-search-max-instance-count", "2")

    assert options.search.instances_max == 2
    assert options.measure.batch_sizes == (4,)
    assert options.search.concurrency_max == 1024


def test_models_in_a_file_have_settings_of_their_own(tmp_path: Path) -> None:
    options = from_yaml(
        tmp_path,
        """\
model_repository: R
objectives: [perf_throughput, perf_latency_p99]
constraints: {perf_latency_p99: {max: 15}}
profile_models:
  resnet:
    parameters: {concurrency: [1, 2], batch_sizes: "1,2"}
    model_config_parameters:
      max_batch_size: [1, 2]
      instance_group: [{kind: KIND_CPU, count: [1, 2]}]
      dynamic_batching: {max_queue_delay_microseconds: [100, 200]}
    objectives: {perf_latency_p99: 2}
    constraints: {perf_throughput: {min: 100}}
    weighting: 3
    cpu_only: true
    perf_analyzer_flags: {percentile: 95, streaming: true, shape: ["a:1", "b:2"]}
  bert:
""",
    )
    resnet, bert = options.models.profile

    assert resnet.concurrency == (1, 2)
    assert resnet.batch_sizes == (1, 2)
    assert [name for name, _ in resnet.config_parameters] == ["max_batch_size", "instance_group", "dynamic_batching"]
    assert resnet.objectives == (Objective(Metric.LATENCY_P99, 2),)
    assert resnet.constraints == (Constraint(Metric.THROUGHPUT, minimum=100),)
    assert resnet.cpu_only
    assert resnet.weight == 3
    assert resnet.perf_flags == (("percentile", "95"), ("streaming", ""), ("shape", "a:1"), ("shape", "b:2"))
    assert bert.name == "bert"
    assert bert.constraints is None
    assert options.goal.objectives == (Objective(Metric.THROUGHPUT), Objective(Metric.LATENCY_P99))
    assert options.goal.constraints == (Constraint(Metric.LATENCY_P99, maximum=15),)


def test_the_deprecated_name_of_the_latency_means_the_99th_percentile(tmp_path: Path) -> None:
    text = (
        "model_repository: R\nobjectives: {perf_latency: 2}\nconstraints: {perf_latency: {max: 15}}\n"
        "profile_models: {m: {objectives: [perf_latency], constraints: {perf_latency: {max: 9}}}}\n"
    )

    options = from_yaml(tmp_path, text)

    assert options.goal.objectives == (Objective(Metric.LATENCY_P99, 2),)
    assert options.goal.constraints == (Constraint(Metric.LATENCY_P99, maximum=15),)
    assert options.models.profile[0].objectives == (Objective(Metric.LATENCY_P99),)
    assert options.models.profile[0].constraints == (Constraint(Metric.LATENCY_P99, maximum=9),)


def test_a_list_of_models_may_mix_names_and_settings(tmp_path: Path) -> None:
    text = "model_repository: R\nprofile_models:\n  - a\n  - b: {parameters: {concurrency: 4}}\n"

    assert [(model.name, model.concurrency) for model in from_yaml(tmp_path, text).models.profile] == [
        ("a", ()),
        ("b", (4,)),
    ]


def test_composing_models_of_both_kinds_are_put_together(tmp_path: Path) -> None:
    text = (
        "model_repository: R\nprofile_models: ens\nbls_composing_models: a,b\n"
        "ensemble_composing_models: {c: {model_config_parameters: {instance_group: [{count: [1, 2]}]}}}\n"
    )

    assert [model.name for model in from_yaml(tmp_path, text).models.composing] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("concurency: 2", "unknown key 'concurency' (hint: did you mean concurrency?)"),
        ("profile_models: {a: {paramters: {}}}", "did you mean parameters?"),
        ("profile_models: {a: {parameters: {concurency: 1}}}", "did you mean concurrency?"),
        ("profile_models: {a: {model_config_parameters: {instance_groups: []}}}", "did you mean instance_group?"),
        ("latency_budget: 010x", "expected an integer"),
        ("objectives: [perf_troughput]", "did you mean perf_throughput?"),
        ("constraints: {perf_latency_p99: {maximum: 5}}", "expected min or max"),
        ("constraints: {inter_token_latency_p98: {max: 5}}", "did you mean inter_token_latency_p99?"),
        ("run_config_search_mode: slow", "expected race or brute or quick or optuna, got 'slow'"),
        ("bls_composing_models: {b: {parameters: {concurrency: 1}}}", "cannot have load settings"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model_repository: R\n{line}\n", encoding="utf-8")

    found = (
        problems("-f", str(path), "--profile-models", "a")
        if "profile_models: {" not in line
        else problems("-f", str(path))
    )

    assert message in found
    assert str(path) in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a\n", ""),
        ("a: [\n", ""),
        ("[" * 5000, ""),
        ("concurrency: 1\nconcurrency: 2\n", "'concurrency' is there twice"),
    ],
)
def test_a_file_that_is_no_mapping_or_has_a_key_twice_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")

    found = problems("-f", str(path))

    assert str(path) in found
    assert problem in found


def test_a_file_that_is_not_there_is_named() -> None:
    assert "nowhere.yaml: cannot be read" in problems("-f", "nowhere.yaml")


def test_all_problems_come_at_once() -> None:
    found = problems("--run-config-search-max-concurrency", "0", "-c", "x", "--triton-launch-mode", "moon")

    assert len(found.splitlines()) == 4  # and no repository


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile-model", "a", "-m", "R", "--run-config-search-max"], "ambiguous"),
        (["--profile-modles", "a"], "did you mean --profile-models?"),
        (["-m", "R", "stray"], "--model-repository: expected one path, got 2"),
        (["-c"], "expected a value behind it"),
        ([*BASE, "-c", "1", "--request-rate", "5"], "expected one of them, got both"),
        ([*BASE, "--run-config-search-min-concurrency", "8", "--run-config-search-max-concurrency", "4"], "at least"),
        (["-m", "R", "--profile-models", "a,a"], "there twice"),
        (["--profile-models", "a"], "--model-repository: expected a folder"),
        (["--triton-launch-mode", "remote"], "--profile-models: expected the names"),
    ],
)
def test_a_wrong_command_line_says_why(arguments: list[str], message: str) -> None:
    assert message in problems(*arguments)


def test_shapes_are_given_one_by_one_or_as_a_list(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("shape: ['a:1,2', 'b:3']", encoding="utf-8")

    for arguments in (["--shape", "a:1,2", "--shape", "b:3"], ["-f", str(path)]):
        assert parse_profile([*BASE, *arguments]).options.measure.shapes == ("a:1,2", "b:3")
    assert "--shape: expected NAME:D1,D2,..." in problems(*BASE, "--shape", "a:x")


TWO_LISTS = """
model_repository: R
run_config_profile_models_concurrently_enable: true
profile_models: {a: {parameters: {concurrency: [2]}}, b: {parameters: {concurrency: [8]}}}
"""


def test_models_measured_at_the_same_time_have_one_list_of_loads(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(TWO_LISTS, encoding="utf-8")

    assert "expected one list of concurrency, got [2] for 'a', [8] for 'b'" in problems("-f", str(path))

    path.write_text(TWO_LISTS.replace("true", "false"), encoding="utf-8")
    assert [model.concurrency for model in parse_profile(["-f", str(path)]).options.models.profile] == [(2,), (8,)]


def test_remote_needs_no_repository() -> None:
    options = parse_profile(["--profile-models", "a", "--triton-launch-mode", "remote"]).options

    assert options.launch.mode is LaunchMode.REMOTE


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["profile", "-m", "R"], (Subcommand.PROFILE, UseCase.ONLINE, ["-m", "R"])),
        (["analyze"], (Subcommand.PROFILE, UseCase.ONLINE, [])),
        (["-f", "x.yaml"], (Subcommand.PROFILE, UseCase.ONLINE, ["-f", "x.yaml"])),
        (["-m", "offline", "profile"], (Subcommand.PROFILE, UseCase.OFFLINE, [])),
        (["report", "-e", "x"], (Subcommand.REPORT, UseCase.ONLINE, ["-e", "x"])),
    ],
)
def test_the_subcommand_may_be_left_out(arguments: list[str], expected: object) -> None:
    assert subcommand(arguments) == expected


def test_an_unknown_subcommand_is_named() -> None:
    with pytest.raises(ServingError, match="did you mean profile"):
        subcommand(["profil"])


def test_a_report_takes_the_names_of_variants_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "report.yaml"
    path.write_text("report_model_configs:\n  a_config_0: {plots: {}}\n  a_config_1:\n", encoding="utf-8")

    assert parse_report(["-f", str(path)]).names == ("a_config_0", "a_config_1")
    assert parse_report(["--report-model-configs", "a_config_default,a_config_0", "-e", "R"]).export == Path.cwd() / "R"


def test_what_an_option_does_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = PROFILE.help().splitlines()

    entries = lines[lines.index("File:") : lines.index("Exit status:")]
    assert [line for line in entries if len(line) > 60] == []


def test_headers_and_environments_are_not_told_to_those_who_read_reports(tmp_path: Path) -> None:
    secret = "s3cret"
    document = {
        "model_repository": "models",
        "profile_models": {"m": {"perf_analyzer_flags": {"header": [f"Authorization:{secret}"], "shape": "input:3"}}},
        "perf_analyzer_flags": {"H": f"Token:{secret}"},
        "triton_server_environment": {"KEY": secret},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(document))  # which is YAML, too

    named = parse_profile(["-f", str(path), "--override-output-model-repository"]).named

    assert secret not in str(named)
    assert "Authorization:***" in named["profile_models"]
    assert "input:3" in named["profile_models"]
    assert named["override_output_model_repository"] == "true"


@pytest.mark.parametrize("where", ["profile_models", "bls_composing_models"])
def test_settings_of_one_model_without_a_meaning_here_are_noted(tmp_path: Path, where: str) -> None:
    path = tmp_path / "config.yaml"
    other = "" if where == "profile_models" else "profile_models: a\n"
    path.write_text(
        f"model_repository: R\n{other}{where}:\n  b:\n"
        "    triton_server_flags: {log-verbose: 1}\n    triton_docker_args: {x: y}\n    genai_perf_flags: {}\n"
    )

    notes = parse_profile(["-f", str(path)]).notes

    assert [note.partition(" has no effect")[0] for note in notes] == [
        "triton_server_flags of model 'b'",
        "triton_docker_args of model 'b'",
        "genai_perf_flags of model 'b'",
    ]


def test_the_preset_before_the_subcommand_is_kept() -> None:
    command, tune_for, rest = subcommand(["-m", "offline", "profile", "--min-throughput", "5"])

    options = parse_profile([*BASE, *rest], tune_for).options

    assert command == "profile"
    assert options.goal.tune_for == "offline"
    assert options.goal.min_throughput == 5


@pytest.mark.parametrize("arguments", [["profile", "PATH"], ["PATH"], ["-m", "PATH"]])
def test_a_path_is_the_repository_and_everything_is_in_one_folder(arguments: list[str], tmp_path: Path) -> None:
    given = [str(tmp_path) if each == "PATH" else each for each in arguments]
    _, tune_for, rest = subcommand([*given, "-e", str(tmp_path / "out")])
    options = parse_profile(rest, tune_for).options

    assert options.launch.repository == tmp_path
    assert options.output.repository == tmp_path / "out" / "models"
    assert options.output.journal_folder == tmp_path / "out" / "checkpoints"
