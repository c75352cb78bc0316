"""Print a CycloneDX document of the image's content: `sbom.py PYTHON DPKG_STATUS`.

The Python packages come from the environment of PYTHON, read by cyclonedx-bom, with what the documents in ours list; the
Debian packages from DPKG_STATUS, a copy of the image's /var/lib/dpkg/status.
"""

import json
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import quote


def debian_components(status: str) -> list[dict[str, Any]]:
    """Return a component for each paragraph of `status` whose package is installed."""
    components = []
    for paragraph in status.strip().split("\n\n"):
        fields = HeaderParser().parsestr(paragraph)
        if not fields["Status"].endswith(" installed"):
            continue
        url = f"pkg:deb/debian/{quote(fields['Package'])}@{quote(fields['Version'])}?arch={fields['Architecture']}"
        components.append(
            {
                "type": "library",
                "bom-ref": url,
                "name": fields["Package"],
                "version": fields["Version"],
                "purl": url,
            }
        )
    return components


def packed_components(environment: Path) -> list[dict[str, Any]]:
    """Return what the server's own documents list: files of others in it, and what is linked into it."""
    paths = sorted(environment.glob("lib/python3*/site-packages/charonia-*.dist-info/sboms/*.json"))
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [found for document in documents for found in document.get("components", ())]


def main(python: str, status: Path) -> None:
    """Write the document to standard output."""
    command = ["cyclonedx-py", "environment", "--output-format", "JSON", "--output-reproducible", python]
    document = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    document["components"] += packed_components(Path(python).parents[1])
    document["components"] += debian_components(status.read_text())
    json.dump(document, sys.stdout, indent=1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
