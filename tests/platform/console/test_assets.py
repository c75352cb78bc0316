"""Files of the pages: at addresses that change with their content; no markup brings a script or a style along."""

import gzip
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from charonia.core.errors import ServingError
from charonia.platform.console import assets

ROOT = Path(assets.__file__).parent
TEMPLATES = sorted((ROOT / "templates").glob("*.html"))
BLOCK = re.compile(r":root \{(.*?)\}", re.DOTALL)
COLOUR = re.compile(r"(--[\w-]+):\s*([^;]+);")


@pytest.mark.parametrize("name", sorted(assets.BUNDLES))
def test_a_file_under_its_hash_is_kept_for_long(anybody: TestClient, name: str) -> None:
    answer = anybody.get(assets.address(name))

    assert answer.status_code == 200
    assert answer.headers["cache-control"] == assets.KEPT
    assert answer.content == assets.asset(name).content == gzip.decompress(assets.asset(name).compressed)


def test_a_file_under_another_hash_is_asked_for_again(anybody: TestClient) -> None:
    answer = anybody.get("/assets/000000000000/console.css")

    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-cache"


def test_there_is_nothing_else() -> None:
    with pytest.raises(ServingError, match="secret"):
        assets.asset("secret")


def test_what_is_vendored_has_its_licence() -> None:
    vendor = ROOT / "assets" / "vendor"
    names = {path.name.partition("-")[0] for path in vendor.glob("*.min.*")}

    assert names == {"htmx", "uplot"} == {path.stem for path in vendor.glob("*.LICENSE")}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_markup_has_a_script_or_a_style_in_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert not re.search(r"\sstyle=|\son[a-z]+=|<style|javascript:|hx-on|js:|\| ?safe", without_known(text))
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))


def without_known(text: str) -> str:
    """Leave out attributes that templates write themselves, in quotes that must not be escaped."""
    return re.sub(r"""' [a-z-]+(="[\w /-]*")?' \| safe""", "", text)


def test_every_colour_that_is_used_has_a_value_in_light_and_dark() -> None:
    text = assets.asset("console.css").content.decode()
    blocks = [dict(COLOUR.findall(block)) for block in BLOCK.findall(text)]
    light, dark = blocks[0] | blocks[2], blocks[1] | blocks[3]

    assert set(re.findall(r"var\((--[\w-]+)", text)) - {"--series"} <= light.keys()
    assert light.keys() == dark.keys()
