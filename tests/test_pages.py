"""Links in README.md, CONTRIBUTING.md and docs/ work, and the tables of options are complete."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from fedexp.config.options import MULTIPLE, list_options
from fedexp.trackers import names
from fedexp.training.rows import TAIL
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


OTHERS = ["REPRODUCTION.md", "CHANGELOG.md", "benchmarks/README.md", "benchmarks/RESULTS.md"]


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_links_of_each_page_are_valid(name):
    assert not list(wrong_links(ROOT / name, read(ROOT / name)))


def rows(heading: str) -> dict[str, list[str]]:
    """Return the table below a heading of the page of options: first cell -> the others."""
    section = (
        read(ROOT / "docs" / "guide" / "options.md").split(f"## {heading}\n")[1].split("\n## ")[0]
    )
    lines = [
        line.strip("| ").split(" | ")
        for line in section.replace("| |", "|  |").splitlines()
        if line[:2] == "| "
    ]
    return {first: rest for first, *rest in lines[1:]}


def test_table_of_groups_is_complete():
    table = rows("Groups")
    assert set(table) == {
        f"`{path.name}`" for conf in CONFS for path in conf.iterdir() if path.is_dir()
    } - {f"`{name}`" for name in ("launcher", "sweep", "sweeper", "tuned")}
    for group, (options, *_) in table.items():
        if group not in ("`algorithm`", "`experiment`"):  # they have separate pages
            known = set(list_options(group.strip("`"), CONFS))
            if group == "`dataset`":  # too many for one cell
                options = read(ROOT / "docs" / "guide" / "data.md").split("## Downloads")[0]
            assert known <= set(re.findall(r"\w+", options)), group
    for line in re.findall(r"^\| (`\w+`) \| (.*) \|$", read(ROOT / "README.md"), re.MULTILINE):
        assert line[0] in table


def test_table_of_keys_has_all_defaults():
    config, digits = (
        OmegaConf.load(CONF / "config.yaml"),
        OmegaConf.load(CONF / "dataset" / "digits.yaml"),
    )
    table, said = rows("Keys"), set()
    for keys, (default, own, *_) in table.items():
        names = re.findall(r"`([^`]+)`", keys)
        said.update(names)
        if names[0] in ("data_dir", "hydra.run.dir"):  # described, not quoted
            continue
        values = [default] if len(names) == 1 else default.split(", ")
        assert [yaml.safe_load(value) for value in values] == [
            plain(OmegaConf.select(config, n)) for n in names
        ], keys
        if own.strip():
            assert yaml.safe_load(own) == OmegaConf.select(digits, names[0]), keys
    known = {
        f"{key}.{k}" if isinstance(v, dict) and v else key
        for key, v in OmegaConf.to_container(config).items()
        if key not in ("defaults", "hydra", "resume", "seeds", *MULTIPLE)
        for k in (v if isinstance(v, dict) and v else [""])
    }
    assert known <= said


def plain(value):
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def test_columns_are_documented_and_have_tracker_names():
    page = (ROOT / "docs/guide/run_directory.md").read_text(encoding="utf-8")
    for column in TAIL:
        assert re.search(rf"[`, ]{column}[`, ]", page), column
        assert column in names.NAMES or column.endswith("_seconds"), column


METRICS = ROOT / "docs" / "metrics.md"
BLOCK = re.compile(r"(<!-- ([\w-]+) ?(\S*) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def page_of_metrics() -> str:
    """Return docs/metrics.md with the current docstrings and options."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from generated import DIRECTIVES
    finally:
        sys.path.pop(0)

    def block(found: re.Match[str]) -> str:
        return found[1] + DIRECTIVES[found[2]](*found[3].split()) + found[4]

    return BLOCK.sub(block, METRICS.read_text(encoding="utf-8"))


def test_page_of_metrics_has_the_formulas_of_the_docstrings():
    """`python tests/test_pages.py` writes the page."""
    assert METRICS.read_text(encoding="utf-8") == page_of_metrics()


def test_wrong_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` page\n\n[one](#a-b-page) [two](page.md#other) [three](nowhere.md)"
        " [four](https://x.org) ![five][picture] [six][merged]\n\n"
        "[picture]: page.md\n[last]: page.md [merged]:\npage.md\n"
    )
    assert list(wrong_links(page, read(page))) == ["merged", "page.md#other", "nowhere.md"]


if __name__ == "__main__":
    METRICS.write_text(page_of_metrics(), encoding="utf-8")
