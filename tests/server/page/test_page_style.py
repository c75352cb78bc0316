"""The page looks like the reports: the same names of colours have the same values."""

import re
from importlib.resources import files

_BLOCK = re.compile(r":root \{(.*?)\}", re.DOTALL)
_COLOUR = re.compile(r"(--[\w-]+):\s*([^;]+);")


def palettes(package: str, *path: str) -> list[dict[str, str]]:
    """Return the colours of a style sheet, light and dark."""
    text = files(package).joinpath(*path).read_text(encoding="utf-8")
    return [dict(_COLOUR.findall(block)) for block in _BLOCK.findall(text)]


def test_the_colours_are_those_of_the_reports() -> None:
    page = palettes("charonia.server.page", "assets", "look.css")
    report = palettes("charonia.tools.report", "page", "page.css")

    assert len(page) == len(report) == 2
    for ours, theirs in zip(page, report, strict=True):
        shared = ours.keys() & theirs.keys()
        assert {"--page", "--card", "--ink", "--soft", "--line", "--accent", "--good", "--bad"} <= shared
        assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


def test_every_colour_that_is_used_has_a_value_in_light_and_dark() -> None:
    folder = files("charonia.server.page").joinpath("assets")
    text = "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in ("look.css", "page.css"))
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    light, dark = palettes("charonia.server.page", "assets", "look.css")

    assert used <= light.keys()
    assert light.keys() == dark.keys()
    assert not re.search(r"#[0-9a-f]{3,8}\b", _BLOCK.sub("", text))
