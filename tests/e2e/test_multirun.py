"""Sweeps: all jobs are complete and independent, and a failing job does not stop the others."""

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml
from helpers import ALGORITHM, SMALL, add_class, assert_same_run, summary_of, write_images

from fedexp.cli.sweeps import show_report
from wandb_runs import read_run, run_folders


def jobs(tmp_path: Path, order: str = "algorithm") -> list[Path]:
    """Return the job directories, sorted by a key of their configuration (or a group's option) and
    the seed.
    """

    def key(directory: Path) -> tuple:
        config = yaml.safe_load((directory / "config.yaml").read_text())
        return config["choices"].get(order, config.get(order)), config["seed"]

    found = [
        path
        for path in (tmp_path / "multirun").glob("*/digits_*")
        if (path / "config.yaml").exists()
    ]
    return sorted(found, key=key)


def failed(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in (tmp_path / "multirun").glob("*/digits_*/error.txt"))


@pytest.mark.slow
def test_job_of_a_sweep_equals_a_single_run(fedexp, tmp_path):
    options = ("algorithm=fedavg,fedntd", "seed=0,1", "rounds=2", *SMALL, "figures=true")
    fedexp.done("--multirun", *options)
    names = [directory.name.rpartition("_")[0] for directory in jobs(tmp_path)]
    assert names == [
        f"digits_lda_{algorithm}_seed{seed}"
        for algorithm in ("fedavg", "fedntd")
        for seed in (0, 1)
    ]
    assert len({directory.name.rpartition("_")[2] for directory in jobs(tmp_path)}) == 4
    for directory in jobs(tmp_path):
        summary = summary_of(directory)
        assert summary["status"] == "completed"
        assert f"_{summary['algorithm']}_seed{summary['seed']}_" in directory.name
        assert not (directory / "figures").exists()
    (table,) = tmp_path.glob("multirun/*/table.csv")
    assert (table.parent / "figures/digits_lda_curves.png").exists()
    fedexp.done("figures", str(table.parent))
    assert all((directory / "figures/curves.png").exists() for directory in jobs(tmp_path))
    # The third job equals a single run with the same options.
    fedexp.done("algorithm=fedntd", "rounds=2", "hydra.run.dir=alone", *SMALL)
    assert_same_run(jobs(tmp_path)[2], tmp_path / "alone")


def test_failing_job_does_not_stop_the_others(fedexp, tmp_path, monkeypatch):
    add_class(tmp_path, "algorithm", "broken", ALGORITHM)
    monkeypatch.syspath_prepend(tmp_path)
    answer = fedexp(
        "--multirun", "--config-dir", "own", "algorithm=fedavg,broken,fedprox", "rounds=1", *SMALL
    )
    assert answer.code == 1
    bad, good, last = jobs(tmp_path)
    assert summary_of(good)["status"] == "completed"
    assert summary_of(last)["status"] == "completed"
    assert summary_of(bad)["status"] == "failed"
    report = (bad / "error.txt").read_text()
    assert "Traceback" in report
    assert "the aggregation broke" in report
    assert "Traceback" not in answer.err


def test_every_job_is_checked_before_the_first_starts(fedexp, tmp_path):
    """Also by the preview. Flashback needs public.fraction. Each message is printed once."""
    given = ["algorithm=fedavg,flashback", "local.epochs=1,0", *SMALL]
    given.remove("local.epochs=1")
    for preview in ([], ["preview=true"]):
        answer = fedexp.rejected("--multirun", *given, *preview)
        assert "public.fraction=0: Flashback needs a public set" in answer.err
        assert "(in 1 of 4 jobs: algorithm=flashback local.epochs=1)" in answer.err
        assert "(in 2 of 4 jobs: algorithm=fedavg local.epochs=0, ...)" in answer.err
        assert answer.err.count("local.epochs=0.0: must be") == 1
        assert answer.err.endswith("no job has been started\n")
    assert not (tmp_path / "multirun").exists()


def test_job_that_fails_with_its_data_is_listed_with_its_reason(fedexp, tmp_path):
    """Eight clients with three shards need 24 shards, which ten classes cannot have."""
    sharded = ["partition=sharding", "shards_per_client=5,3", *SMALL]
    sharded.remove("min_size=2")
    answer = fedexp.rejected("--multirun", *sharded, "rounds=1")
    (good,), (bad,) = jobs(tmp_path), failed(tmp_path)
    assert summary_of(good)["status"] == "completed"
    assert "shards_per_client=3" in (bad / "error.txt").read_text()
    assert not (bad / "rounds.csv").exists()
    assert f"Not in the tables: {bad.name} failed: shards_per_client=3" in answer.out


