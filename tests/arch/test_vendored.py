"""The bill of materials in the wheel lists every file of others that the packages include, with its licence."""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENDOR = ROOT / "src/charonia/platform/console/assets/vendor"


def test_the_bill_of_materials_has_each_vendored_file() -> None:
    bill = json.loads((ROOT / "deploy/vendored.cdx.json").read_text())
    listed = {
        file["name"]: file["hashes"][0]["content"]
        for library in bill["components"]
        if library["licenses"]
        for file in library["components"]
    }

    files = [file for file in VENDOR.iterdir() if file.suffix != ".LICENSE"]
    assert listed == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
