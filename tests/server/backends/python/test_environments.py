"""Environments of Python models: prepared ones, archives, and those built from a requirements.txt. All offline."""

import ast
import asyncio
import gzip
import io
import os
import shutil
import sys
import tarfile
import venv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.campaign.archive_bombs import FAMILIES, dictionaries
from tests.support.process import until
from tests.support.python_model import Loaded, config, request, write
from tests.support.wheels import SITE_PACKAGES, inline_metadata, offline_index

from charonia.config.kinds import InstanceKind
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, TooLargeError
from charonia.server.backends.api import BackendSettings, ModelFiles, Outputs, Placement
from charonia.server.backends.python import environment as environment_module
from charonia.server.backends.python.backend import PythonBackend
from charonia.server.backends.python.environment import (
    PYTHON_MIN,
    CommandError,
    environment_of,
    environment_of_file,
    requirements_key,
    run_command,
)

WORKER = Path(environment_module.__file__).parent / "worker"

WHERE = """
import os, sys
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        text = os.environ.get("VIRTUAL_ENV", "") + " " + sys.prefix
        answer = np.array([text.encode()], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", answer)]) for _ in requests]
"""

TINY = "--no-index\n--find-links wheels\ntiny\n"
NEEDS_TINY = WHERE.replace("import os, sys", "import os, sys, tiny").replace("sys.prefix", "tiny.WORD")


def settings(tmp_path: Path, **values: str) -> BackendSettings:
    return BackendSettings(
        {"environment-cache": str(tmp_path / "cache"), **{k.replace("_", "-"): v for k, v in values.items()}}
    )


def with_requirements(tmp_path: Path, text: str, code: str = NEEDS_TINY) -> ModelFiles:
    files = write(tmp_path, code)
    offline_index(files.version_dir / "wheels")
    (files.version_dir / "requirements.txt").write_text(text)
    return files


def make_venv(folder: Path, *, numpy: bool = True) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    if numpy:
        (site,) = folder.glob("lib/python3*/site-packages")
        (site / "numpy.pth").write_text(SITE_PACKAGES)
    return folder


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text + "\n")
    path.chmod(0o755)
    return path


def packed(path: Path, *, conda_unpack: str = "") -> Path:
    """Write an archive as conda-pack makes them, whose interpreter is the one of these tests."""
    folder = path.parent / "unpacked"
    script(folder / "bin" / "python", f'exec {sys.executable} "$@"')
    if conda_unpack:
        (folder / "bin" / "conda-unpack").write_text(conda_unpack)
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(folder, arcname=".")
    shutil.rmtree(folder)
    return path


async def where(files: ModelFiles, given: BackendSettings, **parameters: str) -> str:
    """Load a model as the server does, and return what it says of where it runs."""
    cfg = replace(config(DataType.BYTES), parameters=parameters)
    backend = PythonBackend()
    await backend.complete(files, cfg, given)
    model = await backend.load(files, cfg, given)
    loaded = Loaded(model, await model.create_instance(Placement("m_0_0", InstanceKind.KIND_CPU)))
    try:
        (result,) = await loaded.run([request(np.array([b""], object), DataType.BYTES)])
        assert isinstance(result, Outputs), result
        return str(result.tensors[0].array[0].decode())
    finally:
        await loaded.close()
        await backend.aclose()


def refusal(files: ModelFiles, given: BackendSettings, **parameters: str) -> ServingError:
    with pytest.raises(ServingError) as caught:
        asyncio.run(environment_of(files, replace(config(), parameters=parameters), given))
    return caught.value


# -- prepared environments


def test_a_model_runs_in_the_folder_that_its_parameter_names(tmp_path: Path) -> None:
    files = write(tmp_path, WHERE)
    make_venv(files.model_dir / "env")

    for given in ("env", "$$TRITON_MODEL_DIRECTORY/env", str(files.model_dir / "env")):
        folder, prefix = asyncio.run(where(files, settings(tmp_path), EXECUTION_ENV_PATH=given)).split()
        assert folder == prefix == str(files.model_dir / "env")


