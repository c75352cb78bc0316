"""Ask pip-audit for known faults of installed packages; the exit status is 1 if the server itself needs one of them.

Faults of other packages, such as tools and frameworks, are only printed. A package index without such data is no
failure: the last line says how many packages it knows.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

ANSWER_S_MAX = 120.0
"""Time limit for an index that does not answer."""


def needed(package: str, found: set[str]) -> set[str]:
    """Return the names of a package and of what it requires, without extras."""
    name = re.sub(r"[-_.]+", "-", package).lower()
    if name not in found:
        found.add(name)
        try:
            requirements = map(Requirement, requires(name) or ())
        except PackageNotFoundError:
            return found
        for each in requirements:
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                needed(each.name, found)
    return found


def main() -> int:
    """Run as a program; return the exit status."""
    program = Path(sys.executable).with_name("pip-audit")
    command = [str(program), "--local", "--skip-editable", "--progress-spinner=off", "--format=json"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=ANSWER_S_MAX)
        packages = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        print(f"pip-audit has no answer, so nothing is known: {error}")
        return 0
    ours = needed("charonia", set())
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    faults = [(each["name"], each["version"], fault) for each in packages for fault in each.get("vulns", ())]
    for name, version, fault in faults:
        print(f"{name} {version}: {fault['id']}, repaired in {', '.join(fault['fix_versions']) or 'no version yet'}")
    print(f"{len(packages) - len(unknown)} of {len(packages)} packages are known to the index, {len(faults)} faults")
    return any(name.lower() in ours for name, _, _ in faults)


if __name__ == "__main__":
    sys.exit(main())
