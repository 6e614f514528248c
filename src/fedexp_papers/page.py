"""Write the measured tables of REPRODUCTION.md from the committed runs.

The tables are between two marks in the page. The rest of the page is written by hand.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from fedexp.analysis.layout import all_markdown
from fedexp.core.console import plural
from fedexp.core.errors import ConfigError
from fedexp_papers import layout, readings
from fedexp_papers.sweeps import PaperSweep

PAGE = Path("REPRODUCTION.md")
START = "<!-- `make reproduction` writes the text from here to the next mark. -->\n"
END = "<!-- End of the text that `make reproduction` writes. -->\n"


def page(options: Namespace) -> list[str]:
    """Write or check the page of a checkout. Return no lines to print.

    options: the flags of `fedexp-papers page`. Raises ConfigError if the page has no marks, if a
    table of runs is damaged, or, for a check, if the page is out of date.
    """
    path = options.root / PAGE
    if not path.is_file():
        raise ConfigError(f"{path}: does not exist; run this command in a checkout of fedexp")
    text = path.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ConfigError(f"{path}: has no lines {START.strip()} and {END.strip()}")
    sections = make_sections(*readings.compare_everything(options.root))
    new = f"{before}{START}\n{sections}\n{END}{after}"
    if options.check and new != text:
        raise ConfigError(f"{path} is out of date; run `make reproduction`")
    if not options.check:
        path.write_text(new, encoding="utf-8")
    return []


def make_sections(sweeps: Mapping[str, PaperSweep], tables: Mapping[str, pd.DataFrame]) -> str:
    """Return a section for each table of a paper that has runs.

    tables: by sweep name, for the sweeps that have runs
    """
    others = {name for sweep in sweeps.values() for name in sweep.readings}
    own = [sweep for name, sweep in sweeps.items() if name in tables and name not in others]
    texts = [make_section(sweep, tables[sweep.name]).strip() for sweep in own]
    texts.append(
        f"{len(sweeps) - len(tables)} of {len(sweeps)} tables and figures have no run here."
        " `fedexp --multirun sweep=<name>` runs one."
    )
    return "\n\n".join(texts) + "\n"


def make_section(sweep: PaperSweep, table: pd.DataFrame) -> str:
    """Return the section of a sweep: the origin of its runs, and the measured values."""
    named = layout.with_column_names(table)
    parts = layout.all_sections(named[named["n"] > 0])
    parts += readings.summarise_readings(table) + readings.check_claims(sweep, table)
    origin = f"`sweep={sweep.name}`: {describe_origin(table)}"
    origin += f" [All numbers](multirun/{sweep.name}/comparison.csv)."
    return f"### {sweep.title}\n\n{origin}\n\n{all_markdown(parts, level=4)}"


def describe_origin(table: pd.DataFrame) -> str:
    """Return the number of values, departures from the protocol, seeds, commits and hardware."""
    count = Counter(readings.first_reading(table)["protocol"])
    reduced = count["reduced"] or "other readings"
    changes = list_distinct(table["changes"], "; ")
    texts = [
        f"{plural(count['full'], 'published value')} at the full protocol" if count["full"] else "",
        f"{reduced} at another protocol, not judged ({'; '.join(changes)})" if changes else "",
        f"seeds {', '.join(list_distinct(table['seeds'], ' '))}",
        f"commits {', '.join(list_distinct(table['commits'], ' '))}",
        f"on {', '.join(list_distinct(table['hardware'], '; '))}",
    ]
    return "; ".join(filter(None, texts)) + "."


def list_distinct(values: pd.Series, separator: str) -> list[str]:
    """Split each text at the separator and return all distinct parts, sorted."""
    return sorted({part for value in values for part in str(value).split(separator) if part})