def test_an_archive_is_unpacked_once_and_adapts_itself(tmp_path: Path) -> None:
    files = write(tmp_path, WHERE)
    packed(files.model_dir / "env.tar.gz", conda_unpack="import os\nopen(os.path.dirname(__file__) + '/adapted', 'x')")

    first = asyncio.run(where(files, settings(tmp_path), EXECUTION_ENV_PATH="env.tar.gz"))
    again = asyncio.run(where(files, settings(tmp_path), EXECUTION_ENV_PATH="env.tar.gz"))

    assert first == again
    folder = Path(first.split()[0])
    assert folder.parents[1] == tmp_path / "cache"
    assert (folder / "bin" / "adapted").exists()


def test_archives_of_the_same_content_share_an_environment_and_others_do_not(tmp_path: Path) -> None:
    files = write(tmp_path, WHERE)
    one = packed(files.model_dir / "one.tar.gz")
    shutil.copy(one, files.model_dir / "copy.tar.gz")
    (files.model_dir / "other.tar.gz").write_bytes(gzip.compress(gzip.decompress(one.read_bytes()), 9))

    found = [
        asyncio.run(environment_of(files, config(EXECUTION_ENV_PATH=name), settings(tmp_path))).python
        for name in ("one.tar.gz", "copy.tar.gz", "other.tar.gz")
    ]

    assert found[0] == found[1] != found[2]


def packed_venv(path: Path, interpreter: str = "") -> None:
    """Write an archive of a plain virtual environment, with a link to an interpreter."""
    folder = make_venv(path.parent / "ENV")
    if interpreter:
        link = folder / "bin" / "python"
        link.unlink()
        link.symlink_to(interpreter)
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        archive.add(folder, arcname=".")
    shutil.rmtree(folder)


def test_a_model_runs_in_an_archive_of_a_plain_virtual_environment(tmp_path: Path) -> None:
    files = write(tmp_path, WHERE)
    packed_venv(files.model_dir / "env.tar.gz")

    _, prefix = asyncio.run(where(files, settings(tmp_path), EXECUTION_ENV_PATH="env.tar.gz")).split()

    assert Path(prefix).is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize("interpreter", ["/no/such/python3", "/etc/passwd", "/usr"])
def test_an_archive_of_a_virtual_environment_needs_its_interpreter_on_this_machine(
    tmp_path: Path, interpreter: str
) -> None:
    files = write(tmp_path, WHERE)
    packed_venv(files.model_dir / "env.tar.gz", interpreter)

    error = refusal(files, settings(tmp_path), EXECUTION_ENV_PATH="env.tar.gz")

    assert f"is a link to '{interpreter}', which is no program of this machine" in error.message
    assert "conda-pack brings its own" in error.hint


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "link"])
def test_an_archive_whose_content_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    files = write(tmp_path, WHERE)
    with tarfile.open(files.model_dir / "bad.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "../../outside"
            archive.addfile(member)
        elif name.startswith("/"):
            member.type, member.linkname = tarfile.SYMTYPE, "/etc"
            archive.addfile(member)
        else:
            archive.addfile(member, io.BytesIO())

    error = refusal(files, settings(tmp_path), EXECUTION_ENV_PATH="bad.tar.gz")

    assert error.code is Code.INVALID_ARG
    assert "is refused" in error.message
    assert not list((tmp_path / "cache").glob("*/*/"))


def test_an_archive_that_holds_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_module, "UNPACKED_BYTES_MAX", 10)
    monkeypatch.setattr(environment_module, "UNPACKED_FILES_MAX", 0)
    packed(tmp_path / "env.tar.gz")

    with pytest.raises(TooLargeError, match="its files have more than 10 bytes"):
        environment_module.extract(tmp_path / "env.tar.gz", tmp_path / "env")


@pytest.mark.parametrize("family", ["large headers", "sparse files", "truncated"])
def test_hostile_archives_are_refused(tmp_path: Path, family: str) -> None:
    for number, archive in enumerate(FAMILIES[family](1)):
        if not archive.name.endswith(".zip"):
            (tmp_path / archive.name).write_bytes(archive.content)

            with pytest.raises(ServingError):
                environment_module.extract(tmp_path / archive.name, tmp_path / str(number))


def test_an_archive_whose_decompression_needs_much_memory_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path, WHERE)
    (archive,) = (each for each in dictionaries() if each.name.endswith(".xz"))
    (files.model_dir / "env.tar.xz").write_bytes(archive.content)

    message = refusal(files, settings(tmp_path), EXECUTION_ENV_PATH="env.tar.xz").message

    assert f"'{files.model_dir}/env.tar.xz': it needs more than 512 MiB of memory" in message


