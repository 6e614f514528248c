"""`budget=<minutes>`: the deadline of jobs, the preview, and continuing after it."""

import json
import re
import shutil
import time
from types import SimpleNamespace

import pandas as pd
import pytest

from fedexp.cli import main, preview
from fedexp.cli.preview import Planned, find_measured_runs, job_states, plan_jobs
from fedexp.core.errors import BudgetSpent
from fedexp.rundir import run_reuse
from fedexp.rundir.evidence import kept_below
from fedexp.training import job, rounds
from fedexp.training.job import Deadline
from fedexp.training.recorder import Recorder
from fedexp.training.rounds import run_rounds
from quick_runs import FEDERATION
from toy_federation import make_simulation

SMALL = [*FEDERATION, "num_clients=4", "alpha=10", "model.channels=[4]", "model.hidden=[8]"]
SMALL += ["local.batch_size=120"]


def fedexp(*arguments: str) -> int:
    return main.main(["--multirun", *SMALL, *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["budget=5"], "budget=5: needs --multirun"),
        (
            ["--multirun", "budget=0", "sweep=cfed_table1"],
            "budget=0: must be a positive number of minutes",
        ),
        (
            ["--multirun", "budget=5", "seed=0,1"],
            "budget=5: needs sweep=<name> or hydra.sweep.dir=<directory>",
        ),
        (["--multirun", "budget=5", "sweep=cfed_table1,nothing"], "sweep=nothing: no such sweep"),
        (
            ["--multirun", "sweep=cfed_table1,cfed_table2", "hydra.sweep.dir=x"],
            "hydra.sweep.dir=x: cannot be used with several sweeps",
        ),
    ],
)
def test_invalid_budgets_are_rejected(arguments, message, capsys, here):
    assert main.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(here.iterdir())


def test_deadline_is_an_override_of_each_job():
    """The deadline is 1e9 seconds after the epoch. The order of the multiruns is kept."""
    moment = "+hydra.job.env_set.FEDEXP_DEADLINE='1000000000.000'"
    launches = preview.add_deadline([["seed=0,1"], ["seed=2"]], 1e9)
    assert launches == [["seed=0,1", moment], ["seed=2", moment]]
    config = {"env_set": {job.DEADLINE: "1000000000.000"}}
    found = job.deadline_of(SimpleNamespace(job=config))
    assert found == Deadline(1e9)
    with pytest.raises(BudgetSpent):
        found.check()
    assert job.deadline_of(SimpleNamespace(job={})) == Deadline()


def test_work_must_end_before_the_deadline(monkeypatch):
    """At second 100, work of 9 seconds ends before second 110, and work of 10 seconds does not."""
    monkeypatch.setattr(time, "time", lambda: 100.0)
    Deadline().check(1e9)
    Deadline(110.0).check(9.0)
    with pytest.raises(BudgetSpent):
        Deadline(110.0).check(10.0)


def test_a_round_starts_only_if_it_can_be_saved_by_the_deadline(monkeypatch, tmp_path):
    """Rounds of 5, 1, 1, 1 and 1 seconds, checkpoints of 1,000 seconds. Before a round, the longest
    of the last three rounds and the checkpoint must fit."""
    took, asked, clock = iter([5.0, 1.0, 1.0, 1.0, 1.0]), [], [0.0]
    simulation = make_simulation(rounds=5)
    record = rounds.record_round

    def slowly(*arguments):
        record(*arguments)
        clock[0] += next(took)

    monkeypatch.setattr(rounds, "record_round", slowly)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    watched = SimpleNamespace(check=asked.append)
    recorder = Recorder(tmp_path, simulation, [], None)
    monkeypatch.setattr(recorder, "save_checkpoint", lambda state: None)
    recorder.saving_seconds = 1000.0
    run_rounds(simulation, simulation.initial_state(), recorder, watched)
    recorder.close()
    assert asked == [1000, 1005, 1005, 1005, 1001]


def test_budget_stops_a_job_and_the_same_command_resumes_it(here, capsys, monkeypatch):
    """The deadline is simulated: the first job stops after round 2 of 3, and the second does not
    start. The same command then completes both.
    """
    checked = []

    def check(self: Deadline, seconds: float = 0.0) -> None:
        checked.append(seconds)
        # twice at the start, before rounds 1 and 2; then before round 3, and for the other job
        if len(checked) >= 5:
            raise BudgetSpent

    monkeypatch.setattr(Deadline, "check", check)
    command = ["seed=0,1", "rounds=3", "hydra.sweep.dir=multirun/a", "budget=60"]
    assert fedexp(*command) == 0
    shown = capsys.readouterr()
    assert (
        shown.out.splitlines()[-1] == "0 of 2 done, 1 begun; the same command continues the sweep"
    )
    assert "seed0_" in shown.err
    assert "stopped by the budget after round 2" in shown.err
    (job,) = (here / "multirun" / "a").glob("digits_*")
    assert not (job / "error.txt").exists()
    assert not (job / "summary.json").exists()
    assert pd.read_csv(job / "rounds.csv")["round"].tolist() == [0, 1, 2]
    # what the rounds and the checkpoints have taken
    assert all(seconds > 0 for seconds in checked[3:5])
    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.argv", ["fedexp"])
    assert fedexp(*command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 done"
    assert json.loads((job / "summary.json").read_text())["status"] == "completed"
    overrides = (job / ".hydra" / "overrides.yaml").read_text()
    assert "DEADLINE" not in overrides
    assert "hydra" not in overrides


@pytest.mark.slow
def test_budget_covers_several_sweeps(here, capsys):
    """Sweep x has fedavg, sweep y fedavg and fedprox: two runs for three jobs, each in the
    directory of its sweep.
    """
    (here / "own" / "sweep").mkdir(parents=True)
    for name, algorithms in (("x", ["fedavg"]), ("y", ["fedavg", "fedprox"])):
        axis = ", ".join(f"{each}: {{}}" for each in algorithms)
        text = (
            f'# {name}\npaper: none\ntable: "0"\nblocks: [{{algorithm: {{{axis}}}, measures:'
            " []}]\n"
        )
        (here / "own" / "sweep" / f"{name}.yaml").write_text(text)
    assert fedexp("--config-dir", "own", "sweep=x,y", "rounds=1", "seed=0", "budget=60") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 3 done"
    folder = here / "multirun"
    assert sorted(path.parent.parent.name for path in folder.rglob("summary.json")) == ["x", "y"]
    assert len(list(folder.rglob(run_reuse.NOTE))) == 1
    assert pd.read_csv(folder / "y" / "table.csv")["n"].tolist() == [1, 1]
    assert pd.read_csv(folder / "x" / "table.csv")["n"].tolist() == [1]
    assert (folder / "y" / "multirun.yaml").exists()


def test_spent_budget_starts_no_job(here, capsys):
    assert fedexp("seed=0", "rounds=1", "hydra.sweep.dir=multirun/a", "budget=1e-6") == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "0 of 1 done; the same command continues the sweep"
    )
    assert not list((here / "multirun" / "a").glob("digits_*"))


