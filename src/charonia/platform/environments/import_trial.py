"""Runs in an environment: imports the modules of the given packages, and reports their times and the server's form."""

import importlib
import importlib.metadata
import json
import sys
import time


def modules(package: str) -> "list[str]":
    """Return the modules of a package: the one with its name, or else its first one."""
    plain = package.replace("-", "_").lower()
    files = importlib.metadata.files(package) or []
    tops = {path.parts[0] for path in files if path.name == "__init__.py" and len(path.parts) == 2}
    tops |= {path.stem for path in files if len(path.parts) == 1 and path.suffix == ".py"}
    named = [top for top in tops if top.lower() == plain]
    return named or sorted((top for top in tops if not top.startswith("_")), key=lambda top: (len(top), top))[:1]


def main() -> int:
    """Import everything and return the number of failures."""
    arguments = json.loads(sys.argv[1])
    names = dict.fromkeys(
        [*arguments["modules"], *(name for package in arguments["packages"] for name in modules(package))]
    )
    failed = 0
    for name in names:
        start = time.monotonic()
        try:
            importlib.import_module(name)
        except Exception as error:
            failed += 1
            print(f"import {name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"import {name}: {time.monotonic() - start:.1f} s", flush=True)
    if own := sys.modules.get("charonia.compiled"):
        print(f"charonia: {own.form} form", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