@pytest.mark.parametrize(
    "content", [b"", b"no archive", gzip.compress(b"neither" * 999)[:-9]], ids=["empty", "text", "cut off"]
)
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    files = write(tmp_path, WHERE)
    (files.model_dir / "env.tar.gz").write_bytes(content)

    error = refusal(files, settings(tmp_path), EXECUTION_ENV_PATH="env.tar.gz")

    assert "it cannot be read" in error.message
    assert "conda-pack" in error.hint


def test_a_folder_without_interpreter_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path, WHERE)

    assert "has no interpreter bin/python" in refusal(files, settings(tmp_path), EXECUTION_ENV_PATH=".").message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("echo Python 3.7; exit 0", "is Python 3.7, which is too old"),
        ("echo Python 2.7; echo no numpy; exit 1", "is Python 2.7, which is too old"),
        ("echo Python 3.12; echo 'ModuleNotFoundError: numpy'; exit 1", "cannot import numpy:\nPython 3.12\nModule"),
        ("echo cannot execute binary; exit 126", "cannot be run: cannot execute binary"),
    ],
)
def test_an_interpreter_that_workers_cannot_run_on_is_refused(tmp_path: Path, body: str, expected: str) -> None:
    files = write(tmp_path, WHERE)
    script(files.model_dir / "env" / "bin" / "python", body)

    assert expected in refusal(files, settings(tmp_path), EXECUTION_ENV_PATH="env").message


def test_an_environment_without_numpy_is_refused_with_what_to_do(tmp_path: Path) -> None:
    files = write(tmp_path, WHERE)
    make_venv(files.model_dir / "env", numpy=False)

    error = refusal(files, settings(tmp_path), EXECUTION_ENV_PATH="env")

    assert "No module named 'numpy'" in error.message
    assert error.hint == "workers need numpy: install it in the environment"


def test_variables_of_the_server_do_not_lead_a_worker_out_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write(tmp_path, WHERE.replace("sys.prefix", "str('PYTHONPATH' in os.environ)"))
    make_venv(files.model_dir / "env")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    assert asyncio.run(where(files, settings(tmp_path), EXECUTION_ENV_PATH="env")).endswith("False")


def test_a_worker_of_its_own_is_named_as_what_cannot_be_used(tmp_path: Path) -> None:
    files = write(tmp_path, WHERE)
    script(files.model_dir / "triton_python_backend_stub", "true")

    error = refusal(files, settings(tmp_path))

    assert error.code is Code.UNSUPPORTED
    assert "EXECUTION_ENV_PATH" in error.hint


def test_a_worker_of_its_own_does_not_matter_where_the_environment_is_named(tmp_path: Path) -> None:
    files = write(tmp_path, WHERE)
    script(files.model_dir / "triton_python_backend_stub", "true")
    make_venv(files.model_dir / "env")

    environment = asyncio.run(environment_of(files, config(EXECUTION_ENV_PATH="env"), settings(tmp_path)))

    assert environment.folder == files.model_dir / "env"


# -- environments that are built


@pytest.mark.parametrize("builder", ["auto", "pip"])
@pytest.mark.parametrize("names_them", ["requirements.txt", "model.py"])
def test_what_a_model_requires_is_installed_once_with_numpy(tmp_path: Path, builder: str, names_them: str) -> None:
    if names_them == "model.py":
        files = write(tmp_path, inline_metadata(tmp_path / "wheels") + NEEDS_TINY)
    else:
        files = with_requirements(tmp_path, TINY)
    given = settings(tmp_path, environment_builder=builder)

    first = asyncio.run(where(files, given))
    again = asyncio.run(where(files, given))

    assert first == again
    assert first.endswith(" tiny")
    assert first.startswith(str(tmp_path / "cache"))


def test_requirements_in_the_models_folder_count_too(tmp_path: Path) -> None:
    files = with_requirements(tmp_path, "")
    (files.version_dir / "requirements.txt").rename(files.model_dir / "requirements.txt")
    (files.model_dir / "requirements.txt").write_text("--no-index\n--find-links 1/wheels\ntiny\n")

    assert asyncio.run(where(files, settings(tmp_path))).endswith(" tiny")


