import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from charonia.cli import platform
from charonia.cli.main import main
from charonia.cli.platform import LINE, with_environment
from charonia.core.errors import ServingError
from charonia.platform.settings import KubernetesSettings, Oidc, PlatformSettings


def problems(*arguments: str) -> str:
    with pytest.raises(ServingError) as raised:
        LINE.parse(arguments)
    return raised.value.message


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    settings = LINE.parse(
        ["--data=data", "--artifacts=store", "--kubernetes=config", "--kubernetes-values=values", "--helm=./helm"]
    )

    assert settings.data == tmp_path / "data"
    assert settings.artifacts == str(tmp_path / "store")
    kubernetes = settings.kubernetes
    assert (kubernetes.config, kubernetes.values) == (str(tmp_path / "config"), str(tmp_path / "values"))
    assert kubernetes.helm == str(tmp_path / "helm")
    assert LINE.parse(["--kubernetes=in-cluster", "--helm=helm"]).kubernetes == KubernetesSettings("in-cluster")


def test_the_options_are_the_settings(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden\n")
    settings = LINE.parse(
        [
            f"--data={tmp_path}",
            "--database=postgresql://db/charonia",
            "--artifacts=s3://bucket/models",
            "--host=0.0.0.0",
            "--port=80",
            "--public-url=https://models.example.org",
            "--ports=20000-20100",
            "--oidc-issuer=https://id.example.org",
            "--oidc-client-id=charonia",
            f"--oidc-secret-file={secret}",
            "--oidc-admins=ada@example.org, eve@example.org",
        ]
    )

    assert settings == PlatformSettings(
        data=tmp_path,
        database="postgresql://db/charonia",
        artifacts="s3://bucket/models",
        host="0.0.0.0",
        port=80,
        public_url="https://models.example.org",
        ports=(20000, 20100),
        oidc=Oidc("https://id.example.org", "charonia", "hidden", ("ada@example.org", "eve@example.org")),
    )
    assert "hidden" not in repr(settings)
    assert (settings.url, settings.is_https) == ("https://models.example.org", True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--host=0.0.0.0"], "--host: others reach '0.0.0.0', so expected --public-url as well"),
        (["--host=models.example.org"], "--host: others reach 'models.example.org'"),
        (["--public-url=models.example.org"], "--public-url: expected http://HOST:PORT or https://HOST:PORT, got"),
        (["--public-url=https://example.org/models"], "--public-url: expected a URL without a path, got"),
        (["--ports=9000"], "--ports: expected FIRST-LAST, got '9000'"),
        (["--ports=9999-9000"], "--ports: expected FIRST-LAST from 1 to 65535, got '9999-9000'"),
        (["--port=65536"], "--port: expected an integer from 0 to 65535"),
        (["--oidc-issuer=https://id.example.org"], "--oidc-issuer: expected --oidc-client-id as well"),
        (["--oidc-issuer=http://id.example.org", "--oidc-client-id=x"], "--oidc-issuer: expected https://..."),
        (["--kubernetes-image=charonia"], "--kubernetes: expected a kubeconfig or 'in-cluster' with the options"),
        (["--kubernetes=in-cluster", "--kserve-mode=raw"], "--kserve-mode: expected standard or knative, got 'raw'"),
        (["--kubernetes=in-cluster", "--kubernetes-owner=a b"], "--kubernetes-owner: expected up to 56 letters"),
        (["--kubernetes=in-cluster", "--kubernetes-proxy=here:1"], "--kubernetes-proxy: expected http://HOST:PORT or"),
        (["--kubernetes-images=torch"], "--kubernetes-images: expected ENVIRONMENT=IMAGE, got 'torch'"),
        (["--ray-owner=a"], "--ray: expected the address of a dashboard with the options"),
        (["--ray=ray:8265"], "--ray: expected http://HOST:PORT or https://HOST:PORT, got 'ray:8265'"),
        (
            ["--ray=http://ray:8265", "--ray-http=ray"],
            "--ray-http: expected http://HOST:PORT or https://HOST:PORT, got 'ray'",
        ),
        (["--ray=http://ray:8265", "--ray-owner=a b"], "--ray-owner: expected up to 63 letters"),
        (["--oidc-secret-file=/nowhere"], "--oidc-secret-file: '/nowhere' cannot be read: No such file or directory"),
    ],
)
def test_settings_that_do_not_fit_are_named(arguments: list[str], expected: str) -> None:
    assert problems(*arguments).startswith(expected)


def test_a_cluster() -> None:
    settings = LINE.parse(
        [
            "--kubernetes=~/.kube/config",
            "--kubernetes-context=prod",
            "--kubernetes-namespace=models",
            "--kubernetes-owner=team-a",
            "--kubernetes-image=charonia:1",
            "--kubernetes-images=torch=charonia:torch,tf=charonia:tf",
            "--kubernetes-images=llm=charonia:llm",
            "--kubernetes-values=values.yaml",
            "--kubernetes-chart=chart",
            "--kubernetes-store-secret=store",
            "--kubernetes-claim=claim",
            "--kubernetes-proxy=http://127.0.0.1:8001",
            "--helm=/opt/helm",
        ]
    )

    assert settings.kubernetes == KubernetesSettings(
        config=str(Path("~/.kube/config").expanduser()),
        context="prod",
        namespace="models",
        owner="team-a",
        image="charonia:1",
        images=(("torch", "charonia:torch"), ("tf", "charonia:tf"), ("llm", "charonia:llm")),
        values=str(Path.cwd() / "values.yaml"),
        chart=str(Path.cwd() / "chart"),
        store_secret="store",
        claim="claim",
        proxy="http://127.0.0.1:8001",
        helm="/opt/helm",
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_alone_needs_no_public_address(host: str) -> None:
    settings = LINE.parse([f"--host={host}", "--port=1"])

    assert settings.url == f"http://{f'[{host}]' if ':' in host else host}:1"
    assert not settings.is_https


def test_the_environment_has_what_the_command_line_should_not(tmp_path: Path) -> None:
    environment = {"CHARONIA_OIDC_SECRET": "hidden", "CHARONIA_DATABASE": "postgresql://db/charonia"}
    found = with_environment(PlatformSettings(tmp_path), environment)
    kept = with_environment(replace(found, database="sqlite:///x", oidc=Oidc(client_secret="own")), environment)

    assert (found.oidc.client_secret, found.database) == ("hidden", "postgresql://db/charonia")
    assert (kept.oidc.client_secret, kept.database) == ("own", "sqlite:///x")


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "find_spec", lambda name: None if name == "fastapi" else name)

    assert main(["platform"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("charonia platform: the platform needs fastapi (hint: ")
    assert "[platform]" in printed


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["platform"], 1, "charonia platform: the platform needs alembic, authlib, fastapi, "),
        (["models", "list", "--data=/nowhere"], 1, "charonia models list: no platform of this user runs with"),
        (["deploy", "m", "--server=http://127.0.0.1:9", "--key=x"], 1, "charonia deploy: no platform answers at"),
    ],
)
def test_only_the_platform_itself_needs_the_extra(arguments: list[str], status: int, expected: str) -> None:
    program = f"import sys; sys.modules.update(dict.fromkeys({platform.MODULES!r}))\n"
    program += f"from charonia.cli.main import main\nsys.exit(main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)

    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(expected)
