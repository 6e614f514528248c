"""Test overlays, exported charts and the print version of a page of `fedexp view` in a browser."""

import base64
import io
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from browser import Page, chromium
from fedexp.cli.commands import call
from test_view import NASTY, browser, choose, texts, write_run, write_sweep

pytestmark = browser


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Open the page of a sweep over alpha that has a hostile name."""
    sweep = write_sweep(
        tmp_path_factory.mktemp("view") / "mine",
        algorithms=["fedavg", "fedntd"],
        seeds=2,
        classes=4,
    )
    write_run(
        sweep / "hostile",
        {"algorithm": "fedprox", "alpha": "1", "note": NASTY},
        names=[NASTY, "b", "c"],
    )
    assert call("view", [str(sweep)]) == 0
    with chromium() as page:
        page.look(1200, 900)
        page.open(sweep / "view.html")
        page.settle()
        yield page


def saved(page: Page, kind: str, panel: int = 0) -> str:
    """Return the file that a button of a chart offers."""
    page.run("URL.createObjectURL = (blob) => { window.offered = blob; return 'blob:none'; }")
    page.run("HTMLAnchorElement.prototype.click = function () { window.fileName = this.download; }")
    page.run(
        f"[...document.querySelectorAll('#curves .panel')[{panel}].querySelectorAll('.export"
        f" button')].find((button) => button.textContent === {kind!r}).click()"
    )
    return page.run("window.offered.text()")


def test_overlay_shows_all_values_of_a_parameter(shown):
    """Each line has its own colour and dashes."""
    choose(shown, "#setting", "overlay")
    assert shown.run("document.querySelectorAll('#curves .panel').length") == 2  # left and right
    named = texts(shown, "#curves .panel:first-child .legend span")
    assert {"FedAvg alpha=0.1", "FedAvg alpha=1", "FedNTD alpha=0.1", "FedNTD alpha=1"} <= set(
        named
    )
    lines = "[...document.querySelectorAll('#curves .panel:first-child .legend line')]"
    looks = shown.run(
        f"{lines}.map((line) => line.style.stroke + line.getAttribute('stroke-dasharray'))"
    )
    assert len(set(looks)) == len(named)
    drawn = shown.run(
        "document.querySelectorAll('#curves .panel:first-child svg.chart path:not(.area)').length"
    )
    assert drawn >= len(named)
    axes = texts(shown, "#curves .panel:first-child svg.chart .axis")
    assert axes == ["round", "test accuracy"]
    choose(shown, "#setting", "0")
    assert shown.run("document.querySelectorAll('#curves .legend').length") == 0
    assert shown.errors == []


def test_csv_has_the_points_of_the_chart(shown):
    """Hostile names are not exported as formulas for a spreadsheet."""
    choose(shown, "#setting", "0")
    table = pd.read_csv(io.StringIO(saved(shown, "CSV")))
    assert shown.run("window.fileName").endswith("test_accuracy.csv")
    assert list(table) == ["line", "round", "test_accuracy", "std", "runs"]
    points = shown.run(
        "linesOf([0], 'test_accuracy').flatMap((l) => l.points.map((p) => [l.name, p[0], p[1]]))"
    )
    assert table[["line", "round"]].to_numpy().tolist() == [
        [name, number] for name, number, _ in points
    ]
    np.testing.assert_allclose(table["test_accuracy"], [value for *_, value in points])
    assert (table.loc[table["runs"] == 1, "std"].isna()).all()
    cells = shown.run("""['=1+1', '@x', '-2', 'a,b', 'a"b', 3].map(csvCell)""")
    assert cells == ["'=1+1", "'@x", "'-2", '"a,b"', '"a""b"', "3"]


def test_svg_is_complete_and_well_formed(shown):
    """It has axes, title and legend, and does not depend on the page."""
    for setting in ("0", "overlay"):
        choose(shown, "#setting", setting)
        text = saved(shown, "SVG")
        root = ElementTree.fromstring(text)
        shown_texts = [
            "".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")
        ]
        names = shown.run("linesOf(shownSettings(), state.left).map((line) => line.name)")
        assert {"round", "test accuracy", *names} <= set(shown_texts)
        assert "var(" not in text
        assert "<script" not in text
        assert not [
            node for node in root.iter() if any(name.startswith("on") for name in node.attrib)
        ]
    choose(shown, "#setting", "0")


def test_printed_page_is_complete(shown):
    """It shows all parts, and no buttons."""
    shown.run("dispatchEvent(new Event('beforeprint'))")
    shown.call("Emulation.setEmulatedMedia", media="print")
    shown.settle()
    assert shown.run(
        "[...document.querySelectorAll('svg.chart')].every((svg) => svg.querySelector('path'))"
    )
    assert shown.run("[...document.querySelectorAll('main canvas')].every((c) => c.width !== 300)")
    assert shown.run(
        "[...document.querySelectorAll('.scroll')].every((s) => s.scrollHeight <= s.clientHeight"
        " + 1)"
    )
    assert shown.run("[...document.querySelectorAll('main details')].every((d) => d.open)")
    assert shown.run("getComputedStyle(document.querySelector('.export')).display") == "none"
    pages = base64.b64decode(shown.call("Page.printToPDF")["data"]).count(b"/Type /Page\n")
    assert pages >= 2
    shown.call("Emulation.setEmulatedMedia", media="")
    shown.run("dispatchEvent(new Event('afterprint'))")
    assert not shown.run("[...document.querySelectorAll('main details')].some((d) => d.open)")
    assert shown.errors == []
