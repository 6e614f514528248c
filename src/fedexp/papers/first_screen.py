"""The first screen of REPRODUCTION.md: what holds, what is inferred, what does not fit."""

import io
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedexp.analysis.sweep import load_sweep
from fedexp.config.options import conf_directory
from fedexp.figures import style
from fedexp.papers import statistics
from fedexp.papers.statistics import CELL, COLUMN, SWEEP, under_the_rule
from fedexp.rundir import evidence

PICTURE = Path("docs", "reproduction", "first_screen.svg")
READINGS = {
    "fedntd_table1_clients": "partition and cohorts of the released code",
    "fedntd_table1_tau3": "FedNTD with the loss before the release, tau=3",
    "fedntd_table1_released": "MOON with mu=0.1 of the release",
}
ON_OTHER_DATA = ("cfed_table1", "cfed_table1_lr1e-6", "cfed_table1_titles")
BAND = 2.0  # points
# The run that was made in two precisions with one seed, and its rounds in bf16.
IN_TWO_PRECISIONS = "mnist_sharding_fedavg_seed0_both"
IN_BF16 = Path("docs", "reproduction", "mnist_sharding_fedavg_bf16_seed0_rounds.csv")


def text(found: dict[str, Any]) -> str:
    """Return the first screen. found: of `facts`."""
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
        "points_interval": lambda ends: f"[{ends[0]:.2f}, {ends[1]:.2f}]",
        "signed_interval": lambda ends: f"[{ends[0]:+.2f}, {ends[1]:+.2f}]",
        "fraction_interval": lambda ends: f"[{ends[0]:.3f}, {ends[1]:.3f}]",
    }
    return made.get_template("first_screen.md.j2").render(found).strip()


def picture(found: dict[str, Any]) -> str:
    """Return the SVG: accuracies, and gains over FedAvg, ours against the print."""
    table = found["table"][found["table"]["metric"] == "accuracy"]
    ours, plain = under_the_rule(table), under_the_rule(table, "plain", "mean_of_last(10)")
    held = ours.index.isin(statistics.held_out(ours).index)
    gains, out = statistics.gains(ours), io.StringIO()
    with style.styled():
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.0, 4.0), layout="constrained")
        for axes, points, unit in [(left, ours, "accuracy"), (right, gains, "gain over FedAvg")]:
            ends = np.array([points["printed"].min() - 3, points["printed"].max() + 3])
            axes.plot(ends, ends, color=style.GREY)
            axes.fill_between(ends, ends - BAND, ends + BAND, color=style.GREY, alpha=0.2)
            axes.set(xlabel=f"{unit}, printed (points)", ylabel=f"{unit}, ours (points)")
        left.scatter(plain["printed"], plain["value"], s=10, color=style.GREY, label="plain test")
        both = ours.merge(plain, on=CELL, suffixes=("", "_plain"))
        for row in both.to_dict("records"):
            start, end = (row["printed"], row["value_plain"]), (row["printed"], row["value"])
            arrow = {"arrowstyle": "->", "color": style.GREY, "lw": 0.6}
            left.annotate("", xy=end, xytext=start, arrowprops=arrow)
        for name, part, face in [
            ("augmented test, held out", ours[held], style.BLUE),
            ("augmented test", ours[~held], "none"),
        ]:
            place = part["printed"], part["value"]
            left.scatter(*place, s=22, facecolor=face, edgecolor=style.BLUE, label=name, zorder=3)
        left.legend()
        for data, part in gains.groupby("dataset"):
            right.scatter(part["printed"], part["value"], s=22, label=str(data), zorder=3)
        right.legend()
        figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def facts(root: Path) -> dict[str, Any]:
    """Return all numbers of the page from the files of a checkout; {} where fewer than two columns
    have two methods in both views. Raises ConfigError for a damaged file of a run."""
    sweep = load_sweep(SWEEP, [conf_directory()])
    every = statistics.load_runs(root, sweep)
    runs = statistics.both_views(every)
    if (runs.groupby(COLUMN)["method"].nunique() > 1).sum() < 2:
        return {}
    table = statistics.cells(runs)
    ours, spread = under_the_rule(table), statistics.known_spread(sweep)
    plain = under_the_rule(table, "plain", "mean_of_last(10)")
    held = statistics.held_out(ours)
    rule, last_ten = ("augmented", "ema(0.6)"), ("augmented", "mean_of_last(10)")
    sums = statistics.sums(ours).groupby("dataset")[["value", "printed"]]
    return of_pairs(every) | {
        "table": table,
        "printed": len(statistics.printed_values()) // 2,
        "cells": len(ours) // 2,
        "columns": len(ours[COLUMN].drop_duplicates()),
        "runs": runs["run"].nunique(),
        "draws": f"{statistics.DRAWS:,}",
        "picture": PICTURE.as_posix(),
        "ours": {metric: accuracy_of(part) for metric, part in ours.groupby("metric")},
        "plain": {metric: accuracy_of(part) for metric, part in plain.groupby("metric")},
        "held": {metric: accuracy_of(part) for metric, part in held.groupby("metric")},
        "gain": {metric: gain(part) for metric, part in ours.groupby("metric")},
        "chance": statistics.chance(ours, spread),
        "held_chance": statistics.chance(held, spread),
        "held_plain_within": within(statistics.held_out(plain), spread),
        "nearer": statistics.nearer(table, rule, ("plain", "ema(0.6)")),
        "nearer_ten": statistics.nearer(table, rule, last_ten),
        "datasets": sorted(ours["dataset"].unique()),
        "views": statistics.VIEWS,
        "rules": statistics.RULES,
        "errors": statistics.errors(table, ["dataset", "metric", "view", "rule"]),
        "rivals": statistics.rivals(runs, table),
        "outside": outside(ours, spread),
        "fedntd": forgetting_of_fedntd(ours),
        "sums": {name: statistics.rmse(part.to_numpy()) for name, part in sums},
        "readings": tried(root, ours),
        "spread": spread,
        **of_runs(root, runs),
    }


