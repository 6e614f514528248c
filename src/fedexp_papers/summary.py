"""The generated parts of REPRODUCTION.md: how far the runs agree with each paper.

published/verdicts.csv has the order of the papers, the verdicts, which are written by hand, and for
each paper at most one other reading that the first screen counts, too.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from fedexp.analysis.layout import markdown
from fedexp_papers.agreement import (
    BASELINE,
    PLACE,
    Agreement,
    count_agreement,
    count_coverage,
)
from fedexp_papers.cells import TABLES

VERDICTS = TABLES.with_name("verdicts.csv")
POINTS = {"percent": 1.0, "fraction": 100.0}  # one unit of a value in points of accuracy


def load_verdicts() -> pd.DataFrame:
    """Return the page, the verdict and the other reading ("" for none) of each paper.

    The index is the paper, in the order to show.
    """
    return pd.read_csv(VERDICTS, index_col="paper", dtype=str, keep_default_na=False)


def summarise(judged: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the table of the first screen, and the coverage.

    The table has a row for each paper, one for its held-out columns if these are only some of its
    columns, and if verdicts.csv names another reading, one for it and one for the same values with
    our settings. judged: from `judged_values`. tables: from `readings.compare_everything`.
    """
    first, verdicts = judged[judged["reading"] == ""], load_verdicts()
    covered = {paper: count_coverage(tables, paper) for paper in verdicts.index}
    rows = []
    for paper, known in verdicts.iterrows():
        mine = first[first["paper"] == paper]
        about = {
            "paper": f"[{paper}]({known['page']})",
            "published": covered[str(paper)].published,
            "verdict": known["verdict"],
        }
        rows.append(about | describe_strictly(mine))
        held = mine[mine["held_out"]]
        if 0 < len(held) < len(mine):
            rows.append({"paper": f"{paper}, held out"} | describe_strictly(held))
        other = judged[(judged["paper"] == paper) & (judged["reading"] == known["reading"])]
        if known["reading"] and len(other):
            rows.append({"paper": f"{paper}, {known['reading']}"} | describe_strictly(other))
            same = mine.merge(other[[*PLACE, "method", "metric"]])
            name = f"{paper}, the same values, our settings"
            rows.append({"paper": name} | describe_strictly(same))
    heads = ["published", "compared", "agree strictly", "by chance", "FedAvg alone", "verdict"]
    shown = pd.DataFrame(rows, dtype=object).set_index("paper")[heads].fillna("")
    every = count_coverage(tables)
    parts = [f"{paper} {each.judged} of {each.published}" for paper, each in covered.items()]
    share = f"{100 * every.judged / every.published:.0f} %"
    coverage = (
        f"**{every.judged} of the {every.published} published entries are judged ({share})**,"
        f" counting repeated ones and runs with other settings, too: {', '.join(parts)}."
    )
    return f"{markdown(shown, corner='paper')}\n{coverage}\n"


def describe_strictly(rows: pd.DataFrame) -> dict[str, str]:
    """Return the cells of the first screen that count strict agreements. rows: judged rows."""
    found = count_agreement(rows, strict=True)
    return {
        "compared": str(found.values),
        "agree strictly": describe_agreeing(found),
        "by chance": describe_chance(found),
        "FedAvg alone": describe_baseline(found),
    }


def describe_agreeing(found: Agreement) -> str:
    """Return the number of agreements, then that in columns with FedAvg if these are fewer."""
    if not found.values:
        return "-"
    text = f"**{found.agree}** of {found.values}"
    is_part = 0 < found.comparable < found.values
    return text + f"; **{found.comparable_agree}**{of_comparable(found)}" * is_part


def describe_chance(found: Agreement) -> str:
    """Return the mean number and the range of agreements with exchanged methods."""
    if not found.comparable:
        return "-"
    low, high = found.interval()
    return f"{found.expected:.1f}{of_comparable(found)} ({low} to {high})"


