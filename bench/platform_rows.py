"""A platform's data folder with many rows, written directly."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sqlalchemy import insert, select

from charonia.platform.app import make_platform
from charonia.platform.artifacts.manifest import digest, size, to_json
from charonia.platform.database.tables import (
    AuditRow,
    DeploymentRow,
    EnvironmentRow,
    GrantRow,
    HistoryRow,
    KeyRow,
    ModelRow,
    PlatformTable,
    ProjectRow,
    RevisionRow,
    ServerKeyRow,
    TaskRow,
    UserRow,
    VersionRow,
)
from charonia.platform.deployments.collector import LEVELS
from charonia.platform.models.records import TensorRecord, VersionReport
from charonia.platform.people.projects import DEFAULT
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform
from charonia.platform.targets.local_server import DeploymentFolder

MODELS = 1000
VERSIONS = 3
DEPLOYMENTS = 100
REVISIONS = 20
ENVIRONMENTS = 50
TASKS = 5000
AUDIT = 50_000
PEOPLE = 100
HISTORY_DAYS = 30

CONFIG = 'backend: "identity"\nmax_batch_size: 8\n' + "".join(
    f'{kind} {{ name: "{kind.upper()}0" data_type: TYPE_FP32 dims: 16 }}\n' for kind in ("input", "output")
)


def model_name(number: int) -> str:
    return f"model-{number:04}"


def deployment_name(number: int) -> str:
    return f"deployment-{number:03}"


def models_of(deployment: int) -> list[str]:
    """Return the names of the models of a deployment."""
    return [model_name(number) for number in range(deployment, MODELS, 400)]


def make_rows(data: Path) -> None:
    """Write a data folder. Nothing is measured in it but reading, so times are all the same."""
    platform = make_platform(PlatformSettings(data, isolation="available"))
    content = platform.artifacts.add([CONFIG.encode()], what="config.pbtxt")
    files = {"config.pbtxt": content, **{f"1/part-{number}": content for number in range(20)}}
    tensors = [TensorRecord(f"TENSOR{number}", "FP32", [-1, 224, 224, 3]) for number in range(4)]
    members = {
        "backend": "identity",
        "max_batch_size": 8,
        "parameters": {str(n): {"string_value": "x"} for n in range(20)},
    }
    report = VersionReport(is_checked=True, backend="identity", config=members, inputs=tensors, outputs=tensors)
    moment = time.time()
    with platform.database.transaction() as session:
        found = ProjectRow(name=DEFAULT, created=moment)
        session.add(found)
        session.flush()
        project = found.id
        rows: list[PlatformTable] = []
        for number in range(MODELS):
            model = ModelRow(project_id=project, name=model_name(number), owner="Ada", created=moment)
            model.tags, model.last_number = [f"team-{number % 40}", "vision"], VERSIONS
            model.versions = [
                VersionRow(
                    number=version,
                    state="ready",
                    digest=digest(files),
                    size=size(files),
                    files=to_json(files),
                    backend="identity",
                    report=report.to_json(),
                    author="Ada",
                    created=moment,
                )
                for version in range(1, VERSIONS + 1)
            ]
            rows.append(model)
        for number in range(DEPLOYMENTS):
            deployment = DeploymentRow(project_id=project, name=deployment_name(number), target="local", created=moment)
            deployment.latest = deployment.wanted = deployment.serving = REVISIONS
            deployment.state, deployment.ready = "ready", moment
            deployment.revisions = [
                RevisionRow(
                    number=revision,
                    spec=spec(number, revision),
                    state="serving" if revision == REVISIONS else "replaced",
                    author="Ada",
                    created=moment,
                )
                for revision in range(1, REVISIONS + 1)
            ]
            rows.append(deployment)
        for number in range(ENVIRONMENTS):
            environment = EnvironmentRow(
                project_id=project, name=f"environment-{number}", python="3.11", created=moment
            )
            environment.requirements, environment.digest, environment.state = "numpy\n", f"{number:064}", "ready"
            environment.packages = [[f"package-{each}", "1.0"] for each in range(60)]
            rows.append(environment)
        rows += [
            TaskRow(
                kind="version.check",
                project_id=project,
                subject=f"{model_name(number % MODELS)}/1",
                state="done",
                created=moment,
            )
            for number in range(TASKS)
        ]
        rows += [
            AuditRow(
                project_id=project,
                who="Ada",
                action="version.add",
                subject=model_name(number % MODELS),
                detail={"number": 1},
                created=moment,
            )
            for number in range(AUDIT)
        ]
        for number in range(PEOPLE):
            grant = {"project_id": project, "role": "deployer", "created": moment}
            rows.append(
                KeyRow(name=f"key-{number}", digest=f"{number:064}", created=moment, grants=[GrantRow(**grant)])
            )
            rows.append(
                UserRow(
                    issuer="bench",
                    subject=str(number),
                    name=f"User {number}",
                    created=moment,
                    grants=[GrantRow(**grant)],
                )
            )
        session.add_all(rows)
        session.flush()
        deployments = session.scalars(select(DeploymentRow.id)).all()
        session.execute(insert(HistoryRow), [row for number in deployments for row in history(number, moment)])
        session.add_all(
            ServerKeyRow(deployment_id=number, name="client", scopes=["infer"], digest=f"{number:064}", created=moment)
            for number in deployments
        )
    make_task_log(platform)
    platform.database.close()


def history(deployment_id: int, moment: float) -> Iterator[dict[str, object]]:
    """Yield the figures of a deployment over `HISTORY_DAYS`, for two models of two versions."""
    figures = [12.34, 0.01, 4.567, 23.45, 0.123, 0.2, 2.5, 0.0, 0.4, 2.0, 1.2e7]
    names = [f"{name}/{version}" for name in models_of(deployment_id)[:2] for version in (1, 2)]
    data = {"all": figures, "versions": dict.fromkeys(names, figures), "machine": [4e8, 0.8, None, None]}
    for step_s, kept_s in LEVELS:
        for number in range(int(min(kept_s, HISTORY_DAYS * 86_400) / step_s)):
            yield {
                "deployment_id": deployment_id,
                "step": step_s,
                "created": moment - number * step_s,
                "is_busy": True,
                "data": data,
            }


def spec(deployment: int, revision: int) -> dict[str, object]:
    """Return the specification of a deployment's revision."""
    models: list[dict[str, object]] = [{"name": name, "versions": [1, 2]} for name in models_of(deployment)]
    models[0]["batching"] = {"max_batch_size": revision}
    return {"name": deployment_name(deployment), "target": "local", "models": models, "keys": True}


