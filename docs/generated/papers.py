"""The page of a paper: methods, settings, tables, and published values that cannot be right."""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedexp.config.options import conf_directories, list_options
from fedexp_papers.cells import TABLES, published_cells
from fedexp_papers.sweeps import PaperSweep, all_paper_sweeps

from .names import methods, title
from .text import ROOT, comments, description, prose, table

MEASURED = "[Reproduction](../../REPRODUCTION.md) has the results, some at a reduced budget."


def committed(sweep: str) -> str:
    """Return the number of each verdict in the committed table of a sweep."""
    path = ROOT / "multirun" / sweep / "comparison.csv"
    if not path.exists():
        return "no committed table"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["reading"]]
    counts = Counter(row["verdict"] for row in rows)
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())


def paper_tables(paper: str) -> str:
    """Return a table of the sweeps for a paper's tables and figures, with the state of each."""
    mine = sorted(
        (s for s in all_paper_sweeps() if s.paper == paper), key=lambda s: natural(s.name)
    )
    lines = []
    for sweep in mine:
        jobs = sum(len(list(block.combinations())) for block in sweep.blocks)
        what = prose(sweep.title.partition(": ")[2])
        which = sweep.title.partition(": ")[0].removeprefix(f"{paper} ")
        printed = len(published_cells(sweep))
        lines.append(
            (which, what, f"`sweep={sweep.name}`", str(jobs), str(printed), committed(sweep.name))
        )
    head = (
        "in the paper",
        "content",
        "name",
        "runs per seed",
        "published values",
        "verdicts of the committed table",
    )
    return "\n\n".join([table(head, lines), "\n".join(sweep_notes(mine)), MEASURED]).strip()


def sweep_notes(mine: list[PaperSweep]) -> Iterator[str]:
    """Yield the notes in the sweeps' files, each once."""
    said: dict[str, list[str]] = {}
    for sweep in mine:
        if note := sweep.content.get("note"):
            said.setdefault(note, []).append(f"`{sweep.name}`")
    for note, names in said.items():
        yield f"- {', '.join(names)}: {prose(note)}"


def suspects(paper: str) -> str:
    """Return the published values that cannot be right, by which the report does not judge."""
    with TABLES.open(encoding="utf-8", newline="") as file:
        found = [
            row
            for row in csv.DictReader(file)
            if row["paper"] == paper and row["note"].startswith("suspect: ")
        ]
    why: dict[tuple[str, str], list[str]] = {}
    for row in found:
        why.setdefault((row["table"], row["note"].removeprefix("suspect: ")), []).append(
            f"{row['method']} {row['value']}"
        )
    return "\n".join(
        f"- Table {number}, {', '.join(cells)}: {note}." for (number, note), cells in why.items()
    )


def natural(name: str) -> list[Any]:
    """Return a key that sorts numbers in names by their value."""
    return [
        float(part) if part[:1].isdigit() else part for part in re.split(r"(\d+(?:\.\d+)?)", name)
    ]


def protocols(path: Path) -> list[Path]:
    """Return the files on which a setting builds."""
    bases = re.findall(r"^  - (\w+/_\w+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [path.parents[1] / f"{base}.yaml" for base in bases]


def paper_settings(paper: str) -> str:
    """Return the paper's settings (`experiment=`) with their descriptions."""
    folder = next(
        found
        for conf in conf_directories()
        if (found := conf / "experiment" / paper.lower()).is_dir()
    )
    names = list_options(paper.lower(), [folder.parent])
    lines, notes = [], []
    for name in sorted(names, key=natural):
        path = folder / f"{name}.yaml"
        lines.append((f"`experiment={paper.lower()}/{name}`", prose(description(path))))
        notes += [" ".join(comments(each)) for each in (path, *protocols(path))]
    sources = "\n".join(f"- {prose(note)}" for note in dict.fromkeys(notes) if note)
    first = folder / f"{sorted(names, key=natural)[0]}.yaml"
    files = [first, *protocols(first)]
    texts = (
        f"`{path.relative_to(ROOT)}`:\n\n```yaml\n{path.read_text(encoding='utf-8')}```"
        for path in files
    )
    whole = "\n\n".join(
        ["The file of the first setting, and the files that it shares with other settings:", *texts]
    )
    return "\n\n".join([table(("setting", "content"), lines), sources, whole])


def paper_methods(paper: str) -> str:
    """Return links to the pages of the methods in the paper's tables."""
    names = sorted(
        set().union(*(methods(sweep) for sweep in all_paper_sweeps() if sweep.paper == paper))
    )
    return ", ".join(f"[{title(name)}](../algorithms/{name}.md)" for name in names) + "."
