"""`hardware.jobs_together`: runs whose clients are trained as one cohort have the results that each
has alone."""

import json
import logging
import threading
from dataclasses import replace

import pandas as pd
import pytest
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.fedntd import FedNTD
from fedexp.cli import main
from fedexp.core.settings import Seeds
from fedexp.engine.vectorised.engine import Request, Vectorised
from fedexp.engine.vectorised.joint import Joint
from fedexp.metrics.forgetting_metric import RoundDrop
from fedexp.training import job
from fedexp.training.lockstep import Lockstep
from fedexp.training.prepare import Prepared, prepare
from fedexp.training.rounds import evaluate
from test_continual import ROWS as CONTINUAL
from test_edge_cases import ROWS, simulation
from toy_federation import (
    DRAWN,
    KEPT,
    LOSSES,
    STRUCTURE,
    Normed,
    advance,
    assemble,
    make_simulation,
    one_of_each_kind,
    play,
    play_round,
)

NTD = FedNTD(beta=1.0, tau=1.0, lambda_=1.0, distance="kl", tau_squared=True, mse_reduction="sum")


def seeded(number):
    return Seeds(partition=number, sampling=number, training=number)


def vectorised(simulation, chunk=None):
    return replace(simulation, engine=Vectorised(chunk=chunk))


def rounds_of(simulation, count=3):
    """The state after some rounds, and the tests of global and local models in each."""
    state, tests = simulation.initial_state(), []
    for _ in range(count):
        result = play_round(simulation, state)
        advance(state, result)
        tests.append(
            (
                result.train_loss,
                result.local_class_correct,
                evaluate(simulation, state.server, state.round),
            )
        )
    return state.server, state.clients, tests


def in_lockstep(simulations, play=rounds_of):
    """The same of runs whose cohorts are trained together."""
    lockstep, found = Lockstep(), {}
    joined = [lockstep.join(Prepared(each, None)).simulation for each in simulations]

    def job(number):
        found[number] = play(joined[number])

    lockstep.run([lambda number=number: job(number) for number in range(len(joined))])
    return [found[number] for number in range(len(joined))]


class Counting(Vectorised):
    """Notes how many runs were trained as one."""

    def train_together(self, requests):
        self.joined = [*getattr(self, "joined", []), len(requests)]
        return super().train_together(requests)


def assert_alike(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    assert found[1].keys() == expected[1].keys()
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-12)
    for (loss, local, tested), (other, wanted, known) in zip(found[2], expected[2], strict=True):
        assert loss == pytest.approx(other, abs=1e-12)
        torch.testing.assert_close(local, wanted, rtol=0, atol=0)
        assert {v: e.class_correct.tolist() for v, e in tested.items()} == {
            v: e.class_correct.tolist() for v, e in known.items()
        }


@one_of_each_kind(
    "name", ROWS, *KEPT, *DRAWN, *LOSSES, *STRUCTURE, "prepare", "initial_params", "client_setup"
)
def test_runs_of_other_seeds_have_the_results_that_each_has_alone(name):
    """Other initial models, other cohorts, other examples; in a stream, whose tasks a seed divides,
    the same ones."""
    stream = ROWS[name] in CONTINUAL
    # into the second task; what is kept of the first round counts in the second
    count = 3 if stream else 2
    seeds = [replace(seeded(number), partition=0 if stream else number) for number in (0, 1)]
    alone = [vectorised(simulation(name, seeds=each)) for each in seeds]
    engine = Counting()
    joined = [replace(each, engine=engine) for each in alone]
    expected = [rounds_of(each, count) for each in alone]
    assert not all(map(torch.equal, *(list(state[0]["params"].values()) for state in expected)))
    for found, wanted in zip(
        in_lockstep(joined, lambda each: rounds_of(each, count)), expected, strict=True
    ):
        assert_alike(found, wanted)
    assert set(engine.joined) == {2}


