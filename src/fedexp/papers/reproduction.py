"""REPRODUCTION.md, which `fedexp reproduction` writes from the committed tables, runs and notes."""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.sweep import Sweep, load_sweep
from fedexp.config.options import conf_directory, list_options
from fedexp.core.storage import storing, write_atomically
from fedexp.papers import both_views, compare, curves, parts
from fedexp.papers.status import judged_orders, status

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
VALUE = ("paper", "table", *compare.CELL, "metric")  # what tells printed values apart
NOTHING = pd.DataFrame(columns=[*VALUE, "protocol", "verdict"])
HEAD = (
    "<!-- Written by `fedexp reproduction` from multirun/*/table.csv and"
    " docs/reproduction/*.md. -->"
)
COLUMNS = ("printed values", "full protocol", "reduced", "seeds", "verdicts", "commits", "hardware")
HOW = (
    "Every table and figure of the four papers that `fedexp --multirun sweep=<name>` runs. *full"
    " protocol*: printed values beside runs with all of the sweep's own knobs; *reduced*: beside"
    " runs with others, which are shown but never judged, and never mixed with the former; only"
    " where the data alone are others, the order of the methods is. A figure prints no values, so"
    " its runs are counted."
)
CURVES = (
    "A picture for each setting: the mean over seeds in a band of one standard deviation, in the"
    " plain test and, where it was run, in the augmented one. Circles: the released code, where it"
    " was run."
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
    """Return path -> content of all that is written in a checkout: REPRODUCTION.md and the curves
    that it shows.

    Raises ConfigError for a damaged file of a run."""
    drawn = {sweep.name: curves.pictures(root, sweep) for sweep in all_sweeps()}
    pictures = {path: text for each in drawn.values() for path, text in each.items()}
    return {
        Path("REPRODUCTION.md"): document(root, {name: list(each) for name, each in drawn.items()}),
        **pictures,
    }


def all_sweeps() -> list[Sweep]:
    """Return the sweeps that stand for a table or figure of a paper."""
    found = [
        load_sweep(name, [conf_directory()]) for name in list_options("sweep", [conf_directory()])
    ]
    return [sweep for sweep in found if sweep.paper]


def document(root: Path, pictures: Mapping[str, Sequence[Path]]) -> str:
    """Return REPRODUCTION.md of a checkout. pictures: of each sweep."""
    folder, sweeps = root / "docs" / "reproduction", all_sweeps()
    names = [sweep.name for sweep in sweeps]
    notes = {
        path.stem: path.read_text(encoding="utf-8").strip() for path in sorted(folder.glob("*.md"))
    }
    tables = {
        sweep.name: read_table(root / "multirun" / sweep.name / "table.csv") for sweep in sweeps
    }
    notes = {name: both_views.filled(note, tables) for name, note in notes.items()}
    others = {other for sweep in sweeps for other in sweep.readings}
    intro = [HEAD, notes.pop("intro", "# Reproduction"), whole(tables, others)]
    texts = [*intro, "## Tables and figures of the papers", HOW]
    rows = [facts(sweep, tables[sweep.name]) for sweep in sweeps]
    texts.append(
        layout.markdown(
            pd.DataFrame(rows, index=[f"`{name}`" for name in names], columns=list(COLUMNS))
        )
    )
    for sweep in sweeps:
        note, table = notes.pop(sweep.name, ""), tables[sweep.name]
        if table is not None or note or pictures.get(sweep.name):
            texts.append(section(sweep, table, note, pictures.get(sweep.name, ())))
    texts += notes.values()
    return "\n\n".join(part.strip() for part in texts) + "\n"


def whole(tables: Mapping[str, pd.DataFrame | None], others: Collection[str] = ()) -> str:
    """Return in words what all tables together say under the papers' rules.

    others: sweeps that read values of another one's table differently. A value counts once, by its
    first reading where both are run alike; the order of a column is that of the first."""
    known = {
        name: table for name, table in tables.items() if table is not None and "protocol" in table
    }
    names = sorted(known, key=lambda name: name in others)  # stable
    printed = [parts.printed_once(known[name]) for name in names]
    both = pd.concat(
        [table[[*VALUE, "protocol", "verdict"]].fillna("") for table in printed] or [NOTHING]
    )
    measured = (
        both[both["protocol"] != ""]
        .sort_values("protocol", kind="stable")
        .drop_duplicates(list(VALUE))
    )
    verdicts = Counter(measured.loc[measured["protocol"] == "full", "verdict"])
    reduced = int((measured["protocol"] == "reduced").sum())
    orders = [text for name in names if name not in others for text in judged_orders(known[name])]
    said = ", ".join(f"{number} {kind}" for kind, number in verdicts.most_common())
    texts = [
        f"{sum(verdicts.values())} printed values are measured at the full"
        f" protocol{f': {said}' if said else ''}."
    ]
    if reduced:
        texts.append(
            f"{reduced} are measured with other data, other options or older code, and not judged."
        )
    if orders:
        kept = sum(not text.startswith("swapped") for text in orders)
        texts.append(
            f"In {kept} of {len(orders)} columns with enough methods, no two are swapped beyond"
            " noise."
        )
    return "**Where it stands.** " + " ".join(texts)


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
    return [
        ", ".join(distinct(table[name], "; " if name == "hardware" else " ")) for name in columns
    ]


def distinct(values: pd.Series, separator: str) -> list[str]:
    """Return the parts of all values, each once."""
    return sorted({part for value in values for part in str(value).split(separator) if part})


def section(
    sweep: Sweep, table: pd.DataFrame | None, note: str, pictures: Sequence[Path] = ()
) -> str:
    """Return a section: heading (that of the note, where it has one), what was run, the table,
    curves, the note."""
    first, _, rest = note.partition("\n")
    title, text = (first, rest.strip()) if first.startswith("#") else (f"## {sweep.title}", note)
    texts = [title]
    if table is None:
        texts.append(f"`sweep={sweep.name}`: not run.")
    else:
        texts.append(
            f"`sweep={sweep.name}`: {summary(sweep, table)} [The table with every"
            f" number]({csv_of(sweep)})."
        )
        if compare.printed_cells(sweep):
            texts.append(f"Rule: {sweep.rule}. {compare.TOLERANCES}")
            texts.append(layout.all_markdown(parts.all_parts(table), level=4))
    if pictures:
        shown = [
            f"![Accuracy and forgetting over the rounds]({path.as_posix()})" for path in pictures
        ]
        texts += ["#### Learning curves of the committed runs", CURVES, *shown]
    return "\n\n".join(part.strip() for part in [*texts, text] if part)


def summary(sweep: Sweep, table: pd.DataFrame) -> str:
    named = dict(zip(COLUMNS, facts(sweep, table), strict=True))
    left = (parts.printed_once(table)["n"] == 0).sum()
    texts = [f"{name}: {text}" for name, text in named.items() if text]
    return "; ".join(texts) + f"; not run: {left}."


def csv_of(sweep: Sweep) -> str:
    return f"multirun/{sweep.name}/table.csv"


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
