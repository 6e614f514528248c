"""Show the state of the papers' tables: measured values, hours spent and hours left."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from hydra import compose, initialize_config_dir

from fedexp.algorithms.base import FedAvg
from fedexp.analysis import layout
from fedexp.analysis.algorithm_costs import read_option
from fedexp.analysis.sweep import Sweep, find_cell
from fedexp.config.options import conf_directory
from fedexp.config.values import make_target
from fedexp.papers.cells import find_departures, published_cells
from fedexp.papers.judge import COLUMN
from fedexp.papers.readings import compare_everything, count_explained, first_reading
from fedexp.papers.runs import compute_hours
from fedexp.rundir.schema import OVER

LEGEND = (
    "printed: the number of published values; measured: the values that were run at the full"
    " protocol (alternative readings have separate rows); explained: the values that are outside"
    " the tolerance but within it in an alternative reading; order reproduced: the columns of the"
    " paper's table in which no methods are swapped beyond noise; spent: core hours on CPUs"
    " (seconds x threads x workers) and GPU hours (seconds x workers); left: the hours needed to"
    " run each job without a judged value once, estimated from runs with the same data set and"
    " model in proportion to the passes over the training data; missing: the data sets that were"
    " not found in data_dir (--data-dir)."
)
COLUMNS = (
    *("printed", "measured, by seeds", "within", "outside", "explained", "order reproduced"),
    *("spent", "left (first seeds)", "missing"),
)
HOURS = {"cpu": "core h", "gpu": "GPU h"}


def format_status(root: Path, data: Sequence[Path]) -> str:
    """Return the table that `fedexp reproduction` prints.

    root: the directory that contains `multirun`. data: the directories that contain data sets.
    """
    sweeps, runs, tables = compare_everything(root)
    facts = runs.drop_duplicates(["sweep", "run"])
    facts = facts[facts["status"].isin(OVER)]
    hours = [compute_hours(summary) for summary in facts["summary"]]
    facts = facts.join(pd.DataFrame(hours, index=facts.index, columns=list(HOURS)))
    jobs = pd.DataFrame(
        [job for name in sweeps for job in list_jobs(sweeps[name], tables.get(name))]
    )
    jobs = add_costs(jobs, facts, sweeps)
    rows = {}
    for name, sweep in sweeps.items():
        mine = facts[(facts["sweep"] == name) & (facts["made_by"] == name)]
        of_sweep = jobs[jobs["sweep"] == name]
        rows[f"`{name}`"] = {
            "printed": str(len(published_cells(sweep)) or "-"),
            **count_verdicts(tables.get(name)),
            "spent": format_spent(mine),
            "left (first seeds)": format_left(of_sweep),
            "missing": list_missing_data(of_sweep[~of_sweep["done"]], data),
        }
    columns = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=list(COLUMNS))
    shown = columns.fillna("")
    return f"{layout.markdown(shown)}\n{LEGEND}\n"


def list_jobs(sweep: Sweep, table: pd.DataFrame | None) -> list[dict[str, Any]]:
    """Return the distinct jobs of a sweep as dicts with these keys:

    overrides: the job's overrides, without the seed
    algorithm, data, kind, passes: see `describe_work`
    done: whether the table has the job's values at the full protocol, in the view of the rule
    """
    found: dict[frozenset[str], dict[str, Any]] = {}
    for block in sweep.blocks:
        for combination in block.combinations():
            texts = frozenset([*(f"{key}={value}" for key, value in combination), *block.fixed])
            if texts not in found:
                done = has_values(table, block.fields(combination))
                job = {"sweep": sweep.name, "overrides": texts, "done": done}
                found[texts] = job | describe_work(texts)
    return list(found.values())


def describe_work(overrides: frozenset[str]) -> dict[str, Any]:
    """Return what a job trains.

    It is derived from the job's composed configuration, so no data are read.

    data: the data sets that the job reads
    kind: its data set, scenario and model; run times can be compared between jobs of the same kind
    passes: the number of passes over the training data of all clients, which is rounds x
        participation x local epochs
    """
    options = dict(text.split("=", 1) for text in overrides)
    algorithm = options.get("algorithm", "fedavg")
    # Composing takes most of the time, and the algorithm's options do not change the work.
    setting = frozenset(text for text in overrides if not text.startswith("algorithm"))
    config = compose_config(setting)
    choices = config.hydra.runtime.choices
    node = read_option(conf_directory() / "algorithm" / f"{algorithm}.yaml")
    data = [choices["dataset"], *(config.scenario.get("domains") or ())]
    if make_target(dict(node), "algorithm", FedAvg).needs.surrogate and config.surrogate.dataset:
        data.append(config.surrogate.dataset)
    model = sorted(text for text in overrides if text.startswith("model."))
    share = 1.0 if node.get("paradigm") == "centralized" else config.participation
    return {
        "algorithm": algorithm,
        "data": tuple(dict.fromkeys(map(str, data))),
        "kind": " ".join([*(choices[name] for name in ("dataset", "scenario", "model")), *model]),
        "passes": round(config.rounds * config.local.epochs * share, 9),
    }


@cache
def compose_config(overrides: frozenset[str]) -> Any:
    """Return the configuration that Hydra composes from these overrides."""
    with initialize_config_dir(str(conf_directory().resolve()), version_base="1.3"):
        return compose("config", overrides=sorted(overrides), return_hydra_config=True)


def has_values(table: pd.DataFrame | None, fields: Mapping[str, str]) -> bool:
    """Return whether a table has a job's values at the full protocol, in the view of the rule."""
    if table is None or not fields:
        return False
    judged = ~table["verdict"].str.endswith(" view") & (table["protocol"] == "full")
    mine = (table[list(fields)] == pd.Series(fields)).all(axis=1)
    return bool((judged & mine).any())


