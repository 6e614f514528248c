"""Every file of a run that tables need, with every damage, and every command that reads it.

A damaged job is reported, left out and run again. It does not affect the tables of other jobs, and
no command ends in a traceback.
"""

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedexp.cli import main, preview
from fedexp.cli.commands import call
from fedexp.config.values import resolve
from fedexp.data.partitioned import Partition, partition_hash
from fedexp.papers.aggregate import write_report
from fedexp.rundir.lock import is_occupied
from fedexp.rundir.reader import RunDirectory, finished_summary
from fedexp.rundir.repair import repair_job
from fedexp.rundir.sweeps import find_jobs, sweep_name
from quick_runs import FEDERATION, write_run
from toy_federation import composed

FILES = ("summary.json", "rounds.csv", "class_accuracy.csv", "config.yaml", ".hydra/overrides.yaml")
SWEEP = ("sound", "hurt")  # the jobs


def replace_numbers(path, value):
    """Replace every number after the first row, column or key."""
    if path.suffix == ".csv":
        table = pd.read_csv(path).astype(object)
        table.iloc[1:] = value
        path.write_text(table.to_csv(index=False))
    elif path.suffix == ".json":
        keys = f'"rounds": {value}, "accuracy": {value}, "best_accuracy": {value}'
        path.write_text(
            f'{{"status": "completed", "algorithm": "fedavg", "dataset": "digits", {keys}}}'
        )
    elif path.name == "config.yaml":
        path.write_text(f"rounds: {value}\nseed: {value}\nchoices: {{dataset: digits}}\n")
    else:
        path.write_text(f"- {value}\n")


def as_folder(path):
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "blank": lambda path: path.write_text("\n \n"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2 - 2]),
    "list": lambda path: path.write_text("[1, {}]\n"),
    "number": lambda path: path.write_text("17\n"),
    "null": lambda path: path.write_text("null\n"),
    "text": lambda path: path.write_text('"words"\n'),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "null bytes": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 64),
    "latin-1": lambda path: path.write_bytes(path.read_bytes() + "ä".encode("latin-1")),
    "missing": lambda path: path.unlink(),
    "folder": as_folder,
    "link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),  # which would be waited for
    "nan": lambda path: replace_numbers(path, "NaN" if path.suffix == ".json" else ".nan"),
    "huge": lambda path: replace_numbers(path, "1.0e+999"),
    "large": lambda path: replace_numbers(path, "9" * 400),
    "deep": lambda path: path.write_text("[" * 100_000),
}
CASES = [(name, damage) for name in FILES for damage in DAMAGES]


def sample(first, every=11):
    """Return all cases; those not in the sample (every n-th case from `first` on) are slow."""
    return [
        case if i % every == first else pytest.param(*case, marks=pytest.mark.slow)
        for i, case in enumerate(CASES)
    ]


def write_job(directory, seed):
    """Write a finished run with a partition, so that figures can be drawn."""
    write_run(directory, {"algorithm": "fedavg", "alpha": "1", "seed": str(seed)}, rounds=4)
    parts = tuple(np.split(np.arange(12), 4))
    classes = [f"class {c}" for c in range(3)]
    Partition(parts, np.full((4, 3), 1), partition_hash(parts), {}).save(
        directory / "partition.npz", classes
    )
    return directory


@pytest.fixture
def sweep(here):
    for seed, name in enumerate(SWEEP):
        write_job(here / "multirun" / "mine" / name, seed)
    return here / "multirun" / "mine"


def hurt(sweep, name, damage):
    DAMAGES[damage](sweep / "hurt" / name)
    return sweep / "hurt"


def is_damaged(name, damage):
    """Return whether the job is damaged. A run without a summary is only unfinished."""
    return (name, damage) != ("summary.json", "missing")


def finished(sweep):
    """Return the finished jobs of a sweep."""
    return [run for run in find_jobs(sweep) if run.finished]


def test_valid_runs_are_complete(sweep):
    jobs = finished(sweep)
    assert [run.directory.name for run in jobs] == sorted(SWEEP)
    assert [run.problems for run in jobs] == [{}, {}]


