"""FedKA's Table 3 tested on one cohort, and the highest accuracies in Flashback's settings."""

import itertools
import json
import lzma
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedexp.metrics.record import Record
from fedexp_papers import evidence
from fedexp_papers.run_checks import cohort_accuracies, tabulate_ceilings, tabulate_cohort_test
from quick_runs import make_run

ROOT = Path(__file__).parents[2]
NAMES = {"fedavg": "FedAvg", "fedntd": "FedNTD", "fedka": "FedKA"}
PUBLISHED = {
    ("0.2", "FedAvg"): 0.384,
    ("0.6", "FedAvg"): 0.591,
    ("0.2", "FedNTD"): 0.398,
    ("0.6", "FedNTD"): 0.588,
    ("0.2", "FedKA"): 0.458,
    ("0.6", "FedKA"): 0.591,
}


def test_accuracy_of_a_cohort_is_weighted_by_its_examples():
    """Clients have 1 example of class 0, 3 of class 1, and 2 of each. The first two have 1 and 3,
    the first and the third 3 and 2, the last two 2 and 5. The first round is too early."""
    record = Record(counts=np.array([[1, 0], [0, 3], [2, 2]]))
    for number, accuracies in enumerate(([0.0, 0.0], [0.8, 0.4], [0.5, 1.0])):
        record.add(number, np.array(accuracies))
    found = cohort_accuracies(record, size=2, rounds=2)
    wanted = [[2.0 / 4, 3.5 / 4], [3.2 / 5, 3.5 / 5], [3.6 / 7, 6.0 / 7]]
    assert found == pytest.approx(np.array(wanted))


def accuracies_on_cohorts(line):
    """The accuracies of the last ten rounds on each cohort, from a run's line, client by client."""
    given = line["tables"]["class_accuracy.csv"]
    columns = [given[name].split(",") for name in ("round", "class", "accuracy")]
    tested = {
        (int(number), int(label)): float(value)
        for number, label, value in zip(*columns, strict=True)
    }
    counts = line["partitions"]["partition.npz"]["counts"]
    size = round(line["config"]["participation"] * len(counts))
    return [
        sum(n * tested[number, label] for row in cohort for label, n in enumerate(row))
        / sum(map(sum, cohort))
        for cohort in itertools.combinations(counts, size)
        for number in range(91, 101)
    ]


def test_committed_runs_of_fedka_tested_on_one_cohort():
    """All six published values are within 1.3 deviations of the mean."""
    with lzma.open(ROOT / "multirun/fedka_table3" / evidence.TABLE, "rt") as file:
        lines = [json.loads(text) for text in file]
    measured = {key: [] for key in PUBLISHED}
    for line in lines:
        config = line["config"]
        key = (str(config["participation"]), NAMES.get(line["summary"]["algorithm"]))
        penalty = [config["algorithm"].get(name) for name in ("norm", "beta")]
        if key in measured and (key[1] != "FedKA" or penalty == ["per_anchor", 0.01]):
            measured[key] += accuracies_on_cohorts(line)
    table = pd.DataFrame([{"participation": p, "method": m} for p, m in PUBLISHED])
    table = table.assign(printed=PUBLISHED.values(), mean=0.5, plain_last10=0.4, n=1, reading="")
    rows = tabulate_cohort_test(ROOT, table).splitlines()[2:]
    for text, (key, value) in zip(rows, PUBLISHED.items(), strict=True):
        name, *numbers, one_cohort, distance = text.strip("| ").split(" | ")
        assert (name, numbers) == (", ".join(key), [f"{value:.3f}", "0.500", "0.400"])
        mean, deviation = np.mean(measured[key]), np.std(measured[key])
        assert one_cohort == f"{mean:.3f} ± {deviation:.3f}"
        assert distance == f"{abs(value - mean) / deviation:.1f}"
        assert float(distance) <= 1.3


def test_run_that_failed_before_it_had_a_configuration_is_left_out(tmp_path):
    folder = tmp_path / "multirun" / "fedka_table3"
    given = ["experiment=fedka/cifar10", "participation=0.2", "algorithm=fedavg"]
    make_run(folder, given, [0.5], status="failed")
    (folder / "run0" / "config.yaml").unlink()
    known = {"participation": "0.2", "method": "FedAvg", "reading": "", "n": 1}
    text = tabulate_cohort_test(tmp_path, pd.DataFrame([known]))
    assert text.splitlines()[2:] == []


def test_ceilings_are_the_highest_accuracies_of_each_reading(tmp_path):
    """A is 0.59 at beta=0.5. A changed mu is named, a run that has not ended is left out."""
    folder = tmp_path / "multirun" / "flashback_table1"
    given = ["experiment=flashback/cifar10_lda0.5"]
    make_run(folder, [*given, "algorithm=fedavg"], [0.2, 0.55, 0.5])
    make_run(folder, [*given, "algorithm=fedntd", "rounds=2"], [0.3, 0.6])
    make_run(folder, [*given, "algorithm=fedntd", "seed=1"], [0.4])
    make_run(folder, [*given, "algorithm=moon", "algorithm.mu=10"], [0.58])
    make_run(folder, [*given, "algorithm=fedprox"], [0.9], status="failed")
    two = tmp_path / "multirun" / "flashback_table1_two_epochs"
    more = ["augment=false", "local.epochs=2"]
    make_run(two, [*given, "algorithm=flashback", *more], [0.7])
    rows = tabulate_ceilings(tmp_path).splitlines()[2:]
    first = "FedNTD 0.600 (2), MOON (algorithm.mu=10) 0.580 (1), FedAvg 0.550 (2)"
    assert rows == [
        f"| CIFAR10, beta=0.5, as FedNTD | 0.621 | {first} |",
        "| CIFAR10, beta=0.5, no augmentation, E=2 | 0.621 | Flashback 0.700 (1) |",
    ]
