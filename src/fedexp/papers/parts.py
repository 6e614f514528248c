"""The sections of a sweep's report, made from its table.csv."""

import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.layout import Section
from fedexp.papers import claims, readings


def printed_once(tidy: pd.DataFrame) -> pd.DataFrame:
    """Return a row for every printed value of the paper's table: of its first reading, without
    claims of the text."""
    return readings.first(tidy[~claims.of_text(tidy)]) if "table" in tidy else tidy


def all_parts(tidy: pd.DataFrame) -> list[Section]:
    """Return all sections: the table as the paper has it, the plain test, the order, the readings,
    and the claims."""
    table = tidy[~claims.of_text(tidy)]
    return layout.all_sections(table) + readings.sections(table) + claims.sections(tidy)