def of_pairs(every: pd.DataFrame) -> dict[str, Any]:
    """Return what the page says of pairs of methods."""
    pairs = statistics.method_pairs(every)
    by_plain = pairs[pairs["view"] == "plain"]
    return {
        "pairs": pairs,
        "swapped": pairs[pairs["swapped"]].to_dict("records"),
        "plain_pairs": len(by_plain),
        "plain_decidable": by_plain["decidable"].sum(),
        "plain_swapped": by_plain["swapped"].sum(),
    }


def of_runs(root: Path, runs: pd.DataFrame) -> dict[str, Any]:
    """Return what the page says of seeds, swings and costs, and of other tables."""
    return {
        "swing_of_sum": statistics.swing_of_sum(runs),
        "second_seeds": second_seeds(runs),
        "seeds": statistics.seed_spread(runs),
        "swings": statistics.shared_swings(runs),
        "precisions": across_precisions(root, runs),
        "left": left(runs),
        "orders": other_data(root),
        "other_tables": other_tables(root),
        "reconstructed": reconstructed(root),
        "without_commit": sorted(runs.loc[runs["commit"].isna(), "run"].unique()),
    }


def accuracy_of(table: pd.DataFrame) -> dict[str, Any]:
    values = table[["value", "printed"]].to_numpy()
    return {
        "n": len(values),
        "rmse": statistics.rmse(values),
        "rmse_interval": statistics.interval(table, statistics.rmse),
        "bias": statistics.bias(values),
        "bias_interval": statistics.interval(table, statistics.bias),
    }


def gain(table: pd.DataFrame) -> dict[str, Any]:
    found = statistics.gains(table)
    return {
        "n": len(found),
        "correlation": statistics.correlation(found[["value", "printed"]].to_numpy()),
        "interval": statistics.interval(found, statistics.correlation),
        "sign": statistics.same_sign(found),
    }


def within(table: pd.DataFrame, spread: dict[str, float]) -> int:
    return int((table["difference"].abs() <= statistics.tolerances(table, spread)).sum())


def outside(table: pd.DataFrame, spread: dict[str, float]) -> list[dict[Any, Any]]:
    """Return the values outside the tolerance, with `text`: ours and the print."""
    far = table[table["difference"].abs() > statistics.tolerances(table, spread)]
    decimals = far["metric"].map({"accuracy": 1, "forgetting": 2})
    texts = [
        f"{ours:.{digits}f}, printed {printed:.{digits}f}"
        for ours, printed, digits in zip(far["value"], far["printed"], decimals, strict=True)
    ]
    return far.assign(text=texts).sort_values(["metric", *CELL]).to_dict("records")


def forgetting_of_fedntd(table: pd.DataFrame) -> dict[str, Any]:
    """Return how far FedNTD's F is from the print on CIFAR-10, and from how far the other methods
    of its column are (`relative`)."""
    mine = table[(table["dataset"] == "CIFAR-10") & (table["metric"] == "forgetting")]
    is_fedntd = mine["method"] == "FedNTD"
    far = mine[is_fedntd].set_index(COLUMN)["difference"]
    others = mine[~is_fedntd].groupby(COLUMN)["difference"].mean()
    relative = (far - others).dropna()
    return {
        "n": len(far),
        "low": int((far < 0).sum()),
        "bias": far.mean(),
        "relative": relative.mean(),
    }


