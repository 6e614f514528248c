"""A directory of runs as tables: means over seeds, rounds to a target, and, for a named sweep, beside the print."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp import compare, files
from fedexp.cli import conf_directory
from fedexp.compare import Run, load_runs
from fedexp.errors import ConfigError
from fedexp.sweep import Sweep, load_sweep

MARKER = "sweep.json"  # in the directory of a named sweep
VALUES = ("accuracy", "best_accuracy", "forgetting", "round_forgetting", "average_accuracy", "new_task_accuracy",
          "task_forgetting")  # fmt: skip
FACTORS, SHARE = (0.75, 0.9, 1.0), 0.95  # Flashback Table 1: rounds to these parts of A, which is 0.95 of the best


def mark(directory: Path, sweep: str) -> None:
    """Notes in a directory which sweep it holds."""
    directory.mkdir(parents=True, exist_ok=True)
    files.write_json(directory / MARKER, {"sweep": sweep})


def sweep_of(directory: Path) -> Sweep | None:
    """The named sweep of a directory; None for another."""
    path = directory / MARKER
    name = json.loads(path.read_text(encoding="utf-8"))["sweep"] if path.exists() else directory.name
    try:
        return load_sweep(name, [conf_directory()])
    except ConfigError:
        return None


@dataclass(frozen=True)
class Tables:
    """What runs say together."""

    tidy: pd.DataFrame  # compare.cells where `sweep` is given, else means
    targets: pd.DataFrame  # rounds_to_targets
    sweep: Sweep | None  # named and with printed values


def tables_of(directory: Path, runs: Sequence[Run]) -> Tables:
    """Of the runs of a sweep, at least one."""
    sweep = sweep_of(directory)
    if sweep is not None and compare.printed_cells(sweep):
        return Tables(compare.cells(sweep, runs), rounds_to_targets(runs), sweep)
    return Tables(means(runs), rounds_to_targets(runs), None)


def write_tables(directory: Path) -> list[Path]:
    """table.csv, .md and .tex of a sweep, and rounds_to_target.csv; the paths. Nothing where no run is over."""
    runs = load_runs(directory)
    if not runs:
        return []
    tables = tables_of(directory, runs)
    tidy, targets = tables.tidy, tables.targets
    if tables.sweep is not None:
        wide, head = compare.wide(tidy), heading(tables.sweep, tidy)
    else:
        wide, head = tidy.drop(columns=["diverged"]).set_index("run").map(plain_number), f"# {directory.name}\n"
    text = f"{head}\n{markdown(wide)}\n## Rounds to target\n\n{markdown(targets.set_index('run').map(plain_number))}"
    contents = {
        "table.csv": tidy.to_csv(index=False),
        "table.md": text,
        "table.tex": wide.to_latex(escape=True),
        "rounds_to_target.csv": targets.to_csv(index=False),
    }
    for name, content in contents.items():
        files.write_atomically(directory / name, content.encode())
    return [directory / name for name in contents]


def heading(sweep: Sweep, tidy: pd.DataFrame) -> str:
    """What the table shows, and how many verdicts of each kind there are."""
    return (
        f"# {sweep.title}\n\nOurs ± standard deviation over seeds (forgetting) [printed (forgetting)]; * within the "
        f"tolerance of the print, ! outside. {compare.TOLERANCES}\n\n{verdicts(tidy)}\n"
    )


def verdicts(tidy: pd.DataFrame) -> str:
    counts = ", ".join(f"{number} {kind}" for kind, number in tidy["verdict"].value_counts().items())
    return f"{len(tidy)} printed values: {counts}."


def parts_of(choices: Mapping[str, Any], overrides: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """What a run is but for its seed: (data set and partition, algorithm and its options, other overrides)."""
    data, algorithm = [str(choices.get(name)) for name in ("dataset", "partition")], str(choices.get("algorithm"))
    changes = [o for o in overrides if not o.startswith(("seed", "hydra.", "tracker", "hardware", "figures"))]
    others = [o for o in changes if not o.startswith(("algorithm", "dataset=", "partition="))]
    return data, [algorithm, *(o for o in changes if o.startswith("algorithm."))], others


def key_of(run: Run) -> tuple[str, str]:
    """(what it is but for the seed, the same but for the algorithm as well)."""
    data, method, others = parts_of(run.summary, run.overrides)
    return " ".join([*data, *method, *others]), " ".join([*data, *others])


def means(runs: Sequence[Run]) -> pd.DataFrame:
    """Mean and standard deviation over the seeds of each run."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key_of(run)[0], []).append(run)
    rows = []
    for name, members in groups.items():
        row: dict[str, Any] = {"run": name, "n": len(members), "diverged": sum(run.diverged for run in members)}
        for value in VALUES:
            found = [v for run in members if not run.diverged and (v := run.summary.get(value)) is not None]
            if found:
                row[value] = float(np.mean(found))
                row[f"{value}_std"] = float(np.std(found, ddof=1)) if len(found) > 1 else None
        rows.append(row)
    return pd.DataFrame(rows)


def rounds_to_targets(runs: Sequence[Run]) -> pd.DataFrame:
    """Rounds to 0.75, 0.9 and 1 times A = 0.95 of the best accuracy of any run of the setting, mean over seeds, and
    how many times faster than FedAvg; empty where a seed never gets there."""
    settings: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        name, setting = key_of(run)
        settings.setdefault(setting, {}).setdefault(name, []).append(run)
    rows = []
    for members in settings.values():
        best = max(run.summary["best_accuracy"] for group in members.values() for run in group)
        rounds = {
            name: [mean_rounds(group, SHARE * best * factor) for factor in FACTORS] for name, group in members.items()
        }
        fedavg = next((rounds[name] for name, group in members.items() if is_plain_fedavg(group[0])), None)
        for name, values in rounds.items():
            row: dict[str, Any] = {"run": name, "A": SHARE * best}
            row |= {f"rounds_to_{factor:g}A": value for factor, value in zip(FACTORS, values, strict=True)}
            for factor, value, base in zip(FACTORS, values, fedavg or [None] * 3, strict=True):
                row[f"speedup_{factor:g}A"] = base / value if base and value else None
            rows.append(row)
    return pd.DataFrame(rows)


def is_plain_fedavg(run: Run) -> bool:
    return run.summary.get("algorithm") == "fedavg" and not any(o.startswith("algorithm.") for o in run.overrides)


def mean_rounds(runs: Sequence[Run], accuracy: float) -> float | None:
    found = [run.rounds_to(accuracy) for run in runs]
    return None if None in found else float(np.mean([value for value in found if value is not None]))


def plain_number(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return str(value) if isinstance(value, str | int | np.integer) else f"{value:.4g}"


def markdown(table: pd.DataFrame) -> str:
    """Without another package; the index is the first column."""
    lines = ["| | " + " | ".join(map(str, table.columns)) + " |", "|" + " --- |" * (len(table.columns) + 1)]
    for name, row in zip(table.index, table.to_numpy(), strict=True):
        lines.append("| " + " | ".join([str(name), *map(str, row)]) + " |")
    return "\n".join(lines) + "\n"
