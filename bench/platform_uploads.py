"""Time until an uploaded model is checked, alone and while another project has sent large archives.

Usage: python -m bench.platform_uploads [--archives 16]
"""

import argparse
import bz2
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from examples.platform.process import PROJECT, running_platform

from bench.models import MODELS
from charonia.cli.models import RegistryOptions, add_versions
from charonia.cli.platform_access import PlatformAccess
from charonia.platform.api_client import PlatformClient, path_of

OTHER = "other"
ZEROS_MIB = 512
ROUNDS = 3


def large_archive(path: Path) -> None:
    """Write an archive of some hundred bytes whose only file is large."""
    entry = tarfile.TarInfo("m/1/model.onnx")
    entry.size = ZEROS_MIB * 2**20
    compressor, block = bz2.BZ2Compressor(), bytes(2**20)
    parts = [compressor.compress(entry.tobuf()), *(compressor.compress(block) for _ in range(ZEROS_MIB))]
    path.write_bytes(b"".join([*parts, compressor.compress(bytes(1024)), compressor.flush()]))


def added_s(client: PlatformClient, model: Path, name: str) -> float:
    """Add a model, and return the time until it is checked."""
    begin_s = time.monotonic()
    add_versions(client, RegistryOptions(source=str(model), name=name, access=PlatformAccess(project=PROJECT)))
    return time.monotonic() - begin_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archives", type=int, default=16)
    count = parser.parse_args().archives
    with tempfile.TemporaryDirectory(prefix="charonia-bench-") as made:
        folder = Path(made)
        MODELS["mlp"](folder / "models")
        (model,) = (folder / "models").iterdir()
        archive = folder / "m.tar.bz2"
        large_archive(archive)
        with running_platform(folder / "platform", 0) as platform:
            client = PlatformClient(platform.url, (folder / "platform" / "owner.key").read_text().strip())
            client.call("POST", path_of("projects"), {"name": OTHER})
            alone = [added_s(client, model, f"alone-{number}") for number in range(ROUNDS)]
            given = RegistryOptions(source=str(archive), access=PlatformAccess(project=OTHER), waits=False)
            for number in range(count):
                add_versions(client, replace(given, name=f"large-{number}"))
            beside = [added_s(client, model, f"beside-{number}") for number in range(ROUNDS)]
            waiting = client.call("GET", path_of("projects", OTHER, "tasks"), query={"limit": 200})
            left = sum(task["state"] in ("waiting", "running") for task in waiting)
    print(f"archive: {archive.name}, {ZEROS_MIB} MiB of zeros")
    print(f"alone: {median(alone):.1f} s ({min(alone):.1f} to {max(alone):.1f})")
    print(f"beside {count} archives: {median(beside):.1f} s ({min(beside):.1f} to {max(beside):.1f})")
    print(f"archives that were still waiting or running at the end: {left}")


if __name__ == "__main__":
    main()
