"""The printed values of a paper's table beside the runs of its sweep: a row for each.

`cells` gives the rows of table.csv. Runs of different protocols are never put together: those at
the sweep's own stand beside the print or, where there are none, the largest group that was run at
another.
"""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.algorithms.local_training import SCHEDULES_OVER_ALL_ROUNDS
from fedexp.analysis.measures import describe_origin
from fedexp.analysis.rules import Rule
from fedexp.analysis.sweep import Sweep, find_cell, find_protocol_changes
from fedexp.config.options import conf_directory
from fedexp.core import yaml_files
from fedexp.data.views import PLAIN, VALIDATION
from fedexp.papers.judge import tolerance, verdict, with_order
from fedexp.rundir.revisions import outdated
from fedexp.rundir.schema import OVER

TABLES = Path(__file__).parent / "published" / "tables.csv"
# what the papers' released code gives at the printed protocol, where known
RELEASED = TABLES.with_name("released.csv")
OF_RELEASED = ["paper", "table", "dataset", "partition_param", "setting", "method", "metric"]
CELL = (
    *("dataset", "partition", "partition_param", "clients", "participation", "local_epochs"),
    *("setting", "method"),
)
EMPTY = ("not_applicable", "not_run")  # beginnings of the notes on cells that are printed empty
OF_RULE, OF_TASKS = ("accuracy", "forgetting"), ("average_accuracy", "new_task_accuracy")
AGAINST_FEDAVG = ("rounds_to_fedavg", "speedup_to_fedavg")
LAST, LAST_TEN = Rule("last"), Rule("mean_of_last(10)")
EXPECTED = {  # by an option of the group `experiment`
    "train": "training examples",
    "test": "test examples",
    "classes": "classes",
    "clients": "clients",
}
ROUNDING = 0.001  # of an expected number: a split by fractions may round elsewhere


@cache
def printed_values() -> pd.DataFrame:
    """Return all printed values as texts, with `released`, such as `84.5 (round 110, seed 1)`."""
    table = pd.read_csv(TABLES, dtype=str, keep_default_na=False)
    released = pd.read_csv(RELEASED, dtype=str, keep_default_na=False)
    released["released"] = released["value"] + " (" + released["of"] + ")"
    known = table[~table["note"].str.startswith(EMPTY)]
    both = known.merge(released[[*OF_RELEASED, "released"]], on=OF_RELEASED, how="left")
    return both.fillna({"released": ""})


def printed_cells(sweep: Sweep, table: str = "") -> pd.DataFrame:
    """Return the printed values of a sweep's table, or of another one of its paper."""
    known = printed_values()
    mine = (known["paper"] == sweep.paper) & (known["table"] == (table or sweep.table))
    return known[mine & (known["method"] != "(all)")]


