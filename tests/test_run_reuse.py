"""Runs of one sweep count in the tables of other sweeps, and their jobs do not run again."""

import json

import pandas as pd
import pytest
import yaml

from fedexp.cli import main
from fedexp.cli.preview import job_status, plan_jobs
from fedexp.config.values import resolve
from fedexp.papers.aggregate import write_tables
from fedexp.rundir import run_reuse
from fedexp.rundir.run_reuse import find_reusable, finished_runs
from fedexp.rundir.sweeps import find_jobs, without_outdated, write_sweep_name
from quick_runs import FEDERATION
from test_compare import make_run, one
from toy_federation import composed


def make(folder, overrides, accuracy, choices, **changes):
    """Write a finished run of a composed configuration, in both views unless the overrides say
    otherwise."""
    plain = PLAIN in overrides
    seed = next(
        (int(text.removeprefix("seed=")) for text in overrides if text.startswith("seed=")), 0
    )
    make_run(folder, overrides, [accuracy], seed=seed, views=not plain)
    directory = max(folder.glob("run*"))
    config = (
        resolve(composed(*overrides, *([] if plain else [BOTH]))) | {"choices": choices} | changes
    )
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory


PLAIN, BOTH = (f"test_views=[{names}]" for names in ("plain", "plain,augmented"))
CIFAR = ["experiment=fedntd/cifar10_s2", "algorithm=fedavg"]
CHOICES = {"dataset": "cifar10", "algorithm": "fedavg"}


def table10(folder):
    """FedNTD Table 10 (participation): its R=0.1 is Table 1's setting."""
    write_tables(folder)
    return pd.read_csv(folder / "table.csv", keep_default_na=False)


def reuse(job, other, overrides):
    """Note, as a sweep does, that a job uses another sweep's run."""
    job.mkdir(parents=True)
    run_reuse.record_reuse(job, other, overrides)


def test_run_of_another_table_counts_for_a_job_that_reuses_it(tmp_path):
    """Two jobs of Table 10 at R=0.1 use a run of Table 1 and one of Table 8. A run of Table 8 that
    no job uses does not count."""
    multirun = tmp_path / "multirun"
    mine, shares = multirun / "fedntd_table10", [*CIFAR, "participation=0.1"]
    first = make(multirun / "fedntd_table1", [*CIFAR, "data_dir=/somewhere"], 0.40, CHOICES)
    bf16 = [*shares, "seed=1", "hardware.precision=bf16"]
    second = make(multirun / "fedntd_table8", bf16, 0.42, CHOICES)
    make(multirun / "fedntd_table8", [*shares, "seed=2"], 0.9, CHOICES)
    write_sweep_name(mine, "fedntd_table10")
    # the names of runs contain a hash of their configuration
    reuse(mine / "a", first.rename(first.with_name("a")), [*shares, "seed=0"])
    reuse(mine / "b", second.rename(second.with_name("b")), [*shares, "seed=1"])
    own = ["experiment=fedntd/cifar10_s2", "algorithm=fedntd", "participation=0.3"]
    make(mine, own, 0.5, {"dataset": "cifar10", "algorithm": "fedntd"})
    table = table10(mine)
    row = one(table, setting="R=0.1", method="FedAvg", metric="accuracy")
    assert (row["n"], float(row["mean"]), row["protocol"]) == (2, pytest.approx(41), "full")
    assert row["from"] == "fedntd_table1 fedntd_table8"
    assert "includes runs of other sweeps: `fedntd_table1`, `fedntd_table8`." in (
        mine / "table.md"
    ).read_text(encoding="utf-8")
    assert (table["n"] > 0).sum() == 4  # accuracy and forgetting of both runs


def test_only_runs_below_multirun_are_reused(tmp_path):
    make(tmp_path / "other" / "fedntd_table1", CIFAR, 0.4, CHOICES)
    assert list(finished_runs(tmp_path / "other" / "fedntd_table10")) == []
    make(tmp_path / "multirun" / "deeper" / "s", CIFAR, 0.4, CHOICES)
    assert len(list(finished_runs(tmp_path / "multirun" / "fedntd_table10"))) == 1


