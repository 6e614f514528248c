"""Write the first screen of REPRODUCTION.md.

The first screen says which results agree with the papers, which results differ, and which
protocols are inferred.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from fedexp.analysis.sweep import Sweep
from fedexp.figures import style
from fedexp.papers.runs import compute_hours
from reproduction import statistics
from reproduction.series import list_curves
from reproduction.statistics import CELL, COLUMN, PLAIN, SWEEP, is_held_out, is_within, select

PICTURE = Path("docs", "reproduction", "first_screen.svg")
READINGS = {  # label of an alternative reading in the sweep's file -> its description
    "released clients": "partition and cohorts of the released code",
    "before the release": "FedNTD with the loss before the release, tau=3",
    "released clients, before the release": "the two changes above together",
    "released": "MOON with mu=0.1 of the release",
}
ON_OTHER_DATA = ("cfed_table1", "cfed_table1_lr1e-6", "cfed_table1_titles")
BAND = 2.0  # percentage points
# The run that was repeated in bf16 with the same seed, and the file with its rounds in bf16.
IN_TWO_PRECISIONS = "mnist_sharding_fedavg_seed0_both"
IN_BF16 = Path("docs", "reproduction", "mnist_sharding_fedavg_bf16_seed0_rounds.csv")


def render_page(found: dict[str, Any]) -> str:
    """Return the first screen as Markdown. found: the result of `compute_facts`."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "points": lambda value: f"{value:.2f}",
        "signed": lambda value: f"{value:+.2f}",
        "fraction": lambda value: f"{value:.3f}",
        "percent": lambda value: f"{100 * value:.0f} %",
    }
    return made.get_template("first_screen.md.j2").render(found).strip()


def draw_values(table: pd.DataFrame) -> Figure:
    """Plot our accuracies, and our gains over FedAvg, against the published values.

    table: the result of `statistics.cells`.
    """
    table = table[table["metric"] == "accuracy"]
    ours, plain = select(table), select(table, PLAIN)
    gains, held = statistics.gains(ours), is_held_out(ours)
    with style.styled():
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.0, 4.0), layout="constrained")
        for axes, points, unit in [(left, ours, "accuracy"), (right, gains, "gain over FedAvg")]:
            ends = np.array([points["printed"].min() - 3, points["printed"].max() + 3])
            axes.plot(ends, ends, color=style.GREY)
            axes.fill_between(ends, ends - BAND, ends + BAND, color=style.GREY, alpha=0.2)
            axes.set(xlabel=f"{unit}, published (points)", ylabel=f"{unit}, ours (points)")
        left.scatter(plain["printed"], plain["value"], s=10, color=style.GREY, label="plain test")
        arrow = {"arrowstyle": "->", "color": style.GREY, "lw": 0.6}
        for row in ours.merge(plain, on=CELL, suffixes=("", "_plain")).to_dict("records"):
            start, end = (row["printed"], row["value_plain"]), (row["printed"], row["value"])
            left.annotate("", xy=end, xytext=start, arrowprops=arrow)
        for name, part, face in [
            ("augmented test, held out", ours[held], style.BLUE),
            ("augmented test", ours[~held], "none"),
        ]:
            look = {"s": 22, "facecolor": face, "edgecolor": style.BLUE, "zorder": 3}
            left.scatter(part["printed"], part["value"], label=name, **look)
        for data, part in gains.groupby("dataset"):
            right.scatter(part["printed"], part["value"], s=22, label=str(data), zorder=3)
        left.legend()
        right.legend()
    plt.close(figure)
    return figure


def compute_facts(
    root: Path, sweep: Sweep, runs: pd.DataFrame, tables: Mapping[str, pd.DataFrame]
) -> dict[str, Any]:
    """Return all numbers of the first screen.

    Return {} unless at least two columns have two methods that were evaluated in both views. root:
    the directory of the checkout. sweep: the sweep of Table 1. runs: the runs of all sweeps, see
    `runs.read_runs`. tables: sweep name -> its table, see `readings.compare_sweep`.
    """
    every = statistics.select_runs(sweep, runs)
    mine = statistics.select_both_views(every)
    if (mine.groupby(COLUMN)["method"].nunique() > 1).sum() < 2:
        return {}
    return (
        compare_values(sweep, mine)
        | measure_noise(root, sweep, mine)
        | summarise_other_runs(runs, tables)
        | {
            "pairs": statistics.method_pairs(every),
            "left": estimate_rest(sweep, mine),
            "plain_only": len(every[CELL].drop_duplicates()) - len(mine[CELL].drop_duplicates()),
            "picture": PICTURE.as_posix(),
            "draws": f"{statistics.DRAWS:,}",
            "views": statistics.VIEWS,
            "rules": statistics.RULES,
        }
    )


