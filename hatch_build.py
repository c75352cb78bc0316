"""Compiles the request path with mypyc: a hook of the wheel's build, which acts where CHARONIA_COMPILE is 1.

`python hatch_build.py` only generates the C code, to check that the modules can be compiled. With a level of
optimisation, 0 to 3, it compiles this checkout with the environment's own mypy and setuptools.
"""

import json
import os
import runpy
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILE = "CHARONIA_COMPILE"

REQUIRES = ["mypy==2.4.1", "setuptools==84.2.1"]
"""The compiler. It sees no types of other packages, so the generated code depends on these two and the source only."""

ROOT = Path(__file__).resolve().parent

_ROOMS = {
    "core": "raw_data request response tensor trace",
    "wire": "answer grpc_framing grpc_headers grpc_infer http_response json_text plain_values tensors "
    "v2_data v2_request v2_response",
    "server.scheduling": "api dynamic in_place queue schedulers slots",
    "": "busy_poll clock",
    "server.backends": "batch",
    "server.backends.workers": "codec",
    "server.channel": "channel end tensors",
    "server.front_ends": "bursts",
    "server.execution": "admission deadlock executor in_flight runner version_runner",
    "server.ensembles": "call flow",
    "server": "engine",
    "server.http": "connection exchange inference limits parser routes",
    "client": "grpc_transport http2 http_transport",
    "tools.perf": "loops sending sequences",
    "server.grpc": "call_table calls connection detached http2 limits methods streams",
}

MODULES = [f"charonia.{room}.{name}".replace("..", ".") for room, names in _ROOMS.items() for name in names.split()]
"""The modules of the request path, of servers and of clients. Others would not be faster, or are not waited for. `execution.tracing` and
`sequences.runner` combine classes at run time, for which `super()` of compiled classes does not look."""


_THROW = "PyObject_CallFunctionObjArgs(_m, type, value, traceback, NULL)"
"""How mypyc's library raises an exception in a coroutine of source that compiled code awaits. Python 3.12 and later warn
of the three arguments; where warnings are errors, a request would fail with the warning instead."""


def generate(target: Path, level: str = "3") -> list[Any]:
    """Write the C code of the modules into a folder; return the extensions to build, with a level of optimisation."""
    from mypyc.build import mypycify

    os.chdir(ROOT / "src")  # tracebacks name files as they are given here
    paths = [module.replace(".", "/") + ".py" for module in MODULES]
    types = ["--config-file=", "--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
    options = [*types, "--explicit-package-bases", f"--cache-dir={target / 'types'}", *paths]
    group: list[tuple[list[str], str | None]] = [(paths, "charonia")]
    how: dict[str, Any] = {"multi_file": True, "debug_level": "0", "opt_level": level}
    extensions = list(mypycify(options, separate=group, target_dir=str(target / "c"), **how))
    runtime = target / "c" / "misc_ops.c"
    code = runtime.read_text(encoding="utf-8")
    if code.count(_THROW) != 1:
        raise RuntimeError(f"expected one '{_THROW}' in {runtime}, got {code.count(_THROW)}")
    runtime.write_text(code.replace(_THROW, "PyObject_CallOneArg(_m, value)"), encoding="utf-8")
    return extensions


def compile_into(folder: Path, level: str = "3") -> None:
    """Compile the modules into a folder; add the hashes of their sources, and the license of mypyc's runtime library."""
    form = runpy.run_path(str(ROOT / "src" / "charonia" / "compiled.py"))
    hashes = {name: form["hash_of"](form["module_path"](str(ROOT / "src"), name, ".py")) for name in MODULES}
    with tempfile.TemporaryDirectory() as scratch:
        extensions = generate(Path(scratch), level)
        from setuptools import Distribution  # type: ignore[import-untyped]

        command: Any = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(folder), scratch
        command.ensure_finalized()
        command.build_extensions = lambda: _build(command)
        command.run()
    (folder / "LICENSE.mypy").write_text(distribution("mypy").read_text("licenses/LICENSE") or "")
    (folder / form["HASHES"]).write_text("".join(f"{name} {value}\n" for name, value in hashes.items()))


def _build(command: Any) -> None:
    # setuptools compiles the files of an extension one after the other, and nearly all files are of one.
    compile_files = command.compiler.compile
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_in_parallel(sources: list[str], **options: Any) -> list[str]:
            objects = pool.map(lambda source: compile_files([source], **options), sources)
            return [name for names in objects for name in names]

        command.compiler.compile = compile_in_parallel
        for extension in command.extensions:
            command.build_extension(extension)


def _bill() -> dict[str, Any]:
    """Return the bill of materials of the compiled form: the runtime library of mypyc, which is linked in."""
    name, version = REQUIRES[0].split("==")
    library = {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
    library_licensed = {**library, "licenses": [{"license": {"id": "MIT"}}]}
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": [library_licensed]}


def _folder() -> Path:
    return Path(runpy.run_path(str(ROOT / "src" / "charonia" / "compiled.py"))["FOLDER"])


class CompileHook(BuildHookInterface):  # type: ignore[type-arg] # of any configuration
    """Adds the compiled form to a wheel, or to the checkout that an editable wheel refers to."""

    def dependencies(self) -> list[str]:
        return REQUIRES if os.environ.get(COMPILE) == "1" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, if the environment says so."""
        if os.environ.get(COMPILE) != "1":
            return
        folder = _folder()
        if version != "editable":
            packed, folder = folder.relative_to(ROOT / "src"), Path(tempfile.mkdtemp(), folder.name)
            build_data["force_include"][str(folder)] = str(packed)
            build_data["infer_tag"], build_data["pure_python"] = True, False
            bill = folder.parent / "compiled.cdx.json"
            bill.write_text(json.dumps(_bill()))
            build_data["sbom_files"].append(str(bill))
        shutil.rmtree(folder, ignore_errors=True)
        compile_into(folder)


if __name__ == "__main__" and sys.argv[1:]:
    compile_into(_folder(), sys.argv[1])
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as target:
        generate(Path(target))