def test_failed_or_unfinished_run_is_not_reused(tmp_path):
    folder = tmp_path / "multirun" / "a"
    directory, config = make(folder, CIFAR, 0.4, CHOICES), resolve(composed(*CIFAR))
    job = tmp_path / "multirun" / "b" / "job"
    assert find_reusable(job, config) == directory
    (directory / "summary.json").write_text(json.dumps({"status": "failed"}))
    assert find_reusable(job, config) is None
    (directory / "summary.json").unlink()
    assert find_reusable(job, config) is None


def test_run_tested_in_more_views_is_reused_for_a_job_with_fewer(tmp_path):
    """Its plain values are equal. The reverse would lack the second view."""
    folder = tmp_path / "multirun" / "a"
    directory, job = make(folder, CIFAR, 0.4, CHOICES), tmp_path / "multirun" / "b" / "job"
    assert find_reusable(job, resolve(composed(*CIFAR))) == directory
    assert find_reusable(job, resolve(composed(*CIFAR, BOTH))) == directory
    assert find_reusable(job, resolve(composed(*CIFAR, "seed=1"))) is None
    other = tmp_path / "other" / "multirun"
    plain = make(other / "a", [*CIFAR, PLAIN], 0.4, CHOICES)
    assert find_reusable(other / "b" / "job", resolve(composed(*CIFAR, BOTH))) is None
    assert find_reusable(other / "b" / "job", resolve(composed(*CIFAR))) == plain


@pytest.mark.parametrize(
    ("views", "local", "expected"),
    [
        ([BOTH], [], "1 jobs: 1 done"),
        ([PLAIN], [], "1 jobs: 0 done, 1 new"),  # tests less than the job does
        ([BOTH], ["local.lr=0.5"], "1 jobs: 0 done, 1 new"),
    ],
)
def test_preview_shows_runs_of_other_sweeps(here, capsys, views, local, expected):
    made = make(
        here / "multirun" / "fedntd_table1", [*CIFAR, "seed=0", *views, *local], 0.4, CHOICES
    )
    restriction = ["algorithm=fedavg", "participation=0.1", "seed=0"]
    assert main.main(["--multirun", "sweep=fedntd_table10", *restriction, "preview=true"]) == 0
    line, *_ = lines = capsys.readouterr().out.splitlines()
    assert expected in lines
    assert line.endswith(f" completed          in fedntd_table1/{made.name}") == (
        "1 done" in expected
    )
    assert not (here / "multirun" / "fedntd_table10").exists()


@pytest.mark.slow  # two sweeps of small runs
def test_job_reuses_run_of_another_sweep(here, capsys, caplog):
    small = [*FEDERATION, "rounds=1"]
    assert main.main(["--multirun", *small, "seed=0", "hydra.sweep.dir=multirun/a"]) == 0
    capsys.readouterr()
    again = ["--multirun", *small, "seed=0,1", "hydra.sweep.dir=multirun/b"]
    assert main.main(again) == 0
    (first,) = (here / "multirun" / "a").glob("digits_*")
    job = here / "multirun" / "b" / first.name
    assert sorted(
        path.name for path in job.iterdir() if path.is_file() and "lock" not in path.name
    ) == [run_reuse.NOTE]
    assert "reusing the complete run" in capsys.readouterr().err
    runs = without_outdated(find_jobs(here / "multirun" / "b"))
    assert [run.finished for run in runs] == [True, True]
    assert {run.directory for run in runs} == {
        first,
        *(path for path in job.parent.glob("digits_*") if path != job),
    }
    table = pd.read_csv(here / "multirun" / "b" / "table.csv")
    assert table["n"].tolist() == [2]
    jobs = plan_jobs([["seed=0", *small, "hydra.sweep.dir=multirun/b"]], [])
    assert job_status(jobs[0]) == "completed"
    # Once that run is gone the job is one again.
    (first / "summary.json").unlink()
    assert job_status(jobs[0]) == "new"
    assert main.main(again) == 0
    assert (job / "summary.json").exists()
    assert not (job / run_reuse.NOTE).exists()
