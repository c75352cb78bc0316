"""The page of a run in Chromium."""

from pathlib import Path
from xml.etree import ElementTree as ET

from tests.support.browser import chromium, needed, new_tab, without_faults
from tests.support.runs import synthetic_run

from charonia.tools.report.html import render

pytestmark = needed


def test_a_plot_is_saved_as_a_picture_that_needs_no_page(tmp_path: Path) -> None:
    (tmp_path / "run.html").write_bytes(render([synthetic_run()]))

    with chromium() as browser:
        tab = new_tab(browser)
        with without_faults(tab):
            tab.goto(f"file://{tmp_path}/run.html")
            with tab.expect_download() as saved:
                tab.locator("#load figure .save, #timeline figure .save").first.click()
            saved.value.save_as(tmp_path / "plot.svg")
            name = saved.value.suggested_filename

    svg = ET.parse(tmp_path / "plot.svg").getroot()
    texts = [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert name.endswith(".svg")
    assert ":root" in str(svg[0].text)
    assert float(svg.attrib["width"]) > 0
    assert len(texts) > 4
