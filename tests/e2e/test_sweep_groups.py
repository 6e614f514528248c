"""Which runs the report of a sweep averages, and which jobs a command may start."""

import json
from pathlib import Path

import pytest
from helpers import SMALL, add_class

import fedexp as package
from fedexp.core.storage import read_csv
from fedexp.rundir import jobs as jobs_file
from fedexp.rundir.lock import occupied

KEEPING = """
from typing import ClassVar

from fedexp.algorithms.base import FedAvg


class Keeping(FedAvg):
    version: ClassVar[int] = 1

    keep: float

    def aggregate(self, server, messages, round):
        new, old = super().aggregate(server, messages, round), server["params"]
        mixed = {k: self.keep * old[k] + (1 - self.keep) * v for k, v in new["params"].items()}
        return {**new, "params": mixed}
"""
STOPPER = """
from typing import ClassVar

from fedexp.trackers.base import Callback, CallbackConfig


class Ends(Callback):
    def after_round(self, record):
        return "enough" if record.round >= 1 else None


class Stopper(CallbackConfig):
    ends_runs: ClassVar[bool] = True

    def create(self):
        return Ends()
"""
SWEEP = ("--multirun", "--config-dir", "own", "rounds=2", "hydra.sweep.dir=x", *SMALL)


def names_of(tmp_path: Path, algorithm: str) -> list[str]:
    return sorted(path.name for path in (tmp_path / "x").glob(f"*_{algorithm}_*"))


def accuracies(tmp_path: Path, names: list[str]) -> list[float]:
    summaries = [json.loads((tmp_path / "x" / name / "summary.json").read_text()) for name in names]
    return [summary["accuracy"] for summary in summaries]


def means(tmp_path: Path) -> dict[str, tuple[int, float]]:
    """Return the number of seeds and the mean accuracy of each method in table.csv."""
    table = read_csv(tmp_path / "x/table.csv")
    pairs = table[["n", "accuracy"]].itertuples(index=False, name=None)
    return dict(zip(table["method"], pairs, strict=True))


@pytest.fixture
def edited(fedexp, tmp_path, monkeypatch):
    """A sweep whose command was repeated after a file of options was edited: (jobs before, now)."""
    monkeypatch.syspath_prepend(tmp_path)
    add_class(tmp_path, "algorithm", "keeping", KEEPING, "keep: 0.1\n")
    command = (*SWEEP, "algorithm=keeping", "seed=0,1")
    fedexp.done(*command)
    before = names_of(tmp_path, "keeping")
    option = tmp_path / "own/algorithm/keeping.yaml"
    option.write_text(option.read_text().replace("0.1", "0.9"))
    fedexp.done(*command)
    return before, [name for name in names_of(tmp_path, "keeping") if name not in before]


def test_report_has_only_the_runs_of_the_edited_options(fedexp, tmp_path, edited):
    """It names those of the former ones with what has changed, and load_sweep marks them."""
    before, now = edited
    assert len(before) == len(now) == 2
    assert means(tmp_path) == {"keeping": (2, pytest.approx(sum(accuracies(tmp_path, now)) / 2))}
    text = (tmp_path / "x/table.md").read_text()
    assert f"Not in the tables: {', '.join(before)}: a later command has other runs" in text
    assert "(algorithm.keep: 0.1, now 0.9)" in text
    sweep = package.load_sweep(tmp_path / "x")
    assert sweep.runs["current"].to_dict() == {name: name in now for name in [*before, *now]}
    assert sweep.select(current=True).names == now
    rounds = sweep.rounds
    assert set(rounds.loc[rounds["current"], "run"]) == {*now}

    # with the former options, the former runs count again
    option = tmp_path / "own/algorithm/keeping.yaml"
    option.write_text(option.read_text().replace("0.9", "0.1"))
    fedexp.done(*SWEEP, "algorithm=keeping", "seed=0,1")
    assert package.load_sweep(tmp_path / "x").select(current=True).names == before


def test_runs_of_a_sweep_without_a_list_of_jobs_are_told_apart_by_their_values(
    fedexp, tmp_path, edited
):
    """A sweep of an earlier version has no such list. No two identities are averaged."""
    before, now = edited
    (tmp_path / "x" / jobs_file.NAME).unlink()
    fedexp.done("report", "x", "--no-figures")
    assert means(tmp_path) == {
        f"keeping keep={keep}": (2, pytest.approx(sum(accuracies(tmp_path, names)) / 2))
        for keep, names in ((0.1, before), (0.9, now))
    }
    assert package.load_sweep(tmp_path / "x").runs["current"].all()
    # repeating the command finds them in their files
    fedexp.done(*SWEEP, "algorithm=keeping", "seed=1,2")
    assert set(jobs_file.read(tmp_path / "x").replaced) == {before[1]}
    assert {name: n for name, (n, _) in means(tmp_path).items()} == {
        "keeping keep=0.1": 1,
        "keeping keep=0.9": 3,
    }