@pytest.mark.parametrize("chunk", [None, 3])
def test_running_statistics_and_local_tests_are_each_run_s_own(chunk):
    """Batch norm; three runs; the augmented view, which each draws by its own seed; clients three
    at a time."""
    settings = dict(
        model=Normed(), forgetting_metric=RoundDrop(local=True), test_views=("plain", "augmented")
    )
    alone = [vectorised(make_simulation(NTD, seeds=seeded(n), **settings), chunk) for n in range(3)]
    for found, wanted in zip(in_lockstep(alone), [rounds_of(each) for each in alone], strict=True):
        assert_alike(found, wanted)


def request(simulation, lr=0.1, **changes):
    state = play(simulation, 1)
    server = state.server
    asked = Request(
        simulation.algorithm, simulation.bench, server, assemble(simulation, state, 2), lr, False
    )
    return replace(asked, **changes)


def test_only_runs_that_are_alike_are_trained_as_one():
    first = make_simulation(seeds=seeded(0))
    others = [
        request(make_simulation(seeds=seeded(1))),
        request(make_simulation(seeds=seeded(2)), lr=0.05),
        request(make_simulation(NTD)),
        request(make_simulation(model=Normed())),
        request(make_simulation(local=replace(first.bench.local, momentum=0.5))),
        request(make_simulation(seeds=seeded(3)), evaluate_local=True),
        request(make_simulation(seeds=seeded(4))),
    ]
    assert Joint(Vectorised()).groups([request(first), *others]) == [
        [0, 1, 7],
        [2],
        [3],
        [4],
        [5],
        [6],
    ]


def test_other_data_and_frozen_parameters_are_not_trained_as_one():
    one, two = request(make_simulation(seeds=seeded(0))), request(make_simulation(seeds=seeded(1)))
    x = two.bench.data.x_train.clone()
    x[0] += 1
    other = replace(two, bench=replace(two.bench, data=replace(two.bench.data, x_train=x)))
    assert not Joint(Vectorised()).alike(one, other)
    first = next(iter(two.server["params"]))
    held = {name: value for name, value in two.server["params"].items() if name != first}
    pair = [replace(each, server=each.server | {"params": held}) for each in (one, two)]
    assert not Joint(Vectorised()).alike(*pair)


def test_runs_of_other_lengths_go_on_without_those_that_have_ended():
    alone = [vectorised(make_simulation(seeds=seeded(number))) for number in range(3)]
    lockstep, found = Lockstep(), {}
    joined = [lockstep.join(Prepared(each, None)).simulation for each in alone]
    lockstep.run([lambda n=n: found.setdefault(n, rounds_of(joined[n], n + 1)) for n in range(3)])
    for number in range(3):
        assert_alike(found[number], rounds_of(alone[number], number + 1))


def test_an_interrupt_ends_all_after_a_round(monkeypatch):
    """Each run is told at its next cohort, and can save what it has."""
    lockstep, played, stopped = Lockstep(), [], []
    joined = [
        lockstep.join(Prepared(vectorised(make_simulation(seeds=seeded(n))), None)).simulation
        for n in (0, 1)
    ]
    joining, main_thread = threading.Thread.join, threading.current_thread()

    def join(thread, timeout=None):
        """Ctrl+C in the main thread, once both have played a round."""
        if (
            threading.current_thread() is main_thread
            and len(played) >= 2
            and not lockstep._interrupted
        ):
            raise KeyboardInterrupt
        joining(thread, 0.01)

    def job(simulation):
        state = simulation.initial_state()
        try:
            while True:
                advance(state, play_round(simulation, state))
                played.append(state.round)
        except KeyboardInterrupt:
            stopped.append(state.round)
            raise

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        lockstep.run([lambda one=one: job(one) for one in joined])
    assert len(stopped) == 2
    assert max(stopped) - min(stopped) <= 1
    assert min(stopped) >= 1


# --- the command