def second_seeds(runs: pd.DataFrame) -> dict[str, int]:
    """Return how many cells have several seeds (`n`), and how many of these had a value outside
    the fixed tolerance with the first."""
    several = runs.groupby(CELL)["seed"].nunique().loc[lambda count: count > 1].index
    first = under_the_rule(
        statistics.cells(statistics.first_seeds(runs[runs["view"] == "augmented"]))
    )
    first = first[pd.MultiIndex.from_frame(first[CELL]).isin(several)]
    far = first["difference"].abs() > first["metric"].map(statistics.FIXED)
    return {"n": len(several), "outside": len(first[far][CELL].drop_duplicates())}


def tried(root: Path, table: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return for each other reading, and all together, how many values outside and within the
    fixed tolerance it was tried on, and how many of each changed sides."""
    found = statistics.other_readings(root, table, list(READINGS))
    groups = [(READINGS[str(name)], part) for name, part in found.groupby("reading", sort=False)]
    return [
        {
            "name": name,
            "failures": int((~part["was"]).sum()),
            "fixed": int((~part["was"] & part["now"]).sum()),
            "controls": int(part["was"].sum()),
            "broken": int((part["was"] & ~part["now"]).sum()),
        }
        for name, part in [*groups, ("together", found)]
    ]


def across_precisions(root: Path, runs: pd.DataFrame) -> float:
    """Return how far the swings of one run in fp32 and in bf16 agree, as statistics.shared_swings
    does for two methods; nan where the rounds in bf16 are not there."""
    known = runs[runs["run"] == IN_TWO_PRECISIONS].assign(seed=0, reconstructed=False)
    if not (root / IN_BF16).exists() or known.empty:
        return np.nan
    rounds = pd.read_csv(root / IN_BF16)["test_accuracy_augmented"].to_numpy()[1:]
    other = known.assign(method="bf16", values=pd.Series([rounds] * len(known), known.index))
    return statistics.shared_swings(pd.concat([known, other]))


def left(runs: pd.DataFrame) -> dict[str, float]:
    """Return what of Table 1 was not run -> its cost in core hours; 0 where it is not known. A run
    is taken to cost the median of those on its data set."""
    hours = runs.drop_duplicates("run").groupby("dataset")["hours"].median()
    printed = statistics.printed_values()[CELL].drop_duplicates()
    done = pd.MultiIndex.from_frame(runs[CELL].drop_duplicates())
    missing = printed[~pd.MultiIndex.from_frame(printed).isin(done)]
    counts = missing.groupby("dataset").size()
    found = {
        f"{count} cells of {data} (`fedexp --multirun sweep={SWEEP}`)": hours.get(data, 0) * count
        for data, count in counts.items()
    }
    seeds = runs.groupby(CELL)["seed"].nunique()
    more = (3 - seeds).clip(lower=0).groupby("dataset").sum()
    again = "the other two seeds of the measured cells, which would replace the pooled spread"
    return found | {again: float((more * hours).sum())}


def other_data(root: Path) -> list[dict[Any, Any]]:
    """Return the columns of CFeD that were run on other data than the paper's."""
    rows: list[dict[Any, Any]] = []
    for sweep in ON_OTHER_DATA:
        path = root / "multirun" / sweep / "table.csv"
        table = pd.read_csv(path) if path.exists() else pd.DataFrame()
        found = statistics.orders_on_other_data(table) if len(table) else table
        rows += found.assign(sweep=sweep).to_dict("records")
    return [row for row in rows if row["n"] > 2]


def other_tables(root: Path) -> list[dict[str, Any]]:
    """Return the judged tables beside Table 1: `sweep`, values `within`, of `n`."""
    rows = []
    for path in sorted((root / "multirun").glob("*/table.csv")):
        table = pd.read_csv(path)
        if path.parent.name in (SWEEP, *READINGS) or "verdict" not in table:
            continue
        judged = table["verdict"].isin(["within", "outside"])
        within = int((table["verdict"] == "within").sum())
        rows.append({"sweep": path.parent.name, "within": within, "n": int(judged.sum())})
    return [row for row in rows if row["n"]]


def reconstructed(root: Path) -> int:
    """Return how many files of runs were rebuilt from a table of rounds."""
    kept = evidence.kept_below([root / "multirun"])
    return sum(bool(run["summary"].get("reconstructed")) for run in kept)
