"""Versions from Git repositories."""

import base64
import hashlib
import hmac
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.platform.conftest import when_ended
from tests.platform.models.conftest import MODELS, add, settled
from tests.support.git_server import GitServer, git_server, ssh_server

from charonia.core.errors import ServingError, invalid
from charonia.platform.database.tables import DeploymentRow
from charonia.platform.models import git
from charonia.platform.models.git import is_git, parse_git
from charonia.platform.models.sources import AllowedHosts
from charonia.platform.state import Platform

pytestmark = pytest.mark.usefixtures("quick_checks")

NET = {"nets/net/config.pbtxt": b"max_batch_size: 1", "nets/net/1/model.onnx": b"one\r\n"}


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitServer]:
    with git_server(tmp_path_factory.mktemp("git"), monkeypatch) as served:
        yield served


def content(client: TestClient, version: dict[str, Any], path: str) -> bytes:
    place = f"/api/v1/projects/default/models/{version['model']}/versions/{version['number']}/files/{path}"
    return client.get(place).content


def https_of(server: GitServer) -> str:
    return server.address.removeprefix("git+")


def put_secret(client: TestClient, name: str, value: str) -> None:
    assert client.put(f"/api/v1/projects/default/secrets/{name}", json={"value": value}).status_code < 300


@pytest.mark.parametrize(
    ("text", "remote", "ref", "folder", "name"),
    [
        ("git+https://h.org/g/r.git", "https://h.org/g/r.git", "", "", "r"),
        ("https://h.org:8443/g/r@feature/x#a/b/", "https://h.org:8443/g/r", "feature/x", "a/b", "b"),
        ("git+ssh://git@h:22/g/r.git@v1#f.py", "ssh://git@h:22/g/r.git", "v1", "f.py", "f.py"),
        ("git@h.org:g/r.git@v1", "git@h.org:g/r.git", "v1", "", "r"),
        ("hf://org/SmolLM2-1.7B@main#sub", "https://huggingface.co/org/SmolLM2-1.7B", "main", "sub", "sub"),
    ],
)
def test_addresses(text: str, remote: str, ref: str, folder: str, name: str) -> None:
    found = parse_git(text)

    assert (found.remote, found.ref, found.folder, found.name) == (remote, ref, folder, name)
    again = parse_git(found.at("0" * 40))
    assert (again.remote, again.ref, again.folder) == (remote, "0" * 40, folder)
    assert is_git(found.at("0" * 40))
    assert is_git(text) == (text != "https://h.org:8443/g/r@feature/x#a/b/")


@pytest.mark.parametrize(
    "text",
    [
        *("hf://model", "hf://../m", "hf://o/m/x"),
        *("git+http://h/r", "git+file:///r", "git+ext::sh", "git+https://u:hidden@h/r", "git+https://hidden@h/r"),
        *(
            "git+ssh://-oProxyCommand=x/r",
            "-o@h:r",
            "git@-h:r",
            "git@h:-r",
            "git+https://h/r@-x",
            "git+https://h/r@a..b",
        ),
        *("git+https://h/r#../x", "git+https://h/r#/etc", "git+https://h/r\n", "git+https://h/r?x", "/folder"),
    ],
)
def test_an_address_with_another_protocol_an_option_or_a_password_is_refused(text: str) -> None:
    with pytest.raises(ServingError) as refused:
        parse_git(text)

    assert "hidden" not in refused.value.message


