"""Links of all pages work, and every option, key and column is documented."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedexp.config.options import MULTIPLE, list_options
from fedexp.metrics.forgetting_metric import FORGETTING, ROUND_FORGETTING
from fedexp.metrics.quantity import ACCURACY, ARRIVED, COSTS, LOSS, LR, TASK, TRAIN_LOSS
from fedexp.metrics.tasks import QUANTITIES as OF_TASKS
from toy_federation import CONF, CONFS

ROOT = Path(__file__).parents[1]
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")})
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[\w+\]: (\S+)$", re.MULTILINE)
REFERENCE = re.compile(r"\]\[(\w+)\]")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def read(path: Path) -> str:
    """Return the text of a page without its code blocks."""
    return CODE.sub("", path.read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub and the site make them."""
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in HEADING.findall(text))
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def wrong_links(path: Path, text: str) -> Iterator[str]:
    """Yield the links of a page to files, headings or references that do not exist."""
    for name in REFERENCE.findall(text):
        if not re.search(rf"^\[{name}\]: \S+$", text, re.MULTILINE):
            yield name
    for target in (first or second for first, second in LINK.findall(text)):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if re.match(r"\w+:", target):
            continue
        if not file.exists() or (anchor and anchor not in anchors(read(file))):
            yield target


OTHERS = ["REPRODUCTION.md", "CHANGELOG.md", "SECURITY.md", "multirun/README.md"]
OTHERS += ["benchmarks/README.md", "benchmarks/RESULTS.md"]


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_links_of_each_page_are_valid(name):
    assert not list(wrong_links(ROOT / name, read(ROOT / name)))


def table_of_groups() -> dict[str, str]:
    """Return the groups and their options, as docs/guide/start.md lists them."""
    section = read(ROOT / "docs/guide/start.md").split("## Groups\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))


def test_every_group_and_option_is_documented():
    table = table_of_groups()
    pages = {"dataset": "docs/guide/data.md", "partition": "docs/guide/data.md"}
    pages |= {"algorithm": "docs/algorithms/index.md"}
    pages |= dict.fromkeys(("forgetting_metric", "analysis"), "docs/metrics.md")
    groups = {path.name for conf in CONFS for path in conf.iterdir() if path.is_dir()}
    assert set(table) == groups - {"launcher", "sweep", "sweeper", "tuned"}
    for group, options in table.items():
        text = read(ROOT / pages[group]) if group in pages else options
        known = list_options(group, CONFS) if group != "experiment" else []
        missing = set(known) - set(re.findall(r"\w+", text))
        assert not missing, f"{pages.get(group, 'docs/guide/start.md')} lacks a row for {missing}"
    assert set(re.findall(r"^\| `(\w+)` \|", read(ROOT / "README.md"), re.MULTILINE)) <= set(table)


def test_every_key_of_a_run_has_a_comment():
    """It is behind the key, behind the key that contains it, or above its paragraph."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8").partition("\nhydra:")[0]
    for paragraph in text.split("\n\n"):
        explained = [paragraph.startswith("#")]
        for line in paragraph.splitlines():
            if (key := re.match(r"((?:  )*)(\w+):", line)) and key[2] not in MULTIPLE:
                depth = 1 + len(key[1]) // 2
                explained[depth:] = [" #" in line]
                assert any(explained), line


def test_columns_are_documented_in_their_order():
    page = read(ROOT / "docs/guide/run_directory.md")
    table = page.partition("| columns | content |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| `([\w, ]+)` \|", table, re.MULTILINE)
    documented = [name for cell in cells for name in cell.split(", ")]
    always = [ACCURACY, LOSS, TRAIN_LOSS, LR, FORGETTING, ROUND_FORGETTING]
    declared = [*always, TASK, *OF_TASKS, *COSTS, ARRIVED]
    assert documented == ["round", *(each.name for each in declared)]


def test_wrong_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` page\n\n[one](#a-b-page) [two](page.md#other) [three](nowhere.md)"
        " [four](https://x.org) ![five][picture] [six][merged]\n\n"
        "[picture]: page.md\n[last]: page.md [merged]:\npage.md\n"
    )
    assert list(wrong_links(page, read(page))) == ["merged", "page.md#other", "nowhere.md"]
