"""Write dist/provenance.json: from which commit, with which command and tools the files in dist/ were built.

An in-toto statement with a SLSA 1 predicate. Sign it with your own key, or let the forge attest it.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

DIST = Path("dist")
TOOLS = ("build", "hatchling", "twine")
BUILDER = "CHARONIA_BUILDER"
"""Variable with the address of the builder: a forge's workflow, for example."""


def git(*arguments: str) -> str:
    """Return the output of git."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def statement(files: list[Path]) -> dict[str, object]:
    """Return the statement about built files."""
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        raise SystemExit(f"expected a checkout without changes, got\n{changed}")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": file.name, "digest": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}} for file in files
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:charonia:make",
                "externalParameters": {"command": "make release"},
                "internalParameters": {
                    "python": platform.python_version(),
                    "system": platform.platform(),
                    "tools": {name: version(name) for name in TOOLS},
                },
                "resolvedDependencies": [
                    {"name": "charonia", "digest": {"gitCommit": git("rev-parse", "HEAD")}},
                ],
            },
            "runDetails": {"builder": {"id": os.environ.get(BUILDER, "urn:charonia:desk")}},
        },
    }


def main() -> int:
    """Run as a program; return the exit status."""
    files = sorted(file for file in DIST.iterdir() if file.suffix in (".whl", ".gz"))
    target = DIST / "provenance.json"
    target.write_text(json.dumps(statement(files), indent=2) + "\n")
    print(f"{target}: {len(files)} files of commit {git('rev-parse', '--short', 'HEAD')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