@pytest.mark.parametrize(("name", "damage"), sample(0, every=8))
def test_damaged_job_is_not_complete(sweep, name, damage):
    """So `--multirun` runs it again."""
    job = hurt(sweep, name, damage)
    assert finished_summary(job) is None
    assert [run.directory.name for run in finished(sweep)] == ["sound"]
    assert RunDirectory(job).status == ("damaged" if is_damaged(name, damage) else "unfinished")
    if is_damaged(name, damage):
        line = RunDirectory(job).describe_damage()
        assert line.startswith(f"{name}: ")
        assert len(line.splitlines()) == 1
        assert len(line) < 400


@pytest.mark.parametrize(("name", "damage"), sample(0))
def test_report_leaves_out_damaged_runs(sweep, name, damage, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("fedexp"), "propagate", True)
    hurt(sweep, name, damage)
    assert len(write_report(sweep, figures=False)) == 5
    table = pd.read_csv(sweep / "table.csv")
    assert (table["n"].tolist(), table["seeds"].tolist()) == ([1], [0])
    told = [
        line
        for line in (sweep / "table.md").read_text(encoding="utf-8").splitlines()
        if "damaged" in line
    ]
    assert len(told) == is_damaged(name, damage)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == told
    assert all(line.startswith(f"Not in the tables: hurt is damaged ({name}: ") for line in told)


@pytest.mark.parametrize(("name", "damage"), sample(2))
def test_table_of_all_runs_leaves_out_damaged_runs(sweep, name, damage, capsys):
    hurt(sweep, name, damage)
    assert call("report", [str(sweep), "--out", str(sweep / "all")]) == 0
    assert pd.read_csv(sweep / "all.csv")["seed"].tolist() == [0]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == is_damaged(name, damage)
    assert all(f"hurt: {name}: " in line for line in told)


@pytest.mark.parametrize(("name", "damage"), sample(8))
def test_preview_plans_damaged_runs_again(sweep, name, damage, capsys):
    job = hurt(sweep, name, damage)
    planned = [preview.Planned(path, resolve(composed())) for path in (job, sweep / "sound")]
    preview.show_jobs(planned)
    first, *_, last = capsys.readouterr().out.splitlines()
    state = "damaged" if is_damaged(name, damage) else "interrupted"
    assert first.split()[:2] == ["hurt", state]
    assert last == f"2 jobs: 1 done, 1 {state}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"), [case for case in CASES if case[0] != ".hydra/overrides.yaml"]
)
def test_figures_of_damaged_runs_are_drawn_or_name_the_file(sweep, name, damage, capsys):
    """The command draws figures, or ends with code 2 and one line with the file's name."""
    job = hurt(sweep, name, damage)
    code, told = call("figures", [str(job)]), capsys.readouterr()
    assert code in (0, 2)
    assert bool(code) == bool(told.err)
    if code:
        assert name in told.err
        assert len(told.err.splitlines()) == 1
    assert not list(Path(job).rglob(".*.tmp"))


def test_full_disk_while_drawing_is_one_message(sweep, monkeypatch, capsys):
    def full(directory, look):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fedexp.figures.make_figures", full)
    assert call("figures", [str(sweep / "sound")]) == 1
    expected = f"fedexp: {sweep / 'sound'}: cannot be read or written (No space left on device)\n"
    assert capsys.readouterr().err == expected


