"""REPRODUCTION.md, which `fedexp reproduction` writes from the committed runs."""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.sweep import Sweep, load_sweep
from fedexp.config.options import conf_directory, list_options
from fedexp.core.storage import storing, write_atomically
from fedexp.papers import first_screen, readings
from fedexp.papers.cells import printed_cells
from fedexp.papers.curves import as_svg, learning_curves
from fedexp.papers.runs import counted_runs, read_runs
from fedexp.papers.statistics import SWEEP
from fedexp.papers.status import status

FOLDER = Path("docs", "reproduction", "curves")
HEAD = "<!-- Written by `fedexp reproduction` from multirun/*/runs. Do not edit. -->"


def all_files(root: Path) -> dict[Path, bytes]:
    """Return path -> content of all that is written in a checkout: REPRODUCTION.md and the pictures
    that it names.

    Raises ConfigError for a damaged file of a run."""
    sweeps = all_sweeps()
    runs = all_runs(root, sweeps)
    found: dict[Path, bytes] = {}
    for name in runs["sweep"].unique():
        mine = counted_runs(sweeps[name], root / "multirun" / name, runs)
        figure = learning_curves(sweeps[name], mine)
        if figure is not None:
            found[FOLDER / f"{name}.svg"] = as_svg(figure)
    screen = "# Reproduction\n\nToo few runs of FedNTD's Table 1 are kept here to compare them."
    tables = all_tables(root, sweeps, runs)
    facts = first_screen.facts(root, sweeps[SWEEP], runs, tables)
    if facts:
        screen = first_screen.text(facts)
        found[first_screen.PICTURE] = as_svg(first_screen.picture(facts["table"]))
    page = document(sweeps, tables, screen, set(found))
    return {Path("REPRODUCTION.md"): page.encode()} | found


def all_sweeps() -> dict[str, Sweep]:
    """Return the sweeps that stand for a table or figure of a paper, by name."""
    conf = [conf_directory()]
    found = {name: load_sweep(name, conf) for name in list_options("sweep", conf)}
    return {name: sweep for name, sweep in found.items() if sweep.paper}


def all_runs(root: Path, sweeps: Mapping[str, Sweep]) -> pd.DataFrame:
    """Return the runs of all these sweeps that are here."""
    folders = [root / "multirun" / name for name in sweeps]
    return read_runs([folder for folder in folders if folder.is_dir()])


def all_tables(
    root: Path, sweeps: Mapping[str, Sweep], runs: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """Return the table of each sweep that has printed values and a run."""
    made = {
        name: readings.table_of(sweeps[name], root / "multirun" / name, runs)
        for name in runs["sweep"].unique()
        if len(printed_cells(sweeps[name]))
    }
    return {name: table for name, table in made.items() if (table["n"] > 0).any()}


def document(
    sweeps: Mapping[str, Sweep],
    tables: Mapping[str, pd.DataFrame],
    screen: str,
    pictures: Collection[Path],
) -> str:
    """Return REPRODUCTION.md. tables: of the sweeps with runs; screen: its beginning."""
    others = {name for sweep in sweeps.values() for name in sweep.readings}
    texts = [HEAD, screen, "## Measured tables", "In brackets: the printed value."]
    for name, sweep in sweeps.items():
        if name in tables and name not in others:
            curves = [name, *(other for other in sweep.readings if other in tables)]
            paths = [FOLDER / f"{each}.svg" for each in curves]
            shown = [path for path in paths if path in pictures]
            texts.append(section(sweep, tables[name], shown))
    texts.append(
        f"{len(sweeps) - len(tables)} of {len(sweeps)} tables and figures have no run here."
        " `fedexp reproduction --status` lists them with the hours that each takes, and"
        " `fedexp --multirun sweep=<name>` runs one."
    )
    return "\n\n".join(part.strip() for part in texts) + "\n"


def section(sweep: Sweep, table: pd.DataFrame, pictures: Sequence[Path] = ()) -> str:
    """Return a section: what was run, the measured values, the learning curves."""
    texts = [f"### {sweep.title}", f"`sweep={sweep.name}`: {origin(table)}"]
    texts[-1] += f" [All numbers](multirun/{sweep.name}/table.csv)."
    parts = readings.all_sections(sweep, table, table[table["n"] > 0])
    kept = [part for part in parts if not is_order(part)]
    texts.append(layout.all_markdown(kept, level=4))
    if pictures:
        links = [f"[{path.stem}]({path.as_posix()})" for path in pictures]
        texts.append(f"Learning curves: {', '.join(links)}.")
    return "\n\n".join(part.strip() for part in texts)


def is_order(part: layout.Section) -> bool:
    """Return whether a section is about the order of methods, which the first screen has."""
    return part.title.startswith("Order of the methods")


def origin(table: pd.DataFrame) -> str:
    """Return what was run of a table: values, seeds, departures from the protocol, commits and
    hardware."""
    printed = readings.first(table)
    count, changes = Counter(printed["protocol"]), distinct(table["changes"], "; ")
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
    runs = all_runs(root, sweeps)
    tables = all_tables(root, sweeps, runs)
    folders = data or [Path(os.environ.get("FEDEXP_DATA", root / "data"))]
    both = {name: (sweep, tables.get(name)) for name, sweep in sweeps.items()}
    print(status(both, runs, folders), end="")
    return 0


def check_files(root: Path, found: Mapping[Path, bytes]) -> int:
    """Say which files are not current; return the exit code. Of pictures, whose bytes depend on the
    version of matplotlib, only whether they are there."""
    text = root / "REPRODUCTION.md"
    old = [path for path in found if not (root / path).is_file()] + left_over(root, found)
    if text.is_file() and text.read_bytes() != found[Path(text.name)]:
        old.append(Path(text.name))
    for path in old:
        print(f"{root / path} is not current: run `fedexp reproduction`")
    if not old:
        print(f"{text} is current")
    return 1 if old else 0


def left_over(root: Path, found: Mapping[Path, bytes]) -> list[Path]:
    """Return the pictures of runs that are no longer there."""
    there = [path.relative_to(root) for path in sorted((root / FOLDER).glob("*.svg"))]
    return [path for path in there if path not in found]


def write_files(root: Path, found: Mapping[Path, bytes]) -> int:
    for path, content in found.items():
        write_atomically(root / path, content)
        print(f"  {root / path}")
    for path in left_over(root, found):
        with storing(root / path):
            (root / path).unlink()
    return 0
