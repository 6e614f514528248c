"""REPRODUCTION.md, which `fedexp reproduction` writes from the committed tables and runs."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.sweep import Sweep, load_sweep
from fedexp.config.options import conf_directory, list_options
from fedexp.core.storage import storing, write_atomically
from fedexp.papers import compare, curves, first_screen, parts
from fedexp.papers.status import status

NUMBERS = (
    "n",
    "diverged",
    "mean",
    "std",
    "error",
    "plain_last",
    "plain_last10",
    "plain_error",
    "printed",
    "printed_std",
    "difference",
    "tolerance",
    "rho",
    "not_shown",
)
HEAD = (
    "<!-- Written by `fedexp reproduction` from multirun/*/table.csv and multirun/*/runs. Do not"
    " edit. -->"
)


def read_table(path: Path) -> pd.DataFrame | None:
    """Read a committed table.csv, text as text; None where there is none."""
    if not path.exists():
        return None
    table = pd.read_csv(path, keep_default_na=False, dtype=str)
    for name in set(NUMBERS) & set(table.columns):
        table[name] = pd.to_numeric(table[name])
    return table


def all_files(root: Path) -> dict[Path, str]:
    """Return path -> content of all that is written in a checkout: REPRODUCTION.md and the pictures
    that it names.

    Raises ConfigError for a damaged file of a run."""
    drawn = {sweep.name: curves.pictures(root, sweep) for sweep in all_sweeps()}
    found = {path: text for each in drawn.values() for path, text in each.items()}
    screen = "# Reproduction\n\nToo few runs of FedNTD's Table 1 are kept here to compare them."
    if facts := first_screen.facts(root):
        screen = first_screen.text(facts)
        found[first_screen.PICTURE] = first_screen.picture(facts)
    page = document(root, screen, {name: list(each) for name, each in drawn.items()})
    return {Path("REPRODUCTION.md"): page} | found


def all_sweeps() -> list[Sweep]:
    """Return the sweeps that stand for a table or figure of a paper."""
    found = [
        load_sweep(name, [conf_directory()]) for name in list_options("sweep", [conf_directory()])
    ]
    return [sweep for sweep in found if sweep.paper]


def document(root: Path, screen: str, pictures: Mapping[str, Sequence[Path]]) -> str:
    """Return REPRODUCTION.md of a checkout. screen: its beginning; pictures: of each sweep."""
    sweeps = all_sweeps()
    tables = {
        sweep.name: read_table(root / "multirun" / sweep.name / "table.csv") for sweep in sweeps
    }
    others = {name for sweep in sweeps for name in sweep.readings}
    texts = [HEAD, screen, "## Measured tables", "In brackets: the printed value."]
    for sweep in sweeps:
        table = tables[sweep.name]
        if table is not None and sweep.name not in others:
            texts.append(section(sweep, table, pictures.get(sweep.name, ())))
    shown = sum(table is not None for table in tables.values())
    texts.append(
        f"{len(sweeps) - shown} of {len(sweeps)} tables and figures have no run here."
        " `fedexp reproduction --status` lists them with the hours that each takes, and"
        " `fedexp --multirun sweep=<name>` runs one."
    )
    return "\n\n".join(part.strip() for part in texts) + "\n"


def section(sweep: Sweep, table: pd.DataFrame, pictures: Sequence[Path] = ()) -> str:
    """Return a section: what was run, the measured values, the learning curves."""
    texts = [f"### {sweep.title}", f"`sweep={sweep.name}`: {origin(table)}"]
    texts[-1] += f" [All numbers](multirun/{sweep.name}/table.csv)."
    run = table[table["n"] > 0]
    if compare.printed_cells(sweep) and len(run):
        kept = [part for part in parts.all_parts(run) if not is_order(part)]
        texts.append(layout.all_markdown(kept, level=4))
    if pictures:
        names = [path.stem.removeprefix(f"{sweep.name}_") for path in pictures]
        places = [path.as_posix() for path in pictures]
        links = [f"[{name}]({place})" for name, place in zip(names, places, strict=True)]
        texts.append(f"Learning curves: {', '.join(links)}.")
    return "\n\n".join(part.strip() for part in texts)


def is_order(part: layout.Section) -> bool:
    """Return whether a section is about the order of methods, which the first screen has."""
    return part.title.startswith("Order of the methods")


def origin(table: pd.DataFrame) -> str:
    """Return what was run of a table: values, seeds, departures from the protocol, commits and
    hardware."""
    printed = parts.printed_once(table)
    count = Counter(printed["protocol"]) if "protocol" in printed else Counter()
    changes = distinct(table["changes"], "; ") if "changes" in table else []
    texts = [
        f"{count['full']} printed values at the full protocol" if count["full"] else "",
        f"{count['reduced']} at another, not judged ({'; '.join(changes)})" if changes else "",
        f"seeds {', '.join(distinct(table['seeds'], ' '))}",
        f"commits {', '.join(distinct(table['commits'], ' '))}",
        f"on {', '.join(distinct(table['hardware'], '; '))}",
    ]
    return "; ".join(filter(None, texts)) + "."


def distinct(values: pd.Series, separator: str) -> list[str]:
    """Return the parts of all values, each once."""
    return sorted({part for value in values for part in str(value).split(separator) if part})


def show_status(root: Path, data: Sequence[Path]) -> int:
    """Print the table of a checkout; return the exit code. data: where data sets lie."""
    sweeps = all_sweeps()
    tables = [read_table(root / "multirun" / sweep.name / "table.csv") for sweep in sweeps]
    folders = data or [Path(os.environ.get("FEDEXP_DATA", root / "data"))]
    print(status(list(zip(sweeps, tables, strict=True)), root, folders), end="")
    return 0


def check_files(root: Path, found: Mapping[Path, str]) -> int:
    """Say which files are not current; return the exit code."""
    old = [path for path, text in found.items() if not is_current(root / path, text)] + left_over(
        root, found
    )
    for path in old:
        print(f"{root / path} is not current: run `fedexp reproduction`")
    if not old:
        print(f"{root / 'REPRODUCTION.md'} is current")
    return 1 if old else 0


def is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def left_over(root: Path, found: Mapping[Path, str]) -> list[Path]:
    """Return the pictures of runs that are no longer there."""
    there = [path.relative_to(root) for path in sorted((root / curves.FOLDER).glob("*.svg"))]
    return [path for path in there if path not in found]


def write_files(root: Path, found: Mapping[Path, str]) -> int:
    for path, text in found.items():
        write_atomically(root / path, text.encode())
        print(f"  {root / path}")
    for path in left_over(root, found):
        with storing(root / path):
            (root / path).unlink()
    return 0
