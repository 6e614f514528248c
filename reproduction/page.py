"""Make the content of REPRODUCTION.md and its pictures from the committed runs."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.sweep import Sweep
from fedexp.papers import readings
from reproduction import first_screen
from reproduction.curves import draw_learning_curves, render_svg
from reproduction.statistics import SWEEP

PAGE = Path("REPRODUCTION.md")
CURVES = Path("docs", "reproduction", "curves")
HEAD = "<!-- Written by `make reproduction` from multirun/*/runs. Do not edit. -->"


def make_files(root: Path, pictures: bool = True) -> dict[Path, bytes]:
    """Return a dict that maps the paths of the page and its pictures to their contents.

    root: the directory of the checkout. pictures: False leaves the pictures empty, since rendering
    them takes half of the time. Raises ConfigError if the file of any run is damaged.
    """
    sweeps, runs, tables = readings.compare_everything(root)
    found: dict[Path, bytes] = {}
    for name in runs["sweep"].unique():
        figure = draw_learning_curves(sweeps[name], runs[runs["sweep"] == name])
        if figure is not None:
            found[CURVES / f"{name}.svg"] = render_svg(figure) if pictures else b""
    screen = "# Reproduction\n\nToo few runs of FedNTD's Table 1 are kept here to compare them."
    facts = first_screen.compute_facts(root, sweeps[SWEEP], runs, tables)
    if facts:
        screen = first_screen.render_page(facts)
        figure = first_screen.draw_values(facts["table"])
        found[first_screen.PICTURE] = render_svg(figure) if pictures else b""
    page = make_page(sweeps, tables, screen, set(found))
    return {PAGE: page.encode()} | found


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
            paths = [CURVES / f"{each}.svg" for each in curves]
            shown = [path for path in paths if path in pictures]
            texts.append(make_section(sweep, tables[name], shown))
    texts.append(
        f"{len(sweeps) - len(tables)} of {len(sweeps)} tables and figures have no run here."
        " `fedexp reproduction` lists them with the hours that each takes, and"
        " `fedexp --multirun sweep=<name>` runs one."
    )
    return "\n\n".join(part.strip() for part in texts) + "\n"


def make_section(sweep: Sweep, table: pd.DataFrame, pictures: Sequence[Path] = ()) -> str:
    """Return the section of a sweep: origin of its runs, measured values, and learning curves."""
    texts = [f"### {sweep.title}", f"`sweep={sweep.name}`: {describe_origin(table)}"]
    texts[-1] += f" [All numbers](multirun/{sweep.name}/table.csv)."
    named = layout.with_column_names(table)
    parts = [part for part in layout.all_sections(named[named["n"] > 0]) if not is_order(part)]
    parts += readings.summarise_readings(table) + readings.check_claims(sweep, table)
    texts.append(layout.all_markdown(parts, level=4))
    if pictures:
        links = [f"[{path.stem}]({path.as_posix()})" for path in pictures]
        texts.append(f"Learning curves: {', '.join(links)}.")
    return "\n\n".join(part.strip() for part in texts)


def is_order(part: layout.Section) -> bool:
    """Return whether a section shows the order of methods, which the first screen shows too."""
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
