"""Measure how closely the committed runs reproduce FedNTD's Table 1.

`select_runs` and `cells` make tidy tables, from which the other functions compute the numbers in
REPRODUCTION.md. Accuracies are in percent, and forgetting F is a fraction. A cell is a combination
of a data set, a setting and a method. A column is a combination of a data set and a setting.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy import signal, stats

from fedexp.analysis.rules import Rule
from fedexp.analysis.sweep import Sweep, find_cell
from fedexp.papers.cells import find_departures, published_cells
from fedexp.papers.judge import ABSOLUTE, FORGETTING
from fedexp.papers.judge import COLUMN as TABLE_COLUMN
from fedexp.papers.readings import pair_readings
from reproduction.series import list_curves

SWEEP = "fedntd_table1"
COLUMN = ["dataset", "partition_param"]
CELL = [*COLUMN, "method"]
VIEWS, RULES = ("plain", "augmented"), ("last", "mean_of_last(10)", "ema(0.6)", "best")
INFERRED, PLAIN = ("augmented", "ema(0.6)"), ("plain", "mean_of_last(10)")  # (view, rule)
SCALE = {"accuracy": 100.0, "forgetting": 1.0}  # from fractions to the units of published values
FIXED = {"accuracy": ABSOLUTE["percent"], "forgetting": FORGETTING}  # tolerances
# Columns that were known before the view and the rule were chosen. All others are held out.
SEEN = [("CIFAR-10", "s=2"), ("CIFAR-10", "alpha=0.1"), ("MNIST", "s=2"), ("MNIST", "alpha=0.1")]
WINDOW = 50  # number of final rounds that are compared between runs
DRAWS, LEVEL = 10_000, 0.95  # number of bootstrap samples and permutations; level of all intervals
WEIGHT = 0.6  # weight of earlier values in the moving average


def select_runs(sweep: Sweep, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the completed runs of Table 1 that follow the full protocol and are not outdated.

    There is one row for each run, view and metric. A row contains the run's cell, the published
    value (`printed`, `printed_std`), and `values` [R], one per evaluated round from 1 on.

    runs: see `fedexp.papers.runs.read_runs`.
    """
    mine = runs[(runs["made_by"] == sweep.name) & (runs["status"] == "completed")]
    rows = []
    for run in mine.to_dict("records"):
        found = find_cell(sweep, run["overrides"])
        if found is not None and not find_departures(sweep, run):
            rows.append({**found[1], "run": run["run"]})
    names = pd.DataFrame(rows, columns=[*CELL, "run"])
    mine = list_curves(mine)
    mine = mine[mine["view"].isin(VIEWS) & mine["measure"].isin(SCALE)]
    mine = mine.rename(columns={"measure": "metric"}).merge(names, on="run")
    scaled = mine["values"] * mine["metric"].map(SCALE)
    return mine.assign(values=scaled).merge(published(sweep), on=[*CELL, "metric"])


def published(sweep: Sweep) -> pd.DataFrame:
    """Return the published values (columns: CELL, `metric`, `printed` and `printed_std`)."""
    table = published_cells(sweep).rename(columns={"value": "printed", "std": "printed_std"})
    numbers = table[["printed", "printed_std"]].apply(pd.to_numeric)
    return table[[*CELL, "metric"]].join(numbers).dropna(subset="printed")


