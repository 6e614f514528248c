"""Runs that commit 347bd94c has begun, and how they end. They are resumed by this code.

`python tests/e2e/test_earlier_runs.py --write <checkout of 347bd94c>` made golden/earlier/*.tar.xz.
Each archive has the run as that commit left it (`run`), and what the same commit made of it by
resuming it (`end`). In float64, only the order of summation differs between CPUs, so numbers are
compared to 1e-9; on one machine they are equal bit for bit.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch

from fedexp.core import storage
from fedexp.rundir.checkpoint import ClientStates
from fedexp.rundir.reader import RunDirectory

KEPT = Path(__file__).parents[1] / "golden" / "earlier"
SMALL = ["hardware=cpu", "hardware.engine=sequential", "hardware.threads=1", "figures.draw=false"]
SMALL += ["hardware.precision=fp64", "num_clients=4", "participation=0.5", "local.epochs=1"]
SMALL += ["local.batch_size=60", "min_size=2", "model.channels=[2]", "model.hidden=[4]"]
SMALL += ["checkpoint_interval=1"]
ALONE = [*SMALL, "tracker=none"]

# A callback of one's own that has a state and ends runs, as the guide described it.
OWN = {
    "seldom.py": """
from fedexp.trackers.base import Callback, CallbackConfig


class Seldom(Callback):
    def __init__(self, last):
        self.last, self.seen = last, []

    def after_round(self, record):
        self.seen.append(record.round)
        return "enough" if len(self.seen) > self.last else None

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def summary(self):
        return {"seen": self.seen}


class SeldomConfig(CallbackConfig):
    ends_runs = True
    last: int = 3

    def create(self):
        return Seldom(self.last)
""",
    "own/callback/seldom.yaml": """# @package callback.seldom
# Ends a run after some rounds.
_target_: seldom.SeldomConfig
last: 3
""",
}


class Earlier(NamedTuple):
    """A run of the earlier commit."""

    # the overrides of each command, and the round in which it is interrupted; 0: it ends
    commands: tuple[tuple[list[str], int], ...]
    end: tuple[str, ...] = ()  # the overrides of the last command, after resume=
    kills: bool = False  # the last interrupt ends the process at once
    sweep: bool = False  # the commands are those of a sweep, whose last one is repeated


METHOD = [*ALONE, "algorithm=scaffold", "forgetting_metric=all"]
TASKS = ["scenario=class_incremental", "scenario.num_tasks=2", "rounds=2"]
TRIALS = ["hydra/sweeper=optuna", "local.lr=interval(0.01,0.1)", "hydra.sweeper.n_trials=2"]
TRIALS += ["objective=accuracy", "hydra.sweeper.sampler=random", "rounds=2", *ALONE]
RUNS = {
    "killed": Earlier(
        (([*METHOD, "analysis=weight_divergence", "rounds=4", "checkpoint_interval=2"], 4),),
        kills=True,
    ),
    "extended": Earlier((([*METHOD, "rounds=2"], 0), (["rounds=4"], 4))),
    "complete": Earlier((([*ALONE, "algorithm=fedavgm", "rounds=2"], 0),), ("rounds=3",)),
    "patience": Earlier(
        (
            (
                [
                    *ALONE,
                    "local.lr=1e-9",
                    "rounds=6",
                    "stop.patience=2",
                    "stop.metric=test_accuracy",
                ],
                0,
            ),
        ),
        ("stop.patience=3",),
    ),
    "minutes": Earlier((([*ALONE, "rounds=3", "stop.minutes=1e-5"], 0),), ("stop.minutes=null",)),
    "callback": Earlier((([*ALONE, "rounds=5", "callback=seldom", "callback.seldom.last=2"], 0),)),
    "tasks": Earlier((([*ALONE, *TASKS, "algorithm=fedewc"], 4),)),
    "wandb": Earlier((([*SMALL, "tracker.wandb.mode=offline", "rounds=3"], 3),)),
    "ranks": Earlier((([*ALONE, "hardware.workers=2", "hardware.engine=workers", "rounds=3"], 3),)),
    "sweep": Earlier((([*ALONE, "algorithm=fedavg,fedntd", "rounds=2"], 4),), sweep=True),
    "search": Earlier(((TRIALS, 4),), sweep=True),
}

# What the earlier commit runs: its own command, which is interrupted at the n-th round.
DRIVER = """
import os, sys
from fedexp.cli.main import main
import fedexp.training.rounds as rounds

number, kills, *arguments = sys.argv[1:]
play, played = rounds.play_round, [0]


def play_round(simulation, state, *options):
    played[0] += 1
    at = played[0] if "--multirun" in arguments else state.round + 1
    if at == int(number):
        if kills == "True":
            os._exit(9)
        raise KeyboardInterrupt
    return play(simulation, state, *options)