@pytest.mark.slow
def test_each_job_is_a_wandb_run(fedexp, tmp_path):
    pytest.importorskip("wandb")
    answer = fedexp.done(
        "--multirun", "seed=0,1", "rounds=1", "tracker=wandb", "tracker.wandb.mode=offline", *SMALL
    )
    identities, groups = set(), set()
    for seed, directory in enumerate(jobs(tmp_path)):
        (offline,) = run_folders(directory)
        run, _, records = read_run(offline)
        identities.add(run["run_id"])
        groups |= {record["run"]["run_group"] for record in records if record["type"] == "run"}
        assert run["config"]["seed"] == seed
        assert run["tags"][-1] == directory.parent.name  # the sweep
    assert len(identities) == 2
    assert len(groups) == 1  # repetitions
    assert not (tmp_path / "wandb").exists()
    # The table of means and standard deviations is a separate W&B run.
    sweep = directory.parent
    (offline,) = run_folders(sweep)
    run, _, records = read_run(offline)
    (record,) = [record["run"] for record in records if record["type"] == "run"]
    assert (run["name"], record["job_type"], record["run_group"]) == (
        f"{sweep.name} table",
        "table",
        sweep.name,
    )
    logged = json.loads((offline / "files" / run["summary"]["tables/table"]["path"]).read_text())
    printed = pd.read_csv(sweep / "table.csv")
    stds = pd.DataFrame(logged["data"], columns=logged["columns"])["accuracy_std"]
    assert stds.tolist() == printed["accuracy_std"].tolist()
    assert run["summary"]["tables/rounds_to_target"]["nrows"] == 1
    assert answer.err.count("wandb sync") == 3
    # The next report keeps the id.
    # Also if wandb marks the folder, since a folder of the same second has the name.
    offline.rename(offline.with_name(f"{offline.name}-1"))
    show_report(sweep, None, figures=False)
    assert {read_run(folder)[0]["run_id"] for folder in run_folders(sweep)} == {run["run_id"]}


SWEEP = ("--multirun", "hydra.sweep.dir=multirun/again", "rounds=3", *SMALL)


@pytest.mark.slow
def test_same_command_runs_only_incomplete_jobs(fedexp, tmp_path):
    """Complete jobs are unchanged, an added seed is run, and a failed job is run again."""
    fedexp.done(*SWEEP, "seed=0,1")
    first = {path.name: (path / "summary.json").stat().st_mtime_ns for path in jobs(tmp_path)}
    broken = jobs(tmp_path)[1]
    (broken / "summary.json").write_text('{"status": "failed"}')
    (broken / "error.txt").write_text("it broke")
    (broken / "checksums.json").unlink()  # a failed run has none
    answer = fedexp.done(*SWEEP, "seed=0,1,2", "checkpoint_interval=2")
    assert len(jobs(tmp_path)) == 3
    assert answer.err.count("nothing to do") == 1
    assert (jobs(tmp_path)[0] / "summary.json").stat().st_mtime_ns == first[jobs(tmp_path)[0].name]
    assert summary_of(broken)["status"] == "completed"
    assert not (broken / "error.txt").exists()


def test_interrupted_report_names_the_command_that_writes_it(fedexp, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    command = ("--multirun", "hydra.sweep.dir=multirun/a", "rounds=1", *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr("fedexp.analysis.report.write_tables", interrupted)
        answer = fedexp(*command)
    assert answer.code == 130
    assert "Continue the sweep with:  fedexp --multirun" in answer.err
    answer = fedexp.done(*command)
    assert "nothing to do" in answer.err
    assert (tmp_path / "multirun/a/table.md").exists()


def test_preview_names_data_that_are_missing(fedexp, tmp_path):
    """Once for all jobs. What exists, and what comes with a package, is not named."""
    write_images(tmp_path / "photos", 4, 2)
    for split in ("train", "test"):
        (tmp_path / "data/mnist" / split).mkdir(parents=True)
    given = ("num_clients=2", "participation=1", "data_dir=data", "preview=true")

    def notes(*more: str) -> list[str]:
        lines = fedexp.done("--multirun", *given, *more).out.splitlines()
        return [line for line in lines if "this machine" in line]

    assert notes("dataset=digits,mnist", "seed=0,1") == []
    assert notes("dataset=image_folder", "dataset.root=photos") == []
    (note,) = notes("dataset=cifar10", "seed=0,1")
    assert note.startswith("cifar10 is not on this machine: a run downloads cifar-10-python.tar.gz")
    (note,) = notes("dataset=image_folder", "dataset.root=nowhere", "seed=0,1")
    assert note.startswith("image_folder is not on this machine: nowhere/train: ")
    texts = ("dataset=thucnews", "model=textcnn", "surrogate.dataset=weibo")
    labelled, unlabelled = notes(*texts)
    assert labelled.startswith("thucnews is not on this machine: data/thucnews: has no texts")
    assert unlabelled.startswith("weibo is not on this machine: dataset.file=")
    assert notes("dataset=femnist", "partition=natural")
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "data"}
