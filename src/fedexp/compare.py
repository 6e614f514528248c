"""A sweep beside the printed table: every cell with n, mean, standard deviation, the printed value and a verdict."""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fedexp import files
from fedexp.metrics.targets import rounds_to_target
from fedexp.sweep import Block, Sweep, cell_of, protocol_of

TABLES = Path(__file__).parent / "published" / "tables.csv"
CELL = ("dataset", "partition", "partition_param", "clients", "participation", "local_epochs", "setting", "method")
# How far from the printed value is still "within": a fraction of the unit, or of the printed value (rounds, ratios).
ABSOLUTE = {"percent": 2.0, "fraction": 0.02}
FORGETTING, RELATIVE = 0.05, 0.25
NEVER = math.inf
# Beginnings of overrides that say where a run is computed; hardware.precision is not one of them.
WHERE = tuple(f"hardware{rest}" for rest in ("=", ".device", ".engine", ".threads", ".workers", ".chunk"))
TOLERANCES = (
    f"Within: accuracy by {ABSOLUTE['percent']:g} points or two printed standard deviations, "
    f"forgetting and alignment by {FORGETTING}, rounds and speed-ups by {RELATIVE:.0%}."
)


@dataclass(frozen=True)
class Run:
    """The directory of a run, whatever has become of it."""

    directory: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """{} before its end."""
        path = self.directory / files.SUMMARY
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    @property
    def status(self) -> str:
        """completed, diverged, failed or unfinished."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def finished(self) -> bool:
        return self.status in ("completed", "diverged")

    @cached_property
    def overrides(self) -> list[str]:
        path = self.directory / ".hydra" / "overrides.yaml"
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else []

    @cached_property
    def curve(self) -> pd.DataFrame:
        """round and test_accuracy of the evaluated rounds from 1 on."""
        table = pd.read_csv(self.directory / files.ROUNDS)
        return table[table["round"] >= 1].dropna(subset="test_accuracy")

    @property
    def diverged(self) -> bool:
        return self.status == "diverged"

    def accuracy_at(self, round: int) -> float | None:
        found = self.curve.loc[self.curve["round"] == round, "test_accuracy"]
        return float(found.iloc[0]) if len(found) else None

    def rounds_to(self, accuracy: float) -> int | None:
        """The first round that reaches it."""
        rounds, values = self.curve["round"].tolist(), self.curve["test_accuracy"].tolist()
        return next(iter(rounds_to_target(rounds, values, [accuracy], ()).values()))


def load_jobs(directory: Path) -> list[Run]:
    """All runs of a sweep, also those that have failed or are not at their end."""
    found = {path.parent for path in directory.glob(f"*/{files.SUMMARY}")}
    found |= {path.parent.parent for path in directory.glob("*/.hydra/overrides.yaml")}
    return [Run(path) for path in sorted(found)]


def load_runs(directory: Path) -> list[Run]:
    """All that are over; a job that failed is none."""
    return [run for run in load_jobs(directory) if run.finished]


Found = tuple[Run, Mapping[str, Any]]  # a run of a printed cell, with what to measure


def printed_cells(sweep: Sweep) -> list[dict[str, str]]:
    with TABLES.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if (row["paper"], row["table"]) == (sweep.paper, sweep.table)]


def cells(sweep: Sweep, jobs: Sequence[Run]) -> pd.DataFrame:
    """The tidy table: a row for every printed value, whether it has been run or not."""
    printed = printed_cells(sweep)
    runs = [run for run in jobs if run.finished]
    mine: dict[int, list[Found]] = {i: [] for i in range(len(printed))}
    for run in jobs:
        if found := cell_of(sweep, run.overrides):
            for i, measure in matches(printed, *found):
                mine[i].append((run, measure))
    return pd.DataFrame(
        cell(Context(sweep, row, printed, runs), mine[i]) for i, row in enumerate(printed) if row["method"] != "(all)"
    )


def matches(
    printed: Sequence[Mapping[str, str]], block: Block, fields: Mapping[str, str]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The printed values of a run, with what to measure for each."""
    for measure in block.measures:
        wanted = dict(fields) | {key: str(measure[key]) for key in ("metric", "setting") if key in measure}
        for i, row in enumerate(printed):
            if all(row[key] == value for key, value in wanted.items()):
                yield i, measure


def cell(context: "Context", jobs: Sequence[Found]) -> dict[str, Any]:
    """One row of the tidy table. Runs of different protocols are never put together: those at the sweep's own stand
    there or, where there are none, the largest group that was run at another."""
    row = context.row
    protocols: dict[tuple[str, ...], list[Found]] = {(): []}
    for run, measure in jobs:
        if run.finished:
            protocols.setdefault(tuple(protocol_of(context.sweep, run.overrides)), []).append((run, measure))
    changes = () if protocols[()] else max(protocols, key=lambda key: (len(protocols[key]), -len(key)))
    used = protocols[changes]
    scale = 100.0 if row["unit"] == "percent" else 1.0
    raw = [value for run, measure in used if not run.diverged if (value := context.value(run, measure)) is not None]
    never = sum(value == NEVER for value in raw)
    values = np.array([] if never else raw) * scale  # the mean over those seeds that get there would flatter
    target = float(row["value"]) if row["value"] else None
    mean = float(values.mean()) if len(values) else None
    difference = None if mean is None or target is None else mean - target
    return {
        **{name: row[name] for name in ("paper", "table", *CELL, "metric", "unit")},
        "status": ", ".join(f"{n} {kind}" for kind, n in Counter(run.status for run, _ in jobs).items()) or "not run",
        "n": len(used),
        "diverged": sum(run.diverged for run, _ in used),
        "mean": mean,
        "std": float(values.std(ddof=1)) if len(values) > 1 else None,
        "printed": target,
        "printed_std": float(row["std"]) if row["std"] else None,
        "difference": difference,
        "tolerance": None if target is None else tolerance(row),
        "verdict": verdict(row, used, len(raw) - never, never, difference, bool(changes)),
        "protocol": "" if not used else "reduced" if changes else "full",
        "changes": " ".join(changes),
        "not_shown": sum(map(len, protocols.values())) - len(used),
        **origin([run for run, _ in used]),
        "note": row["note"],
    }