def select_both_views(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that were evaluated in both views: for each seed, the first such run."""
    first = runs[runs["view"] == "augmented"].drop_duplicates([*CELL, "seed", "metric"])
    return runs[runs["run"].isin(first["run"])]


def cells(sweep: Sweep, runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each cell, metric, view and rule.

    `value` is the mean over `n` seeds, and `difference` is `value - printed`. `tolerance` is the
    largest of the fixed tolerance, two published standard deviations, and two standard errors of
    the mean over seeds.
    """
    key = [*CELL, "metric", "view", "rule", "printed", "printed_std"]
    parts = []
    for rule in map(Rule, RULES):
        pairs = zip(runs["values"], runs["metric"], strict=True)
        values = [rule.reported(values, metric) for values, metric in pairs]
        parts.append(runs.assign(rule=rule.value, value=np.array(values, dtype=float)))
    groups = pd.concat(parts).groupby(key, sort=False, dropna=False)["value"]
    table = groups.agg(value="mean", n="size").reset_index()
    error = table["metric"].map(known_spread(sweep)) / np.sqrt(table["n"])
    least = np.maximum(table["metric"].map(FIXED), 2 * error)
    return table.assign(
        difference=table["value"] - table["printed"],
        tolerance=np.maximum(least, 2 * table["printed_std"].fillna(0)),
    )


def known_spread(sweep: Sweep) -> dict[str, float]:
    """Return a dict that maps metrics to the standard deviation over seeds in the sweep's file."""
    return {metric: value * SCALE[metric] for metric, value in sweep.rule.spread.items()}


def select(table: pd.DataFrame, view_and_rule: tuple[str, str] = INFERRED) -> pd.DataFrame:
    """Return the cells of one view and rule, or by default those of the inferred protocol."""
    view, rule = view_and_rule
    return table[(table["view"] == view) & (table["rule"] == rule)]


def is_held_out(table: pd.DataFrame) -> np.ndarray:
    """Return for each row whether its column was unknown when the rule was fixed."""
    return ~pd.MultiIndex.from_frame(table[COLUMN]).isin(SEEN)


def is_within(table: pd.DataFrame) -> pd.Series:
    """Return for each row whether its value is within the tolerance."""
    return table["difference"].abs() <= table["tolerance"]


def errors(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return the root mean square error, the bias, and the number within the fixed tolerance."""
    table = table.assign(
        squared=table["difference"] ** 2,
        within=table["difference"].abs() <= table["metric"].map(FIXED),
    )
    found = table.groupby(list(by), sort=False).agg(
        n=("difference", "size"),
        bias=("difference", "mean"),
        rmse=("squared", "mean"),
        within=("within", "sum"),
    )
    return found.assign(rmse=np.sqrt(found["rmse"]))


def nearer(table: pd.DataFrame, one: tuple[str, str], other: tuple[str, str]) -> pd.Series:
    """Return the number of cells per metric in which `one` is nearer to the published value.

    `one` and `other` are the pairs (view, rule) that are compared.
    """
    wide = table.pivot(index=[*CELL, "metric"], columns=["view", "rule"], values="difference")
    return (wide[one].abs() < wide[other].abs()).groupby("metric").sum()


def rmse(pairs: np.ndarray) -> float:
    """Return the root mean square difference of pairs of values [n, 2]."""
    return float(np.sqrt(np.mean((pairs[:, 0] - pairs[:, 1]) ** 2)))


def bias(pairs: np.ndarray) -> float:
    return float(np.mean(pairs[:, 0] - pairs[:, 1]))


def correlation(pairs: np.ndarray) -> float:
    return float(np.corrcoef(pairs.T)[0, 1])


def interval(table: pd.DataFrame, statistic: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a statistic of pairs (value, printed).

    Whole columns are resampled, since the methods in a column share clients and cohorts.
    """
    columns = [part[["value", "printed"]].to_numpy() for _, part in table.groupby(COLUMN)]
    drawn = np.random.default_rng(0).integers(len(columns), size=(DRAWS, len(columns)))
    found = [statistic(np.concatenate([columns[i] for i in each])) for each in drawn]
    return central(np.array(found))


def central(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of the central 95 % of values."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return each cell's gain over FedAvg in the same column: `value` (ours) and `printed`."""
    key = [*COLUMN, "metric"]
    base = table[table["method"] == "FedAvg"][[*key, "value", "printed"]]
    found = table[table["method"] != "FedAvg"].merge(base, on=key, suffixes=("", "_fedavg"))
    return found.assign(
        value=found["value"] - found["value_fedavg"],
        printed=found["printed"] - found["printed_fedavg"],
    )


def seed_spread(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the standard deviation over seeds for each metric, pooled over cells.

    Cells with several seeds are used. The columns are `spread`, `freedom` (degrees of freedom), and
    the ends `low` and `high` of the 95 % interval (chi-square, for normal errors).
    """
    mine = runs[runs["view"] == "augmented"]
    mine = mine.assign(value=[smoothed(values)[-1] for values in mine["values"]])
    groups = mine.groupby([*CELL, "metric"])["value"].agg(["var", "size"]).query("size > 1")
    freedom = groups["size"] - 1
    parts = pd.DataFrame({"freedom": freedom, "squares": groups["var"] * freedom})
    found = parts.groupby("metric").sum()
    ends = stats.chi2.ppf([(1 + LEVEL) / 2, (1 - LEVEL) / 2], found[["freedom"]])
    return found.assign(
        spread=np.sqrt(found["squares"] / found["freedom"]),
        low=np.sqrt(found["squares"] / ends[:, 0]),
        high=np.sqrt(found["squares"] / ends[:, 1]),
    )


def chance(table: pd.DataFrame) -> dict[str, Any]:
    """Return statistics of the number of values that would be within the tolerance by chance.

    share: the share of matches (values within the tolerance) among all pairs of a value and another
        method's published value in the same column
    permuted: the mean and 95 % interval of the number of matches, with the methods of each column
        permuted
    most: the largest number of matches in any permutation
    """
    random, totals = np.random.default_rng(0), np.zeros(DRAWS)
    others = pairs = 0
    for _, column in table.groupby(COLUMN):
        hits: Any = 0  # [i, j]: metrics in which i is within j's tolerance
        for _, part in column.groupby("metric"):
            hits = hits + find_matches(part.sort_values("method"))
        n = len(hits)
        others += hits.sum() - np.trace(hits)
        pairs += n * (n - 1) * column["metric"].nunique()
        orders = random.permuted(np.tile(np.arange(n), (DRAWS, 1)), axis=1)
        totals += hits[np.arange(n), orders].sum(axis=1)
    return {
        "within": int(is_within(table).sum()),
        "of": len(table),
        "share": others / pairs,
        "permuted": (totals.mean(), *central(totals)),
        "most": int(totals.max()),
    }


def find_matches(column: pd.DataFrame) -> np.ndarray:
    """Return whether each value is within its tolerance of each published value, bool [n, n]."""
    far = column["value"].to_numpy()[:, None] - column["printed"].to_numpy()
    return np.asarray(np.abs(far) <= column["tolerance"].to_numpy()[:, None])


def share_by_chance(table: pd.DataFrame) -> float:
    """Return the share of values that would be within the tolerance by chance.

    This is the share of matches among all pairs of a value and another method's published value in
    the same column. table: rows of a sweep's table.
    """
    matches = pairs = 0
    for _, column in table.rename(columns={"mean": "value"}).groupby([*TABLE_COLUMN]):
        hits = find_matches(column)
        matches += hits.sum() - np.trace(hits)
        pairs += len(hits) * (len(hits) - 1)
    return matches / pairs if pairs else np.nan


def method_pairs(runs: pd.DataFrame) -> pd.DataFrame:
    """Compare each pair of methods in a column, round by round and for each metric.

    The methods in a column share seeds, clients and cohorts, so most fluctuations cancel in the
    difference. `ours` and `printed` are the differences between the two methods. `view` is
    augmented if all methods in the column were evaluated in this view, and plain otherwise. A pair
    is `decidable` if the published values differ and the moving average of our differences exceeds
    the 0.975 quantile of Student's t times its standard error. The standard error treats the
    differences in the last WINDOW rounds as independent.
    """
    limit = stats.t.ppf((1 + LEVEL) / 2, WINDOW - 1)
    rows = []
    for key, part in runs.groupby([*COLUMN, "metric"]):
        methods = part.groupby("view")["method"].nunique()
        view = "augmented" if len(methods) > 1 and methods.nunique() == 1 else "plain"
        mine = select_first_seeds(part[part["view"] == view])
        for one, other in combinations(mine.to_dict("records"), 2):
            far = one["values"] - other["values"]
            error = np.std(far[-WINDOW:], ddof=1) * np.sqrt((1 - WEIGHT) / (1 + WEIGHT))
            row = dict(zip([*COLUMN, "metric"], key, strict=True))
            row |= {"view": view, "method": one["method"], "other": other["method"]}
            row |= {"ours": smoothed(far)[-1], "printed": one["printed"] - other["printed"]}
            rows.append(row | {"limit": limit * error})
    pairs = pd.DataFrame(rows)
    decidable = (pairs["ours"].abs() > pairs["limit"]) & ~np.isclose(pairs["printed"], 0)
    swapped = decidable & (pairs["ours"] * pairs["printed"] < 0)
    return pairs.assign(decidable=decidable, swapped=swapped)


def select_first_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the run with the lowest seed for each cell and metric.

    If this seed was run twice, a run with complete files is preferred.
    """
    rebuilt = [bool(summary.get("reconstructed")) for summary in runs["summary"]]
    ordered = runs.assign(rebuilt=rebuilt).sort_values(["seed", "rebuilt"])
    return ordered.drop_duplicates([*CELL, "metric"])


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the moving average with weight 0.6 at every round, [R]."""
    return pd.Series(values).ewm(alpha=1 - WEIGHT, adjust=False).mean().to_numpy()


# Each of these alternative explanations is fitted to the other columns (`rest`). It then predicts
# the published values [n] of a column from the plain view.
def one_factor(rest: pd.DataFrame, column: pd.DataFrame) -> np.ndarray:
    return ((rest["printed"] / rest["value"]).mean() * column["value"]).to_numpy()


def affine(rest: pd.DataFrame, column: pd.DataFrame) -> np.ndarray:
    return np.polyval(np.polyfit(rest["value"], rest["printed"], 1), column["value"])


def stopping_early(rest: pd.DataFrame, column: pd.DataFrame) -> np.ndarray:
    far = np.stack(rest["curve"].to_list()) - rest[["printed"]].to_numpy()
    best = (far**2).mean(axis=0).argmin()
    return np.stack(column["curve"].to_list())[:, best]


RIVALS = {"one factor": one_factor, "affine": affine, "stopping early": stopping_early}


def rivals(runs: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the root mean square errors of alternative explanations of the published values.

    Each explanation predicts the published values from the plain view. It is fitted to all columns
    but one and evaluated on that column. There is one row per explanation and one column per
    metric. The explanations are one factor for all cells, a factor and an offset (both applied to
    the mean of the last ten rounds), and one round at which all runs stop (applied to the moving
    average).
    """
    plain = runs[runs["view"] == "plain"]
    plain = plain.assign(curve=plain["values"].map(smoothed))
    curves = plain.groupby([*CELL, "metric"])["curve"].agg(lambda each: np.mean([*each], axis=0))
    known = select(table, PLAIN).merge(curves.reset_index(), on=[*CELL, "metric"])
    found: dict[Any, dict[str, float]] = {}
    for metric, part in known.groupby("metric"):
        found[metric] = {}
        for name, predict in RIVALS.items():
            far = [
                predict(part.drop(column.index), column) - column["printed"].to_numpy()
                for _, column in part.groupby(COLUMN)
            ]
            found[metric][name] = float(np.sqrt(np.mean(np.concatenate(far) ** 2)))
    return pd.DataFrame(found)


def correlate_swings(runs: pd.DataFrame) -> float:
    """Return the mean correlation between the fluctuations of two methods in the same column.

    The fluctuations are the accuracies in the last WINDOW rounds after subtracting straight lines.
    """
    mine = runs[(runs["view"] == "augmented") & (runs["metric"] == "accuracy")]
    found = []
    for _, part in select_first_seeds(mine).groupby(COLUMN):
        rest = signal.detrend([values[-WINDOW:] for values in part["values"]])
        if len(rest) > 1:
            found.append(np.corrcoef(rest)[np.triu_indices(len(rest), 1)])
    return float(np.mean(np.concatenate(found)))


def swing_of_sum(runs: pd.DataFrame) -> pd.Series:
    """Compare the fluctuations of accuracy + F with those of the accuracy, for each data set.

    The result is the ratio of their standard deviations in the last WINDOW rounds, averaged over
    runs. Accuracy and F are fractions.
    """
    mine = runs[runs["view"] == "augmented"]
    wide = mine.pivot(index=["dataset", "run"], columns="metric", values="values")
    accuracy = wide["accuracy"].map(lambda values: values[-WINDOW:] / 100)
    both = accuracy + wide["forgetting"].map(lambda values: values[-WINDOW:])
    return (both.map(np.std) / accuracy.map(np.std)).groupby("dataset").mean()


def sums(table: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy + F of each cell as a fraction: `value` (ours) and `printed`."""
    both = table[["value", "printed"]].div(table["metric"].map(SCALE), axis=0)
    return both.join(table[CELL]).groupby(CELL).sum()


def other_readings(table: pd.DataFrame) -> pd.DataFrame:
    """Return the cells that were also run in an alternative reading (column `reading`).

    `was` tells whether the first reading is within the fixed tolerance. `now` tells whether the
    alternative reading is.

    table: the sweep's table, see `fedexp.papers.readings.compare_sweep`.
    """
    both = pair_readings(table)
    limit = both["metric"].map(FIXED)
    was, now = both["difference_first"].abs() <= limit, both["difference"].abs() <= limit
    return both.assign(was=was, now=now)


def orders_on_other_data(table: pd.DataFrame) -> pd.DataFrame:
    """Measure how far the order of methods agrees with the published one in runs on other data.

    There is one row for each column of the paper's table. A row contains the number `n` of methods,
    Spearman's `rho`, and the number of `pairs` of methods. `decidable` counts the pairs whose
    published values differ and whose means differ by more than two standard errors of their
    difference. `swapped` counts the decidable pairs that have the opposite order.
    """
    known = table[(table["n"] > 0) & (table["reading"] == "")]
    rows = []
    for setting, part in known.groupby("setting", sort=False):
        ours, printed, error = part[["mean", "printed", "error"]].astype(float).to_numpy().T
        first, second = np.triu_indices(len(part), 1)
        far, print_ = ours[first] - ours[second], printed[first] - printed[second]
        decidable = (np.abs(far) > 2 * np.hypot(error[first], error[second])) & (print_ != 0)
        rho = stats.spearmanr(ours, printed).statistic
        swapped = (decidable & (far * print_ < 0)).sum()
        rows.append([setting, len(part), rho, len(far), decidable.sum(), swapped])
    return pd.DataFrame(rows, columns=["setting", "n", "rho", "pairs", "decidable", "swapped"])