def compare_values(sweep: Sweep, runs: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers that compare our values with the published ones.

    runs: the runs that were evaluated in both views.
    """
    table = statistics.cells(sweep, runs)
    ours, plain = select(table), select(table, PLAIN)
    held = ours[is_held_out(ours)]
    last_ten = ("augmented", "mean_of_last(10)")
    sums = statistics.sums(ours).groupby("dataset")
    metrics = ["accuracy", "forgetting"]
    by_metric = {metric: ours[ours["metric"] == metric] for metric in metrics}
    return {
        "table": table,
        "printed": len(statistics.published(sweep)) // 2,
        "cells": len(ours) // 2,
        "columns": len(ours[COLUMN].drop_duplicates()),
        "runs": runs["run"].nunique(),
        "datasets": sorted(ours["dataset"].unique()),
        "ours": statistics.errors(ours, ["metric"]).to_dict("index"),
        "plain": statistics.errors(plain, ["metric"]).to_dict("index"),
        "held": statistics.errors(held, ["metric"]).to_dict("index"),
        "errors": statistics.errors(table, ["dataset", "metric", "view", "rule"]),
        "rmse_interval": {m: statistics.interval(by_metric[m], statistics.rmse) for m in metrics},
        "bias_interval": statistics.interval(by_metric["accuracy"], statistics.bias),
        "gain": {metric: compare_gains(by_metric[metric]) for metric in metrics},
        "chance": statistics.chance(ours),
        "held_chance": statistics.chance(held),
        "held_plain_within": is_within(plain[is_held_out(plain)]).sum(),
        "nearer": statistics.nearer(table, statistics.INFERRED, ("plain", "ema(0.6)")),
        "nearer_ten": statistics.nearer(table, statistics.INFERRED, last_ten),
        "rivals": statistics.rivals(runs, table),
        "outside": list_outside(ours),
        "fedntd": compare_forgetting_of_fedntd(ours),
        "sums": {name: statistics.rmse(part.to_numpy()) for name, part in sums},
    }


def measure_noise(root: Path, sweep: Sweep, runs: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers about seeds, fluctuations and precisions.

    runs: the runs that were evaluated in both views.
    """
    return {
        "spread": statistics.known_spread(sweep),
        "seeds": statistics.seed_spread(runs),
        "second_seeds": count_second_seeds(sweep, runs),
        "swing_of_sum": statistics.swing_of_sum(runs),
        "swings": statistics.correlate_swings(runs),
        "precisions": correlate_precisions(root, runs),
    }


def summarise_other_runs(runs: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """Return the numbers about alternative readings, other tables and incomplete runs."""
    curves = list_curves(runs[runs["sweep"] == SWEEP])
    without = curves[curves["view"] == "augmented"]
    without = without[[summary.get("commit") is None for summary in without["summary"]]]
    return {
        "readings": count_tried_readings(tables[SWEEP]),
        "orders": list_orders_on_other_data(tables),
        "other_tables": count_other_tables(tables),
        "reconstructed": sum(bool(summary.get("reconstructed")) for summary in runs["summary"]),
        "without_commit": sorted(without["run"].unique()),
    }


def compare_gains(table: pd.DataFrame) -> dict[str, Any]:
    found = statistics.gains(table)
    agrees = np.sign(found["value"]) == np.sign(found["printed"])
    return {
        "n": len(found),
        "correlation": statistics.correlation(found[["value", "printed"]].to_numpy()),
        "interval": statistics.interval(found, statistics.correlation),
        "sign": agrees.sum(),
    }


def list_outside(table: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return the values outside the tolerance. `digits` is the number of decimal places to show."""
    far = table[~is_within(table)].sort_values(["metric", *CELL])
    return far.assign(digits=far["metric"].map({"accuracy": 1, "forgetting": 2})).to_dict("records")


def compare_forgetting_of_fedntd(table: pd.DataFrame) -> dict[str, Any]:
    """Compare FedNTD's forgetting F on CIFAR-10 with the published values.

    n: the number of columns with a value
    bias: the mean difference from the published values
    relative: the bias minus the mean difference of the other methods in the same columns
    low: the number of columns in which our F is lower than the published F
    """
    mine = table[(table["dataset"] == "CIFAR-10") & (table["metric"] == "forgetting")]
    is_fedntd = mine["method"] == "FedNTD"
    far = mine[is_fedntd].set_index(COLUMN)["difference"]
    others = mine[~is_fedntd].groupby(COLUMN)["difference"].mean()
    return {
        "n": len(far),
        "low": (far < 0).sum(),
        "bias": far.mean(),
        "relative": (far - others).mean(),
    }


def count_second_seeds(sweep: Sweep, runs: pd.DataFrame) -> dict[str, int]:
    """Count the cells that were run with several seeds.

    n: the number of these cells
    outside: the number of these cells in which a value of the first seed is outside the fixed
        tolerance
    """
    runs = runs[runs["view"] == "augmented"]
    several = runs[runs.groupby(CELL)["seed"].transform("nunique") > 1]
    first = select(statistics.cells(sweep, statistics.select_first_seeds(several)))
    far = first[first["difference"].abs() > first["metric"].map(statistics.FIXED)]
    return {
        "n": len(first[CELL].drop_duplicates()),
        "outside": len(far[CELL].drop_duplicates()),
    }


def count_tried_readings(table: pd.DataFrame) -> list[dict[Any, Any]]:
    """Count the values that were tried in each alternative reading, and in all of them together.

    failures: values that are outside the fixed tolerance in the first reading
    fixed: failures that are within the tolerance in the alternative reading
    controls: values that are within the fixed tolerance in the first reading
    broken: controls that are outside the tolerance in the alternative reading
    """
    found = statistics.other_readings(table)
    groups = [(name, found[found["reading"] == label]) for label, name in READINGS.items()]
    return [
        {
            "name": name,
            "failures": (~part["was"]).sum(),
            "fixed": (~part["was"] & part["now"]).sum(),
            "controls": part["was"].sum(),
            "broken": (part["was"] & ~part["now"]).sum(),
        }
        for name, part in [*groups, ("together", found)]
        if len(part)
    ]


def correlate_precisions(root: Path, runs: pd.DataFrame) -> float:
    """Return the correlation between the fluctuations of the same run in fp32 and in bf16.

    Return nan if the run is missing in either precision.
    """
    known = runs[runs["run"] == IN_TWO_PRECISIONS]
    if not (root / IN_BF16).exists() or known.empty:
        return np.nan
    rounds = pd.read_csv(root / IN_BF16)["test_accuracy_augmented"].to_numpy()[1:]
    other = known.assign(method="bf16", values=pd.Series([rounds] * len(known), known.index))
    return statistics.correlate_swings(pd.concat([known, other]))


def estimate_rest(sweep: Sweep, runs: pd.DataFrame) -> dict[str, float]:
    """Return a dict that maps descriptions of missing Table 1 runs to core hours (0 if unknown).

    The time of a missing run is estimated as the median time of the runs on the same data set.
    """
    facts = runs.drop_duplicates("run")
    facts = facts.assign(hours=[compute_hours(summary)["cpu"] for summary in facts["summary"]])
    hours = facts.groupby("dataset")["hours"].median()
    seeds = facts.groupby(CELL)["seed"].nunique()
    every = statistics.published(sweep)[CELL].drop_duplicates()
    was_run = pd.MultiIndex.from_frame(every).isin(seeds.index)
    found = {}
    for data, count in every[~was_run].groupby("dataset").size().items():
        what = f"{count} cells of {data} (`fedexp --multirun sweep={SWEEP}`)"
        found[what] = float(hours.get(data, 0)) * count
    more = (3 - seeds).clip(lower=0).groupby("dataset").sum()
    again = "the other two seeds of the measured cells, which would replace the pooled spread"
    return found | {again: float((more * hours).sum())}


def list_orders_on_other_data(tables: Mapping[str, pd.DataFrame]) -> list[dict[Any, Any]]:
    """Return the columns in which at least three methods were run on other data."""
    rows: list[dict[Any, Any]] = []
    for name in ON_OTHER_DATA:
        if name in tables:
            found = statistics.orders_on_other_data(tables[name])
            rows += found[found["n"] > 2].assign(sweep=name).to_dict("records")
    return rows


def count_other_tables(tables: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Return a dict for each table other than Table 1, with the numbers of its verdicts.

    sweep: the name of the sweep
    n: the number of judged values
    within: the number of values within the tolerance
    chance: the share of values that would be within the tolerance by chance
    """
    rows = []
    for name, table in tables.items():
        judged = table[table["verdict"].isin(["within", "outside"])]
        if not name.startswith(SWEEP) and len(judged):
            within = (judged["verdict"] == "within").sum()
            chance = statistics.share_by_chance(judged)
            rows.append({"sweep": name, "within": within, "n": len(judged), "chance": chance})
    return rows
