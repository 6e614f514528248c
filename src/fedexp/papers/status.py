"""The state of the papers' tables (`--status`): what is measured, what it has cost, what the rest
would cost."""

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
from fedexp.papers.cells import departures, printed_cells
from fedexp.papers.judge import COLUMN
from fedexp.papers.readings import explained, first
from fedexp.papers.runs import hours_of
from fedexp.rundir.schema import OVER

LEGEND = (
    "measured: printed values with runs at the full protocol (a sweep of another reading has a row"
    " of its own); explained: those outside that are within where another reading of the setting"
    " was run; order reproduced: columns of the paper's table without a swap beyond noise. spent:"
    " core hours (seconds of all rounds x threads x workers) on CPUs, GPU hours (x workers) on"
    " GPUs, of the runs that are here or kept; left: one run of each job without a value in the"
    " view that the paper's rule judges, from measured runs of the same data and model, by the"
    " passes over the training data; missing: data sets without a folder below data_dir"
    " (--data-dir)."
)
COLUMNS = (
    *("printed", "measured, by seeds", "within", "outside", "explained", "order reproduced"),
    *("spent", "left (first seeds)", "missing"),
)
HOURS = {"cpu": "core h", "gpu": "GPU h"}


def status(
    sweeps: Mapping[str, tuple[Sweep, pd.DataFrame | None]],
    runs: pd.DataFrame,
    data: Sequence[Path],
) -> str:
    """Return the table of `--status`.

    sweeps: by name, with their tables where they have runs; runs: of `runs.read_runs`; data:
    directories in which data sets lie."""
    facts = runs.drop_duplicates(["sweep", "run"])
    facts = facts[facts["status"].isin(OVER)]
    facts = facts.join(pd.DataFrame([hours_of(s) for s in facts["summary"]], index=facts.index))
    jobs = pd.DataFrame([job for sweep, table in sweeps.values() for job in jobs_of(sweep, table)])
    jobs = with_costs(jobs, facts, {name: sweep for name, (sweep, _) in sweeps.items()})
    rows = {}
    for name, (sweep, table) in sweeps.items():
        mine = facts[(facts["sweep"] == name) & (facts["made_by"] == name)]
        of_sweep = jobs[jobs["sweep"] == name]
        rows[f"`{name}`"] = {
            "printed": str(len(printed_cells(sweep)) or "-"),
            **counts(table),
            "spent": spent(mine),
            "left (first seeds)": left(of_sweep),
            "missing": missing(of_sweep[~of_sweep["done"]], data),
        }
    columns = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=list(COLUMNS))
    shown = columns.fillna("")
    return f"{layout.markdown(shown)}\n{LEGEND}\n"


def jobs_of(sweep: Sweep, table: pd.DataFrame | None) -> list[dict[str, Any]]:
    """Return the jobs of a sweep, each once.

    overrides: without a seed
    algorithm, data, kind, passes: see `workload`
    done: whether the table has the job's values at the full protocol, in the view of the rule
    """
    found: dict[frozenset[str], dict[str, Any]] = {}
    for block in sweep.blocks:
        for combination in block.combinations():
            texts = frozenset([*(f"{key}={value}" for key, value in combination), *block.fixed])
            if texts not in found:
                done = has_values(table, block.fields(combination))
                job = {"sweep": sweep.name, "overrides": texts, "done": done}
                found[texts] = job | workload(texts)
    return list(found.values())


def workload(overrides: frozenset[str]) -> dict[str, Any]:
    """Return what a job trains, from its composed configuration; no data are read.

    data: data sets that it reads
    kind: data set, scenario and model; times of jobs of one kind can be compared
    passes: over the training data of all clients, rounds x participation x local epochs
    """
    options = dict(text.split("=", 1) for text in overrides)
    algorithm = options.get("algorithm", "fedavg")
    # Composing takes most of the time, and no option of an algorithm matters here.
    setting = frozenset(text for text in overrides if not text.startswith("algorithm"))
    config = composed(setting)
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
def composed(overrides: frozenset[str]) -> Any:
    """Return the configuration that Hydra composes from these overrides."""
    with initialize_config_dir(str(conf_directory().resolve()), version_base="1.3"):
        return compose("config", overrides=sorted(overrides), return_hydra_config=True)


def has_values(table: pd.DataFrame | None, fields: Mapping[str, str]) -> bool:
    """Return whether a table has the values of a job at the full protocol, and judges them."""
    if table is None or not fields:
        return False
    judged = ~table["verdict"].str.endswith(" view") & (table["protocol"] == "full")
    mine = (table[list(fields)] == pd.Series(fields)).all(axis=1)
    return bool((judged & mine).any())