def test_a_branch_a_tag_and_a_commit_become_versions_that_record_the_commit(
    admin: TestClient, server: GitServer
) -> None:
    attributes = {".gitattributes": b"* text eol=lf ident\n*.onnx working-tree-encoding=UTF-16\n"}
    first = server.commit({**NET, **attributes})
    server.git("tag", "-a", "v1", "-m", "v1")
    second = server.commit({"nets/net/1/model.onnx": b"two", "services/add.onnx": b"function", **attributes})

    by_tag = add(admin, "net", kind="git", place=f"{server.address}@v1#nets/net")
    latest = add(admin, "net", kind="git", place=f"{server.address}#nets/net")
    by_commit = add(admin, "again", kind="git", place=f"{server.address}@{first}#nets")
    file = add(admin, "add", kind="git", place=f"{server.address}@main#services/add.onnx")

    assert (by_tag["state"], by_tag["source"]) == ("ready", f"{server.address}@{first}#nets/net")
    assert (latest["state"], latest["source"]) == ("ready", f"{server.address}@{second}#nets/net")
    assert content(admin, by_tag, "1/model.onnx") == content(admin, by_commit, "1/model.onnx") == b"one\r\n"
    assert content(admin, latest, "1/model.onnx") == b"two"
    assert [each["path"] for each in file["files"]] == ["1/model.onnx"]


@pytest.mark.parametrize(("secret", "sent"), [("sesame\n", "oauth2:sesame"), ("ada:sesame", "ada:sesame")])
def test_a_token_of_the_project_opens_a_repository(
    admin: TestClient, server: GitServer, monkeypatch: pytest.MonkeyPatch, secret: str, sent: str
) -> None:
    commands: list[str] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: Any, **more: Any) -> None:
            commands.append(str(command))
            super().__init__(command, **more)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    server.commit(NET)
    server.authorization = f"Basic {base64.b64encode(sent.encode()).decode()}"
    put_secret(admin, "token", secret)

    without = add(admin, "without", kind="git", place=f"{server.address}#nets/net")
    version = add(admin, "net", kind="git", place=f"{server.address}#nets/net", secret="token")

    assert version["state"] == "ready"
    assert (without["state"], without["report"]["hint"]) == (
        "refused",
        "the repository needs a secret of the project that may read it",
    )
    found = str(
        [commands, version, admin.get(f"/api/v1/tasks/{version['task']}").text, admin.get("/api/v1/audit").text]
    )
    assert "sesame" not in found
    assert server.authorization.removeprefix("Basic ") not in found