def test_missing_rows_and_invalid_values_are_found(sweep):
    job = sweep / "hurt"
    rounds, classes = (
        (job / name).read_text().splitlines(keepends=True) for name in ("rounds.csv", FILES[2])
    )
    for name, lines, reason in (
        (
            "rounds.csv",
            rounds[:-1],
            "ends with round 3, but the run ended with round 4; was it cut short?",
        ),
        (
            "rounds.csv",
            [*rounds[:3], rounds[2], *rounds[3:]],
            "has rounds that are not in ascending order",
        ),
        ("rounds.csv", [*rounds[:-1], rounds[-1].replace("4,", "4,1e9,", 1)], "is not a table"),
        ("rounds.csv", [*rounds[:-1], rounds[-1].rstrip("\n")[:-1]], "ends in the middle of a row"),
        (
            "class_accuracy.csv",
            classes[:-1],
            "has rounds without some of the classes; was it cut short?",
        ),
        ("class_accuracy.csv", classes[:-3], "lacks round 4, which was evaluated"),
        (
            "class_accuracy.csv",
            [*classes[:-1], "4,2,1.5\n"],
            "has 1.5 in the column accuracy, which is not an accuracy",
        ),
        ("class_accuracy.csv", [*classes[:-1], "4,2,x\n"], "has 'x' in the column accuracy"),
    ):
        whole = (job / name).read_text()
        (job / name).write_text("".join(lines))
        ((file, problem),) = RunDirectory(job).problems.items()
        assert file == name
        assert problem.startswith(reason)
        (job / name).write_text(whole)
    assert RunDirectory(job).finished


def test_user_column_may_have_accuracy_in_its_name(sweep):
    job = sweep / "hurt"
    table = pd.read_csv(job / "rounds.csv")
    table.assign(accuracy_drop=-0.5).to_csv(job / "rounds.csv", index=False)
    assert not RunDirectory(job).problems
    table.assign(in_local_accuracy=-0.5).to_csv(job / "rounds.csv", index=False)
    (problem,) = RunDirectory(job).problems.values()
    assert problem == "has -0.5 in the column in_local_accuracy, which is not an accuracy"


def test_damaged_marker_or_lock_is_ignored(sweep):
    for content in (b"", b"[", b"[]", b'{"sweep": 3}', b"\xff\xfe"):
        (sweep / "sweep.json").write_bytes(content)
        assert sweep_name(sweep) == "mine"
    (sweep / "hurt" / ".lock").mkdir()
    assert not is_occupied(sweep / "hurt")


@pytest.mark.parametrize("left", ["nothing else", "a table"])
def test_rejected_job_is_not_damaged(tmp_path, caplog, monkeypatch, left):
    """But tables of rounds without a configuration are damage."""
    monkeypatch.setattr(logging.getLogger("fedexp"), "propagate", True)
    (tmp_path / "summary.json").write_text(
        '{"status": "failed", "error": "local.optimizer=adam: ...", "exit_code": 2}'
    )
    (tmp_path / "error.txt").write_text("local.optimizer=adam: ...")
    if left == "a table":
        (tmp_path / "rounds.csv").write_text("round\n0\n")
    repair_job(tmp_path, ["algorithm=scaffold", "local.optimizer=adam"])
    assert ("config.yaml: is missing" in caplog.text) == (left == "a table")
    assert (tmp_path / "damaged").exists() == (left == "a table")
    assert not (tmp_path / "summary.json").exists()


REPAIRS = {
    "summary.json": "folder",
    "rounds.csv": "binary",
    "class_accuracy.csv": "cut",
    "config.yaml": "list",
}
REPAIRS |= {".hydra/overrides.yaml": "folder"}


@pytest.mark.slow  # a small run, and again for each damage
def test_same_command_repairs_a_damaged_job(here, capsys):
    """The numbers are the same, and the damaged files are kept."""
    small = [*FEDERATION, "rounds=1", "seed=0", "hydra.sweep.dir=multirun/a"]
    assert main.main(["--multirun", *small]) == 0
    (job,) = find_jobs(here / "multirun" / "a")
    before, overrides = job.class_accuracy(), (job.directory / FILES[-1]).read_text()
    for name, damage in REPAIRS.items():
        DAMAGES[damage](job.directory / name)
        assert finished(here / "multirun" / "a") == []
        capsys.readouterr()
        assert main.main(["--multirun", *small]) == 0
        assert f"{name}: " in capsys.readouterr().err
        (again,) = finished(here / "multirun" / "a")
        pd.testing.assert_frame_equal(again.class_accuracy(), before)
        assert (job.directory / FILES[-1]).read_text() == overrides
    assert {"class_accuracy.csv", "rounds.csv"} <= {
        path.name for path in (job.directory / "damaged").iterdir()
    }