def test_value_that_a_command_no_longer_has_is_named(fedexp, tmp_path):
    command = ("--multirun", "rounds=1", "hydra.sweep.dir=x", *SMALL, "algorithm=fedprox")
    fedexp.done(*command, "algorithm.mu=0.1", "seed=0")
    fedexp.done(*command, "algorithm.mu=1.0", "seed=0")
    text = (tmp_path / "x/table.md").read_text()
    assert "Not in the last command, but in an earlier one: mu=0.1." in text
    fedexp.done(*command, "algorithm.mu=1.0,0.1", "seed=1")  # further seeds of both
    assert "Not in the last command" not in (tmp_path / "x/table.md").read_text()
    assert {name: n for name, (n, _) in means(tmp_path).items()} == {
        "fedprox mu=1.0": 2,
        "fedprox mu=0.1": 2,
    }


def test_default_value_that_one_command_repeats_makes_no_group_of_its_own(fedexp, tmp_path):
    command = ("--multirun", "rounds=1", "hydra.sweep.dir=x", *SMALL, "algorithm=fedprox")
    fedexp.done(*command, "seed=0")
    mu = package.load_sweep(tmp_path / "x")[0].config["algorithm"]["mu"]
    fedexp.done(*command, "seed=1", f"algorithm.mu={mu}")
    assert {name: n for name, (n, _) in means(tmp_path).items()} == {"fedprox": 2}


@pytest.mark.parametrize(
    "swept",
    [
        "data_dir=clean,noisy",
        "hardware.threads=1,2",
        "alpha=0.5,0.50",
        "seed=0,0",
        "figures=true,false",
    ],
)
def test_combinations_that_would_share_a_directory_are_refused(swept, fedexp, tmp_path):
    """Before, all but the first were dropped without a word."""
    key = swept.partition("=")[0]
    given = [text for text in SMALL if not text.startswith(f"{key}=")]
    for preview in ([], ["preview=true"]):
        answer = fedexp.rejected("--multirun", *given, "rounds=1", swept, *preview)
        assert answer.err.startswith(f"fedexp: {key}")
        assert "would have the same directory" in answer.err or "twice" in answer.err
    assert not (tmp_path / "multirun").exists()


def test_jobs_with_and_without_a_callback_that_ends_them_are_different(
    fedexp, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    add_class(tmp_path, "callback", "stopper", STOPPER)
    fedexp.done(*SWEEP, "callback=none,stopper", "seed=0,1")
    sweep = package.load_sweep(tmp_path / "x")
    assert sorted(run.summary["rounds"] for run in sweep) == [1, 1, 2, 2]
    assert {name: n for name, (n, _) in means(tmp_path).items()} == {
        "fedavg": 2,
        "fedavg callback=stopper": 2,
    }


def test_runs_that_a_callback_of_an_earlier_version_ended_are_told_apart(
    fedexp, tmp_path, monkeypatch
):
    """Their identities do not have the callback."""
    monkeypatch.syspath_prepend(tmp_path)
    add_class(tmp_path, "callback", "stopper", STOPPER)
    fedexp.done(*SWEEP, "callback=stopper", "seed=0,1")
    fedexp.done(*SWEEP, "seed=2,3")
    for path in (tmp_path / "x").glob("*/origin.json"):
        content = json.loads(path.read_text())
        values = content["values"].items()
        content["values"] = {k: v for k, v in values if not k.startswith("callback.")}
        path.write_text(json.dumps(content))
    fedexp.done("report", "x", "--no-figures")
    assert {name: n for name, (n, _) in means(tmp_path).items()} == {
        "fedavg callback.stopper._target_=stopper.Stopper": 2,
        "fedavg": 2,
    }


def test_directories_are_named_by_the_values_that_a_sweep_varies(fedexp, tmp_path):
    """A command that varies other keys, or an earlier version, named them differently."""
    command = ("--multirun", "rounds=1", "hydra.sweep.dir=x", *SMALL, "algorithm=fedprox")
    fedexp.done(*command, "algorithm.mu=0.1,1.0", "local.lr=0.05", "seed=0")
    first = names_of(tmp_path, "fedprox")
    ends = [name.rpartition("_")[2] for name in first]
    assert first == [
        f"digits_lda_fedprox_mu{mu}_seed0_{end}"
        for mu, end in zip(("0.1", "1.0"), ends, strict=False)
    ]
    (tmp_path / "x" / first[1]).rename(tmp_path / "x" / f"digits_lda_fedprox_seed0_{ends[1]}")
    answer = fedexp.done(*command, "algorithm.mu=1.0", "local.lr=0.05", "seed=0,1")
    assert answer.err.count("nothing to do") == 1
    names = [name.rpartition("_")[0] for name in names_of(tmp_path, "fedprox")]
    assert names == [
        "digits_lda_fedprox_mu0.1_seed0",
        *(f"digits_lda_fedprox_seed{i}" for i in (0, 1)),
    ]


def test_second_search_in_a_directory_is_refused(fedexp, tmp_path):
    """It would take the first one's running trial for an interrupted one."""
    pytest.importorskip("optuna")
    search = ("--multirun", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "rounds=1", *SMALL)
    given = ("validation.fraction=0.2", "local.lr=0.1,0.2", "hydra.sweep.dir=x")
    with occupied(tmp_path / "x"):
        answer = fedexp.rejected(*search, *given)
        assert "x: process " in answer.err
        assert "is using this directory" in answer.err
        assert not (tmp_path / "x/study.db").exists()
    fedexp.done(*search, *given)
