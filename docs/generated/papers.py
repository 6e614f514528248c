"""What the page of a paper shows: its methods, settings, tables, and the printed values that cannot
be right."""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedexp.analysis.sweep import Sweep
from fedexp.cli.help import description
from fedexp.config.options import list_options, read_sweeps
from fedexp.papers.cells import TABLES, published_cells

from .names import methods, sweeps, title
from .text import CONF, ROOT, comments, prose, table

MEASURED = "[Reproduction](../../REPRODUCTION.md) has the results, some at a reduced budget."


def committed(sweep: str) -> str:
    """What the committed table of a sweep says: its verdicts, counted."""
    path = ROOT / "multirun" / sweep / "table.csv"
    if not path.exists():
        return "no table committed yet"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["reading"]]
    counts = Counter(row["verdict"] for row in rows)
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())


def paper_tables(paper: str) -> str:
    """The tables and figures of a paper as sweeps, with the command and the state of each."""
    mine = sorted((s for s in sweeps() if s.paper == paper), key=lambda s: natural(s.name))
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
        "what",
        "name",
        "runs a seed",
        "printed values",
        "verdicts of the committed table",
    )
    return "\n\n".join([table(head, lines), "\n".join(sweep_notes(mine)), MEASURED]).strip()


def sweep_notes(mine: list[Sweep]) -> Iterator[str]:
    """What the sweeps' files say beyond their titles, each once."""
    said: dict[str, list[str]] = {}
    files = read_sweeps([CONF])
    for sweep in mine:
        _, content = files[sweep.name]
        if note := content.get("note"):
            said.setdefault(note, []).append(f"`{sweep.name}`")
    for note, names in said.items():
        yield f"- {', '.join(names)}: {prose(note)}"


def suspects(paper: str) -> str:
    """Printed values that cannot be right; the report never judges by them."""
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
    """Sorts numbers by their value."""
    return [
        float(part) if part[:1].isdigit() else part for part in re.split(r"(\d+(?:\.\d+)?)", name)
    ]


def protocols(path: Path) -> list[Path]:
    """The files that a setting builds on."""
    bases = re.findall(r"^  - (\w+/_\w+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [CONF / "experiment" / f"{base}.yaml" for base in bases]


def paper_settings(paper: str) -> str:
    """The paper's settings (`experiment=`), with what each is."""
    names = [
        name for name in list_options("experiment", [CONF]) if name.startswith(f"{paper.lower()}/")
    ]
    lines, notes = [], []
    for name in sorted(names, key=natural):
        path = CONF / "experiment" / f"{name}.yaml"
        lines.append((f"`experiment={name}`", prose(description(path))))
        notes += [" ".join(comments(each)) for each in (path, *protocols(path))]
    sources = "\n".join(f"- {prose(note)}" for note in dict.fromkeys(notes) if note)
    first = CONF / "experiment" / f"{sorted(names, key=natural)[0]}.yaml"
    files = [first, *protocols(first)]
    texts = (
        f"`conf/{path.relative_to(CONF)}`:\n\n```yaml\n{path.read_text(encoding='utf-8')}```"
        for path in files
    )
    whole = "\n\n".join(["The first setting, and what it shares with others:", *texts])
    return "\n\n".join([table(("setting", "what"), lines), sources, whole])


def paper_methods(paper: str) -> str:
    """The methods in the paper's tables, with the pages of the algorithms."""
    names = sorted(set().union(*(methods(sweep) for sweep in sweeps() if sweep.paper == paper)))
    return ", ".join(f"[{title(name)}](../algorithms/{name}.md)" for name in names) + "."
