"""The state of the papers' tables (`--status`): what is measured, what it has cost, what the rest
would cost."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.analysis import layout
from fedexp.analysis.sweep import Block, Sweep, cell_of
from fedexp.papers import compare, parts, readings
from fedexp.papers.compare import departures, load_jobs
from fedexp.papers.judge import COLUMN
from fedexp.papers.workload import Workload, workloads
from fedexp.rundir.elsewhere import views_of
from fedexp.rundir.evidence import with_kept
from fedexp.rundir.reader import RunDirectory

COLUMNS = (
    "printed",
    "measured, by seeds",
    "within",
    "outside",
    "explained",
    "order reproduced",
    "spent",
    "left (first seeds)",
    "missing",
)
LEGEND = (
    "measured: printed values with runs at the full protocol (a sweep of another reading has a row"
    " of its own); explained: those outside that are within where another reading of the setting"
    " was run; order reproduced: columns of the paper's table without a swap beyond noise. spent:"
    " core hours (seconds of all rounds x threads x workers) on CPUs, GPU hours (x workers) on"
    " GPUs, of the runs that are here or kept; left: one run of each job without a value in the"
    " view that the paper's rule judges, from measured runs of the same data and model (~: of"
    " another method, or of other numbers of rounds, clients or epochs, scaled by the passes over"
    " the training data); missing: data sets without a folder below data_dir (--data-dir), memory"
    " that this machine lacks."
)


@dataclass(frozen=True)
class Job:
    """A run that a sweep consists of, but for its seed."""

    overrides: frozenset[str]
    algorithm: str
    work: Workload
    cells: tuple[tuple[str, str], ...] = ()  # fields of its printed cells

    def is_in(self, table: pd.DataFrame | None) -> bool:
        """Return whether a table has its values at the full protocol and in the view of the rule,
        wherever its runs are now."""
        if table is None or "protocol" not in table or not self.cells:
            return False
        mine = (table["protocol"] == "full") & (table["verdict"] != layout.NO_VIEW)
        for name, value in self.cells:
            mine &= table[name].astype(str) == value
        return bool(mine.any())


@dataclass
class Hours:
    """Hours on CPU cores and on GPUs, apart."""

    cpu: float = 0.0
    gpu: float = 0.0
    untimed: int = 0  # runs of an early version, whose times are not known

    def __add__(self, other: "Hours") -> "Hours":
        return Hours(self.cpu + other.cpu, self.gpu + other.gpu, self.untimed + other.untimed)

    def __str__(self) -> str:
        parts = [
            f"{hours:.1f} {name} h"
            for name, hours in (("core", self.cpu), ("GPU", self.gpu))
            if hours
        ]
        unknown = (
            f" ({self.untimed} run{'s' if self.untimed > 1 else ''} without times)"
            if self.untimed
            else ""
        )
        return (", ".join(parts) or "-") + unknown


@dataclass
class Costs:
    """Hours a pass over the training data of runs at the full protocol, by what they are, and the
    largest memory."""

    known: dict[Any, list[Hours]] = field(default_factory=dict)  # by `keys`
    # Workload.kind -> bytes at the peak
    memory: dict[tuple[str, ...], int] = field(default_factory=dict)

    def add(self, job: Job, run: RunDirectory) -> None:
        hours = hours_of(run)
        for key in keys(job):
            self.known.setdefault(key, []).append(
                Hours(hours.cpu / job.work.passes, hours.gpu / job.work.passes)
            )
        peak = (run.summary.get("peak_memory") or {}).get("host") or 0
        self.memory[job.work.kind] = max(peak, self.memory.get(job.work.kind, 0))

    def estimate(self, job: Job, kind: str) -> tuple[float | None, bool]:
        """(hours of a run on `cpu` or `gpu`, whether they are of runs of the same method with as
        many passes); None where nothing was measured."""
        for number, key in enumerate(keys(job)):
            if found := [
                hours for each in self.known.get(key, ()) if (hours := getattr(each, kind))
            ]:
                return float(np.median(found)) * job.work.passes, number == 0
        return None, False


def keys(job: Job) -> tuple[Any, ...]:
    """Return what runs have in common with a job whose times are taken for it, those that are most
    alike first."""
    work = job.work
    return (work, job.algorithm), (work.kind, job.algorithm), work.kind


def hours_of(run: RunDirectory) -> Hours:
    """Hours of one run, of all its rounds."""
    hardware, seconds = run.summary.get("hardware") or {}, run.summary.get("seconds")
    if not seconds:
        return Hours(untimed=1)
    workers = max(hardware.get("workers") or 1, 1)  # on GPUs each has one of its own
    if str(hardware.get("device", "cpu")).startswith("cuda"):
        return Hours(gpu=seconds * workers / 3600)
    return Hours(cpu=seconds * workers * (hardware.get("threads") or 1) / 3600)


def jobs_of(sweep: Sweep) -> list[tuple[Block, Job]]:
    """The jobs of a sweep, each once, with their blocks."""
    found: dict[frozenset[str], tuple[Block, str, tuple[tuple[str, str], ...]]] = {}
    for block in sweep.blocks:
        for combination in block.combinations():
            texts = frozenset([*(f"{key}={value}" for key, value in combination), *block.fixed])
            cells = tuple(block.fields(combination).items())
            given = dict(text.partition("=")[::2] for text in texts)
            found.setdefault(texts, (block, given.get("algorithm", "fedavg"), cells))
    work = workloads((texts, algorithm) for texts, (_, algorithm, _) in found.items())
    return [
        (block, Job(texts, algorithm, work[texts, algorithm], cells))
        for texts, (block, algorithm, cells) in found.items()
    ]


@dataclass(frozen=True)
class Standing:
    """A sweep with its jobs and the runs at the full protocol that each has."""

    sweep: Sweep
    table: pd.DataFrame | None  # as committed
    runs: dict[Job, list[RunDirectory]]
    spent: Hours

    @property
    def open(self) -> list[Job]:
        """Return the jobs without a run in the view of the rule."""
        view = self.sweep.rule.view
        done = {
            job
            for job, runs in self.runs.items()
            if any(view in views_of(run.config) for run in runs)
        }
        return [job for job in self.runs if job not in done and not job.is_in(self.table)]


def standing(sweep: Sweep, table: pd.DataFrame | None, directory: Path) -> Standing:
    """directory: of the sweep, which need not be there."""
    jobs = jobs_of(sweep)
    runs: dict[Job, list[RunDirectory]] = {job: [] for _, job in jobs}
    spent = Hours()
    if directory.is_dir():
        with with_kept(directory) as source:
            for run in (run for run in load_jobs(source) if run.finished):
                if run.stands_for is None:
                    spent += hours_of(run)
                found, given = cell_of(sweep, run.overrides), set(run.overrides)
                if found and not departures(sweep, run):
                    mine = [
                        job
                        for block, job in jobs
                        if block is found[0] and given.issuperset(job.overrides)
                    ]
                    for job in mine[:1]:
                        runs[job].append(run)
    return Standing(sweep, table, runs, spent)


def status(
    sweeps: Sequence[tuple[Sweep, pd.DataFrame | None]], root: Path, data: Sequence[Path]
) -> str:
    """The table of `--status`. root: the checkout; data: directories in which data sets lie."""
    found = [standing(sweep, table, root / "multirun" / sweep.name) for sweep, table in sweeps]
    costs = Costs()
    for each in found:
        for job, runs in each.runs.items():
            for run in runs:
                costs.add(job, run)
    rows = [row(each, costs, data) for each in found]
    names = [f"`{each.sweep.name}`" for each in found]
    return f"{layout.markdown(pd.DataFrame(rows, index=names, columns=list(COLUMNS)))}\n{LEGEND}\n"


def row(each: Standing, costs: Costs, data: Sequence[Path]) -> list[str]:
    """A row of the table."""
    printed = [cell for cell in compare.printed_cells(each.sweep) if cell["method"] != "(all)"]
    once = (
        None
        if each.table is None or "protocol" not in each.table
        else parts.printed_once(each.table)
    )
    full = None if once is None else once[once["protocol"] == "full"]
    texts = [""] * 5
    if full is not None:
        seeds = sorted(Counter(full["n"].astype(int)).items())
        assert each.table is not None
        verdicts, orders = Counter(full["verdict"]), judged_orders(each.table)
        texts = [
            ", ".join(f"{number} with {n} seed{'s' if n > 1 else ''}" for n, number in seeds)
            or "0",
            str(verdicts["within"]),
            str(verdicts["outside"]),
            str(readings.explained(each.table)),
            (
                f"{sum(not text.startswith('swapped') for text in orders)} of {len(orders)}"
                if orders
                else "-"
            ),
        ]
    return [
        str(len(printed) or "-"),
        *texts,
        str(each.spent),
        left(each.open, len(each.runs), costs),
        missing(each.open, costs, data),
    ]


def judged_orders(table: pd.DataFrame) -> list[str]:
    """The verdict on the order of the methods of each column of the paper's table that has one, of
    one on other data too."""
    judged = table[
        (table["order_by"].fillna("") != "")
        & ~table["order"].fillna("").str.startswith("not judged")
    ]
    return [str(group["order"].iloc[0]) for _, group in judged.groupby(list(COLUMN), sort=False)]


def left(jobs: Sequence[Job], total: int, costs: Costs) -> str:
    """Jobs without a run, and what they would take on CPUs and on GPUs."""
    if not jobs:
        return f"0 of {total} jobs"
    parts = []
    for kind, unit in (("cpu", "core h"), ("gpu", "GPU h")):
        known = [costs.estimate(job, kind) for job in jobs]
        hours = [hours for hours, _ in known if hours is not None]
        if hours:
            about = "" if all(same for hours, same in known if hours is not None) else "~"
            some = f" for {len(hours)} of them" if len(hours) < len(jobs) else ""
            parts.append(f"{about}{sum(hours):.1f} {unit}{some}")
    return f"{len(jobs)} of {total} jobs: " + (" or ".join(parts) or "not measured")


def missing(jobs: Sequence[Job], costs: Costs, data: Sequence[Path]) -> str:
    """Data sets that are not here, and memory that this machine has not, for these jobs."""
    needed = sorted({name for job in jobs for name in job.work.data})
    absent = [name for name in needed if not any(is_here(name, folder) for folder in data)]
    there = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    )
    kinds = sorted({job.work.kind for job in jobs})
    large = [
        f"{kind[0]} with {kind[-1]}: {peak / 1e9:.0f} GB"
        for kind in kinds
        if (peak := costs.memory.get(kind, 0)) > there > 0
    ]
    return "; ".join([*([f"data: {', '.join(absent)}"] if absent else []), *large])


def is_here(dataset: str, data_dir: Path) -> bool:
    """Return whether data_dir has a folder or file whose name begins with that of the data set;
    digits come with scikit-learn."""
    if dataset == "digits":
        return True
    entries = [path.name for path in data_dir.iterdir()] if data_dir.is_dir() else []
    name = re.sub(r"\W|_", "", dataset.lower())
    return any(re.match(rf"{name}(?!\d)", re.sub(r"\W|_", "", entry.lower())) for entry in entries)
