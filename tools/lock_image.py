"""Renew deploy/image/requirements/*.txt: which packages each variant of the container image gets, with their hashes.

`python tools/lock_image.py` after any change of the dependencies in pyproject.toml keeps the versions that still fit;
`--upgrade` takes the latest. Needs uv, and the package index that uv is configured with, whose address is not written.
"""

import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "deploy" / "image" / "requirements"
PYTHON_VERSION = "3.13"  # of the Debian release that the Dockerfile begins with

EXTRAS = {
    "cpu": ("stores",),
    "cuda": ("gpu", "stores"),
    "torch": ("gpu", "stores", "torch"),
    "llm": ("llama", "llm", "openai", "stores"),
    "platform": ("platform",),
}
# The package of ONNX Runtime for GPUs takes the place of the other one. CUDA's libraries come with it.
ON_GPU = ("cuda", "torch")
ONNX_RUNTIME_ON_GPU = "onnxruntime-gpu[cuda,cudnn]"
# What builds the image and is not in it.
BUILD = ("cyclonedx-bom", "hatchling", "uv", *runpy.run_path(str(ROOT / "hatch_build.py"))["REQUIRES"])


def lock(uv: str, variant: str, sources: list[str], *options: str) -> None:
    """Write the lock file of `variant`, from the files or requirements `sources`."""
    print(variant, flush=True)
    command = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--python-version", PYTHON_VERSION, "--output-file", str(REQUIREMENTS / f"{variant}.txt")]
    subprocess.run([*command, *options, *sources], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def main() -> None:
    """Renew all lock files."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin") or "uv"
    with tempfile.TemporaryDirectory() as folder:
        build, on_gpu, without = (Path(folder, name) for name in ("build.in", "on_gpu.in", "without.txt"))
        build.write_text("\n".join(BUILD))
        on_gpu.write_text(ONNX_RUNTIME_ON_GPU)
        without.write_text("onnxruntime; python_version < '0'")
        lock(uv, "build", [str(build)], *sys.argv[1:])
        for variant, extras in EXTRAS.items():
            options = [word for extra in extras for word in ("--extra", extra)]
            sources = ["pyproject.toml"]
            if variant in ON_GPU:
                sources.append(str(on_gpu))
                options += ["--overrides", str(without)]
            lock(uv, variant, sources, *options, *sys.argv[1:])


if __name__ == "__main__":
    main()
