"""Golden trajectories: short runs in float64 on digits equal the committed numbers in golden/. If a
change alters them, it changes what users measure. `python tests/test_golden.py --write` renews the
files; explain why in the changelog."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedexp.config.build import build
from fedexp.training.evaluation import evaluate
from fedexp.training.prepare import prepare
from fedexp.training.rounds import play_round
from fedexp.training.simulation import Simulation
from toy_federation import composed

GOLDEN = Path(__file__).parent / "golden"
COMMON = [
    "tracker=none",
    "hardware=cpu",
    "hardware.precision=fp64",
    "hardware.threads=1",
    "num_clients=6",
    "participation=0.5",
    "rounds=3",
    "local.epochs=1",
    "alpha=0.3",
]
RUNS = {
    "fedavg": ["algorithm=fedavg"],
    "fedprox": ["algorithm=fedprox", "algorithm.mu=1.0"],
    "fedntd": ["algorithm=fedntd", "algorithm.tau=2.0"],
    "fedntd_mse": ["algorithm=fedntd", "algorithm.distance=mse", "algorithm.beta=0.01"],
    "fedntd_sharding_uniform": [
        "algorithm=fedntd",
        "partition=sharding",
        "weighting=uniform",
        "shards_per_client=5",
    ],
}


def trajectory(simulation: Simulation) -> list[dict[str, float]]:
    """Return one row per round, starting with the initial model."""
    totals = torch.bincount(simulation.runtime.data.y_test).numpy()
    state, rows = simulation.initial_state(), []
    scores = evaluate(simulation, state.server, {}, 0)
    train_loss = float("nan")
    while True:
        (test,) = scores.values()
        correct = np.rint(test.class_accuracy * totals)
        row = {
            "round": state.round,
            "test_accuracy": correct.sum() / totals.sum(),
            "test_loss": test.loss,
        }
        row |= {"train_loss": train_loss} | {
            f"class_{c}": a for c, a in enumerate(correct / totals)
        }
        rows.append({key: float(value) for key, value in row.items()})
        if state.round == simulation.settings.rounds:
            return rows
        result = play_round(simulation, state)
        state.advance(result)
        scores, train_loss = result.scores, result.train_loss


def compute(name: str, *overrides: str) -> list[dict[str, float]]:
    common = [
        o for o in COMMON if not (o.startswith("alpha") and "partition=sharding" in RUNS[name])
    ]
    return trajectory(prepare(build(composed(*common, *RUNS[name], *overrides))).simulation)


def read(name: str) -> list[dict[str, float]]:
    with open(GOLDEN / f"{name}.csv", newline="", encoding="utf-8") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(autouse=True)
def _threads():
    """Restore the number of threads, which `prepare` sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# The vectorised engine once: test_algorithms.py compares the engines for every algorithm.
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("fedntd", "sequential"),
        *(
            pytest.param(name, "sequential", marks=pytest.mark.slow)
            for name in RUNS
            if name != "fedntd"
        ),
        pytest.param("fedntd", "vectorised", marks=pytest.mark.slow),
    ],
)
def test_run_equals_its_golden_file(name, engine):
    """Accuracies are equal; losses agree to 1e-9, which allows another order of summation but not
    another method."""
    actual, expected = compute(name, f"hardware.engine={engine}"), read(name)
    assert [list(row) for row in actual] == [list(row) for row in expected]
    for got, wanted in zip(actual, expected, strict=True):
        for key in got:
            tolerance = 1e-9 if key.endswith("loss") else 0.0
            np.testing.assert_allclose(
                got[key], wanted[key], rtol=tolerance, atol=0, err_msg=f"{key} in {wanted}"
            )


def test_golden_runs_differ_and_learn():
    """The files were written by runs that train."""
    last = {name: read(name)[-1] for name in RUNS}
    assert len({row["test_loss"] for row in last.values()}) == len(RUNS)
    assert all(row["test_loss"] < read(name)[0]["test_loss"] for name, row in last.items())


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], "usage: python tests/test_golden.py --write"
    for run_name in RUNS:
        table = compute(run_name)
        with open(GOLDEN / f"{run_name}.csv", "w", newline="", encoding="utf-8") as output:
            writer = csv.DictWriter(output, list(table[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                {k: int(v) if k == "round" else repr(v) for k, v in row.items()} for row in table
            )
