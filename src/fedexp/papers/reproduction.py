"""Write REPRODUCTION.md from the committed runs (`fedexp reproduction`)."""

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
from fedexp.papers.cells import published_cells
from fedexp.papers.curves import draw_learning_curves, render_svg
from fedexp.papers.runs import collect_runs, read_runs
from fedexp.papers.statistics import SWEEP
from fedexp.papers.status import format_status

FOLDER = Path("docs", "reproduction", "curves")
HEAD = "<!-- Written by `fedexp reproduction` from multirun/*/runs. Do not edit. -->"


def all_files(root: Path) -> dict[Path, bytes]:
    """Map the paths of REPRODUCTION.md and its pictures to their contents.

    Raises ConfigError if the file of any run is damaged.
    """
    sweeps = all_sweeps()
    runs = all_runs(root, sweeps)
    found: dict[Path, bytes] = {}
    for name in runs["sweep"].unique():
        mine = collect_runs(sweeps[name], root / "multirun" / name, runs)
        figure = draw_learning_curves(sweeps[name], mine)
        if figure is not None:
            found[FOLDER / f"{name}.svg"] = render_svg(figure)
    screen = "# Reproduction\n\nToo few runs of FedNTD's Table 1 are kept here to compare them."
    tables = all_tables(root, sweeps, runs)
    facts = first_screen.compute_facts(root, sweeps[SWEEP], runs, tables)
    if facts:
        screen = first_screen.render_page(facts)
        found[first_screen.PICTURE] = render_svg(first_screen.draw_values(facts["table"]))
    page = make_page(sweeps, tables, screen, set(found))
    return {Path("REPRODUCTION.md"): page.encode()} | found


def all_sweeps() -> dict[str, Sweep]:
    """Map the name of each sweep that reproduces a table or figure of a paper to the sweep."""
    conf = [conf_directory()]
    found = {name: load_sweep(name, conf) for name in list_options("sweep", conf)}
    return {name: sweep for name, sweep in found.items() if sweep.paper}


def all_runs(root: Path, sweeps: Mapping[str, Sweep]) -> pd.DataFrame:
    """Return all runs of the given sweeps in a checkout."""
    folders = [root / "multirun" / name for name in sweeps]
    return read_runs([folder for folder in folders if folder.is_dir()])


def all_tables(
    root: Path, sweeps: Mapping[str, Sweep], runs: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """Map the name of each sweep to its table; sweeps without runs or published values are left
    out."""
    made = {
        name: readings.compare_sweep(sweeps[name], root / "multirun" / name, runs)
        for name in runs["sweep"].unique()
        if len(published_cells(sweeps[name]))
    }
    return {name: table for name, table in made.items() if (table["n"] > 0).any()}


def make_page(
    sweeps: Mapping[str, Sweep],
    tables: Mapping[str, pd.DataFrame],
    screen: str,
    pictures: Collection[Path],
) -> str:
    """Return the content of REPRODUCTION.md.

    tables: sweep name -> table, for the sweeps that have runs. screen: the first part of the page.
    """
    others = {name for sweep in sweeps.values() for name in sweep.readings}
    texts = [HEAD, screen, "## Measured tables", "Published values are in brackets."]
    for name, sweep in sweeps.items():
        if name in tables and name not in others:
            curves = [name, *(other for other in sweep.readings if other in tables)]
            paths = [FOLDER / f"{each}.svg" for each in curves]
            shown = [path for path in paths if path in pictures]
            texts.append(make_section(sweep, tables[name], shown))
    texts.append(
        f"{len(sweeps) - len(tables)} of {len(sweeps)} tables and figures have no run here."
        " `fedexp reproduction --status` lists them with the hours that each takes, and"
        " `fedexp --multirun sweep=<name>` runs one."
    )
    return "\n\n".join(part.strip() for part in texts) + "\n"


def make_section(sweep: Sweep, table: pd.DataFrame, pictures: Sequence[Path] = ()) -> str:
    """Return the section of a sweep: the origin of its runs, measured values, and learning
    curves."""
    texts = [f"### {sweep.title}", f"`sweep={sweep.name}`: {describe_origin(table)}"]
    texts[-1] += f" [All numbers](multirun/{sweep.name}/table.csv)."
    parts = readings.report_sections(sweep, table, table[table["n"] > 0])
    kept = [part for part in parts if not is_order(part)]
    texts.append(layout.all_markdown(kept, level=4))
    if pictures:
        links = [f"[{path.stem}]({path.as_posix()})" for path in pictures]
        texts.append(f"Learning curves: {', '.join(links)}.")
    return "\n\n".join(part.strip() for part in texts)


def is_order(part: layout.Section) -> bool:
    """Return whether a section shows the order of the methods, which is also on the first
    screen."""
    return part.title.startswith("Order of the methods")


def describe_origin(table: pd.DataFrame) -> str:
    """Summarise the runs behind a table.

    The text gives the number of values, departures from the protocol, seeds, commits and hardware.
    """
    printed = readings.first_reading(table)
    count, changes = Counter(printed["protocol"]), list_distinct(table["changes"], "; ")
    texts = [
        f"{count['full']} published values at the full protocol" if count["full"] else "",
        f"{count['reduced']} at another protocol, not judged ({'; '.join(changes)})"
        if changes
        else "",
        f"seeds {', '.join(list_distinct(table['seeds'], ' '))}",
        f"commits {', '.join(list_distinct(table['commits'], ' '))}",
        f"on {', '.join(list_distinct(table['hardware'], '; '))}",
    ]
    return "; ".join(filter(None, texts)) + "."


def list_distinct(values: pd.Series, separator: str) -> list[str]:
    """Split each text at the separator and return all distinct parts, sorted."""
    return sorted({part for value in values for part in str(value).split(separator) if part})


def print_status(root: Path, data: Sequence[Path]) -> int:
    """Print the state of all tables; return the exit code.

    data: the directories that contain data sets.
    """
    sweeps = all_sweeps()
    runs = all_runs(root, sweeps)
    tables = all_tables(root, sweeps, runs)
    folders = data or [Path(os.environ.get("FEDEXP_DATA", root / "data"))]
    both = {name: (sweep, tables.get(name)) for name, sweep in sweeps.items()}
    print(format_status(both, runs, folders), end="")
    return 0


def check_files(root: Path, found: Mapping[Path, bytes]) -> int:
    """Print which files are out of date; return the exit code.

    Pictures only need to exist, since their bytes depend on the version of matplotlib.
    """
    text = root / "REPRODUCTION.md"
    old = [path for path in found if not (root / path).is_file()] + find_stale_curves(root, found)
    if text.is_file() and text.read_bytes() != found[Path(text.name)]:
        old.append(Path(text.name))
    for path in old:
        print(f"{root / path} is out of date; run `fedexp reproduction` to update it")
    if not old:
        print(f"{text} is up to date")
    return 1 if old else 0


def find_stale_curves(root: Path, found: Mapping[Path, bytes]) -> list[Path]:
    """Return the learning curves in a checkout that belong to runs which have been removed."""
    there = [path.relative_to(root) for path in sorted((root / FOLDER).glob("*.svg"))]
    return [path for path in there if path not in found]


def write_files(root: Path, found: Mapping[Path, bytes]) -> int:
    for path, content in found.items():
        write_atomically(root / path, content)
        print(f"  {root / path}")
    for path in find_stale_curves(root, found):
        with storing(root / path):
            (root / path).unlink()
    return 0