def origin(runs: Sequence[Run]) -> dict[str, str]:
    """Seeds, commits and hardware of runs, as far as they are known."""
    seeds = sorted({int(run.summary["seed"]) for run in runs if run.summary.get("seed") is not None})
    commits = sorted({str(run.summary["commit"])[:7] for run in runs if run.summary.get("commit")})
    machines = sorted({machine(run.summary["hardware"]) for run in runs if run.summary.get("hardware")})
    return {"seeds": " ".join(map(str, seeds)), "commits": " ".join(commits), "hardware": "; ".join(machines)}


def machine(hardware: Mapping[str, Any]) -> str:
    """Such as `AMD EPYC (cpu, fp32)`."""
    return f"{hardware.get('name')} ({hardware.get('device')}, {hardware.get('precision')})"


@dataclass(frozen=True)
class Context:
    """What a value may need beside its own run."""

    sweep: Sweep
    row: Mapping[str, str]
    printed: Sequence[Mapping[str, str]]
    runs: Sequence[Run]

    def value(self, run: Run, measure: Mapping[str, Any]) -> float | None:
        """Our number, as a fraction or in rounds; NEVER for a target out of reach, None where there is no number."""
        kind = measure["value"]
        match kind:
            case "accuracy" | "forgetting":
                return run.summary.get(kind)
            case "accuracy_at":
                return run.accuracy_at(int(measure["round"]))
            case "average_accuracy" | "new_task_accuracy":
                ends = {end["task"]: end[kind] for end in run.summary.get("tasks", ())}
                return ends.get(int(measure["task"]))
            case "rounds_to":
                return run.rounds_to(float(measure["factor"]) * self.printed_target()) or NEVER
            case "alignment":
                layers = run.summary.get("alignment") or ()
                layer = int(measure["layer"])
                return layers[layer - 1][measure["pair"]] if layer <= len(layers) else None
            case "rounds_to_fedavg" | "speedup_to_fedavg":
                return self.against_fedavg(run, speedup=kind == "speedup_to_fedavg")
        return None

    def printed_target(self) -> float:
        """Flashback's A of this setting."""
        same = ("dataset", "partition_param")
        found = [r for r in self.printed if r["metric"] == "target_accuracy" and all(r[k] == self.row[k] for k in same)]
        return float(found[0]["value"])

    def against_fedavg(self, run: Run, speedup: bool) -> float | None:
        """Rounds to FedAvg's accuracy in its last round, mean over the FedAvg runs of the setting at the same
        protocol; or how many times fewer than FedAvg's number of rounds."""
        fedavg, protocol = [], protocol_of(self.sweep, run.overrides)
        for other in self.runs:
            found = cell_of(self.sweep, other.overrides)
            if found and found[1].get("method") == "FedAvg" and found[1]["dataset"] == self.row["dataset"]:
                fedavg += [other] if protocol_of(self.sweep, other.overrides) == protocol else []
        if not fedavg:
            return None
        rounds = run.rounds_to(float(np.mean([other.summary["accuracy"] for other in fedavg])))
        if rounds is None:
            return NEVER
        return float(np.mean([other.summary["rounds"] for other in fedavg])) / rounds if speedup else rounds


def verdict(
    row: Mapping[str, str], used: Sequence[Found], there: int, never: int, difference: float | None, reduced: bool
) -> str:
    """within | outside | failed as printed | not reached as printed | not run | not judged: <why>.

    there, never: how many runs have a number, and how many never reach their target."""
    if not used:
        return "not run"
    if reduced:
        return "not judged: reduced protocol"
    if row["note"].startswith("suspect"):
        return "not judged: suspect print"
    all_diverged = all(run.diverged for run, _ in used)
    if row["note"].startswith("failed"):
        return "failed as printed" if all_diverged else "outside"
    if all_diverged:
        return "outside"
    if there and never:
        return f"not judged: reached by {there} of {there + never}"
    if row["note"] == "not_reached" and (there or never):
        return "not reached as printed" if never else "outside"
    if never:
        return "outside"
    if difference is None:
        return "not judged: no number"
    return "within" if abs(difference) <= tolerance(row) else "outside"


def tolerance(row: Mapping[str, str]) -> float:
    """In the unit of the printed value."""
    if row["unit"] in ("rounds", "ratio"):
        return RELATIVE * float(row["value"])
    if row["metric"] in ("forgetting", "alignment"):
        return FORGETTING
    return max(ABSOLUTE[row["unit"]], 2 * float(row["std"] or 0))