def describe_baseline(found: Agreement) -> str:
    """Return the number of agreements with FedAvg's result for every method."""
    return f"{found.baseline}{of_comparable(found)}" if found.comparable else "-"


def of_comparable(found: Agreement) -> str:
    """Return the number of values that the null models can count."""
    return f" of {found.comparable}"


def list_groups(judged: pd.DataFrame, detailed: bool) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield (name, rows) for each paper and its held-out columns.

    detailed: whether to yield each table and each other reading, too.
    """
    for paper in load_verdicts().index:
        mine = judged[judged["paper"] == paper]
        first = mine[mine["reading"] == ""]
        yield from with_held_out(str(paper), first)
        if not detailed:
            continue
        numbers = sorted(first["table"].unique(), key=lambda name: (len(name), name))
        for number in numbers if len(numbers) > 1 else ():
            yield f"{paper} Table {number}", first[first["table"] == number]
        for reading, rows in mine[mine["reading"] != ""].groupby("reading", sort=False):
            yield from with_held_out(f"{paper} ({reading})", rows)


def with_held_out(name: str, rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the rows, and those in held-out columns if these are only some of them."""
    if len(rows):
        yield name, rows
    if 0 < rows["held_out"].sum() < len(rows):
        yield f"{name}, held-out columns", rows[rows["held_out"]]


def tabulate_agreement(judged: pd.DataFrame, detailed: bool = False) -> str:
    """Return the numbers of agreeing values and cells by both tolerances, and the null models.

    judged: from `judged_values`. The row of the wider tolerance is left out if it equals the other.
    """
    rows = []
    for name, mine in list_groups(judged, detailed):
        strict, wide = (
            describe_agreement(count_agreement(mine, is_strict)) for is_strict in (True, False)
        )
        rows.append({"": name, "tolerance": "strict", **strict})
        if wide != strict:
            rows.append({"": "", "tolerance": "wider", **wide})
    return markdown(pd.DataFrame(rows).set_index(""))


def describe_agreement(found: Agreement) -> dict[str, str]:
    """Return the columns of a row of `tabulate_agreement`."""
    compared = found.comparable > 0
    ours = f"{found.comparable_agree} of {found.comparable}"
    low, high = found.interval()
    return {
        "values": f"{found.agree} of {found.values}",
        "whole cells": f"{found.full_cells} of {found.cells}",
        "in columns with FedAvg": ours if compared else "-",
        "by chance": f"{found.expected:.1f} ({low} to {high})" if compared else "-",
        "P": format_probability(found.p_value) if compared else "-",
        "FedAvg alone": str(found.baseline) if compared else "-",
    }


