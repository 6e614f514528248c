"""index.html of a sweep: its tables as in table.md, then its figures and links to csv files."""

import html
import logging
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from fedexp.analysis.sweep_figures import KINDS
from fedexp.core import storage
from fedexp.figures.pictures import picture_files
from fedexp.rundir import files
from fedexp.rundir.checksums import checksum

log = logging.getLogger("fedexp")
PAGE = "index.html"
TABLES = ("table.md", "comparison.md")  # what the page shows, in this order
MARK = "\n<!-- summary.json of the runs: "
BAR = re.compile(r"(?<!\\)\|")  # between two cells, but not within text
MARKS = (  # in Markdown and in HTML
    (re.compile(r"\*\*(.+?)\*\*"), r"<b>\1</b>"),
    (re.compile(r"`(.+?)`"), r"<code>\1</code>"),
)


def write_page(directory: Path, written: Collection[Path]) -> Path:
    """Write index.html with the tables and figures in a sweep's directory. Return its path.

    written: the paths of the report. Figures of earlier reports are left out, since they may show
    other runs, and so is a table of an earlier report without the results of a run (`mark_of`).
    """
    from jinja2 import Environment, FileSystemLoader

    present = {checksum(path) for path in directory.glob(f"*/{files.SUMMARY}")}
    texts = []
    for path in (directory / name for name in TABLES if (directory / name).exists()):
        text, mark, runs = path.read_text(encoding="utf-8").partition(MARK)
        if path in written or (mark and present <= {*runs.split()}):
            texts.append(to_html(text))
        else:
            log.warning("%s: lacks the results of a run, so %s does not show it", path, PAGE)
    figures = {
        path.relative_to(directory).as_posix(): path.stem.replace("_", " ")
        for path in picture_files(directory / "figures")
        if path in written or not path.stem.endswith(KINDS)
    }
    data = sorted(path.name for path in directory.glob("*.csv"))
    folder = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=folder, autoescape=True).get_template("index.html.j2")
    page = template.render(title=directory.absolute().name, texts=texts, figures=figures, data=data)
    storage.write_atomically(directory / PAGE, page.encode())
    return directory / PAGE


def mark_of(directory: Path) -> str:
    """Return a comment for the end of a table: the checksums of the runs in a sweep's directory."""
    sums = sorted(checksum(path) for path in directory.glob(f"*/{files.SUMMARY}"))
    return f"{MARK}{' '.join(sums)} -->\n"


def to_html(text: str) -> str:
    """Convert Markdown as reports have it: headings, paragraphs, tables, bold and code."""
    return "\n".join(block_html(block) for block in re.split(r"\n\s*\n", text.strip()))


def block_html(block: str) -> str:
    first = block.split(" ")[0]
    if block.startswith("|"):
        return f"<div>{''.join(table_html(block.splitlines()))}</div>"
    if set(first) == {"#"}:
        return f"<h{len(first)}>{inline_html(block.removeprefix(first))}</h{len(first)}>"
    return f"<p>{inline_html(block)}</p>"


def table_html(lines: list[str]) -> Iterator[str]:
    """Yield a table. Its second line separates the head from the body."""
    yield "<table>"
    for number, line in enumerate(lines):
        if number != 1:
            cells = [inline_html(cell) for cell in BAR.split(line.strip())[1:-1]]
            tag = "td" if number else "th"
            yield f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"
    yield "</table>"


def inline_html(text: str) -> str:
    """Convert text, in which `<` and `|` are escaped, see `layout.markdown_text`."""
    shown = html.escape(text.replace("&lt;", "<").replace("\\|", "|").strip(), quote=False)
    for mark, tag in MARKS:
        shown = mark.sub(tag, shown)
    return shown
