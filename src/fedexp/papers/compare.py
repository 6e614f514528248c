"""A sweep beside the printed table: every cell with n, mean, standard deviation, the printed value
and a verdict."""

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedexp.algorithms.local_training import SCHEDULES_OVER_ALL_ROUNDS
from fedexp.analysis.aggregate import rounds_to
from fedexp.analysis.measures import origin, precision_of
from fedexp.analysis.rules import COLUMNS, PLAIN_LAST, PLAIN_LAST_TEN, Noise, Rule, noise
from fedexp.analysis.sweep import Block, Sweep, cell_of, protocol_of
from fedexp.papers.expected import other_data
from fedexp.papers.judge import BY_DEFINITION, tolerance, verdict, with_order
from fedexp.papers.judge import TOLERANCES as TOLERANCES
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.revisions import outdated
from fedexp.rundir.sweeps import SweepDirectory, with_latest

TABLES = Path(__file__).parent / "published" / "tables.csv"
# what the papers' released code gives at the printed protocol, where known
RELEASED = TABLES.with_name("released.csv")
CELL = (
    "dataset",
    "partition",
    "partition_param",
    "clients",
    "participation",
    "local_epochs",
    "setting",
    "method",
)
# beginnings of the notes on cells that the paper leaves empty
EMPTY = ("not_applicable", "not_run")
NEVER = math.inf
OF_TASKS = ("average_accuracy", "new_task_accuracy")
# of FedAvg itself all its rounds and 1, by definition
AGAINST_FEDAVG = ("rounds_to_fedavg", "speedup_to_fedavg")


def load_jobs(directory: Path) -> list[RunDirectory]:
    """All runs of a sweep, also those that have failed or are not at their end, with the latest
    code of each."""
    return with_latest(SweepDirectory(directory).jobs)


def load_runs(directory: Path) -> list[RunDirectory]:
    """All that are over and whole; a job that failed is none."""
    return SweepDirectory(directory).complete


def values_of(run: RunDirectory, rule: Rule, metric: str) -> list[float]:
    """The metric in the view of the rule, round by round where it is defined; [] where the run
    lacks the view."""
    return run.values(rule.column(metric))


def reported(run: RunDirectory, rule: Rule, metric: str) -> float | None:
    """The metric (`accuracy` or `forgetting`) as a paper with this rule reports it, a fraction."""
    if rule.value == "last":
        return run.summary.get(metric if rule.view == "plain" else f"{metric}_{rule.view}")
    return rule.reported(values_of(run, rule, metric), metric)


def series(run: RunDirectory, rule: Rule, measure: Mapping[str, Any]) -> list[float]:
    """Return the values of the rounds of a run from which its number's noise is taken: its metric
    in the view of the rule, or that of the rounds of its task; [] for what has no value a round
    (rounds to a target, alignment)."""
    kind = str(measure["value"])
    if kind in COLUMNS:
        return values_of(run, rule, kind)
    if kind in OF_TASKS and kind in run.table:
        return run.table.loc[run.table["task"] == int(measure["task"]), kind].dropna().tolist()
    return []


Found = tuple[RunDirectory, Mapping[str, Any]]  # a run of a printed cell, with what to measure


def printed_cells(sweep: Sweep, table: str = "") -> list[dict[str, str]]:
    """Return the printed values of a sweep's table, or of another one of its paper."""
    return [dict(row) for row in printed_tables().get((sweep.paper, table or sweep.table), ())]


@cache
def printed_tables() -> dict[tuple[str, str], list[dict[str, str]]]:
    """Return all printed values by paper and table; a cell that is printed as a dash is none."""
    tables: dict[tuple[str, str], list[dict[str, str]]] = {}
    with TABLES.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["note"].startswith(EMPTY):
                continue
            tables.setdefault((row["paper"], row["table"]), []).append(row)
    return tables


def cells(sweep: Sweep, jobs: Sequence[RunDirectory]) -> pd.DataFrame:
    """The tidy table: a row for every printed value, whether it has been run or not."""
    printed = printed_cells(sweep)
    runs = [run for run in jobs if run.finished]
    mine: dict[int, list[Found]] = {i: [] for i in range(len(printed))}
    for run in jobs:
        if found := cell_of(sweep, run.overrides):
            for i, measure in matches(printed, *found):
                mine[i].append((run, measure))
    released = released_code()
    tidy = pd.DataFrame(
        cell(Context(sweep, row, printed, runs), mine[i])
        | {"released": released.get(released_key(row), "")}
        for i, row in enumerate(printed)
        if row["method"] != "(all)"
    )
    return with_order(tidy) if len(tidy) else tidy


def released_code() -> dict[tuple[str, ...], str]:
    """Return what the released code gives for a printed cell, such as `84.5 (round 110, seed 1)`,
    by `released_key`."""
    with RELEASED.open(encoding="utf-8", newline="") as file:
        return {released_key(row): f"{row['value']} ({row['of']})" for row in csv.DictReader(file)}