def test_a_repository_over_ssh_needs_a_deploy_key_and_known_hosts(
    admin: TestClient, server: GitServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    commit = server.commit({**NET, "nets/net/1/weights.bin": server.pointer(b"large")})
    server.authorization = "Basic of-the-host"
    lfs = {"href": f"{https_of(server)}/info/lfs", "header": {"Authorization": server.authorization}}
    with ssh_server(tmp_path_factory.mktemp("ssh"), lfs) as (port, key, known_hosts):
        place = f"git+ssh://root@127.0.0.1:{port}{server.repository}"
        put_secret(admin, "deploy", key + known_hosts)
        put_secret(admin, "other-host", key + known_hosts.replace("127.0.0.1", "127.0.0.2"))
        put_secret(admin, "key-only", key)

        version = add(admin, "net", kind="git", place=f"{place}@main#nets/net", secret="deploy")
        other = add(admin, "a", kind="git", place=place, secret="other-host")
        no_hosts = add(admin, "b", kind="git", place=place, secret="key-only")
        none = add(admin, "c", kind="git", place=place)

    assert (version["state"], version["source"]) == ("ready", f"{place}@{commit}#nets/net")
    assert content(admin, version, "1/weights.bin") == b"large"
    assert "Host key verification failed" in other["report"]["problem"]
    for refused in (no_hosts, none):
        assert "expected a private key, and lines of a known_hosts file" in refused["report"]["problem"]


def test_deployers_name_only_listed_servers_and_redirects_are_not_followed(
    admin: TestClient, as_caller: Callable[..., dict[str, str]], server: GitServer
) -> None:
    server.commit(NET)

    refused = add(admin, "net", as_caller("deployer"), kind="git", place=server.address)
    assert "expected a cloud, or a server that the platform may read from" in refused["report"]["problem"]
    assert not server.seen

    server.moved = https_of(server) + "/elsewhere"
    moved = add(admin, "net", kind="git", place=server.address)
    assert moved["state"] == "refused"
    assert len(server.seen) == 1


def test_files_of_git_lfs_come_with_the_token_from_servers_that_are_allowed(
    admin: TestClient, as_caller: Callable[..., dict[str, str]], server: GitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = os.urandom(100_000)
    server.commit({"net/1/model.onnx": server.pointer(large), ".lfsconfig": b"[lfs]\nurl = https://127.0.0.1:1/x\n"})
    server.authorization = f"Basic {base64.b64encode(b'oauth2:sesame').decode()}"
    put_secret(admin, "token", "sesame")

    def added(name: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
        return add(admin, name, headers, kind="git", place=f"{server.address}#net", secret="token")

    version = added("net")
    assert (version["state"], content(admin, version, "1/model.onnx")) == ("ready", large)

    monkeypatch.setattr(AllowedHosts, "check", lambda _, url: None if url.startswith("https://127") else refuse(url))
    server.large_at = "https://elsewhere.example.org/files"
    assert (
        "refused: https://elsewhere.example.org/files" in added("elsewhere", as_caller("deployer"))["report"]["problem"]
    )
    server.large_at = "http://127.0.0.1/files"
    assert "expected an https:// address" in added("plain")["report"]["problem"]
    server.large_at, server.large = "", dict.fromkeys(server.large, bytes(100_000))
    assert "another file than the pointer names" in added("another")["report"]["problem"]
    server.large.clear()
    assert "expected an https:// address in the answer of its server, got none" in added("absent")["report"]["problem"]


def test_a_language_model_of_the_hub_is_arranged_for_vllm(
    admin: TestClient, as_caller: Callable[..., dict[str, str]], server: GitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = b'{"architectures": ["LlamaForCausalLM"]}'
    files = {"config.json": config, "model.safetensors": b"weights", "onnx/model.onnx": b"x", ".gitattributes": b""}
    server.commit(files)
    monkeypatch.setenv(git.HUB_VARIABLE, https_of(server).removesuffix("/group/models.git"))

    version = add(admin, "net", kind="git", place="hf://group/models")

    assert [file["path"] for file in version["files"]] == [
        *("1/model.json", "1/model/config.json", "1/model/model.safetensors", "1/model/onnx/model.onnx")
    ]
    assert content(admin, version, "1/model.json") == b'{"model": "model"}'
    assert version["report"]["backend"] == "vllm"
    server.commit({**files, "config.json": config.replace(b"CausalLM", b"MaskedLM")})
    refused = add(admin, "mask", kind="git", place="hf://group/models")
    assert "a Hugging Face model, which cannot be served directly" in refused["report"]["problem"]


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [("https://huggingface.co/", True), ("https://cdn-lfs.hf.co/x", True), ("https://cas-bridge.xethub.hf.co/x", True)]
    + [
        (url, False) for url in ("https://nothf.co/", "https://hf.co.example.org/", "https://a@hf.co/", "http://hf.co/")
    ],
)
def test_the_hub_is_allowed_and_nothing_that_resembles_it(url: str, is_allowed: bool) -> None:
    if is_allowed:
        AllowedHosts().check(url)
    else:
        with pytest.raises(ServingError, match="expected a cloud"):
            AllowedHosts().check(url)


def refuse(url: str) -> None:
    raise invalid(f"refused: {url}")


HOOK = "0123456789-of-the-hook"


def signed(body: bytes, host: str, key: str = HOOK) -> dict[str, str]:
    digest = hmac.new(key.encode(), body, hashlib.sha256).hexdigest()
    return {
        "github": {"X-GitHub-Event": "push", "X-Hub-Signature-256": f"sha256={digest}"},
        "gitea": {"X-Gitea-Event": "push", "X-Gitea-Signature": digest},
        "gitlab": {"X-Gitlab-Event": "Push Hook", "X-Gitlab-Token": key},
    }[host]


def follow(client: TestClient, place: str, **more: str) -> Any:
    put_secret(client, "hook", HOOK + "\n")
    return client.put(f"{MODELS}/net/follow", json={"place": place, "hook": "hook", **more})


@pytest.mark.parametrize("host", ["github", "gitea", "gitlab"])
def test_a_signed_push_makes_a_version_that_a_deployment_gets_as_a_canary(
    admin: TestClient, server: GitServer, platform: Platform, host: str
) -> None:
    platform.deployments.close()  # what is wanted is enough
    server.commit(NET)
    assert add(admin, "net", kind="git", place=f"{server.address}#nets/net")["state"] == "ready"
    spec = {"name": "reader", "models": [{"name": "net", "versions": [1]}]}
    assert admin.post("/api/v1/projects/default/deployments", json=spec).status_code == 201
    found = follow(admin, f"{server.address}@main#nets/net", deployment="reader").json()
    commit = server.commit({**NET, "nets/net/1/model.onnx": b"two"})

    body = json.dumps(
        {"ref": "refs/heads/main", "after": "e" * 40, "repository": {"clone_url": "https://evil"}}
    ).encode()
    pushed = admin.post(found["path"], content=body, headers={"Authorization": "", **signed(body, host)})

    assert pushed.status_code == 202, pushed.text
    version = settled(admin, "net", pushed.json()["number"])
    assert (version["state"], version["source"], version["author"]) == (
        "ready",
        f"{server.address}@{commit}#nets/net",
        found["author"],
    )
    changed = admin.get("/api/v1/projects/default/deployments/reader").json()
    assert changed["spec"]["models"][0]["versions"] == [1, 2]
    assert changed["spec"]["models"][0]["traffic"]["weights"] == {"1": 100}
    with platform.database.reading() as session:
        row = session.query(DeploymentRow).one()
    assert row.canaries["net"]["plan"]["version"] == 2


def test_a_push_to_a_repository_reaches_the_models_that_the_deployment_has(
    admin: TestClient, server: GitServer, platform: Platform
) -> None:
    platform.deployments.close()  # what is wanted is enough
    config = b'backend: "identity"'
    server.commit({f"{name}/config.pbtxt": config for name in ("a", "b", "c")})
    path = follow(admin, server.address, deployment="pair", strategy="replace").json()["path"]
    body = json.dumps({"ref": "refs/heads/main"}).encode()

    def push() -> list[dict[str, Any]]:
        task = admin.post(path, content=body, headers=signed(body, "github")).json()["task"]
        versions = when_ended(admin, task)["result"]["versions"]
        for each in versions:
            assert settled(admin, each["model"], each["number"])["state"] == "ready"
        return list(versions)

    assert [each["model"] for each in push()] == ["a", "b", "c"]
    spec = {"name": "pair", "models": [{"name": name, "versions": [1]} for name in ("a", "b")]}
    assert admin.post("/api/v1/projects/default/deployments", json=spec).status_code == 201
    server.commit({f"{name}/config.pbtxt": config + b" max_batch_size: 4" for name in ("a", "b", "c")})

    assert [each["number"] for each in push()] == [2, 2, 2]
    models = admin.get("/api/v1/projects/default/deployments/pair").json()["spec"]["models"]
    assert {each["name"]: each["versions"] for each in models} == {"a": [2], "b": [2]}


@pytest.mark.parametrize("ref", ["", "@main", "@v1"])
def test_a_poll_adds_a_version_of_a_new_commit_and_says_why_it_fails(
    admin: TestClient, server: GitServer, platform: Platform, ref: str
) -> None:
    server.commit(NET)
    server.git("tag", "-a", "-m", "v1", "v1")
    place = f"{server.address}{ref}#nets/net"
    assert admin.put(f"{MODELS}/net/follow", json={"place": place, "every_s": 60}).status_code == 200

    def after(now_s: float) -> dict[str, Any]:
        platform.polls.step(now_s)
        found: dict[str, Any] = admin.get("/api/v1/projects/default/follows").json()["net"]
        return found

    first = after(1e10)
    assert (first["added"], first["commit"], first["problem"]) == (1, server.git("rev-parse", "main"), "")
    assert settled(admin, "net", 1)["state"] == "ready"
    requests = len(server.seen)
    commit = server.commit({**NET, "nets/net/1/model.onnx": b"two"})
    server.git("tag", "-f", "-a", "-m", "v1", "v1")
    assert after(1e10 + 59) == first
    assert len(server.seen) == requests

    second = after(1e10 + 60)
    assert (second["added"], second["commit"]) == (2, commit)
    assert settled(admin, "net", 2)["source"] == f"{server.address}@{commit}#nets/net"
    assert after(1e10 + 120)["added"] == 2
    server.authorization = "Basic sesame"
    assert "terminal prompts disabled" in after(1e10 + 180)["problem"]


def test_a_branch_that_somebody_without_a_role_follows_adds_nothing(
    admin: TestClient, server: GitServer, platform: Platform
) -> None:
    server.commit(NET)
    role = {"role": "deployer", "project": "default"}
    key = admin.post("/api/v1/keys", json={"name": "ci", "roles": [role]}).json()["key"]
    wanted = {"place": f"{server.address}#nets/net", "every_s": 60}
    headers = {"Authorization": f"Bearer {key}"}
    assert admin.put(f"{MODELS}/net/follow", json=wanted, headers=headers).status_code == 200

    assert admin.delete("/api/v1/keys/ci").status_code == 204
    platform.polls.step(1e10)

    found = admin.get(f"{MODELS}/net/follow").json()
    assert (found["added"], found["problem"]) == (0, "'key ci' is no longer a deployer of project 'default'")


def test_a_branch_that_does_not_exist_and_an_interval_out_of_bounds(
    admin: TestClient, server: GitServer, platform: Platform
) -> None:
    server.commit(NET)
    wanted = {"place": f"{server.address}@other", "every_s": 60}
    for changes, problem in (
        ({"every_s": 59}, "every_s: expected 60 to 86400"),
        ({"every_s": 0}, "`every_s` for polls"),
    ):
        assert problem in admin.put(f"{MODELS}/net/follow", json={**wanted, **changes}).json()["error"]

    path = admin.put(f"{MODELS}/net/follow", json=wanted).json()["path"]
    platform.polls.step(1e10)

    assert "no such branch or tag" in admin.get(f"{MODELS}/net/follow").json()["problem"]
    body = json.dumps({"ref": "refs/heads/other"}).encode()
    assert admin.post(path, content=body, headers=signed(body, "github", "")).status_code == 403


@pytest.mark.parametrize(
    ("body", "event", "status"),
    [
        ({"ref": "refs/heads/other", "after": "e"}, {}, 202),
        ({"ref": "refs/heads/main", "after": "0" * 40}, {}, 202),
        ({"zen": "x"}, {"X-GitHub-Event": "ping"}, 202),
        ([1], {}, 202),
        ("[" * 10_000, {}, 400),
        ({"ref": "refs/heads/main", "more": "x" * 5_000_000}, {}, 413),
    ],
)
def test_a_signed_call_about_something_else_makes_no_version(
    admin: TestClient, body: Any, event: dict[str, str], status: int
) -> None:
    path = follow(admin, "git@h.org:g/r.git@main").json()["path"]
    content = (body if isinstance(body, str) else json.dumps(body)).encode()

    answer = admin.post(path, content=content, headers={**signed(content, "github"), **event})

    assert (answer.status_code, answer.json() if status == 202 else None) == (status, None)
    assert admin.get(f"{MODELS}/net").json()["versions"] == []


def test_a_push_without_a_signature_is_refused_as_one_to_a_model_that_does_not_exist(admin: TestClient) -> None:
    path = follow(admin, "git@h.org:g/r.git").json()["path"]
    body = json.dumps({"ref": "refs/heads/main"}).encode()
    headers = [{}, {"X-GitHub-Event": "push"}, {"X-Gitea-Event": "push", "X-Gitea-Signature": "é"}]
    headers += [signed(body, host, "another") for host in ("github", "gitea", "gitlab")]
    headers += [signed(body + b" ", "github"), {"X-Gitlab-Event": "Push Hook", "X-Gitlab-Token": ""}]

    answers = [
        admin.post(path, content=body, headers={name.encode(): value.encode() for name, value in each.items()})
        for each in headers
    ]
    answers.append(admin.post("/hooks/default/absent", content=body, headers=signed(body, "github")))
    admin.delete(f"{MODELS}/net/follow")
    answers.append(admin.post(path, content=body, headers=signed(body, "github")))

    assert {(each.status_code, each.text) for each in answers} == {(403, answers[0].text)}


def test_a_short_signing_secret_is_refused(admin: TestClient) -> None:
    put_secret(admin, "short", "0123")

    refused = follow(admin, "git@h.org:g/r.git", hook="short")

    assert refused.status_code == 400
    assert "expected at least 16 characters" in refused.json()["error"]


def test_code_in_a_repository_needs_the_permission(
    admin: TestClient, app: Any, as_caller: Callable[..., dict[str, str]], server: GitServer, monkeypatch: Any
) -> None:
    monkeypatch.setattr("charonia.platform.models.sources.AllowedHosts.check", lambda *_: None)
    server.commit({"greet.py": b"import charonia\n\n\n@charonia.function\ndef greet(x: str) -> str:\n    return x\n"})
    place = f"{server.address}#greet.py"

    refused = add(admin, "greet", as_caller("deployer"), kind="git", place=place)
    version = add(admin, "greet", as_caller("deployer", may_run_code=True), kind="git", place=place)

    assert "the model is not known to be data" in refused["report"]["problem"]
    assert (version["state"], version["runs_code"]) == ("ready", True)


@pytest.mark.parametrize(
    ("files", "links", "limits", "problem"),
    [
        ({"model.onnx": b"x"}, {"passwd": "/etc/passwd"}, {}, "'passwd' is a link"),
        ({"model.onnx": b"version https://git-lfs.github.com/spec/v1\noid x\n"}, {}, {}, "not a valid pointer"),
        ({"model.onnx": os.urandom(3000)}, {}, {"FETCHED_BYTES_MAX": 4000}, ""),
        ({"model.onnx": bytes(300_000)}, {}, {"FETCHED_BYTES_MAX": 200_000}, "expected at most 200000 bytes"),
        ({"model.onnx": b"x", "more": b""}, {}, {"FILES_MAX": 1}, "expected at most 1 files, found 2"),
        ({"model.onnx": b"x"}, {}, {"FETCH_S_MAX": -1.0}, "git has not ended"),
    ],
)
def test_a_commit_with_links_pointers_or_too_much_is_refused(
    admin: TestClient,
    server: GitServer,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, bytes],
    links: dict[str, str],
    limits: dict[str, float],
    problem: str,
) -> None:
    server.commit(files, links)
    for name, value in limits.items():
        monkeypatch.setattr(git, name, value)

    version = add(admin, "net", kind="git", place=server.address)

    if problem:
        assert problem in version["report"]["problem"]
    else:
        assert version["state"] == "ready"


def test_a_submodule_is_refused_and_not_fetched(admin: TestClient, server: GitServer) -> None:
    commit = server.commit(NET)
    server.git("clone", "--quiet", str(server.repository), "sub", folder=server.root)
    sub = server.root / "sub"
    (sub / ".gitmodules").write_text(f'[submodule "m"]\n path = m\n url = {https_of(server)}\n')
    server.git("update-index", "--add", "--cacheinfo", f"160000,{commit},m", folder=sub)
    server.git("add", ".gitmodules", folder=sub)
    server.git("commit", "--quiet", "-m", "m", folder=sub)
    server.git("push", "--quiet", "origin", "main", folder=sub)

    assert "'m' is a submodule" in add(admin, "net", kind="git", place=server.address)["report"]["problem"]
    assert add(admin, "net", kind="git", place=f"{server.address}#nets/net")["state"] == "ready"


@pytest.mark.parametrize(
    ("rest", "problem"), [("@absent", "couldn't find remote ref"), ("#absent", "the commit has no files at 'absent'")]
)
def test_an_absent_ref_or_folder_is_said_so(admin: TestClient, server: GitServer, rest: str, problem: str) -> None:
    server.commit(NET)

    assert problem in add(admin, "net", kind="git", place=server.address + rest)["report"]["problem"]