def test_preview_counts_jobs_within_the_budget(capsys):
    """Two jobs of 30 s fit into a minute. A job that takes longer is not skipped."""
    preview.show_limit([30.0, 30.0, 30.0], 1)
    preview.show_limit([30.0, None, 40.0], 1)
    preview.show_limit([70.0, 30.0], 1)
    limit = "budget 0:01:00, one job at a time in this order:"
    assert capsys.readouterr().out.splitlines() == [
        f"{limit} 2 of 3 remaining jobs would finish",
        f"{limit} 1 of 3 remaining jobs would finish; no estimate for 1",
        f"{limit} 0 of 2 remaining jobs would finish",
    ]


def test_kept_run_gives_a_time_estimate(here, capsys):
    """Seed 0 was run and only its kept file is left. It gives an estimate for seed 1."""
    assert fedexp("seed=0", "rounds=2", "hydra.sweep.dir=multirun/a") == 0
    assert main.main(["report", "multirun/a", "--keep", "--no-figures"]) == 0
    (made,) = (here / "multirun" / "a").glob("digits_*")
    (kept,) = kept_below([here / "multirun"])
    shutil.rmtree(made)
    capsys.readouterr()
    jobs = plan_jobs([["rounds=2", "seed=0,1", *SMALL, "hydra.sweep.dir=multirun/a"]], [])
    left = preview.show_jobs(jobs, find_measured_runs(jobs))
    seconds = [float(cell) for cell in kept["tables"]["rounds.csv"]["seconds"].split(",") if cell]
    # the median of two rounds, twice
    assert left == [pytest.approx(sum(seconds))] * 2
    first, second, *_, counts = capsys.readouterr().out.splitlines()
    machine = re.escape(kept["summary"]["hardware"]["name"])
    assert re.search(r"^seed=0 +kept", first)
    assert re.search(rf"^seed=1 +new .*\(measured on {machine}\)$", second)
    assert counts == "2 jobs: 0 done, 1 kept, 1 new"


def test_kept_run_covers_jobs_with_the_same_or_fewer_tests(here, monkeypatch):
    """A run with plain views is not enough for a job with both views.

    A run with another learning rate is another run; other hardware makes no difference.
    """

    def jobs(*overrides: str) -> list[Planned]:
        return plan_jobs(
            [[*SMALL, "dataset=cifar10", "hydra.sweep.dir=multirun/a", *overrides]], []
        )

    def is_kept(job: list[Planned], *kept: list[Planned]) -> bool:
        contents = [{"config": each[0].config} for each in kept]
        monkeypatch.setattr(preview, "kept_below", lambda folders: contents)
        ((_, state, _),) = job_states(job)
        return state == "kept"

    plain, both = jobs(), jobs("test_views=[plain,augmented]")
    assert is_kept(plain, plain)
    assert is_kept(plain, both)
    assert is_kept(both, plain, both)
    assert not is_kept(both, plain)
    assert not is_kept(jobs("evaluate=[global,personal]"), plain)
    assert is_kept(plain, jobs("evaluate=[global,personal]"))
    assert is_kept(plain, jobs("hardware.precision=bf16"))
    assert not is_kept(plain, jobs("local.lr=0.5"))
    assert not is_kept(plain, jobs("seed=1"))


def test_config_dir_may_contain_commas_and_brackets(here):
    folder = here / "my conf, (x) [y]"
    (folder / "algorithm").mkdir(parents=True)
    (folder / "algorithm" / "mine.yaml").write_text("_target_: fedexp.algorithms.base.FedAvg\n")
    (job,) = plan_jobs([["algorithm=mine", *SMALL, "hydra.sweep.dir=multirun/a"]], [folder])
    assert job.config["algorithm"]["_target_"].endswith("FedAvg")


def test_unwritable_tables_fail_only_the_command(here, capsys):
    (here / "multirun/a/table.md").mkdir(parents=True)
    assert fedexp("rounds=1", "seed=0", "hydra.sweep.dir=multirun/a", "budget=10") == 1
    answer = capsys.readouterr()
    assert answer.err.count("table.md: cannot be written") == 1
    assert answer.out.endswith("1 of 1 done\n")