def released_key(row: Mapping[str, str]) -> tuple[str, ...]:
    names = ("paper", "table", "dataset", "partition_param", "setting", "method", "metric")
    return tuple(row[name] for name in names)


def matches(
    printed: Sequence[Mapping[str, str]], block: Block, fields: Mapping[str, str]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the printed values of a run, with what to measure for each."""
    for measure in block.measures:
        wanted = dict(fields) | {
            key: str(measure[key]) for key in ("metric", "setting") if key in measure
        }
        for i, row in enumerate(printed):
            if all(row[key] == value for key, value in wanted.items()):
                yield i, measure


def cell(context: "Context", jobs: Sequence[Found]) -> dict[str, Any]:
    """Return one row of the tidy table. Runs of different protocols are never put together: those
    at the sweep's own stand there or, where there are none, the largest group that was run at
    another."""
    row = context.row
    protocols: dict[tuple[str, ...], list[Found]] = {(): []}
    for run, measure in jobs:
        if run.finished:
            protocols.setdefault(tuple(context.protocol(run, measure)), []).append((run, measure))
    changes = (
        () if protocols[()] else max(protocols, key=lambda key: (len(protocols[key]), -len(key)))
    )
    used = counted(context, protocols[changes])
    said = [text for text in changes if text.startswith(("data: ", "older code: "))]
    return {
        **{name: row[name] for name in ("paper", "table", *CELL, "metric", "unit")},
        "status": ", ".join(
            f"{n} {kind}" for kind, n in Counter(run.status for run, _ in jobs).items()
        )
        or "not run",
        "n": len(used),
        "diverged": sum(run.diverged for run, _ in used),
        **numbers(context, used, bool(changes)),
        "protocol": "" if not used else "reduced" if changes else "full",
        "changes": "; ".join(filter(None, (" ".join(t for t in changes if t not in said), *said))),
        "not_shown": sum(map(len, protocols.values())) - len(used),
        **origin([run for run, _ in used]),
        "from": " ".join(
            sorted({run.directory.parent.name for run, _ in used if run.stands_for is not None})
        ),
        "note": row["note"],
    }


def numbers(context: "Context", used: Sequence[Found], changed: bool) -> dict[str, Any]:
    """Return what a cell has of numbers: measured and printed, their difference, what it may be,
    and the verdict.

    used: the runs that count; changed: whether their protocol is not the sweep's own."""
    row, rule = context.row, context.sweep.rule
    scale = 100.0 if row["unit"] == "percent" else 1.0
    sound = [(run, measure) for run, measure in used if not run.diverged]
    raw = [value for pair in sound if (value := context.value(*pair)) is not None]
    never = sum(value == NEVER for value in raw)
    # the mean over those seeds that get there would flatter
    values = np.array([] if never else raw) * scale
    target = float(row["value"]) if row["value"] else None
    mean = float(values.mean()) if len(values) else None
    difference = None if mean is None or target is None else mean - target
    ruled = sound and sound[0][1]["value"] in COLUMNS
    metric = str(sound[0][1]["value"]) if ruled else ""
    within = [rule.standard_error(series(run, rule, measure)) for run, measure in sound]
    error = scaled(noise((values / scale).tolist(), within), scale)
    over_seeds = rule.error_over_seeds(metric, len(values))
    noise_of_cell = error.error if over_seeds is None else over_seeds * scale
    allowed = None if target is None else tolerance(row, noise_of_cell)
    lacks = rule.view if metric and mean is None and rule.view != "plain" else ""
    diverged, defined = [run.diverged for run, _ in used], is_defined(row, used)
    judged = verdict(
        row, diverged, len(raw) - never, never, difference, allowed, changed, lacks, mean
    )
    return {
        "rule": str(rule) if metric else "",
        "mean": mean,
        "std": float(values.std(ddof=1)) if len(values) > 1 else None,
        "error": error.error,
        "error_from": error.source,
        **plain_values([run for run, _ in sound], metric, scale),
        "printed": target,
        "printed_std": float(row["std"]) if row["std"] else None,
        "difference": difference,
        "tolerance": allowed,
        "verdict": BY_DEFINITION if defined else judged,
    }


def is_defined(row: Mapping[str, str], used: Sequence[Found]) -> bool:
    """Return whether a printed value is so by definition: what FedAvg gains on FedAvg."""
    return row["method"] == "FedAvg" and any(
        measure["value"] in AGAINST_FEDAVG for _, measure in used
    )


def counted(context: "Context", pairs: Sequence[Found]) -> list[Found]:
    """Return those runs of a cell that count, in their order.

    Runs without the view of the rule are not averaged with those that have it; one that diverged
    has no value, and counts. Of a seed that was run more than once, in another precision say, one
    run counts: in the precision that most runs have."""
    has = [context.value(*pair) is not None for pair in pairs]
    known = [
        (pair, there)
        for pair, there in zip(pairs, has, strict=True)
        if there or pair[0].diverged or not any(has)
    ]
    common = Counter(precision_of(run) for (run, _), _ in known)
    # stable
    best = sorted(known, key=lambda each: (-common[precision_of(each[0][0])], not each[1]))
    chosen: dict[Any, RunDirectory] = {}
    for (run, _), _ in best:
        chosen.setdefault(run.summary.get("seed", id(run)), run)
    return [pair for pair, _ in known if any(pair[0] is run for run in chosen.values())]


def scaled(found: Noise, scale: float) -> Noise:
    return Noise(None if found.error is None else found.error * scale, found.source)


def plain_values(
    runs: Sequence[RunDirectory], metric: str, scale: float
) -> dict[str, float | None]:
    """Return the values of the plain test, whatever the rule: the last round, the mean of the last
    ten and its standard error, each as a mean over seeds; None for what is neither accuracy nor
    forgetting."""
    names = {"plain_last": PLAIN_LAST, "plain_last10": PLAIN_LAST_TEN}
    found: dict[str, float | None] = dict.fromkeys((*names, "plain_error"))
    for name, rule in names.items():
        values = [
            value for run in runs if metric and (value := reported(run, rule, metric)) is not None
        ]
        if values:
            found[name] = float(np.mean(values)) * scale
            within = [rule.standard_error(values_of(run, rule, metric)) for run in runs]
            # in the end that of the last ten
            found["plain_error"] = scaled(noise(values, within), scale).error
    return found


def departures(sweep: Sweep, run: RunDirectory) -> list[str]:
    """Say how a run departs from the protocol of the printed table: other options, other data under
    its name, or a method that was corrected since."""
    return (
        protocol_of(sweep, run.overrides)
        + other_data(run.summary, run.overrides)
        + outdated(run.config)
    )


@dataclass(frozen=True)
class Context:
    """Context of a value beyond its own run."""

    sweep: Sweep
    row: Mapping[str, str]
    printed: Sequence[Mapping[str, str]]
    runs: Sequence[RunDirectory]

    def protocol(self, run: RunDirectory, measure: Mapping[str, Any]) -> list[str]:
        """Return how the run departs from the protocol of the printed value. Fewer rounds do not
        change when a target is reached, where the learning rate does not depend on their number."""
        found = departures(self.sweep, run)
        schedule = (run.config.get("local") or {}).get("schedule")
        if measure["value"] != "rounds_to" or schedule in SCHEDULES_OVER_ALL_ROUNDS:
            return found
        if self.value(run, measure) in (None, NEVER):
            return found
        return [text for text in found if not text.startswith("rounds=")]

    def value(self, run: RunDirectory, measure: Mapping[str, Any]) -> float | None:
        """Our number, as a fraction or in rounds; NEVER for a target out of reach, None where there
        is no number."""
        kind = measure["value"]
        match kind:
            case "accuracy" | "forgetting":
                return reported(run, self.sweep.rule, kind)
            case "accuracy_at":
                return run.accuracy_at(int(measure["round"]))
            case _ if kind in OF_TASKS:
                ends = {end["task"]: end[kind] for end in run.summary.get("tasks", ())}
                return ends.get(int(measure["task"]))
            case "rounds_to":
                return rounds_to(run, float(measure["factor"]) * self.printed_target()) or NEVER
            case "alignment":
                layers = run.summary.get("alignment") or ()
                layer = int(measure["layer"])
                return layers[layer - 1][measure["pair"]] if layer <= len(layers) else None
            case "rounds_to_fedavg" | "speedup_to_fedavg":
                return self.against_fedavg(run, speedup=kind == "speedup_to_fedavg")
        return None

    def printed_target(self) -> float:
        """Return Flashback's A of this setting."""
        same = ("dataset", "partition_param")
        found = [
            r
            for r in self.printed
            if r["metric"] == "target_accuracy" and all(r[k] == self.row[k] for k in same)
        ]
        return float(found[0]["value"])

    def against_fedavg(self, run: RunDirectory, speedup: bool) -> float | None:
        """Return the rounds to FedAvg's accuracy in its last round, mean over the FedAvg runs of
        the setting at the same protocol; or how many times fewer than FedAvg's number of rounds;
        for FedAvg all its rounds, and 1."""
        if self.row["method"] == "FedAvg":
            return 1.0 if speedup else float(run.summary["rounds"])
        fedavg, protocol = [], departures(self.sweep, run)
        for other in self.runs:
            found = cell_of(self.sweep, other.overrides)
            if (
                found
                and found[1].get("method") == "FedAvg"
                and found[1]["dataset"] == self.row["dataset"]
            ):
                fedavg += [other] if departures(self.sweep, other) == protocol else []
        if not fedavg:
            return None
        accuracy = {"value": "accuracy"}
        fedavg = [
            other
            for other, _ in counted(self, [(other, accuracy) for other in fedavg])
            if not other.diverged
        ]
        if not fedavg:
            return None
        ends = [
            other.summary["accuracy" if "accuracy" in other.summary else "validation_accuracy"]
            for other in fedavg
        ]
        rounds = rounds_to(run, float(np.mean(ends)))
        if rounds is None:
            return NEVER
        return (
            float(np.mean([other.summary["rounds"] for other in fedavg])) / rounds
            if speedup
            else rounds
        )
