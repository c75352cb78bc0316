"""The commands of a platform's users, against its API."""

import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from tests.support.models import add_sub
from tests.support.platform_models import add_version
from tests.support.served_platform import ServedPlatform, served_platform

from charonia.cli import people, platform_access
from charonia.cli.deploy import DeployOptions, changed_spec
from charonia.cli.main import main
from charonia.cli.models import files_of
from charonia.cli.platform_access import PlatformAccess, connect
from charonia.core.errors import Code, ServingError
from charonia.platform.api_client import PlatformClient, path_of
from charonia.platform.database.tables import EnvironmentRow
from charonia.platform.tasks.runner import TaskRun


@pytest.fixture(autouse=True)
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.cli.rollout.LOOK_S", 0.02)
    monkeypatch.setattr(platform_access, "LOOK_S", 0.02)
    for name in (platform_access.SERVER_VARIABLE, platform_access.KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedPlatform]:
    with served_platform(tmp_path / "data") as found:
        yield found


@pytest.fixture
def echo(served: ServedPlatform) -> ServedPlatform:
    for content in (b"one", b"two"):
        add_version(
            served.platform.database, served.data, "echo", {"config.pbtxt": b'backend: "identity"', "1/m": content}
        )
    return served


@pytest.fixture
def run(served: ServedPlatform, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command and return its exit status, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main([*arguments, f"--data={served.data}"])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def test_a_file_is_added_checked_and_shown(run: Any, tmp_path: Path) -> None:
    (tmp_path / "sum.onnx").write_bytes(add_sub())
    added = run("models", "add", str(tmp_path / "sum.onnx"), "--notes=the first")
    listed = run("models", "list")
    shown = run("models", "show", "sum")
    version = run("models", "show", "sum", "1")

    assert added[:2] == (0, "sum/1\n")
    assert listed[1].splitlines()[2].split()[:4] == ["sum", "1", "ready", "onnxruntime"]
    assert shown[1].splitlines()[0] == "sum"
    assert version == run("models", "show", "sum/1")
    assert "from: upload of sum.onnx" in version[1]
    assert "notes: the first" in version[1]
    assert "inputs   INPUT0   FP32  16" in version[1]


def test_a_file_that_is_deployed_twice_is_one_version(run: Any, tmp_path: Path) -> None:
    (tmp_path / "sum.onnx").write_bytes(add_sub())
    first = run("deploy", str(tmp_path / "sum.onnx"))
    second = run("deploy", str(tmp_path / "sum.onnx"))
    added = run("models", "add", str(tmp_path / "sum.onnx"))

    assert first[1].splitlines()[0] == "sum: created, revision 1"
    assert (second[0], second[1].splitlines()[0]) == (0, "sum: no change, revision 1")
    assert (added[0], added[1]) == (1, "")
    assert "version 1 has the same files (hint: use that one)" in added[2]


def test_a_version_that_is_refused_is_an_error(run: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    status, out, error = run("models", "add", str(tmp_path / "broken.onnx"))

    assert (status, out) == (1, "")
    assert "charonia models add: broken/1: " in error
    assert run("models", "list")[1].splitlines()[2].split()[:3] == ["broken", "1", "refused"]


def test_a_folder_is_sent_with_its_paths(run: Any, tmp_path: Path, served: ServedPlatform) -> None:
    folder = tmp_path / "sum" / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(add_sub())
    (folder.parent / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 4\n')
    assert run("models", "add", str(folder.parent), "--name=other")[:2] == (0, "other/1\n")

    client = PlatformClient(served.url, served.key)
    version = client.call("GET", path_of("projects", "default", "models", "other", "versions", 1))
    assert {file["path"] for file in version["files"]} == {"1/model.onnx", "config.pbtxt"}
    assert version["report"]["max_batch_size"] == 4


def test_a_folder_of_the_platforms_machine_is_not_sent(run: Any, tmp_path: Path) -> None:
    (tmp_path / "sum" / "1").mkdir(parents=True)
    (tmp_path / "sum" / "1" / "model.onnx").write_bytes(add_sub())
    assert run("models", "add", str(tmp_path / "sum"), "--on-server", "--no-wait")[:2] == (0, "sum/1\n")
    assert f"{tmp_path / 'sum'}\n" in run("models", "show", "sum/1")[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["models", "show", "none"], "charonia models show: model 'none' does not exist in project 'default'"),
        (["models", "add", "/nowhere/x.onnx"], "charonia models add: there is no '/nowhere/x.onnx' on this machine"),
        (["models", "list", "--project=none"], "charonia models list: project 'none' does not exist"),
        (["deploy", "none"], "charonia deploy: "),
        (["deploy", "a/b"], "charonia deploy: expected NAME, NAME/VERSION or a file or folder, got 'a/b'"),
        (["apply"], "charonia apply: expected -f FILE, got none"),
        (["apply", "-f", "/nowhere"], "charonia apply: '/nowhere' cannot be read: No such file or directory"),
        (["rollout", "undo", "none"], "charonia rollout undo: "),
        (["environments", "add", "x"], "charonia environments add: expected one of --requirements, --script and --pre"),
        (["environments", "add", "x", "--preset=none"], "charonia environments add: there is no preset 'none'"),
        (["environments", "show", "none"], "charonia environments show: "),
        (["environments", "show", "a/b"], "charonia environments show: there is nothing at /api/v1/projects/default/"),
    ],
)
def test_what_cannot_be_is_an_error_of_one_line(arguments: list[str], expected: str, run: Any) -> None:
    status, out, error = run(*arguments)

    assert (status, out) == (1, "")
    assert error.startswith(expected)
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("command", ["models", "environments", "rollout"])
def test_a_command_lists_its_subcommands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    listed = capsys.readouterr().out
    assert main([command]) == 2
    capsys.readouterr()
    assert main([command, "lits"]) == 2

    assert listed.startswith(f"usage: charonia {command} SUBCOMMAND [OPTIONS]\n")
    assert f"charonia {command}: unknown subcommand 'lits' (hint: " in capsys.readouterr().err


def test_a_model_is_deployed_changed_and_taken_back(run: Any, echo: ServedPlatform) -> None:
    created = run("deploy", "echo/1", "--name=reader", "--instances=2", "--note=a try")
    again = run("deploy", "echo/1", "--name=reader")
    changed = run("deploy", "echo", "--name=reader")
    undone = run("rollout", "undo", "reader")

    assert created[0] == 0
    assert created[1].splitlines()[0] == "reader: created, revision 1"
    assert created[1].splitlines()[-1] == "reader: revision 1 serves at http://127.0.0.1:1"
    assert again[1].splitlines()[0] == "reader: no change, revision 1"
    assert changed[1].splitlines()[:2] == ["reader: changed, revision 2", "  model 'echo': version 1 -> version 2"]
    assert undone[1].splitlines()[:2] == ["reader: changed, revision 3", "  model 'echo': version 2 -> version 1"]
    assert [each.spec.models[0].instances.min for each in echo.target.applied] == [2, 2, 2]


def test_a_revision_that_fails_is_said(run: Any, echo: ServedPlatform) -> None:
    echo.target.broken = {2: "it has no weights"}
    run("deploy", "echo/1", "--name=reader")
    status, _, error = run("deploy", "echo/2", "--name=reader")
    waited = run("rollout", "status", "reader")
    looked = run("rollout", "status", "reader", "--no-wait")
    history = run("rollout", "history", "reader")
    log = run("rollout", "log", "reader", "--level=error")

    assert log[0] == 0
    assert status == waited[0] == looked[0] == 1
    assert "charonia deploy: reader: revision 2 has failed, revision 1 serves: " in error
    assert "it has no weights" in error
    assert "it has no weights" in looked[1]
    assert [line.split()[:2] for line in history[1].splitlines()[2:]] == [["2", "failed"], ["1", "serving"]]


def test_the_hint_of_a_first_revision_that_fails_is_to_start_it_again(run: Any, echo: ServedPlatform) -> None:
    echo.target.broken = {1: "it has no weights"}
    first = run("deploy", "echo/1", "--name=reader")
    echo.target.broken = {}
    again = run("rollout", "start", "reader")

    assert "none serves: it has no weights (hint: charonia rollout start reader)" in first[2]
    assert again[0] == 0
    assert run("rollout", "status", "reader")[0] == 0


def test_a_deployment_is_stopped_started_and_removed(run: Any, echo: ServedPlatform) -> None:
    def states() -> list[list[str]]:
        return [line.split()[:2] for line in run("rollout", "status")[1].splitlines()[2:]]

    run("deploy", "echo", "--name=reader")
    before = states()
    stop = run("rollout", "stop", "reader")
    stopped = run("rollout", "status", "reader")
    start = run("rollout", "start", "reader")
    assert run("rollout", "status", "reader")[:2] == (0, "reader: revision 1 serves at http://127.0.0.1:1\n")
    removed = run("rollout", "remove", "reader")

    assert (stop[0], stop[1].partition(";")[0]) == (0, "reader: stopping")
    assert (start[0], start[1].splitlines()[-1]) == (0, "reader: revision 1 serves at http://127.0.0.1:1")
    assert removed[:2] == (0, "reader: its servers are being stopped, its revisions are deleted\n")

    assert before == [["reader", "ready"]]
    assert (stopped[0], stopped[2].startswith("charonia rollout status: reader: it is stop")) == (1, True)


SPEC = """\
name: reader
models:
  - name: echo
    versions: [1, 2]
    traffic: {weights: {1: 90, 2: 10}}
---
{"name": "second", "models": [{"name": "echo"}]}
"""


def test_a_file_is_applied_once(run: Any, echo: ServedPlatform, tmp_path: Path) -> None:
    file = tmp_path / "deployments.yaml"
    file.write_text(SPEC)
    dry = run("apply", "-f", str(file), "--dry-run")
    listed = run("rollout", "status")
    first = run("apply", "-f", str(file))
    second = run("apply", "-f", str(file))
    file.write_text(SPEC.replace("90", "50"))
    difference = run("apply", "--dry-run", "--file", str(file))

    assert dry[0] == first[0] == second[0] == difference[0] == 0
    assert [line for line in dry[1].splitlines() if line[0] != " "] == [
        "reader: would be created",
        "second: would be created",
    ]
    assert len(listed[1].splitlines()) == 2
    assert "reader: created, revision 1" in first[1]
    assert second[1].splitlines()[:2] == ["reader: no change, revision 1", "second: no change, revision 1"]
    assert difference[1].splitlines()[0] == "reader: would be changed"
    assert "version 1: 50" in difference[1].splitlines()[1]
    assert difference[1].splitlines()[2] == "second: no change, revision 1"


def test_what_does_not_fit_is_known_before(run: Any, echo: ServedPlatform, tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(SPEC.split("---")[0])
    echo.target.misfits = ["it needs 8 GiB of memory"]
    dry = run("apply", "-f", str(file), "--dry-run")
    real = run("apply", "-f", str(file))

    assert dry[0] == real[0] == 1
    assert "  does not fit: it needs 8 GiB of memory" in dry[1]
    assert "it needs 8 GiB of memory" in real[2]


def test_everything_that_is_wrong_with_a_file_is_named(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("name: reader\nmodles: []\nreplicas: -1\n")
    status, _, error = run("apply", "-f", str(file))

    assert status == 1
    assert all(word in error for word in ("modles", "models", "replicas"))
    file.write_text("- a list")
    assert "expected deployments with a name each" in run("apply", "-f", str(file))[2]
    for text in ("a: [", "name: 2026-13-01"):
        file.write_text(text)
        assert "expected YAML or JSON" in run("apply", "-f", str(file))[2]


def test_two_who_change_a_deployment_at_once(run: Any, echo: ServedPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    run("deploy", "echo/1", "--name=reader")
    real = PlatformClient.call

    def call(self: PlatformClient, method: str, path: str, body: Any = None, **more: Any) -> Any:
        if method == "PUT":  # somebody is faster
            real(self, "PUT", path, {**body, "ready_within_s": 60}, query={})
        return real(self, method, path, body, **more)

    monkeypatch.setattr(PlatformClient, "call", call)
    status, _, error = run("deploy", "echo/2", "--name=reader")

    assert status == 1
    assert "revision" in error


def test_the_log_of_a_build_is_shown_and_its_failure(
    run: Any, served: ServedPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(task: TaskRun) -> Mapping[str, Any]:
        task.log("collecting nothing")
        raise ServingError(Code.INVALID_ARG, "no wheel of nothing")

    monkeypatch.setitem(served.platform.tasks._handlers, "environment", build)
    (tmp_path / "requirements.txt").write_text("nothing==1\n")
    status, out, error = run("environments", "add", "mine", f"--requirements={tmp_path / 'requirements.txt'}")

    assert (status, out) == (1, "")
    assert error.splitlines()[0] == "collecting nothing"
    assert error.splitlines()[-1].endswith("no wheel of nothing")


def test_environments_are_listed_shown_and_removed(
    run: Any, served: ServedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(served.platform.tasks._handlers, "environment", lambda task: {})
    assert run("environments", "add", "--preset=forests")[:2] == (0, "forests\n")
    with served.platform.database.transaction() as session:
        session.execute(update(EnvironmentRow).values(state="ready", packages=[["xgboost", "3.1"]]))
    listed = run("environments", "list")[1]
    shown = run("environments", "show", "forests")[1]
    assert run("environments", "remove", "forests")[0] == 0

    assert listed.splitlines()[2].split()[:2] == ["forests", "ready"]
    assert "to choose with --preset: forests, llama-cpp, onnx" in listed
    assert "xgboost  3.1" in shown
    assert "forests " not in run("environments", "list")[1]


def access_error(access: PlatformAccess, environment: Mapping[str, str] | None = None) -> ServingError:
    with pytest.raises(ServingError) as raised:
        connect(access, environment or {}).call("GET", "/api/v1/me")
    return raised.value


def test_the_key_of_this_machine_goes_to_its_platform_only(served: ServedPlatform) -> None:
    def name(access: PlatformAccess, **environment: str) -> str:
        return str(connect(access, environment).call("GET", "/api/v1/me")["name"])

    assert name(PlatformAccess(data=served.data)) == "key owner"
    assert name(PlatformAccess(data=served.data, server=served.url + "/")) == "key owner"
    assert name(PlatformAccess(), CHARONIA_PLATFORM=served.url, CHARONIA_PLATFORM_KEY=served.key) == "key owner"
    elsewhere = access_error(PlatformAccess(data=served.data, server="http://127.0.0.1:9"))
    assert elsewhere.message == "expected an API key for http://127.0.0.1:9, got none"
    wrong = access_error(PlatformAccess(data=served.data, key="charonia_x"))
    assert (wrong.message, wrong.hint) == (
        "the API key is unknown or has expired",
        "give a key with --key or CHARONIA_PLATFORM_KEY",
    )


def test_the_record_of_a_platform_that_has_ended_is_not_followed(tmp_path: Path) -> None:
    with served_platform(tmp_path) as served:
        pass
    assert (tmp_path / "running.json").exists()

    assert access_error(PlatformAccess(data=served.data)).message.startswith("no platform of this user runs with")


def test_an_address_where_nothing_answers(tmp_path: Path) -> None:
    away = access_error(PlatformAccess("http://127.0.0.1:9", "key", tmp_path))
    wrong = access_error(PlatformAccess("127.0.0.1", "key", tmp_path))

    assert (away.code, away.message) == (
        Code.UNAVAILABLE,
        "no platform answers at http://127.0.0.1:9: Connection refused",
    )
    assert wrong.message == "--server: expected http://HOST:PORT or https://HOST:PORT, got '127.0.0.1'"


def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    served: ServedPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(1000)
    (tmp_path / "large.bin").write_bytes(content)
    real, broken = PlatformClient.call, list[int]()

    def call(self: PlatformClient, method: str, path: str, body: Any = None, **more: Any) -> Any:
        if method == "PUT" and len(broken) < 3:  # the first half arrives, then the connection breaks
            broken.append(more["query"]["offset"])
            real(self, method, path, body[: len(body) // 2], **more)
            raise self._unreachable(ConnectionResetError())
        return real(self, method, path, body, **more)

    monkeypatch.setattr(PlatformClient, "call", call)
    monkeypatch.setattr("charonia.platform.api_client.PIECE_BYTES", 400)
    monkeypatch.setattr("charonia.platform.api_client.PAUSE_S", 0.0)
    seen: list[tuple[int, int]] = []
    client = PlatformClient(served.url, served.key)
    batch = client.send_files("default", {"large.bin": tmp_path / "large.bin"}, lambda *now: seen.append(now))

    [upload] = client.call("GET", path_of("projects", "default", "uploads"), query={"batch": batch})
    assert broken == [0, 200, 400]
    assert seen[-1] == (1000, 1000)
    assert (served.data / "uploads" / upload["key"]).read_bytes() == content


def test_the_files_of_a_folder_lie_below_its_name(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").touch()

    assert list(files_of(tmp_path / "m")) == ["m/1/model.onnx"]
    assert list(files_of(tmp_path / "m" / "1" / "model.onnx")) == ["model.onnx"]


def test_options_change_what_they_name_and_leave_the_rest() -> None:
    before: dict[str, Any] = {
        "name": "reader",
        "models": [
            {"name": "a", "versions": [1], "config": {"x": 1}},
            {"name": "b", "versions": [1, 2], "batching": {"max_batch_size": 4}},
        ],
        "device": {"cpu_cores": 4},
        "keys": True,
    }
    given = DeployOptions(gpus=(0,), max_queue_delay_us=50, environment="pytorch")

    assert changed_spec(before, "reader", "b", 3, given) == {
        "name": "reader",
        "models": [
            {"name": "a", "versions": [1], "config": {"x": 1}},
            {"name": "b", "versions": [3], "batching": {"max_batch_size": 4, "max_queue_delay_microseconds": 50}},
        ],
        "device": {"cpu_cores": 4, "gpus": [0]},
        "keys": True,
        "environment": "pytorch",
        "strategy": "replace",
    }
    assert before["models"][1]["versions"] == [1, 2]
    assert changed_spec(None, "new", "c", 0, DeployOptions()) == {
        "name": "new",
        "models": [{"name": "c", "versions": "latest"}],
        "strategy": "replace",
    }


SPLIT: dict[str, Any] = {
    "weights": {"1": 80, "2": 20},
    "sticky": "key",
    "shadow": {"2": {"share": 0.1}},
}


def test_a_version_that_comes_to_others_that_share_the_requests_needs_a_strategy() -> None:
    before = {"models": [{"name": "a", "versions": [1, 2], "traffic": SPLIT}]}

    with pytest.raises(ServingError, match="split among the versions 1, 2: expected --strategy, got none"):
        changed_spec(before, "a", "a", 3, DeployOptions())
    spec = changed_spec(before, "a", "a", 3, DeployOptions(strategy="canary"))

    assert (spec["strategy"], spec["models"]) == ("canary", [{"name": "a", "versions": [3]}])
    with pytest.raises(ServingError, match="without --strategy beside"):
        changed_spec(before, "a", "a", 3, DeployOptions(strategy="beside", traffic={"3": 1.0}))


def test_traffic_names_the_versions_that_share_the_requests() -> None:
    before = {"models": [{"name": "a", "versions": [1, 2], "traffic": SPLIT}]}

    (model,) = changed_spec(before, "a", "a", 0, DeployOptions(traffic={"2": 90.0, "3": 10.0}))["models"]
    (alone,) = changed_spec(before, "a", "a", 0, DeployOptions(traffic={"3": 100.0}))["models"]

    assert model["versions"] == [2, 3]
    assert model["traffic"] == {"weights": {"2": 90.0, "3": 10.0}}  # the platform keeps the rest
    assert (alone["versions"], alone["traffic"]) == ([3], {"weights": {"3": 100.0}})


def test_deploying_leaves_the_weights_and_traffic_changes_them(run: Any, echo: ServedPlatform) -> None:
    run("deploy", "echo/1", "--traffic=1=100")
    status, beside, _ = run("deploy", "echo", "--strategy=beside")
    split = run("deploy", "echo/2", "--traffic=1=75,2=25")
    wrong = run("deploy", "echo", "--traffic=one=1")

    spec = PlatformClient(echo.url, echo.key).call("GET", path_of("projects", "default", "deployments", "echo"))["spec"]
    assert status == 0
    assert "versions 1, 2" in beside
    assert split[0] == 0
    assert spec["models"][0]["versions"] == [1, 2]
    assert spec["models"][0]["traffic"]["weights"] == {"1": 75, "2": 25}
    assert wrong[0] == 2
    assert "expected VERSION=NUMBER" in wrong[2]


def test_keys_are_made_listed_and_revoked(run: Any, served: ServedPlatform) -> None:
    made = run("people", "add-key", "ci", "--role=deployer", "--code", "--days=7")
    listed = run("people", "keys")
    revoked = run("people", "revoke-key", "ci")

    assert made[0] == 0
    assert made[1].startswith("charonia_")
    assert "deployer with code in default" in listed[1]
    assert (revoked[0], "ci " in run("people", "keys")[1]) == (0, False)
    with pytest.raises(ServingError, match="unknown or has expired"):
        PlatformClient(served.url, made[1].strip()).call("GET", path_of("me"))


def test_users_are_added_get_roles_and_links_and_are_removed(run: Any, served: ServedPlatform) -> None:
    added = run("people", "add-user", "Ada", "--email=ada@example.org")
    role = run("people", "role", "ada@example.org", "--role=deployer")
    everywhere = run("people", "role", "Ada", "--role=viewer", "--everywhere")
    link = run("people", "link", "Ada")
    listed = run("people", "users")
    nobody = run("people", "role", "Bob", "--role=viewer")
    removed = run("people", "remove-user", "Ada")

    assert f"{served.url}" in added[1] or "/login/link?token=" in added[1]
    assert role[1] == "Ada: deployer in default\n"
    assert everywhere[1] == "Ada: deployer in default, viewer in all projects\n"
    assert "/login/link?token=" in link[1]
    assert "ada@example.org" in listed[1]
    assert (nobody[0], "there is no user 'Bob'" in nobody[2]) == (1, True)
    assert (removed[0], "Ada" in run("people", "users")[1]) == (0, False)


def test_secrets_are_read_from_stdin_and_a_link_signs_the_owner_in(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("s3cret\n"))
    assert run("people", "put-secret", "hub")[0] == 0
    status, listed, _ = run("people", "secrets")
    assert (status, "hub" in listed, "s3cret" in listed) == (0, True, False)
    assert run("people", "remove-secret", "hub")[0] == 0

    assert "/login/link?token=" in run("platform", "login-link")[1]


def test_alerts_are_created_listed_and_removed(run: Any) -> None:
    rule = ("--condition=p99_ms", "--threshold=200", "--for=30", "--deployment=reader", "--url=http://127.0.0.1:1/hook")
    assert run("platform", "create-alert", "slow", *rule)[0] == 0
    again = run("platform", "create-alert", "slow", *rule)
    listed = run("platform", "alerts")[1]
    refused = run("platform", "create-alert", "other", "--condition=slow")
    assert run("platform", "remove-alert", "slow")[0] == 0

    assert (again[0], "alert 'slow' already exists" in again[2]) == (1, True)
    assert listed.splitlines()[2].split() == ["slow", "p99_ms", "reader", "200"]
    assert (refused[0], "error_rate" in refused[2]) == (2, True)
    assert "slow" not in run("platform", "alerts")[1]


def test_several_of_a_name_are_told_apart_by_their_numbers(run: Any) -> None:
    for _ in range(2):
        run("people", "add-user", "Ada")

    status, _, error = run("people", "remove-user", "Ada")

    assert status == 1
    assert "several users are called 'Ada'" in error


def test_the_audit_log_is_shown_the_newest_first(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(people, "PAGE", 2)
    for name in ("one", "two", "three"):
        run("people", "add-key", name)

    lines = run("people", "audit", "--everywhere", "--entries=3")[1].splitlines()
    entries = [json.loads(line) for line in run("people", "audit", "--everywhere", "--json")[1].splitlines()]

    assert [line.split("key.create")[1].split()[0] for line in lines[2:]] == ["three", "two", "one"]
    assert [entry["subject"] for entry in entries[:3]] == ["three", "two", "one"]
    assert run("people", "add-key")[0] == 2
    assert run("people", "add-key", "x", "--role=king")[0] == 2


def test_a_dry_run_of_a_file_shows_the_plan_and_adds_nothing(run: Any, tmp_path: Path) -> None:
    (tmp_path / "sum.onnx").write_bytes(add_sub())
    status, said, _ = run("deploy", str(tmp_path / "sum.onnx"), "--dry-run", "--instances=2")

    assert status == 0
    assert said.splitlines()[:2] == [
        f"sum/1: would be added from '{tmp_path}/sum.onnx', unless a version has the same files",
        "sum: would be created",
    ]
    assert "instances" in said
    assert len(run("models", "list")[1].splitlines()) == 2
