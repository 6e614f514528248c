"""How closely the committed runs reproduce FedNTD's Table 1.

The numbers on the first screen of REPRODUCTION.md. All come from the files of runs
(`multirun/<sweep>/runs`) and the printed values. Accuracies are in percent, forgetting F is a
fraction. A cell is a data set, a setting and a method; a column is a data set and a setting.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import signal, stats

from fedexp.analysis.rules import Rule
from fedexp.analysis.sweep import Sweep, cell_of, load_sweep, protocol_of
from fedexp.config.options import conf_directory
from fedexp.papers.judge import ABSOLUTE, FORGETTING
from fedexp.rundir import evidence, files
from fedexp.rundir.revisions import outdated

SWEEP = "fedntd_table1"
COLUMN = ["dataset", "partition_param"]
CELL = [*COLUMN, "method"]
METRICS = {"accuracy": "test_accuracy", "forgetting": "forgetting"}
VIEWS, RULES = ("plain", "augmented"), ("last", "mean_of_last(10)", "ema(0.6)", "best")
FIXED = {"accuracy": ABSOLUTE["percent"], "forgetting": FORGETTING}
# Columns that were seen before the view and the rule were fixed. The others are held out.
SEEN = [("CIFAR-10", "s=2"), ("CIFAR-10", "alpha=0.1"), ("MNIST", "s=2"), ("MNIST", "alpha=0.1")]
WINDOW = 50  # the last rounds, over which runs are compared round by round
DRAWS, LEVEL = 10_000, 0.95  # of the bootstrap and of permutations; of all intervals
WEIGHT = 0.6  # of the moving average


def load_runs(root: Path, sweep: Sweep) -> pd.DataFrame:
    """Return a row for each run (at the full protocol, with today's code), view and metric.

    `values` [R] are those of the evaluated rounds from 1 on, in the unit of the print;
    `reconstructed` marks files that were rebuilt from a table of rounds.
    """
    rows = []
    for path in sorted((root / "multirun" / sweep.name / "runs").glob(f"*{evidence.SUFFIX}")):
        run = evidence.read(path)
        if "elsewhere" in run or protocol_of(sweep, run["overrides"]) or outdated(run["config"]):
            continue
        found = cell_of(sweep, run["overrides"])
        if found is None or run["summary"]["status"] != "completed":
            continue
        facts = {
            "run": path.name.removesuffix(evidence.SUFFIX),
            "seed": run["summary"]["seed"],
            "commit": run["summary"].get("commit"),
            "reconstructed": bool(run["summary"].get("reconstructed")),
            "hours": core_hours(run["summary"]),
        }
        rows += [found[1] | facts | each for each in series(run["tables"][files.ROUNDS])]
    names = [*CELL, *("run", "seed", "commit", "reconstructed", "hours")]
    names += ["view", "metric", "values"]
    return pd.DataFrame(rows, columns=names)


def core_hours(summary: dict[str, Any]) -> float:
    """Return what a run cost on CPU cores; nan where its time is not known or it used a GPU."""
    machine = summary["hardware"]
    if machine["device"] != "cpu" or "seconds" not in summary:
        return np.nan
    cores = max(machine.get("workers") or 1, 1) * (machine.get("threads") or 1)
    return summary["seconds"] * cores / 3600


def series(table: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the values of each view and metric that a table of rounds has."""
    for view in VIEWS:
        for metric, column in METRICS.items():
            name = column if view == "plain" else f"{column}_{view}"
            if name in table:
                values = np.array([float(cell or "nan") for cell in table[name].split(",")])[1:]
                scale = 100 if metric == "accuracy" else 1
                yield {"view": view, "metric": metric, "values": scale * values[~np.isnan(values)]}


def printed_values() -> pd.DataFrame:
    """Return Table 1 as printed: the columns of CELL, `metric`, `printed` and `printed_std`."""
    table = pd.read_csv(Path(__file__).parent / "published" / "tables.csv", dtype={"table": str})
    table = table[(table["paper"] == "FedNTD") & (table["table"] == "1") & table["value"].notna()]
    table = table.rename(columns={"value": "printed", "std": "printed_std"})
    return table[[*CELL, "metric", "printed", "printed_std"]]


def both_views(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that have both views; of a seed that was run twice, the first."""
    first = runs[runs["view"] == "augmented"].drop_duplicates([*CELL, "seed", "metric"])
    return runs[runs["run"].isin(first["run"])]


def cells(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each cell, metric, view and rule: `value` (mean over seeds), `n` seeds,
    `printed`, `difference`."""
    parts = []
    for rule in RULES:
        found = [
            Rule(rule).reported(values, metric)
            for values, metric in zip(runs["values"], runs["metric"], strict=True)
        ]
        parts.append(runs.drop(columns="values").assign(rule=rule, value=np.array(found, float)))
    known = pd.concat(parts).groupby([*CELL, "metric", "view", "rule"], sort=False)
    table = known["value"].agg(["mean", "size"]).reset_index()
    table = table.rename(columns={"mean": "value", "size": "n"})
    table = table.merge(printed_values(), on=[*CELL, "metric"])
    return table.assign(difference=table["value"] - table["printed"])


def under_the_rule(table: pd.DataFrame, view: str = "augmented", rule: str = "ema(0.6)") -> Any:
    """Return the cells in one view by one rule; by default those of the inferred protocol."""
    return table[(table["view"] == view) & (table["rule"] == rule)]


def held_out(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of columns that nobody had looked at when the rule was fixed."""
    return table[~pd.MultiIndex.from_frame(table[COLUMN]).isin(SEEN)]


def errors(table: pd.DataFrame, by: Sequence[str] = ("metric", "view", "rule")) -> pd.DataFrame:
    """Return root mean square error, bias, and how many values lie within the fixed tolerance."""
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
    """Return for each metric in how many cells one (view, rule) is nearer to the print than
    another."""
    wide = table.pivot(index=[*CELL, "metric"], columns=["view", "rule"], values="difference")
    return (wide[one].abs() < wide[other].abs()).groupby("metric").sum()


def rmse(pairs: np.ndarray) -> float:
    """Return the root mean square difference of [n, 2] values."""
    return float(np.sqrt(np.mean((pairs[:, 0] - pairs[:, 1]) ** 2)))


def bias(pairs: np.ndarray) -> float:
    return float(np.mean(pairs[:, 0] - pairs[:, 1]))


def correlation(pairs: np.ndarray) -> float:
    return float(np.corrcoef(pairs.T)[0, 1])


def interval(
    table: pd.DataFrame, statistic: Callable[[np.ndarray], float], draws: int = DRAWS
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a statistic of (value, printed); whole columns are
    drawn, since the methods of a column share its clients and cohorts."""
    columns = [part[["value", "printed"]].to_numpy() for _, part in table.groupby(COLUMN)]
    drawn = np.random.default_rng(0).integers(len(columns), size=(draws, len(columns)))
    found = [statistic(np.concatenate([columns[i] for i in each])) for each in drawn]
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return the gain of each cell over FedAvg in the same column: `value` ours, `printed`."""
    key, both = [*COLUMN, "metric"], ["value", "printed"]
    base = table[table["method"] == "FedAvg"][[*key, *both]]
    found = table[table["method"] != "FedAvg"].merge(base, on=key, suffixes=("", "_base"))
    return found.assign(**{name: found[name] - found[f"{name}_base"] for name in both})


def same_sign(table: pd.DataFrame) -> int:
    return int((np.sign(table["value"]) == np.sign(table["printed"])).sum())


def seed_spread(runs: pd.DataFrame) -> pd.DataFrame:
    """Return for each metric the standard deviation over seeds, pooled over the cells that have
    several, with its 95 % interval (normal errors: chi-square) and degrees of freedom."""
    mine = runs[runs["view"] == "augmented"]
    mine = mine.assign(value=mine["values"].map(lambda values: smoothed(values)[-1]))
    groups = mine.groupby([*CELL, "metric"])["value"].agg(["var", "size"]).reset_index()
    groups = groups[groups["size"] > 1]
    groups = groups.assign(freedom=groups["size"] - 1, squares=groups["var"] * (groups["size"] - 1))
    found = groups.groupby("metric")[["freedom", "squares"]].sum()
    ends = stats.chi2.ppf([(1 + LEVEL) / 2, (1 - LEVEL) / 2], found[["freedom"]])
    return found.assign(
        spread=np.sqrt(found["squares"] / found["freedom"]),
        low=np.sqrt(found["squares"] / ends[:, 0]),
        high=np.sqrt(found["squares"] / ends[:, 1]),
    )


def known_spread(sweep: Sweep) -> dict[str, float]:
    """Return the spread over seeds by which the sweep is judged, in the unit of the print."""
    scale = {"accuracy": 100.0, "forgetting": 1.0}
    return {metric: value * scale[metric] for metric, value in sweep.rule.spread.items()}


def tolerances(table: pd.DataFrame, spread: dict[str, float]) -> pd.Series:
    """Return how far each value may lie from its print: the fixed tolerance, two printed standard
    deviations or two standard errors of the mean over seeds, whichever is most."""
    error = table["metric"].map(spread) / np.sqrt(table["n"])
    least = np.maximum(table["metric"].map(FIXED), 2 * error)
    return np.maximum(least, 2 * table["printed_std"].fillna(0))


def chance(table: pd.DataFrame, spread: dict[str, float], draws: int = DRAWS) -> dict[str, Any]:
    """Return how many values would be within by chance: each against the print of every other
    measured method of its column (`share`), and with the methods of each column permuted.

    `permuted`: mean, and the 2.5 % and 97.5 % quantiles; `most`: of all draws."""
    table = table.assign(tolerance=tolerances(table, spread))
    random, totals = np.random.default_rng(0), np.zeros(draws)
    own = others = pairs = 0
    for _, part in table.groupby([*COLUMN]):
        hits: Any = 0  # [i, j]: how many metrics of method i are within the print of method j
        for _, one in part.groupby("metric"):
            one = one.sort_values("method")
            far = one["value"].to_numpy()[:, None] - one["printed"].to_numpy()
            hits = hits + (np.abs(far) <= one["tolerance"].to_numpy()[:, None])
        n = len(hits)
        own, others = own + np.trace(hits), others + hits.sum() - np.trace(hits)
        pairs += n * (n - 1) * part["metric"].nunique()
        orders = random.permuted(np.tile(np.arange(n), (draws, 1)), axis=1)
        totals += hits[np.arange(n), orders].sum(axis=1)
    low, high = np.quantile(totals, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {
        "within": int(own),
        "of": len(table),
        "share": others / pairs,
        "permuted": (totals.mean(), low, high),
        "most": int(totals.max()),
    }


def method_pairs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return each pair of methods of one column, compared round by round in each metric: `ours`
    and `printed` are their differences, `decidable` and `swapped` are true or false.

    Methods of a column share seed, clients and cohorts, so most of the swing of a run cancels.
    `view`: augmented where all methods of the column have it, else plain. A pair is decidable where
    the moving average of the differences exceeds the 0.975 quantile of Student's t times its
    standard error, and the prints differ. The standard error takes the differences in the last
    WINDOW rounds as independent.
    """
    limit = stats.t.ppf((1 + LEVEL) / 2, WINDOW - 1)
    rows = []
    for (*column, metric), part in runs.groupby([*COLUMN, "metric"]):
        methods = part.groupby("view")["method"].nunique()
        view = "augmented" if methods.nunique() == 1 and len(methods) > 1 else "plain"
        mine = first_seeds(part[part["view"] == view]).merge(printed_values())
        for one, other in combinations(mine.to_dict("records"), 2):
            far = one["values"] - other["values"]
            ours, printed = smoothed(far)[-1], one["printed"] - other["printed"]
            error = np.std(far[-WINDOW:], ddof=1) * np.sqrt((1 - WEIGHT) / (1 + WEIGHT))
            decidable = abs(ours) > limit * error and not np.isclose(printed, 0)
            swapped = decidable and ours * printed < 0
            rows.append([*column, metric, view, one["method"], other["method"], ours, printed])
            rows[-1] += [decidable, swapped]
    names = [*COLUMN, *("metric", "view", "method", "other", "ours", "printed")]
    return pd.DataFrame(rows, columns=[*names, "decidable", "swapped"])


def first_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one run of each cell and metric: that of the lowest seed."""
    return runs.sort_values(["seed", "reconstructed"]).drop_duplicates([*CELL, "metric"])


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the moving average with weight 0.6 in every round, [R]."""
    return pd.Series(values).ewm(alpha=1 - WEIGHT, adjust=False).mean().to_numpy()


Fit = Callable[[pd.DataFrame], Callable[[pd.DataFrame], Any]]


def factor(rest: pd.DataFrame) -> Callable[[pd.DataFrame], Any]:
    ratio = (rest["printed"] / rest["value"]).mean()
    return lambda part: ratio * part["value"]


def affine(rest: pd.DataFrame) -> Callable[[pd.DataFrame], Any]:
    line = np.polyfit(rest["value"], rest["printed"], 1)
    return lambda part: np.polyval(line, part["value"])


def stopping(rest: pd.DataFrame) -> Callable[[pd.DataFrame], Any]:
    curves = np.stack(rest["curve"].to_list())
    best = ((curves - rest[["printed"]].to_numpy()) ** 2).mean(axis=0).argmin()
    return lambda part: np.stack(part["curve"].to_list())[:, best]


RIVALS: dict[str, Fit] = {"one factor": factor, "affine": affine, "stopping early": stopping}


def rivals(runs: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the root mean square error of other explanations of the print by the plain test, one
    row each and one column for each metric.

    Each is fitted to all columns but one and applied to that one: one factor for all cells (mean
    of the last ten rounds), a factor and an offset, one round at which all runs stop (moving
    average)."""
    plain = runs[runs["view"] == "plain"]
    smooth = plain.assign(curve=plain["values"].map(smoothed)).groupby([*CELL, "metric"])["curve"]
    curves = smooth.agg(lambda each: np.mean([*each], axis=0))
    known = under_the_rule(table, "plain", "mean_of_last(10)")
    known = known.merge(curves.reset_index(), on=[*CELL, "metric"])
    found = {
        metric: {name: out_of_column(part, fit) for name, fit in RIVALS.items()}
        for metric, part in known.groupby("metric")
    }
    return pd.DataFrame(found)


def out_of_column(table: pd.DataFrame, fit: Fit) -> float:
    far = [fit(table.drop(part.index))(part) - part["printed"] for _, part in table.groupby(COLUMN)]
    return float(np.sqrt(np.mean(np.concatenate(far) ** 2)))


def shared_swings(runs: pd.DataFrame) -> float:
    """Return how far the swings of two methods of one column agree: the mean correlation of their
    accuracies in the last WINDOW rounds, less their straight lines."""
    mine = runs[(runs["view"] == "augmented") & (runs["metric"] == "accuracy")]
    found: list[float] = []
    for _, part in first_seeds(mine).groupby(COLUMN):
        rest = signal.detrend([values[-WINDOW:] for values in part["values"]])
        found += np.corrcoef(rest)[np.triu_indices(len(rest), 1)].tolist() if len(rest) > 1 else []
    return float(np.mean(found))


def swing_of_sum(runs: pd.DataFrame) -> pd.Series:
    """Return for each data set how far accuracy + F follows the swing of a run: its standard
    deviation in the last WINDOW rounds over that of the accuracy, both as fractions; mean over
    runs."""
    mine = runs[runs["view"] == "augmented"]
    wide = mine.pivot(index=["dataset", "run"], columns="metric", values="values")
    accuracy = wide["accuracy"].map(lambda values: values[-WINDOW:] / 100)
    both = accuracy + wide["forgetting"].map(lambda values: values[-WINDOW:])
    return (both.map(np.std) / accuracy.map(np.std)).groupby("dataset").mean()


def sums(table: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy + F of each cell as a fraction: `value` ours, `printed`."""
    scale = table["metric"].map({"accuracy": 0.01, "forgetting": 1})
    both = ["value", "printed"]
    return table[both].mul(scale, axis=0).join(table[CELL]).groupby(CELL)[both].sum()


def other_readings(root: Path, table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return the cells that were also run in another reading (a sweep of `names`, column
    `reading`), with `value` and `first`, the value of the first reading; `was` and `now` say
    whether each is within the fixed tolerance."""
    parts = []
    for name in names:
        runs = load_runs(root, load_sweep(name, [conf_directory()]))
        parts.append(under_the_rule(cells(both_views(runs))).assign(reading=name))
    first = table[[*CELL, "metric", "difference", "value"]]
    first = first.rename(columns={"difference": "far", "value": "first"})
    found = pd.concat(parts).merge(first, on=[*CELL, "metric"])
    limit = found["metric"].map(FIXED)
    return found.assign(was=found["far"].abs() <= limit, now=found["difference"].abs() <= limit)


def orders_on_other_data(table: pd.DataFrame) -> pd.DataFrame:
    """Return for each column of a table.csv that was run on other data how far its order of methods
    agrees: `n` methods, Spearman's `rho`, `pairs`, those `decidable` (means further apart than two
    standard errors of their difference, and prints that differ) and those `swapped`."""
    known = table[(table["n"] > 0) & table["reading"].isna()]
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