def with_costs(
    jobs: pd.DataFrame, facts: pd.DataFrame, sweeps: Mapping[str, Sweep]
) -> pd.DataFrame:
    """Return the jobs with the hours that one run takes (`cpu`, `gpu`): of their own runs, of those
    of the same method on the same data and model, or of any method on them, by the passes over the
    training data. A job of a figure, which prints no values, is done where it was run."""
    rows = []
    for _, run in facts.iterrows():
        sweep, given = sweeps[run["sweep"]], set(run["overrides"])
        if find_cell(sweep, run["overrides"]) and not departures(sweep, run):
            mine = jobs[jobs["sweep"] == run["sweep"]]
            fits = mine.index[[given.issuperset(texts) for texts in mine["overrides"]]]
            rows += [{"job": job, "cpu": run["cpu"], "gpu": run["gpu"]} for job in fits[:1]]
    own = pd.DataFrame(rows, columns=["job", "cpu", "gpu"]).groupby("job").median()
    figure = jobs["sweep"].map(lambda name: not len(printed_cells(sweeps[name])))
    jobs = jobs.assign(done=jobs["done"] | (figure & jobs.index.isin(own.index)))
    for unit in HOURS:
        rate = own[unit].reindex(jobs.index) / jobs["passes"]
        same = rate.groupby([jobs["kind"], jobs["algorithm"]]).transform("median")
        alike = rate.groupby(jobs["kind"]).transform("median")
        jobs[unit] = rate.fillna(same).fillna(alike) * jobs["passes"]
    return jobs


def counts(table: pd.DataFrame | None) -> dict[str, str]:
    """Return what of a table is measured, with which verdicts."""
    if table is None or not len(table):
        return {}
    full = first(table)
    full = full[full["protocol"] == "full"]
    seeds = sorted(Counter(full["n"].astype(int)).items())
    texts = [f"{number} with {n} seed{'s' if n > 1 else ''}" for n, number in seeds]
    verdicts, orders = Counter(full["verdict"]), judged_orders(table)
    kept = sum(not text.startswith("swapped") for text in orders)
    return {
        "measured, by seeds": ", ".join(texts) or "0",
        "within": str(verdicts["within"]),
        "outside": str(verdicts["outside"]),
        "explained": str(explained(table)),
        "order reproduced": f"{kept} of {len(orders)}" if orders else "-",
    }


def judged_orders(table: pd.DataFrame) -> list[str]:
    """Return the verdict on the order of the methods of each column of the paper's table that has
    one, of one on other data too."""
    judged = table[(table["order_by"] != "") & ~table["order"].str.startswith("not judged")]
    return [str(group["order"].iloc[0]) for _, group in judged.groupby(list(COLUMN), sort=False)]


def spent(facts: pd.DataFrame) -> str:
    """Return the hours of runs on CPUs and on GPUs."""
    sums = facts[list(HOURS)].sum()
    texts = [f"{sums[unit]:.1f} {name}" for unit, name in HOURS.items() if sums[unit]]
    unknown = int(facts[list(HOURS)].isna().all(axis=1).sum())
    more = f" ({unknown} run{'s' if unknown > 1 else ''} without times)" if unknown else ""
    return (", ".join(texts) or "-") + more


def left(jobs: pd.DataFrame) -> str:
    """Return the jobs of a sweep without a run, and what they would take on CPUs and on GPUs."""
    missing = jobs[~jobs["done"]]
    if not len(missing):
        return f"0 of {len(jobs)} jobs"
    parts = []
    for unit, name in HOURS.items():
        known = missing[unit].dropna()
        some = f" for {len(known)} of them" if len(known) < len(missing) else ""
        parts += [f"{known.sum():.1f} {name}{some}"] if len(known) else []
    return f"{len(missing)} of {len(jobs)} jobs: " + (" or ".join(parts) or "not measured")


def missing(jobs: pd.DataFrame, data: Sequence[Path]) -> str:
    """Return the data sets of these jobs that are not here."""
    needed = sorted({name for names in jobs["data"] for name in names})
    absent = [name for name in needed if not any(is_here(name, folder) for folder in data)]
    return f"data: {', '.join(absent)}" if absent else ""


def is_here(dataset: str, data_dir: Path) -> bool:
    """Return whether data_dir has a folder or file whose name begins with that of the data set;
    digits come with scikit-learn."""
    if dataset == "digits":
        return True
    entries = [path.name for path in data_dir.iterdir()] if data_dir.is_dir() else []
    name = re.sub(r"\W|_", "", dataset.lower())
    return any(re.match(rf"{name}(?!\d)", re.sub(r"\W|_", "", entry.lower())) for entry in entries)