SMALL = [
    "num_clients=8",
    "participation=0.5",
    "local.epochs=1",
    "min_size=2",
    "figures=false",
    "hardware=cpu",
    "hardware.engine=vectorised",
    "hardware.threads=1",
    "hardware.precision=fp64",
    "checkpoint_interval=1",
    "model.channels=[4]",
    "model.hidden=[8]",
    "local.batch_size=60",
    "rounds=2",
    "forgetting_metric=in_out_local",
]


def sweep(*arguments):
    return main.main(["--multirun", *SMALL, *arguments])


def jobs_in(directory):
    return sorted(path.parent for path in directory.glob("*/summary.json"))


def loud_prepare(built, *rest):
    logging.getLogger("fedexp").info("prepared with seed %d", built.settings.seed)
    return prepare(built, *rest)


def test_a_sweep_together_has_the_files_of_one_job_after_another(tmp_path, monkeypatch, capsys):
    """Three seeds, two at a time: the third waits for the end. The same command finds all
    complete."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedexp"])
    monkeypatch.setattr(job, "prepare", loud_prepare)
    grid = ["seed=0,1,2", "tracker=none"]
    assert sweep(*grid, "hydra.sweep.dir=alone") == 0
    capsys.readouterr()
    assert sweep(*grid, "hydra.sweep.dir=together", "hardware.jobs_together=2") == 0
    alone, together = jobs_in(tmp_path / "alone"), jobs_in(tmp_path / "together")
    assert [path.name for path in alone] == [path.name for path in together]
    assert len(alone) == 3
    for seed, (one, other) in enumerate(zip(alone, together, strict=True)):
        for name in ("class_accuracy.csv", "clients.csv"):
            pd.testing.assert_frame_equal(
                pd.read_csv(one / name), pd.read_csv(other / name), rtol=1e-9
            )
        for each in (one, other):
            lines = (each / "run.log").read_text()
            assert lines.count("partition=") == 1  # its own lines alone
            assert lines.count("prepared with") == 1
            first, second = lines.splitlines()[:2]  # logged before it was opened
            assert first.endswith(f"INFO job {each.name}")
            assert second.endswith(f"INFO prepared with seed {seed}")
        assert json.loads((other / "summary.json").read_text())["status"] == "completed"
    capsys.readouterr()
    assert sweep(*grid, "hydra.sweep.dir=together", "hardware.jobs_together=2") == 0
    assert capsys.readouterr().err.count("complete (2 rounds); nothing to do") == 3


def test_one_job_of_a_group_may_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedexp"])
    aggregate = FedAvg.aggregate

    seen = []

    def broken(self, server, messages, round):
        """Of the run that is the second to aggregate."""
        seen.extend({threading.get_ident()} - {*seen})
        if seen.index(threading.get_ident()) == 1:
            raise RuntimeError("the aggregation broke")
        return aggregate(self, server, messages, round)

    monkeypatch.setattr(FedAvg, "aggregate", broken)
    assert (
        sweep("seed=0,1,2", "tracker=none", "hydra.sweep.dir=some", "hardware.jobs_together=3") == 1
    )
    states = [
        json.loads((path / "summary.json").read_text())["status"]
        for path in jobs_in(tmp_path / "some")
    ]
    assert sorted(states) == ["completed", "completed", "failed"]
    assert "the aggregation broke" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["hardware.jobs_together=0", "tracker=none"],
            "hardware.jobs_together=0: must be auto or at least 1",
        ),
        (
            ["hardware.jobs_together=many", "tracker=none"],
            "hardware.jobs_together=many: must be auto or at least 1",
        ),
        (
            ["hardware.jobs_together=2", "tracker=wandb", "tracker.mode=offline"],
            "Wandb has one run in a process",
        ),
    ],
)
def test_what_cannot_be_together(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedexp"])
    assert sweep("seed=0,1", *arguments) == 2
    assert message in capsys.readouterr().err
