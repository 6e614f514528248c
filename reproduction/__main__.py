"""`make reproduction`: write the measured tables of REPRODUCTION.md, and learning curves.

The tables are between two marks in the page. The rest of the page is written by hand.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.sweep import Sweep
from fedexp.core.errors import ConfigError, say
from fedexp.papers import readings
from reproduction.curves import draw_learning_curves, list_curves, render_svg

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("REPRODUCTION.md")
CURVES = Path("docs", "reproduction", "curves")
START = "<!-- `make reproduction` writes the text from here to the next mark. -->\n"
END = "<!-- End of the text that `make reproduction` writes. -->\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page and the curves, and return the exit code.

    arguments: by default, sys.argv
    """
    parser = argparse.ArgumentParser(prog="python -m reproduction", description=__doc__)
    check = "write nothing; exit with 1 if the tables are out of date"
    parser.add_argument("--check", action="store_true", help=check)
    root = "path of the git checkout (default: this one)"
    parser.add_argument("--root", type=Path, default=ROOT, help=root)
    options = parser.parse_args(arguments)
    try:
        return update(options.root, options.check)
    except ConfigError as error:
        return say(str(error))


def update(root: Path, check: bool) -> int:
    """Write or check the page and the curves of a checkout. Return the exit code.

    Raises ConfigError if the page has no marks, or a table of runs is damaged.
    """
    text = (root / PAGE).read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ConfigError(f"{root / PAGE}: has no lines {START.strip()} and {END.strip()}")
    sweeps, runs, tables = readings.compare_everything(root)
    curves = {}
    for name, mine in runs.groupby("sweep", sort=False):
        known = list_curves(mine)
        if len(known):
            curves[str(name)] = known
    new = f"{before}{START}\n{make_sections(sweeps, tables, curves)}\n{END}{after}"
    if check:
        if new == text:
            return 0
        return say(f"{root / PAGE} is out of date; run `make reproduction`", 1)
    (root / PAGE).write_text(new, encoding="utf-8")
    for name, known in curves.items():
        path = root / CURVES / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(render_svg(draw_learning_curves(sweeps[name], known)))
    return 0


def make_sections(
    sweeps: Mapping[str, Sweep], tables: Mapping[str, pd.DataFrame], curves: Mapping[str, object]
) -> str:
    """Return a section for each table of a paper that has runs.

    tables, curves: by sweep name, for the sweeps that have runs
    """
    others = {name for sweep in sweeps.values() for name in sweep.readings}
    texts = []
    for name, sweep in sweeps.items():
        if name in tables and name not in others:
            texts.append(make_section(sweep, tables[name]))
            drawn = [each for each in (name, *sweep.readings) if each in curves]
            links = [f"[{each}]({(CURVES / each).as_posix()}.svg)" for each in drawn]
            if links:
                texts.append(f"Learning curves: {', '.join(links)}.")
    texts.append(
        f"{len(sweeps) - len(tables)} of {len(sweeps)} tables and figures have no run here."
        " `fedexp --multirun sweep=<name>` runs one."
    )
    return "\n\n".join(part.strip() for part in texts) + "\n"


def make_section(sweep: Sweep, table: pd.DataFrame) -> str:
    """Return the section of a sweep: the origin of its runs, and the measured values."""
    named = layout.with_column_names(table)
    parts = [part for part in layout.all_sections(named[named["n"] > 0]) if not is_order(part)]
    parts += readings.summarise_readings(table) + readings.check_claims(sweep, table)
    origin = f"`sweep={sweep.name}`: {describe_origin(table)}"
    origin += f" [All numbers](multirun/{sweep.name}/table.csv)."
    return f"### {sweep.title}\n\n{origin}\n\n{layout.all_markdown(parts, level=4)}"


def is_order(part: layout.Section) -> bool:
    """Return whether a section shows the order of methods, which only the sweep's table.md has."""
    return part.title.startswith("Order of the methods")


def describe_origin(table: pd.DataFrame) -> str:
    """Return the number of values, departures from the protocol, seeds, commits and hardware."""
    count = Counter(readings.first_reading(table)["protocol"])
    changes = list_distinct(table["changes"], "; ")
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


if __name__ == "__main__":
    sys.exit(main())