def make_task_log(platform: Platform) -> None:
    folder = platform.tasks.folder(1)
    folder.mkdir(parents=True)
    (folder / "log").write_text("a line of the log of a task\n" * 5000)


@contextmanager
def adopted(data: Path, ports: tuple[int, int, int], key: str) -> Iterator[None]:
    """Let one server represent all deployments: the target finds their folders as it would leave them."""
    with ExitStack() as stack:
        for number in range(DEPLOYMENTS):
            folder = DeploymentFolder(data / "deployments" / "default" / deployment_name(number))
            folder.revision(REVISIONS).path.mkdir(parents=True)
            http, grpc, metrics = ports
            folder.write("address", ports=[http, grpc])
            folder.write("goal", revision=REVISIONS, is_reached=True)
            folder.platform_key.write_text(key)
            server = folder.server(1)
            server.path.mkdir()
            server.write("ports", ports=[http, metrics])
            server.write("serving", revision=REVISIONS, base=REVISIONS, made="bench")
            server.log.write_text("a line of the log of a server\n" * 1000)
            (server.path / "pid").write_text("0")
            lock = stack.enter_context((server.path / "lock").open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_repository(folder: Path) -> None:
    """Write the models of the first deployment."""
    for name in models_of(0):
        for version in (1, 2):
            (folder / name / str(version)).mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG + "version_policy: { all { } }\n")