def format_probability(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def tabulate_distances(judged: pd.DataFrame, detailed: bool = False) -> str:
    """Return the errors of accuracy and F, and whether gains over FedAvg are as published.

    judged: from `judged_values`
    """
    rows = {}
    for name, mine in list_groups(judged, detailed):
        gains = gains_over_baseline(mine)
        same, pairs = count_same_order(mine)
        sided = gains[gains["published"] != 0]  # as in the pairs, a tie in print has no side
        own = (np.sign(sided["ours"]) == np.sign(sided["published"])).sum()
        rows[name] = {
            "accuracy (points)": describe_errors(mine, "accuracy"),
            "F": describe_errors(mine, "forgetting"),
            "same side of FedAvg": f"{own} of {len(sided)}" if len(sided) else "-",
            "pairs in the same order": f"{same} of {pairs}" if pairs else "-",
            "gain in accuracy": correlate_gains(gains, "accuracy"),
            "gain in F": correlate_gains(gains, "forgetting"),
        }
    return markdown(pd.DataFrame.from_dict(rows, orient="index"))


def describe_errors(rows: pd.DataFrame, metric: str) -> str:
    """Return the root mean square error (bias) of a metric, in points for accuracies."""
    mine = rows[rows["metric"] == metric]
    if mine.empty:
        return "-"
    if metric == "accuracy":
        return describe_spread(mine["difference"] * mine["unit"].map(POINTS), digits=2)
    return describe_spread(mine["difference"], digits=3)


def describe_spread(errors: pd.Series, digits: int) -> str:
    """Return the root mean square of errors, and their mean in parentheses."""
    return f"{np.sqrt((errors**2).mean()):.{digits}f} ({errors.mean():+.{digits}f})"


def tabulate_methods(judged: pd.DataFrame) -> str:
    """Return the errors of each method, by paper and reading, in the cells with accuracy and F.

    F is the mean over the classes of the best accuracy less the last one, so accuracy plus F is the
    mean of the classes' best accuracies if each class has as many test images: its error tells
    whether a wrong F comes from the best accuracies or from the last ones. judged: from
    `judged_values`
    """
    points = judged["difference"] * judged["unit"].map(POINTS)
    cells = judged.assign(points=points).pivot(
        index=["paper", "reading", "method", *PLACE[1:]], columns="metric", values="points"
    )
    rows = []
    both = cells.reindex(columns=["accuracy", "forgetting"]).dropna()
    for (paper, reading, method), mine in both.groupby(level=[0, 1, 2], sort=False):
        row = {
            "paper": paper,
            "method": f"{method} ({reading})" if reading else method,
            "cells": len(mine),
            "accuracy (points)": describe_spread(mine["accuracy"], digits=2),
            "F": describe_spread(mine["forgetting"] / 100, digits=3),
            "accuracy + F": describe_spread(mine.sum(axis=1) / 100, digits=3),
        }
        rows.append(row)
    return markdown(pd.DataFrame(rows).set_index("paper"), corner="paper")


def correlate_gains(gains: pd.DataFrame, metric: str) -> str:
    """Return Pearson's correlation of our gains with the published ones.

    Return "-" for fewer than three gains, and if they are equal.
    """
    mine = gains[gains["metric"] == metric]
    found = mine["ours"].corr(mine["published"]) if len(mine) > 2 else np.nan
    return "-" if np.isnan(found) else f"{found:.2f}"


def known_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Return PLACE, metric, method, mean and printed of judged rows.

    A published target that was never reached is infinite.
    """
    never = (rows["unit"] == "rounds") & (rows["note"] == "not_reached")
    known = rows[[*PLACE, "metric", "method", "mean", "printed"]]
    return known.assign(printed=known["printed"].mask(never, np.inf))


def gains_over_baseline(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the differences from FedAvg in the same column, ours and published.

    rows: judged rows. The result has the columns metric, ours and published, and no row for FedAvg
    or for a difference that is not known, such as that of two targets that were never reached.
    """
    key, known = [*PLACE, "metric"], known_numbers(rows)
    base = known[known["method"] == BASELINE].drop(columns="method")
    both = known[known["method"] != BASELINE].merge(base, on=key, suffixes=("", "_base"))
    gains = pd.DataFrame(
        {
            "metric": both["metric"],
            "ours": both["mean"] - both["mean_base"],
            "published": both["printed"] - both["printed_base"],
        }
    )
    return gains.dropna()


def count_same_order(rows: pd.DataFrame) -> tuple[int, int]:
    """Return how many pairs of methods in a column have the published order, and of how many.

    Pairs with the same published value, or with an unknown one, are left out.
    """
    same = pairs = 0
    for _, column in known_numbers(rows).groupby([*PLACE, "metric"], dropna=False):
        first, second = np.triu_indices(len(column), 1)
        ours, printed = column[["mean", "printed"]].to_numpy(float).T
        with np.errstate(invalid="ignore"):  # infinite numbers of rounds
            gaps = printed[first] - printed[second]
            own = ours[first] - ours[second]
        is_known = ~np.isnan(own) & ~np.isnan(gaps) & (gaps != 0)
        pairs += int(is_known.sum())
        same += int((np.sign(own) == np.sign(gaps))[is_known].sum())
    return same, pairs
