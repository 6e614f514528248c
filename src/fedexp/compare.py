"""A sweep beside the printed table: every cell with n, mean, standard deviation, the printed value and a verdict."""

import csv
import json
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
COLUMN = ("dataset", "partition_param", "setting")
CELL = ("dataset", "partition", "partition_param", "clients", "participation", "local_epochs", "setting", "method")
# How far from the printed value is still "within": a fraction of the unit, or of the printed value (rounds, ratios).
ABSOLUTE = {"percent": 2.0, "fraction": 0.02}
FORGETTING, RELATIVE = 0.05, 0.25
TOLERANCES = (
    f"Within: accuracy by {ABSOLUTE['percent']:g} points or two printed standard deviations, "
    f"forgetting by {FORGETTING}, rounds and speed-ups by {RELATIVE:.0%}."
)


@dataclass(frozen=True)
class Run:
    """A finished run directory."""

    directory: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / files.SUMMARY).read_text(encoding="utf-8"))

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
        return self.summary["status"] == "diverged"

    def accuracy_at(self, round: int) -> float | None:
        found = self.curve.loc[self.curve["round"] == round, "test_accuracy"]
        return float(found.iloc[0]) if len(found) else None

    def rounds_to(self, accuracy: float) -> int | None:
        """The first round that reaches it."""
        rounds, values = self.curve["round"].tolist(), self.curve["test_accuracy"].tolist()
        return next(iter(rounds_to_target(rounds, values, [accuracy], ()).values()))


def load_runs(directory: Path) -> list[Run]:
    """All that are over; a job that failed is none."""
    runs = [Run(path.parent) for path in sorted(directory.glob(f"*/{files.SUMMARY}"))]
    return [run for run in runs if run.summary.get("status") in ("completed", "diverged")]


def printed_cells(sweep: Sweep) -> list[dict[str, str]]:
    with TABLES.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if (row["paper"], row["table"]) == (sweep.paper, sweep.table)]


def cells(sweep: Sweep, runs: Sequence[Run]) -> pd.DataFrame:
    """The tidy table: a row for every printed value, whether it has been run or not."""
    printed = printed_cells(sweep)
    mine: dict[int, list[tuple[Run, Mapping[str, Any]]]] = {i: [] for i in range(len(printed))}
    for run in runs:
        if found := cell_of(sweep, run.overrides):
            for i, measure in matches(printed, *found):
                mine[i].append((run, measure))
    rows = []
    for i, row in enumerate(printed):
        if row["method"] == "(all)":
            continue
        rows.append(cell(sweep, row, mine[i], printed, runs))
    return pd.DataFrame(rows)