def test_another_python_than_the_servers_is_for_uv_to_find(tmp_path: Path) -> None:
    file = tmp_path / "service.py"
    file.write_text("# /// script\n# requires-python = '>=4'\n# ///\n")

    with pytest.raises(ServingError, match="requires-python is '>=4', and the server's Python is 3") as caught:
        asyncio.run(environment_of_file(file, settings(tmp_path, environment_builder="pip")))

    assert caught.value.hint == "install uv, which finds or fetches other versions of Python"


def test_instances_and_models_that_start_together_build_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = with_requirements(tmp_path, TINY)

    async def scenario() -> None:
        found = await asyncio.gather(*(environment_of(files, config(), settings(tmp_path)) for _ in range(4)))
        assert len({e.python for e in found}) == 1

    caplog.set_level("INFO")
    asyncio.run(scenario())

    assert caplog.text.count("making the Python environment") == 1
    assert caplog.text.count("which is being made already") == 3


def test_what_the_builder_says_is_in_the_error_whole(tmp_path: Path) -> None:
    files = with_requirements(tmp_path, "--no-index\n--find-links wheels\nno-such-package==7\n")

    error = refusal(files, settings(tmp_path))

    assert "model 'm': the environment of 'requirements.txt' cannot be built" in error.message
    assert "no-such-package" in error.message.split("\n", 1)[1]
    assert not list((tmp_path / "cache").glob("*/*/bin"))


def test_numpy_that_cannot_be_had_is_asked_for(tmp_path: Path) -> None:
    files = with_requirements(tmp_path, TINY)
    for found in (files.version_dir / "wheels").glob("numpy*"):
        found.unlink()

    assert refusal(files, settings(tmp_path)).hint == "workers need numpy: add it to requirements.txt"


def test_a_build_that_was_interrupted_does_not_count(tmp_path: Path) -> None:
    files = with_requirements(tmp_path, TINY)
    place = tmp_path / "cache" / requirements_key(files.version_dir / "requirements.txt")
    leftover = script(place / "abandoned" / "bin" / "python", "exit 1")

    environment = asyncio.run(environment_of(files, config(), settings(tmp_path)))

    assert environment.folder is not None
    assert environment.folder.parent == place
    assert not leftover.exists()


async def test_a_build_that_is_cancelled_leaves_nothing_and_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = with_requirements(tmp_path, "tiny\n")
    pid_file = tmp_path / "pid"
    slow = script(tmp_path / "bin" / "uv", f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 60")
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")

    async with asyncio.timeout(200):
        building = asyncio.ensure_future(environment_of(files, config(), settings(tmp_path)))
        await until(lambda: pid_file.exists())
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building

    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert sorted(path.name for path in (tmp_path / "cache").glob("*/*")) == ["lock"]


def test_a_build_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = with_requirements(tmp_path, "tiny\n")
    slow = script(tmp_path / "bin" / "uv", "sleep 60")
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(environment_module, "BUILD_S_MAX", 0.3)

    assert "was not made within 0.3 s" in refusal(files, settings(tmp_path)).message


def test_an_environment_whose_interpreter_has_gone_is_built_anew(tmp_path: Path) -> None:
    files = write(tmp_path, WHERE)
    packed(files.model_dir / "env.tar.gz")
    cfg = config(EXECUTION_ENV_PATH="env.tar.gz")
    first = asyncio.run(environment_of(files, cfg, settings(tmp_path)))
    Path(first.python).unlink()

    again = asyncio.run(environment_of(files, cfg, settings(tmp_path)))

    assert Path(again.python).exists()
    assert again.folder != first.folder


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path: Path) -> None:
    files = with_requirements(tmp_path, "tiny\n")
    (tmp_path / "cache").write_text("a file")

    assert "CHARONIA_CACHE" in refusal(files, settings(tmp_path)).hint


def test_requirements_can_be_left_alone_by_a_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = with_requirements(tmp_path, "no-such-package\n", WHERE)
    caplog.set_level("INFO")

    assert asyncio.run(where(files, settings(tmp_path, environment_builder="none"))).endswith(sys.prefix)
    assert "requirements.txt of model 'm' is ignored" in caplog.text


def test_a_builder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    files = with_requirements(tmp_path, "tiny\n")

    error = refusal(files, settings(tmp_path, environment_builder="conda"))

    assert "expected one of auto, uv, pip, none, got 'conda'" in error.message


# -- keys


