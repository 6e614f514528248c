"""`fedexp reproduction`: writes REPRODUCTION.md from the committed tables and the notes beside them.

Read are `multirun/<sweep>/table.csv` (what `fedexp report` has written; the runs are not needed) and
`docs/reproduction/<name>.md`: `intro.md` first, the notes on a sweep under its table, any others at the end. With
`--check` nothing is written; the exit code is 1 where the file is not current. `--status` writes nothing and shows
what of each table is measured, what that has cost and what the rest would cost.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedexp.analysis import compare, layout, parts
from fedexp.analysis.status import status
from fedexp.analysis.sweep import Sweep, load_sweep
from fedexp.config.options import conf_directory, list_options
from fedexp.core.errors import ConfigError, say
from fedexp.core.storage import write_atomically

NUMBERS = ("n", "diverged", "mean", "std", "error", "plain_last", "plain_last10", "plain_error", "printed",
           "printed_std", "difference", "tolerance", "rho", "not_shown")  # fmt: skip
HEAD = "<!-- Written by `fedexp reproduction` from multirun/*/table.csv and docs/reproduction/*.md. -->"
COLUMNS = ("printed values", "full protocol", "reduced", "seeds", "verdicts", "commits", "hardware")
HOW = (
    "Every table and figure of the four papers that `fedexp --multirun sweep=<name>` runs. *full protocol*: printed "
    "values beside runs with all of the sweep's own knobs; *reduced*: beside runs with others, which are shown but "
    "never judged, and never mixed with the former. A figure prints no values, so its runs are counted."
)


def read_table(path: Path) -> pd.DataFrame | None:
    """Read a committed table.csv, text as text; None where there is none."""
    if not path.exists():
        return None
    table = pd.read_csv(path, keep_default_na=False, dtype=str)
    for name in set(NUMBERS) & set(table.columns):
        table[name] = pd.to_numeric(table[name])
    return table


def document(root: Path) -> str:
    """Return REPRODUCTION.md of a checkout."""
    folder, names = root / "docs" / "reproduction", list_options("sweep", [conf_directory()])
    notes = {path.stem: path.read_text(encoding="utf-8").strip() for path in sorted(folder.glob("*.md"))}
    sweeps = [load_sweep(name, [conf_directory()]) for name in names]
    tables = {sweep.name: read_table(root / "multirun" / sweep.name / "table.csv") for sweep in sweeps}
    texts = [HEAD, notes.pop("intro", "# Reproduction"), "## Tables and figures of the papers", HOW]
    rows = [facts(sweep, tables[sweep.name]) for sweep in sweeps]
    texts.append(layout.markdown(pd.DataFrame(rows, index=[f"`{name}`" for name in names], columns=list(COLUMNS))))
    for sweep in sweeps:
        note, table = notes.pop(sweep.name, ""), tables[sweep.name]
        if table is not None or note:
            texts.append(section(sweep, table, note))
    texts += notes.values()
    return "\n\n".join(part.strip() for part in texts) + "\n"


def facts(sweep: Sweep, table: pd.DataFrame | None) -> list[str]:
    """Return a row of the overview."""
    printed = [row for row in compare.printed_cells(sweep) if row["method"] != "(all)"]
    if table is None:
        return [str(len(printed) or "-"), "not run", "", "", "", "", ""]
    if not printed:
        return [
            "-",
            f"{table['n'].sum():.0f} runs",
            "",
            *origin(table, "seeds"),
            "",
            *origin(table, "commits", "hardware"),
        ]
    table = parts.printed_once(table)
    count = Counter(table["protocol"])
    verdicts = Counter(table.loc[table["protocol"] == "full", "verdict"])
    return [
        str(len(table)),
        f"{count['full']}" if count["full"] else "not run",
        f"{count['reduced']}: {changes(table)}" if count["reduced"] else "",
        seeds(table),
        ", ".join(f"{n} {kind}" for kind, n in verdicts.most_common()),
        *origin(table, "commits", "hardware"),
    ]


def changes(table: pd.DataFrame) -> str:
    """Return the knobs in which runs differ from the sweep's."""
    return "; ".join(f"`{text}`" for text in table["changes"].unique() if text)


def seeds(table: pd.DataFrame) -> str:
    """Return the number of runs of a value, and their seeds."""
    numbers = sorted({int(n) for n in table.loc[table["n"] > 0, "n"]})
    if not numbers:
        return ""
    each = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"{each} a value (seed {', '.join(distinct(table['seeds'], ' '))})"


def origin(table: pd.DataFrame, *columns: str) -> list[str]:
    return [", ".join(distinct(table[name], "; " if name == "hardware" else " ")) for name in columns]


def distinct(values: pd.Series, separator: str) -> list[str]:
    """Return the parts of all values, each once."""
    return sorted({part for value in values for part in str(value).split(separator) if part})


def section(sweep: Sweep, table: pd.DataFrame | None, note: str) -> str:
    """Return a section: heading (that of the note, where it has one), what was run, the table, the note."""
    first, _, rest = note.partition("\n")
    title, text = (first, rest.strip()) if first.startswith("#") else (f"## {sweep.title}", note)
    texts = [title]
    if table is None:
        texts.append(f"`sweep={sweep.name}`: not run.")
    else:
        texts.append(f"`sweep={sweep.name}`: {summary(sweep, table)} [The table with every number]({csv_of(sweep)}).")
        if compare.printed_cells(sweep):
            texts += [layout.LEGEND, f"Rule: {sweep.rule}. {compare.TOLERANCES}"]
            texts.append(layout.all_markdown(parts.all_parts(table), level=4))
    return "\n\n".join(part.strip() for part in [*texts, text] if part)


def summary(sweep: Sweep, table: pd.DataFrame) -> str:
    named = dict(zip(COLUMNS, facts(sweep, table), strict=True))
    left = (parts.printed_once(table)["n"] == 0).sum()
    texts = [f"{name}: {text}" for name, text in named.items() if text]
    return "; ".join(texts) + f"; not run: {left}."


def csv_of(sweep: Sweep) -> str:
    return f"multirun/{sweep.name}/table.csv"


def show_status(root: Path) -> int:
    """Print the table of a checkout; return the exit code."""
    sweeps = [load_sweep(name, [conf_directory()]) for name in list_options("sweep", [conf_directory()])]
    tables = [read_table(root / "multirun" / sweep.name / "table.csv") for sweep in sweeps]
    data_dir = Path(os.environ.get("FEDEXP_DATA", root / "data"))
    try:
        print(status(list(zip(sweeps, tables, strict=True)), root, data_dir), end="")
    except ConfigError as error:
        return say(str(error))
    return 0


def main(arguments: Sequence[str] | None = None, prog: str = "fedexp reproduction") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: the working directory)")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where REPRODUCTION.md is not current"
    )
    parser.add_argument("--status", action="store_true", help="show what is measured and what the rest would cost")
    options = parser.parse_args(arguments)
    if not (options.root / "docs" / "reproduction").is_dir():
        print(f"fedexp: no docs/reproduction in {options.root.absolute()}; --root names a checkout", file=sys.stderr)
        return 2
    if options.status:
        return show_status(options.root)
    path, text = options.root / "REPRODUCTION.md", document(options.root)
    if options.check:
        current = path.exists() and path.read_text(encoding="utf-8") == text
        print(f"{path} is current" if current else f"{path} is not current: run `fedexp reproduction`")
        return 0 if current else 1
    write_atomically(path, text.encode())
    print(f"  {path}")
    return 0
