"""Write what the committed runs give into REPRODUCTION.md, and all measured tables.

REPRODUCTION.md is written by hand, except for the parts between marks. docs/reproduction/tables.md
is written as a whole.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd

from fedexp.analysis.layout import all_markdown
from fedexp.core.console import plural
from fedexp.core.errors import ConfigError
from fedexp_papers import layout, readings
from fedexp_papers.agreement import judged_values
from fedexp_papers.overview import draw_overview
from fedexp_papers.run_checks import PARTICIPATION, tabulate_ceilings, tabulate_cohort_test
from fedexp_papers.summary import (
    load_verdicts,
    summarise,
    tabulate_agreement,
    tabulate_distances,
    tabulate_methods,
)
from fedexp_papers.sweeps import PaperSweep

PAGE, TABLES = Path("REPRODUCTION.md"), Path("docs/reproduction/tables.md")
PICTURE = TABLES.with_name("overview.svg")
MARK, END = "<!-- `make reproduction` writes {name} until the next mark. -->\n", "<!-- End. -->\n"
METHODS = """Root mean square error (bias) in the cells with accuracy and F. F is the mean over the
classes of the best accuracy less the last one, so accuracy plus F is the mean of the classes' best
accuracies: its error tells whether a wrong F comes from the best accuracies or the last ones."""
PARTS = ("the summary", "the agreement", "the distances", "the cohort test", "the ceilings")
HEAD = """# Measured tables

`make reproduction` writes this page. [Reproduction](../../REPRODUCTION.md) explains the terms.

## Key

`42.06 ± 0.97* (0.57 ± 0.00*) [40.14 tol. 2.30 (0.59)]` is our accuracy ± its standard deviation
over seeds, our forgetting F in parentheses, and in brackets the published accuracy, the tolerance,
and the published F. The tolerance is given where it is wider than the strict one. An empty cell was
not run. Rounds to a target are written in the same way.

"""


def page(options: Namespace) -> list[str]:
    """Write or check the two pages of a checkout. Return no lines to print.

    options: the flags of `fedexp-papers page`. Raises ConfigError if REPRODUCTION.md lacks a mark,
    if there are no runs, if a table of runs is damaged, or, for a check, if a page is out of date.
    """
    path = options.root / PAGE
    if not path.is_file():
        raise ConfigError(f"{path}: does not exist; run this command in a checkout of fedexp")
    text = path.read_text(encoding="utf-8")
    for name in PARTS:
        split_at_marks(text, name, path)
    sweeps, tables = readings.compare_everything(options.root)
    if not tables:
        raise ConfigError(f"{options.root / 'multirun'}: has no run of a published table")
    for name, part in zip(PARTS, make_parts(options.root, sweeps, tables), strict=True):
        before, after = split_at_marks(text, name, path)
        text = f"{before}\n{part}\n{after}"
    if not options.check:  # other versions of matplotlib draw other bytes
        picture = options.root / PICTURE
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(draw_overview(judged_values(sweeps, tables)))
    for file, new in {path: text, options.root / TABLES: make_tables(sweeps, tables)}.items():
        if not options.check:
            file.write_text(new, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != new:
            raise ConfigError(f"{file} is out of date; run `make reproduction`")
    return []


def split_at_marks(text: str, name: str, path: Path) -> tuple[str, str]:
    """Return the text up to a part's first mark, and from its second one on, both included.

    Raises ConfigError if the text, which is that of `path`, lacks the marks.
    """
    mark = MARK.format(name=name)
    before, start, rest = text.partition(mark)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ConfigError(f"{path}: has no lines {mark.strip()} and {END.strip()}")
    return before + start, end + after


def make_parts(
    root: Path, sweeps: Mapping[str, PaperSweep], tables: Mapping[str, pd.DataFrame]
) -> list[str]:
    """Return the generated parts of REPRODUCTION.md, in the order of PARTS."""
    judged = judged_values(sweeps, tables)
    part = tables.get(PARTICIPATION)
    return [
        summarise(judged, tables),
        tabulate_agreement(judged),
        tabulate_distances(judged),
        "Not run.\n" if part is None else tabulate_cohort_test(root, part),
        tabulate_ceilings(root),
    ]


def make_tables(sweeps: Mapping[str, PaperSweep], tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the page of tables: the key, the agreement, and a section for each measured table.

    tables: by sweep name, for the sweeps that have runs
    """
    judged = judged_values(sweeps, tables)
    others = {name for sweep in sweeps.values() for name in sweep.readings}
    own = [sweep for name, sweep in sweeps.items() if name in tables and name not in others]
    texts = [HEAD + "\n".join(f"- `{mark}` {note}" for mark, note in layout.NOTES.items())]
    texts.append(f"## Agreement\n\n{tabulate_agreement(judged, detailed=True).strip()}")
    texts.append(tabulate_distances(judged, detailed=True).strip())
    texts.append(f"## Errors by method\n\n{METHODS}\n\n{tabulate_methods(judged).strip()}")
    for paper in load_verdicts().index:
        mine = [sweep for sweep in own if sweep.paper == paper]
        texts += [f"## {paper}"] * bool(mine)
        texts += [make_section(sweep, tables[sweep.name]).strip() for sweep in mine]
    texts.append(
        f"{len(sweeps) - len(tables)} of {len(sweeps)} sweeps have no run here."
        " `fedexp --multirun sweep=<name>` runs one."
    )
    return "\n\n".join(texts) + "\n"


def make_section(sweep: PaperSweep, table: pd.DataFrame) -> str:
    """Return the section of a sweep: the origin of its runs, and the measured values."""
    named = layout.with_column_names(table)
    parts = layout.all_sections(named[named["n"] > 0])
    parts += readings.summarise_readings(table) + readings.check_claims(sweep, table)
    parts = [replace(part, legend="") for part in parts]  # the key is above all tables
    origin = f"`sweep={sweep.name}`: {describe_runs(table)}"
    origin += f" [All numbers](../../multirun/{sweep.name}/comparison.csv)."
    return f"### {sweep.title}\n\n{origin}\n\n{all_markdown(parts, level=4)}"


def describe_runs(table: pd.DataFrame) -> str:
    """Return the number of values, departures from the protocol, seeds, commits and hardware."""
    is_first = table["reading"] == ""
    count = Counter(table.loc[is_first, "protocol"])
    full = f"{plural(count['full'], 'published value')} at the full protocol"
    texts = [full] * bool(count["full"])
    for number, rows in ((count["reduced"], table[is_first]), ("other readings", table[~is_first])):
        if changes := list_distinct(rows["changes"], "; "):
            texts.append(f"{number} at another protocol ({'; '.join(changes)})")
    texts += [
        f"seeds {', '.join(list_distinct(table['seeds'], ' '))}",
        f"commits {', '.join(list_distinct(table['commits'], ' '))}",
        f"on {', '.join(list_distinct(table['hardware'], '; '))}",
    ]
    return "; ".join(texts) + "."


def list_distinct(values: pd.Series, separator: str) -> list[str]:
    """Split each text at the separator and return all distinct parts, sorted."""
    return sorted({part for value in values for part in str(value).split(separator) if part})