def test_the_key_is_that_of_the_content_whatever_the_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "requirements.txt").write_text("tiny==1.0  # small\n")

    keys = {requirements_key(tmp_path / name / "requirements.txt") for name in ("a", "b")}
    (tmp_path / "b" / "requirements.txt").write_text("tiny==1.1\n")
    keys.add(requirements_key(tmp_path / "b" / "requirements.txt"))

    assert len(keys) == 2


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("-r more.txt", "more.txt"),
        ("--constraint=more.txt", "more.txt"),
        ("-r more.txt", "deep.txt"),
        ("./tiny-1.0-py3-none-any.whl[extra]", "tiny-1.0-py3-none-any.whl"),
        ("tiny @ file:tiny-1.0-py3-none-any.whl", "tiny-1.0-py3-none-any.whl"),
        ("--find-links wheels", "wheels/new.whl"),
        ("-e ./package", "package/setup.py"),
    ],
)
def test_what_a_requirements_file_refers_to_counts(tmp_path: Path, line: str, changed: str) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(line + "\n")
    (tmp_path / "more.txt").write_text("-r deep.txt\n")
    (tmp_path / "deep.txt").write_text("-r more.txt\n")
    (tmp_path / "tiny-1.0-py3-none-any.whl").write_bytes(b"1")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "package").mkdir()
    before = requirements_key(path)
    with (tmp_path / changed).open("a") as file:
        file.write("\n")

    assert requirements_key(path) != before


def test_what_a_build_leaves_beside_the_sources_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text("./package\n")
    (tmp_path / "package" / "tiny.egg-info").mkdir(parents=True)
    before = requirements_key(path)
    (tmp_path / "package" / "tiny.egg-info" / "PKG-INFO").write_text("made")

    assert requirements_key(path) == before


def test_folders_of_boundless_size_are_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_module, "REFERENCED_FILES_MAX", 1)
    path = tmp_path / "requirements.txt"
    path.write_text("--find-links .\n")
    (tmp_path / "second").touch()

    with pytest.raises(ServingError, match="has more than 1 files"):
        requirements_key(path)


# -- commands


def test_without_a_gpu_pytorch_is_the_one_for_cpus_unless_indexes_are_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("UV_TORCH_BACKEND", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment_module, "is_usable", lambda: False)
    assert environment_module.variables()["UV_TORCH_BACKEND"] == "cpu"

    monkeypatch.setenv("UV_INDEX", "https://packages.example.com/simple")
    assert "UV_TORCH_BACKEND" not in environment_module.variables()
    monkeypatch.delenv("UV_INDEX")
    monkeypatch.setattr(environment_module, "is_usable", lambda: True)
    assert "UV_TORCH_BACKEND" not in environment_module.variables()


def test_where_the_index_for_cpus_cannot_be_reached_the_usual_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = with_requirements(tmp_path, TINY)
    refusal = 'if [ "$2" = install ] && [ "$UV_TORCH_BACKEND" = cpu ]; then echo download.pytorch.org; exit 1; fi'
    uv = script(tmp_path / "bin" / "uv", f'{refusal}; exec {sys.executable} -m uv "$@"')
    for name in ("UV_TORCH_BACKEND", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(environment_module, "is_usable", lambda: False)

    assert "tiny" in asyncio.run(where(files, settings(tmp_path)))


def test_only_the_end_of_a_long_output_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_module, "OUTPUT_BYTES_MAX", 20)

    output = asyncio.run(run_command(["seq", "1", "1000"], limit_s=10))

    assert output == "[...]\n96\n997\n998\n999\n1000"


def test_a_command_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="failed with status 3") as caught:
        asyncio.run(run_command(["sh", "-c", "echo to out; echo to err >&2; exit 3"], limit_s=10, cwd=tmp_path))

    assert caught.value.output == "to out\nto err"


def test_a_command_has_a_time_limit() -> None:
    with pytest.raises(CommandError, match=r"did not finish within 0\.2 s") as caught:
        asyncio.run(run_command(["sh", "-c", "echo begun; sleep 60"], limit_s=0.2))

    assert caught.value.output == "begun"


# -- workers


@pytest.mark.parametrize("path", sorted(WORKER.glob("*.py")), ids=lambda path: path.name)
def test_what_runs_in_environments_is_written_for_the_oldest_python(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=PYTHON_MIN)