def cells(sweep: Sweep, runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for every printed value of a sweep, whether it has been run or not.

    runs: those of its directory, as of `runs.read_runs`."""
    printed = printed_cells(sweep)
    found = measured(sweep, printed, runs)
    jobs = dict(list(found.groupby("cell")))
    values: list[dict[Any, Any]] = printed.to_dict("records")
    rows = [
        row_of(sweep, row, jobs.get(cell, found.iloc[:0]))
        for cell, row in zip(printed.index, values, strict=True)
    ]
    return with_order(pd.DataFrame(rows, index=printed.index)) if rows else pd.DataFrame()


def measured(sweep: Sweep, printed: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each run and each printed value (`cell`) that it stands beside: `value` and
    its standard `error` within the run, fractions or rounds (inf: never reached), and `changes`,
    how the run departs from the protocol of the table."""
    rows: list[dict[str, Any]] = []
    for _, parts in runs.groupby(["sweep", "run"], sort=False):
        run = parts.iloc[0]
        found = find_cell(sweep, run["overrides"])
        if found is None:
            continue
        for measure in found[0].measures:
            wanted = found[1] | {k: str(measure[k]) for k in ("metric", "setting") if k in measure}
            mine = printed[(printed[list(wanted)] == pd.Series(wanted)).all(axis=1)]
            values: list[dict[Any, Any]] = mine.to_dict("records")
            for cell, row in zip(mine.index, values, strict=True):
                numbers = numbers_of(sweep, row, parts, measure)
                rows.append({**run, "cell": cell, "kind": measure["value"], **numbers})
    names = ["cell", "kind", "changes", "value", "error", "plain_last", "plain_last10"]
    table = pd.DataFrame(rows, columns=[*runs.columns, *names, "plain_error", "diverged"])
    table = without_repeats(table)
    return against_fedavg(table, printed) if table["kind"].isin(AGAINST_FEDAVG).any() else table


def without_repeats(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table without another sweep's run of a seed that the sweep has itself."""
    borrowed = table["run"].str.contains("/").astype(bool)
    own = table[~borrowed & table["value"].notna()]
    have = pd.MultiIndex.from_frame(own[["cell", "seed"]])
    others = table[borrowed & ~pd.MultiIndex.from_frame(table[["cell", "seed"]]).isin(have)]
    others = others.sort_values("value", key=pd.isna, kind="stable")
    kept = others.drop_duplicates(["cell", "seed"]).index
    return table[~borrowed | table.index.isin(kept)].reset_index(drop=True)


def numbers_of(
    sweep: Sweep, row: Mapping[str, Any], parts: pd.DataFrame, measure: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what one run says of a printed value."""
    run, kind = parts.iloc[0], str(measure["value"])
    found: dict[str, Any] = {"diverged": run["status"] == "diverged"}
    changes = departures(sweep, run)
    if run["status"] not in OVER:
        return found | {"changes": join_changes(changes)}
    if kind in OF_RULE:
        values = values_of(parts, kind, sweep.rule.view)
        found["value"] = sweep.rule.reported(values, kind)
        found["error"] = sweep.rule.standard_error(values)
        plain = values_of(parts, kind)
        found["plain_last"] = LAST.reported(plain, kind)
        found["plain_last10"] = LAST_TEN.reported(plain, kind)
        found["plain_error"] = LAST_TEN.standard_error(plain)
    elif kind in OF_TASKS:
        values = values_of(parts, kind, task=int(measure["task"]))
        ends = {end["task"]: end[kind] for end in run["summary"].get("tasks") or ()}
        found["value"] = ends.get(int(measure["task"]))
        found["error"] = LAST.standard_error(values)
    elif kind == "accuracy_at":
        found["value"] = curve_of(parts, PLAIN).get(int(measure["round"]))
    elif kind == "rounds_to":
        validated = (parts["view"] == VALIDATION).any()
        curve = curve_of(parts, VALIDATION if validated else PLAIN)
        found["value"] = rounds_to(curve, float(measure["factor"]) * target_of(row))
        schedule = (run["config"].get("local") or {}).get("schedule")
        # fewer rounds do not change when a target is reached
        if np.isfinite(found["value"]) and schedule not in SCHEDULES_OVER_ALL_ROUNDS:
            changes = [text for text in changes if not text.startswith("rounds=")]
    elif kind == "alignment":
        layers = dict(enumerate(run["summary"].get("alignment") or (), 1))
        found["value"] = layers.get(int(measure["layer"]), {}).get(measure["pair"])
    return found | {"changes": join_changes(changes)}


def values_of(parts: pd.DataFrame, measure: str, view: str = PLAIN, task: int = 0) -> list[float]:
    """Return the values of one run round by round, of all tasks or of one."""
    mine = (parts["measure"] == measure) & (parts["view"] == view)
    if task:
        mine &= parts["task"] == task
    return [float(value) for values in parts.loc[mine, "values"] for value in values]


def curve_of(parts: pd.DataFrame, view: str) -> pd.Series:
    """Return the accuracy of one run by round."""
    mine = parts[(parts["measure"] == "accuracy") & (parts["view"] == view)]
    rounds = np.concatenate([np.empty(0), *mine["rounds"]])
    return pd.Series(values_of(parts, "accuracy", view), index=rounds.astype(int))


def rounds_to(curve: pd.Series, accuracy: float) -> float:
    """Return the first round that reaches an accuracy; infinite where none does."""
    reached = curve.index[curve >= accuracy]
    return float(reached[0]) if len(reached) else math.inf


def target_of(row: Mapping[str, Any]) -> float:
    """Return Flashback's A of a setting, a fraction."""
    known = printed_values()
    same = known["metric"] == "target_accuracy"
    for name in ("paper", "table", "dataset", "partition_param"):
        same &= known[name] == row[name]
    return float(known.loc[same, "value"].iloc[0])


def against_fedavg(table: pd.DataFrame, printed: pd.DataFrame) -> pd.DataFrame:
    """Return the table with rounds to the accuracy that FedAvg ends at (its mean over seeds, of the
    same data set and protocol), or how many times fewer than FedAvg's number of rounds these are.
    FedAvg itself has no such value but by definition."""
    place = printed.loc[table["cell"], ["dataset", "method"]].set_index(table.index)
    table = table.assign(dataset=place["dataset"])
    base = table[(place["method"] == "FedAvg") & (table["measure"] == "accuracy")]
    base = base[base["status"].isin(OVER) & ~base["diverged"]]
    base = base.drop_duplicates(["dataset", "changes", "seed"])
    base = base.assign(end=[v[-1] for v in base["values"]], last=[r[-1] for r in base["rounds"]])
    ends = base.groupby(["dataset", "changes"])[["end", "last"]].mean()
    wanted = table["kind"].isin(AGAINST_FEDAVG) & (place["method"] != "FedAvg")
    for i in table.index[wanted & table["status"].isin(OVER)]:
        key = (table.loc[i, "dataset"], table.loc[i, "changes"])
        if key in ends.index:
            curve = pd.Series(table.loc[i, "values"], index=table.loc[i, "rounds"])
            rounds = rounds_to(curve, ends.loc[key, "end"])
            fewer = ends.loc[key, "last"] / rounds
            table.loc[i, "value"] = fewer if "speedup" in table.loc[i, "kind"] else rounds
    return table


def departures(sweep: Sweep, run: Any) -> list[str]:
    """Return how a run (a row of runs) departs from the protocol of the printed table: other
    options, other data under its name, or a method that was corrected since."""
    return (
        find_protocol_changes(sweep, run["overrides"])
        + other_data(run["summary"], run["overrides"])
        + outdated(run["config"])
    )


def join_changes(changes: list[str]) -> str:
    """Return departures as a text: options first, in one part."""
    said = [text for text in changes if text.startswith(("data: ", "older code: "))]
    options = " ".join(text for text in changes if text not in said)
    return "; ".join(filter(None, [options, *said]))


def other_data(summary: Mapping[str, Any], overrides: list[str]) -> list[str]:
    """Return how the data of a run differ from those that its experiment expects, such as `data:
    10,000 training examples, not 502,180`; [] for a summary without these numbers."""
    given = dict(text.lstrip("+").partition("=")[::2] for text in overrides)
    found, wanted = summary.get("data") or {}, dict(expected(given.get("experiment", "")))
    if "num_clients" in given:
        wanted["clients"] = int(given["num_clients"])
    if found.get("clients") == 1:  # algorithm.paradigm=centralized
        wanted["clients"] = None
    both = [(word, found.get(name), wanted.get(name)) for name, word in EXPECTED.items()]
    return [
        f"data: {there:,} {word}, not {number:,}"
        for word, there, number in both
        if number is not None and there is not None and abs(there - number) > ROUNDING * number
    ]


@cache
def expected(experiment: str) -> dict[str, int | None]:
    """Return the numbers of examples, classes and clients that an option of the group `experiment`
    expects; {} of another name."""
    path = conf_directory() / "experiment" / f"{experiment}.yaml"
    if not experiment or not path.is_file():
        return {}
    return yaml_files.load(path.read_text(encoding="utf-8")).get("expected") or {}


def one_per_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of a cell that count, one a seed.

    A run without the view of the rule does not count beside those that have it. Of a seed that was
    run twice, the run in the precision that most runs have counts."""
    there = runs["value"].notna()
    known = runs[there | runs["diverged"].astype(bool)] if there.any() else runs
    size = known.groupby(known["precision"].fillna("").astype(str))["run"].transform("size")
    best = known.assign(size=size, there=known["value"].notna())
    best = best.sort_values(["size", "there"], ascending=False, kind="stable")
    best = best.assign(seed=best["seed"].fillna(best["run"])).drop_duplicates("seed")
    return known.loc[sorted(best.index)]


def row_of(sweep: Sweep, row: Mapping[str, Any], jobs: pd.DataFrame) -> dict[str, Any]:
    """Return a printed value with what its runs say. jobs: rows of `measured`."""
    over = jobs[jobs["status"].isin(OVER)]
    full = (over["changes"] == "").any() or not len(over)
    changes = "" if full else str(over["changes"].value_counts().index[0])
    used = one_per_seed(over[over["changes"] == changes])
    states = [f"{count} {state}" for state, count in Counter(jobs["status"]).items()]
    said = {name: row[name] for name in ("paper", "table", *CELL, "metric", "unit")}
    return {
        **said,
        "status": ", ".join(states) or "not run",
        "n": len(used),
        "diverged": int(used["diverged"].sum()),
        **judged(sweep, row, used, changes),
        "protocol": "" if not len(used) else "full" if full else "reduced",
        "changes": changes,
        "not_shown": len(over) - len(used),
        **describe_origin(used["summary"]),
        "from": " ".join(sorted(set(used["made_by"]) - set(used["sweep"]))),
        "note": row["note"],
        "released": row["released"],
    }


def judged(
    sweep: Sweep, row: Mapping[str, Any], used: pd.DataFrame, changes: str
) -> dict[str, Any]:
    """Return ours beside the print, their difference, the tolerance and the verdict.

    used: the runs that count; changes: how they depart from the protocol."""
    scale = 100.0 if row["unit"] == "percent" else 1.0
    sound = used[~used["diverged"].astype(bool)]
    names = ["value", "error", "plain_last", "plain_last10", "plain_error"]
    numbers = sound[names].astype(float) * scale
    known = numbers["value"].dropna()
    never = bool(np.isinf(known).any())  # the mean over the other seeds would flatter
    mean = math.inf if never else known.mean()
    spread = math.nan if never else known.std()
    printed = float(row["value"] or "nan")
    error = spread / math.sqrt(len(known)) if len(known) > 1 else numbers["error"].mean()
    plain = numbers["plain_last10"].dropna()
    plain_error = numbers["plain_error"].mean()
    if len(plain) > 1:
        plain_error = plain.std() / math.sqrt(len(plain))
    ruled = used["kind"].isin(OF_RULE).any()
    over_seeds = sweep.rule.error_over_seeds(row["metric"] if ruled else "", len(known))
    found = {
        "rule": str(sweep.rule) if ruled else "",
        "mean": mean,
        "std": spread,
        "error": error if len(numbers) else math.nan,
        "plain_last": numbers["plain_last"].mean(),
        "plain_last10": plain.mean(),
        "plain_error": plain_error,
        "printed": printed,
        "printed_std": float(row["std"] or "nan"),
        "difference": mean - printed,
        "tolerance": tolerance(row, error if over_seeds is None else over_seeds * scale),
    }
    why = ""
    if changes:
        why = "reduced protocol"
    elif row["method"] == "FedAvg" and used["kind"].isin(AGAINST_FEDAVG).any():
        why = "by definition"
    elif ruled and sweep.rule.view != PLAIN and math.isnan(mean):
        why = f"no {sweep.rule.view} view"
    elif never and np.isfinite(known).any():
        why = f"reached by {np.isfinite(known).sum()} of {len(known)}"
    return found | {"verdict": verdict({**row, **found}, used["diverged"].tolist(), why)}
