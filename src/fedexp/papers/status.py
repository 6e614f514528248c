"""Show how much of the papers' tables has been measured, and the hours spent and still needed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.interfaces import Needs
from fedexp.analysis import layout
from fedexp.analysis.algorithm_costs import read_option
from fedexp.analysis.sweep import Sweep
from fedexp.config.options import conf_directory
from fedexp.config.values import make_target
from fedexp.papers.cells import find_data_changes, find_departures, published_cells
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
    " model in proportion to the gradient passes over the training data."
)
COLUMNS = (
    *("printed", "measured, by seeds", "within", "outside", "explained", "order reproduced"),
    *("spent", "left (first seeds)"),
)
HOURS = {"cpu": "core h", "gpu": "GPU h"}


def format_status(root: Path) -> str:
    """Return the table that `fedexp reproduction` prints.

    root: the directory that contains `multirun`.
    """
    sweeps, runs, tables = compare_everything(root)
    runs = runs[runs["status"].isin(OVER)]
    hours = pd.DataFrame(runs["summary"].map(compute_hours).tolist(), runs.index, list(HOURS))
    runs = runs.join(hours)
    parts = [
        list_jobs(sweep, tables.get(name), runs[runs["sweep"] == name])
        for name, sweep in sweeps.items()
    ]
    jobs = estimate_hours(pd.concat(parts, ignore_index=True), runs)
    rows = {}
    for name, sweep in sweeps.items():
        rows[f"`{name}`"] = {
            "printed": str(len(published_cells(sweep)) or "-"),
            **count_verdicts(tables.get(name)),
            "spent": format_spent(runs[(runs["sweep"] == name) & (runs["made_by"] == name)]),
            "left (first seeds)": format_left(jobs[jobs["sweep"] == name]),
        }
    columns = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=list(COLUMNS))
    return f"{layout.markdown(columns.fillna(''))}\n{LEGEND}\n"


def list_jobs(sweep: Sweep, table: pd.DataFrame | None, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the distinct jobs of a sweep, with the columns of `describe_work` and these columns:

    sweep, overrides: the sweep's name, and the job's overrides without the seed
    done: whether the table has the job's values at the full protocol and in the view of the rule.
    If the sweep has no published values: whether the job was run.

    runs: the finished runs of the sweep.
    """
    full = [set(run["overrides"]) for _, run in runs.iterrows() if not find_departures(sweep, run)]
    found: dict[frozenset[str], dict[str, Any]] = {}
    for block in sweep.blocks:
        for combination in block.combinations():
            texts = frozenset([*map("=".join, combination), *block.fixed])
            if table is None:
                done = any(map(texts.issubset, full))
            else:
                done = has_values(table, block.fields(combination))
            job = {"sweep": sweep.name, "overrides": texts, "done": done}
            found[texts] = job | describe_job(texts)
    return pd.DataFrame(found.values())


# Overrides that change the work of a job, besides the algorithm: options, and values that Hydra
# sets after it has composed the options.
OPTIONS = ("experiment", "dataset", "scenario", "model")
VALUES = ("rounds", "participation", "local.epochs")


def describe_job(overrides: frozenset[str]) -> dict[str, Any]:
    """Return the work of a job, see `describe_work`."""
    given = dict(text.split("=", 1) for text in overrides)
    # Composing takes most of the time, and many jobs have the same options.
    choices, values = compose_options(
        frozenset(o for o in overrides if o.partition("=")[0] in OPTIONS)
    )
    choices = choices | {"algorithm": given.get("algorithm", "fedavg")}
    return describe_work(
        overrides, choices, *(float(given.get(key, values[key])) for key in VALUES)
    )


def describe_work(
    overrides: Iterable[str],
    choices: Mapping[str, str],
    rounds: float,
    participation: float,
    epochs: float,
) -> dict[str, Any]:
    """Return a description of the work of a run or a job, with these keys:

    algorithm: the selected option of the group `algorithm`
    kind: the data set, scenario and model. Run times can be compared between runs of one kind.
    passes: the gradient passes over the training data of all clients. A forward pass counts as a
        third of a gradient pass. The server's computation is not counted.
    """
    needs, paradigm = read_algorithm(choices["algorithm"])
    model = sorted(text for text in overrides if text.startswith("model."))
    share = 1.0 if paradigm == "centralized" else participation
    passes = epochs * (needs.gradients + needs.teachers / 3)
    passes += needs.gradient_passes + needs.forward_passes / 3
    return {
        "algorithm": choices["algorithm"],
        "kind": " ".join([*(choices[name] for name in ("dataset", "scenario", "model")), *model]),
        "passes": round(rounds * share * passes, 9),
    }


@cache
def read_algorithm(name: str) -> tuple[Needs, str]:
    """Return the requirements and the paradigm of an option of the group `algorithm`."""
    node = read_option(conf_directory() / "algorithm" / f"{name}.yaml")
    return make_target(node, "algorithm", FedAvg).needs, node.get("paradigm", "")


@cache
def compose_options(overrides: frozenset[str]) -> tuple[dict[str, str], dict[str, float]]:
    """Compose a configuration; return the chosen options by group, and the values of VALUES."""
    with initialize_config_dir(str(conf_directory().resolve()), version_base="1.3"):
        config = compose("config", overrides=sorted(overrides), return_hydra_config=True)
    values = {key: OmegaConf.select(config, key) for key in VALUES}
    return dict(config.hydra.runtime.choices), values


def has_values(table: pd.DataFrame, fields: Mapping[str, str]) -> bool:
    """Return whether a table has a job's values at the full protocol, in the rule's view."""
    judged = ~table["verdict"].str.endswith(" view") & (table["protocol"] == "full")
    mine = (table[list(fields)] == pd.Series(fields)).all(axis=1)
    return bool((judged & mine).any())


def estimate_hours(jobs: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Add the hours that one run of each job takes (columns `cpu` and `gpu`; nan if unknown).

    The hours are proportional to the job's passes. The hours per pass are the median over runs of
    the same kind and algorithm or, if there are no such runs, over runs of the same kind. runs: a
    table that has the columns `cpu` and `gpu`. Runs on other data than the experiment's are
    ignored.
    """
    rows = []
    for _, run in runs.iterrows():
        config, summary = run["config"], run["summary"]
        if "rounds" in config and not find_data_changes(config, summary):
            values = summary["rounds"], config["participation"], config["local"]["epochs"]
            work = describe_work(run["overrides"], config["choices"], *values)
            rows.append(work | {unit: run[unit] / work["passes"] for unit in HOURS})
    rates = pd.DataFrame(rows, columns=["kind", "algorithm", *HOURS])
    same = rates.groupby(["kind", "algorithm"]).median()
    alike = rates.drop(columns="algorithm").groupby("kind").median()
    own = jobs[["kind", "algorithm"]].join(same, on=["kind", "algorithm"])
    every = jobs[["kind"]].join(alike, on="kind")
    return jobs.join(own[[*HOURS]].fillna(every[[*HOURS]]).mul(jobs["passes"], axis=0))


def count_verdicts(table: pd.DataFrame | None) -> dict[str, str]:
    """Return how many values were measured and how many agree with the paper, as text."""
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
    """Return the verdicts on the order of methods, including those from runs on other data."""
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