def add_costs(jobs: pd.DataFrame, facts: pd.DataFrame, sweeps: Mapping[str, Sweep]) -> pd.DataFrame:
    """Add the hours that one run of each job takes (`cpu`, `gpu`).

    The hours are the median over the job's runs. If it has none, they are estimated from runs with
    the same data set and model, and if possible the same method, in proportion to the passes over
    the training data. A job without published values, such as a job for a figure, is done if it was
    run.
    """
    rows = []
    for _, run in facts.iterrows():
        sweep, given = sweeps[run["sweep"]], set(run["overrides"])
        if find_cell(sweep, run["overrides"]) and not find_departures(sweep, run):
            mine = jobs[jobs["sweep"] == run["sweep"]]
            fits = mine.index[[given.issuperset(texts) for texts in mine["overrides"]]]
            rows += [{"job": job, "cpu": run["cpu"], "gpu": run["gpu"]} for job in fits[:1]]
    own = pd.DataFrame(rows, columns=["job", "cpu", "gpu"]).groupby("job").median()
    figure = jobs["sweep"].map(lambda name: not len(published_cells(sweeps[name])))
    jobs = jobs.assign(done=jobs["done"] | (figure & jobs.index.isin(own.index)))
    for unit in HOURS:
        rate = own[unit].reindex(jobs.index) / jobs["passes"]
        same = rate.groupby([jobs["kind"], jobs["algorithm"]]).transform("median")
        alike = rate.groupby(jobs["kind"]).transform("median")
        jobs[unit] = rate.fillna(same).fillna(alike) * jobs["passes"]
    return jobs


def count_verdicts(table: pd.DataFrame | None) -> dict[str, str]:
    """Return the numbers of measured values, verdicts and reproduced orders in a table, as text."""
    if table is None or not len(table):
        return {}
    full = first_reading(table)
    full = full[full["protocol"] == "full"]
    seeds = sorted(Counter(full["n"].astype(int)).items())
    texts = [f"{number} with {n} seed{'s' if n > 1 else ''}" for n, number in seeds]
    verdicts, orders = Counter(full["verdict"]), list_judged_orders(table)
    kept = sum(not text.startswith("swapped") for text in orders)
    return {
        "measured, by seeds": ", ".join(texts) or "0",
        "within": str(verdicts["within"]),
        "outside": str(verdicts["outside"]),
        "explained": str(count_explained(table)),
        "order reproduced": f"{kept} of {len(orders)}" if orders else "-",
    }


def list_judged_orders(table: pd.DataFrame) -> list[str]:
    """Return the verdicts on the order of the methods in a table, including columns run on other
    data."""
    judged = table[(table["order_by"] != "") & ~table["order"].str.startswith("not judged")]
    return [str(group["order"].iloc[0]) for _, group in judged.groupby(list(COLUMN), sort=False)]


def format_spent(facts: pd.DataFrame) -> str:
    """Return the hours that runs took on CPUs and on GPUs, as text."""
    sums = facts[list(HOURS)].sum()
    texts = [f"{sums[unit]:.1f} {name}" for unit, name in HOURS.items() if sums[unit]]
    unknown = int(facts[list(HOURS)].isna().all(axis=1).sum())
    more = f" ({unknown} run{'s' if unknown > 1 else ''} without times)" if unknown else ""
    return (", ".join(texts) or "-") + more


def format_left(jobs: pd.DataFrame) -> str:
    """Return the number of unfinished jobs and the CPU and GPU hours that they need, as text."""
    missing = jobs[~jobs["done"]]
    if not len(missing):
        return f"0 of {len(jobs)} jobs"
    parts = []
    for unit, name in HOURS.items():
        known = missing[unit].dropna()
        some = f" for {len(known)} of them" if len(known) < len(missing) else ""
        parts += [f"{known.sum():.1f} {name}{some}"] if len(known) else []
    return f"{len(missing)} of {len(jobs)} jobs: " + (" or ".join(parts) or "not measured")


def list_missing_data(jobs: pd.DataFrame, data: Sequence[Path]) -> str:
    """Return the data sets of the jobs that are in none of the directories, as text."""
    needed = sorted({name for names in jobs["data"] for name in names})
    absent = [name for name in needed if not any(has_dataset(name, folder) for folder in data)]
    return f"data: {', '.join(absent)}" if absent else ""


def has_dataset(dataset: str, data_dir: Path) -> bool:
    """Return whether data_dir has a folder or file whose name starts with the name of a data set.

    The digits data set is always available, since it is part of scikit-learn.
    """
    if dataset == "digits":
        return True
    entries = [path.name for path in data_dir.iterdir()] if data_dir.is_dir() else []
    name = re.sub(r"\W|_", "", dataset.lower())
    return any(re.match(rf"{name}(?!\d)", re.sub(r"\W|_", "", entry.lower())) for entry in entries)