rounds.play_round = play_round
sys.argv = ["fedexp", *arguments]
sys.exit(main())
"""


def read_all(directory: Path) -> dict[str, Any]:
    """Everything that a run computed, by the name of its file. Times are left out."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.csv")):
        table = storage.read_csv(path)
        times = [c for c in table if c.endswith(("seconds", "_per_second"))]
        found[path.name] = table.drop(columns=times)
    state = torch.load(directory / "checkpoint/latest.pt", weights_only=True)
    clients = ClientStates(directory / "checkpoint/clients", state["clients"])
    state["clients"] = dict(clients)
    added = ("checksums", "stopped")  # keys that earlier checkpoints do not have
    for key in ("lengths", "seconds", "train_seconds", "trackers", "wandb_id", *added):
        state.pop(key, None)
    # a callback that has no state need not be named, and earlier checkpoints have no checksums
    state["callbacks"] = {name: kept for name, kept in state["callbacks"].items() if kept}
    for kept in state["callbacks"].values():
        kept.pop("checksum", None)
    state["callbacks"].pop("fedexp.trackers.wandb_tracker.WandbTracker", None)
    found |= {"checkpoint": state, "state": state.pop("status")}
    summary = json.loads((directory / "summary.json").read_text())
    names = ("status", "rounds", "stopped", "identity", "accuracy", "sweep", "seen")
    return found | {name: summary[name] for name in names if name in summary}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], rtol: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, pd.DataFrame):
            pd.testing.assert_frame_equal(found[name], value, rtol=rtol, atol=rtol)
        elif name == "checkpoint":
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol, equal_nan=True)
        elif isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=rtol, abs=0), name
        else:
            assert found[name] == value, name


def write_own(folder: Path) -> None:
    for path, content in OWN.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)


def last_command(name: str, folder: Path) -> list[str]:
    """The command that ends a run or a sweep in `folder`."""
    each = RUNS[name]
    where = f"--config-dir={folder}/own"
    if each.sweep:
        return ["--multirun", where, *each.commands[-1][0], f"hydra.sweep.dir={folder}/run"]
    return [where, f"resume={folder}/run", *each.end]


def jobs_of(folder: Path) -> list[Path]:
    """The run in a folder, or the jobs of the sweep in it."""
    if (folder / "summary.json").exists():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/summary.json"))


# --- how the archives are made


def write(name: str, checkout: Path, folder: Path) -> None:
    each = RUNS[name]
    write_own(folder)
    (folder / "driver.py").write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": f"{checkout}/src:{folder}", "WANDB_SILENT": "true"}

    def call(arguments: list[str], number: int, kills: bool = False) -> None:
        command = [sys.executable, "driver.py", str(number), str(kills), *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        expected = 0 if not number else 9 if kills else 130
        assert done.returncode == expected, (done.returncode, done.stdout, done.stderr)

    where = f"--config-dir={folder}/own"
    for i, (arguments, number) in enumerate(each.commands):
        last = i == len(each.commands) - 1
        place = f"hydra.run.dir={folder}/run" if not i else f"resume={folder}/run"
        if each.sweep:
            place = f"hydra.sweep.dir={folder}/run"
        flags = ["--multirun"] if each.sweep else []
        call([*flags, where, *arguments, place], number, each.kills and last)
    shutil.copytree(folder / "run", folder / "left")
    call(last_command(name, folder), 0)
    (folder / "run").rename(folder / "end")
    (folder / "left").rename(folder / "run")
    left_out = ("previous.pt", ".lock", ".owner", "run.log", "wandb", "figures", "table", "html")
    with tarfile.open(KEPT / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted([*folder.glob("run/**/*"), *folder.glob("end/**/*")]):
            inside = str(path.relative_to(folder))
            is_end = inside.startswith("end") and "csv" not in inside and "summary" not in inside
            used = "checkpoint" in inside and "previous" not in inside
            keeps = not is_end or used
            if keeps and path.is_file() and not any(word in inside for word in left_out):
                entry = tarfile.TarInfo(inside)
                content = path.read_bytes()
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


# --- the tests


SLOW = ("ranks", "search")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS]
)
def test_run_of_an_earlier_version_ends_as_with_that_version(
    name: str, fedexp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with tarfile.open(KEPT / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    write_own(tmp_path)
    run = tmp_path / "run"
    if name == "wandb":
        before = storage.load_tree(run / "checkpoint/latest.pt")["wandb_id"]
    fedexp.done(*last_command(name, tmp_path))
    found, expected = jobs_of(run), jobs_of(tmp_path / "end")
    if RUNS[name].sweep:
        assert [job.name for job in found] == [job.name for job in expected]
    for mine, theirs in zip(found, expected, strict=True):
        one, other = read_all(mine), read_all(theirs)
        if name == "callback":  # callbacks that may end runs belong to the identity since then
            assert one.pop("identity") != other.pop("identity")
        assert_equal(one, other, 1e-9)
    if name == "wandb":  # the folder of the earlier part is not kept
        assert [path.name.split("-")[-1] for path in run.glob("wandb/*run-*")] == [before]


def test_unfinished_run_of_an_earlier_version_is_reported(fedexp: Any, tmp_path: Path) -> None:
    with tarfile.open(KEPT / "tasks.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert RunDirectory(tmp_path / "run").status == "unfinished"
    assert "task_matrix.csv" in fedexp.done("report", "run").out


def test_run_cannot_end_before_its_last_round(fedexp: Any, tmp_path: Path) -> None:
    with tarfile.open(KEPT / "killed.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    said = fedexp.rejected("resume=run", "rounds=3").err
    assert "rounds=3: must be greater than 3, the last completed round" in said


if __name__ == "__main__":
    for each in sys.argv[3:] or RUNS:
        with tempfile.TemporaryDirectory() as temporary:
            write(each, Path(sys.argv[2]).resolve(), Path(temporary))
