"""Checks of two papers' protocols that need whole runs, not only their reported values.

FedKA: until September 2022, PFLlib tested the global model on the clients of the next cohort only,
not on all clients. Our runs have no accuracies of single clients, but the class accuracies on the
joint test set: the expected accuracy of a cohort is their mean, weighted by its examples of each
class.

Flashback: the target accuracy A is 95 % of the highest accuracy of any method in a setting.
"""

from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from fedexp.analysis.layout import markdown
from fedexp.metrics.record import Record
from fedexp_papers.cells import find_departures, look_up_target, select_curve
from fedexp_papers.evidence import all_jobs
from fedexp_papers.rules import NOISE_ROUNDS
from fedexp_papers.sweeps import find_cell, load_paper_sweep

PARTICIPATION, ROUNDS = "fedka_table3", "flashback_table1"  # sweeps
OF_HIGHEST = 0.95  # share of the highest accuracy that is the target accuracy A


def cohort_accuracies(record: Record, size: int, rounds: int = NOISE_ROUNDS) -> np.ndarray:
    """Return the accuracy in the last rounds on the data of each possible cohort.

    The test data of a client are assumed to have the classes of its training data, as in a random
    split. Return float [cohorts, rounds]. size: clients per cohort.
    """
    tested = np.stack(record.class_accuracy[-rounds:])
    clients = len(record.counts)
    members = np.array(
        [np.isin(range(clients), each) for each in combinations(range(clients), size)]
    )
    counts = members @ record.counts
    return counts / counts.sum(1, keepdims=True) @ tested.T


def tabulate_cohort_test(root: Path, table: pd.DataFrame) -> str:
    """Return FedKA's Table 3 with the accuracy on single cohorts.

    root: path of the checkout. table: of the sweep, from `readings.compare_everything`. Runs with
    another protocol are left out. If there are several seeds, their accuracies are pooled.
    """
    sweep = load_paper_sweep(PARTICIPATION)
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    with all_jobs(root / "multirun" / PARTICIPATION) as jobs:
        for run, line in jobs.items():
            _, fields = find_cell(sweep, run.overrides) or (None, {})
            if run.finished and fields and not find_departures(sweep, run, line):
                size = round(run.config["num_clients"] * run.config["participation"])
                key = (fields["participation"], fields["method"])
                found.setdefault(key, []).append(cohort_accuracies(run.record(), size))
    rows = {}
    for _, row in table[(table["n"] > 0) & (table["reading"] == "")].iterrows():
        if parts := found.get((row["participation"], row["method"])):
            values = np.concatenate(parts)
            mean, deviation = values.mean(), values.std()
            rows[f"{row['participation']}, {row['method']}"] = {
                "published": f"{row['printed']:.3f}",
                "all clients, last round": f"{row['mean']:.3f}",
                "all clients, last ten": f"{row['plain_last10']:.3f}",
                "one cohort, last ten": f"{mean:.3f} ± {deviation:.3f}",
                "distance in deviations": f"{abs(row['printed'] - mean) / deviation:.1f}",
            }
    return markdown(pd.DataFrame.from_dict(rows, orient="index"), corner="participation, method")


def tabulate_ceilings(root: Path) -> str:
    """Return the highest accuracy of each method in Flashback's settings, by reading.

    The published target accuracy A is 95 % of the highest accuracy of all methods, so A / 0.95 is
    to be compared with the highest one of a row. root: path of the checkout. Changed options other
    than the number of rounds are added to the name of the method.
    """
    main = load_paper_sweep(ROUNDS)
    rows: dict[str, dict[str, tuple[float, int]]] = {}
    published: dict[str, float] = {}
    for name, label in {ROUNDS: "as FedNTD", **main.readings}.items():
        sweep = load_paper_sweep(name)
        with all_jobs(root / "multirun" / name) as jobs:
            for run, line in jobs.items():
                _, fields = find_cell(sweep, run.overrides) or (None, {})
                curve = select_curve(run.table)
                if not run.finished or not fields or curve.empty:
                    continue
                key = f"{fields['dataset']}, {fields['partition_param']}, {label}"
                place = {"paper": sweep.paper, "table": sweep.table, **fields}
                published[key] = look_up_target(place) / OF_HIGHEST
                changes = find_departures(sweep, run, line, but="rounds=")
                method = f"{fields['method']} ({changes})" if changes else fields["method"]
                best = (float(curve.max()), int(str(curve.idxmax())))
                row = rows.setdefault(key, {})
                row[method] = max(row.get(method, best), best)
    texts = {}
    for key, row in rows.items():
        ours = sorted(row.items(), key=lambda item: item[1], reverse=True)
        texts[key] = {
            "implied": f"{published[key]:.3f}",
            "ours (in round)": ", ".join(f"{name} {high:.3f} ({at})" for name, (high, at) in ours),
        }
    return markdown(pd.DataFrame.from_dict(texts, orient="index"), corner="setting")