def matches(
    printed: Sequence[Mapping[str, str]], block: Block, fields: Mapping[str, str]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The printed values of a run, with what to measure for each."""
    for measure in block.measures:
        wanted = dict(fields) | {key: str(measure[key]) for key in ("metric", "setting") if key in measure}
        for i, row in enumerate(printed):
            if all(row[key] == value for key, value in wanted.items()):
                yield i, measure


def cell(
    sweep: Sweep,
    row: Mapping[str, str],
    found: Sequence[tuple[Run, Mapping[str, Any]]],
    printed: Sequence[Mapping[str, str]],
    runs: Sequence[Run],
) -> dict[str, Any]:
    """One row of the tidy table."""
    full = [(run, measure) for run, measure in found if not protocol_of(sweep, run.overrides)]
    reduced = bool(found) and not full
    used = found if reduced else full  # never mixed
    scale = 100.0 if row["unit"] == "percent" else 1.0
    context = Context(sweep, row, printed, runs)
    raw = [context.value(run, measure) for run, measure in used if not run.diverged]
    values = np.array([value * scale for value in raw if value is not None])
    target = float(row["value"]) if row["value"] else None
    mean = float(values.mean()) if len(values) else None
    difference = None if mean is None or target is None else mean - target
    return {
        **{name: row[name] for name in ("paper", "table", *CELL, "metric", "unit")},
        "n": len(used),
        "diverged": sum(run.diverged for run, _ in used),
        "mean": mean,
        "std": float(values.std(ddof=1)) if len(values) > 1 else None,
        "printed": target,
        "printed_std": float(row["std"]) if row["std"] else None,
        "difference": difference,
        "protocol": "" if not used else "reduced" if reduced else "full",
        "verdict": verdict(row, used, difference, reduced),
        "note": row["note"],
    }


@dataclass(frozen=True)
class Context:
    """What a value may need beside its own run."""

    sweep: Sweep
    row: Mapping[str, str]
    printed: Sequence[Mapping[str, str]]
    runs: Sequence[Run]

    def value(self, run: Run, measure: Mapping[str, Any]) -> float | None:
        """Our number, as a fraction or in rounds; None where there is none."""
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
                return run.rounds_to(float(measure["factor"]) * self.printed_target())
            case "rounds_to_fedavg" | "speedup_to_fedavg":
                return self.against_fedavg(run, speedup=kind == "speedup_to_fedavg")
        return None

    def printed_target(self) -> float:
        """Flashback's A of this setting."""
        same = ("dataset", "partition_param")
        found = [r for r in self.printed if r["metric"] == "target_accuracy" and all(r[k] == self.row[k] for k in same)]
        return float(found[0]["value"])

    def against_fedavg(self, run: Run, speedup: bool) -> float | None:
        """Rounds to FedAvg's accuracy in its last round, mean over the FedAvg runs of the setting; or how many times
        fewer than FedAvg's number of rounds."""
        fedavg = []
        for other in self.runs:
            found = cell_of(self.sweep, other.overrides)
            if found and found[1].get("method") == "FedAvg" and found[1]["dataset"] == self.row["dataset"]:
                fedavg.append(other)
        if not fedavg:
            return None
        rounds = run.rounds_to(float(np.mean([other.summary["accuracy"] for other in fedavg])))
        if rounds is None or not speedup:
            return rounds
        return float(np.mean([other.summary["rounds"] for other in fedavg])) / rounds


def verdict(
    row: Mapping[str, str], used: Sequence[tuple[Run, Mapping[str, Any]]], difference: float | None, reduced: bool
) -> str:
    """within | outside | failed as printed | not run | not judged: <why>."""
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
    if difference is None:
        return "not judged: no number"
    return "within" if abs(difference) <= tolerance(row) else "outside"


def tolerance(row: Mapping[str, str]) -> float:
    """In the unit of the printed value."""
    if row["unit"] in ("rounds", "ratio"):
        return RELATIVE * float(row["value"])
    if row["metric"] == "forgetting":
        return FORGETTING
    return max(ABSOLUTE[row["unit"]], 2 * float(row["std"] or 0))


def label(*parts: str) -> str:
    """The column of a printed table: what its rows do not say."""
    return " ".join(part for part in parts if part)


def number(value: float | None, unit: str) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.2f}" if unit == "percent" else f"{value:.0f}" if unit == "rounds" else f"{value:.3f}"


def shown(group: pd.DataFrame) -> str:
    """A cell: ours +- std (forgetting) [printed (forgetting)], and `*` for within, `!` for outside."""
    first = {row["metric"]: row for _, row in group.iterrows()}
    ours, prints, marks = [], [], ""
    for metric, row in first.items():
        text, printed = both(row)
        marks += {"within": "*", "failed as printed": "*", "outside": "!"}.get(row["verdict"], "")
        bracket = "({})" if metric == "forgetting" else "{}"
        ours.append(bracket.format(text))
        prints.append(bracket.format(printed))
    return f"{' '.join(ours)} [{' '.join(prints)}]{marks}"


def both(row: "Mapping[str, Any] | pd.Series[Any]") -> tuple[str, str]:
    """(ours ± std, printed) of a row of the tidy table."""
    text = number(row["mean"], row["unit"])
    if row["n"] and row["diverged"] == row["n"]:
        text = "failed"
    if row["std"] is not None and row["std"] == row["std"]:
        text += f" ± {number(row['std'], row['unit'])}"
    printed = "failed" if str(row["note"]).startswith("failed") else number(row["printed"], row["unit"])
    return text, printed


def columns_of(table: pd.DataFrame) -> list[str]:
    """Of each row, its column in the printed table."""
    return [label(*row) for row in table[list(COLUMN)].to_numpy().tolist()]


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """Methods x settings, as the paper has them."""
    named = table.assign(column=columns_of(table))
    text = {key: shown(group) for key, group in named.groupby(["method", "column"], sort=False)}
    methods, columns = named["method"].unique(), named["column"].unique()
    return pd.DataFrame([[text.get((m, c), "") for c in columns] for m in methods], index=methods, columns=columns)
