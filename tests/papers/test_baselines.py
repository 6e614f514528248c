"""Runs of a sweep compared with committed runs of a paper's sweep."""

import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from fedexp.config.composition import composed, without_hydra
from fedexp.config.values import resolve
from fedexp_papers.baselines import list_baselines
from fedexp_papers.command import main
from fedexp_papers.evidence import all_jobs
from fedexp_papers.sweeps import load_paper_sweep
from quick_runs import make_run

ROOT = Path(__file__).parents[2]
RELEASED = ["partition.numpy_seed=19940817", "cohorts.draw=round"]
S3, LDA3 = "experiment=fedntd/cifar10_s3", "experiment=fedntd/cifar10_lda0.3"
OTHER = [*RELEASED, "hardware.precision=tf32"]  # the committed runs have bf16


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(ROOT)  # the checkout has the committed runs
    return tmp_path / "mine"


def run_new_method(folder, overrides, accuracies, seed=0, **summary):
    """Make a run of a method that no paper's sweep has, with the configuration of a real one."""
    given = [*overrides, "algorithm=feddecorr", f"seed={seed}"]
    with composed(given) as config:
        values = yaml.safe_load(yaml.safe_dump(resolve(without_hydra(config))))
    make_run(folder, given, accuracies, config=values, seed=seed, **summary)


def compare(mine, capsys, *more):
    code = main(["compare", str(mine), "--with", "fedntd_table1_clients", *more])
    return code, capsys.readouterr()


def test_committed_runs_with_the_same_values_are_added(mine, capsys):
    """At two published settings. Precision, machine and test views differ, seeds are averaged. The
    numbers are those of the committed runs: 51.03 by the rule, and 60.47 after the last round."""
    for seed, last in enumerate((0.5, 0.6)):
        run_new_method(mine, [S3, *OTHER], [0.4, last], seed)
    run_new_method(mine, [LDA3, *OTHER, "test_views=[plain]"], [0.25, 0.7])
    code, output = compare(mine, capsys)
    assert code == 0
    assert "No run of" not in output.out
    table = pd.read_csv(mine / "with_fedntd_table1_clients.csv", keep_default_na=False)
    s3, lda3 = (rows.set_index("method") for _, rows in table.groupby("setting", sort=False))
    assert list(s3.index) == ["feddecorr", "FedAvg", "FedNTD"]
    assert set(lda3.index) == {"feddecorr", "FedAvg", "FedNTD", "FedNova", "SCAFFOLD"}
    own, theirs = s3.loc["feddecorr"], s3.loc["FedAvg"]
    assert (own["source"], own["n"], float(own["accuracy"])) == ("", 2, pytest.approx(0.55))
    assert float(own["accuracy_std"]) == pytest.approx(0.005**0.5)
    assert (theirs["source"], theirs["n"]) == ("fedntd_table1_clients", 1)
    numbers = theirs[["accuracy_rule", "accuracy"]].astype(float)
    assert numbers.round(4).tolist() == [0.5103, 0.6047]
    assert re.fullmatch("[0-9a-f]{7}", theirs["commits"])
    assert theirs["hardware"].endswith("(cpu, bf16)")
    text = (mine / "with_fedntd_table1_clients.md").read_text()
    assert "### fedntd/cifar10_s3\n" in text
    row = next(line for line in text.splitlines() if line.startswith("| FedAvg |"))
    assert "| fedntd_table1_clients | 0 |" in row
    assert theirs["hardware"] in row


def test_differing_values_are_named_where_no_run_fits(mine, capsys):
    """The first setting fits; the second has another learning rate and other clients."""
    run_new_method(mine, [S3, *RELEASED], [0.5])
    run_new_method(mine, [S3, "cohorts.draw=round", "local.lr=0.1"], [0.5])
    code, output = compare(mine, capsys)
    assert code == 0
    (line,) = (line for line in output.out.splitlines() if line.startswith("No run of"))
    assert line == (
        "No run of fedntd_table1_clients fits fedntd/cifar10_s3: the nearest have local.lr=0.01,"
        " not 0.1; partition.numpy_seed=19940817, not None"
    )
    table = pd.read_csv(mine / "with_fedntd_table1_clients.csv")
    assert table["setting"].nunique() == 2
    assert (table["n"] == 1).all()
    assert table.groupby("setting", sort=False).size().tolist() == [3, 1]


def test_other_data_of_the_same_name_do_not_fit(mine, capsys):
    run_new_method(mine, [S3, *RELEASED], [0.5], data={"train": 4000, "test": 10_000})
    assert "the nearest have data.train=50000, not 4000" in compare(mine, capsys)[1].out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fedntd_table11", r"has no committed runs.*nearest: 'fedntd_table1'"),
        ("benchmark", "multirun/benchmark has no committed runs"),  # no sweep of a paper
        ("fedntd_table12", "has no committed runs.*sweeps that have some: .*fedntd_table1,"),
    ],
)
def test_sweep_without_committed_runs_is_refused(name, reason, mine, capsys):
    run_new_method(mine, [S3], [0.5])
    assert main(["compare", str(mine), "--with", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line)
    assert not list(mine.glob("with_*"))


def test_flags_of_figures_are_refused(mine, capsys):
    """There are no figures of such a comparison, so that --no-figures asks for what it does."""
    run_new_method(mine, [S3, *RELEASED], [0.5])
    code, output = compare(mine, capsys, "--no-titles", "--colour-map", "magma")
    assert code == 2
    (line,) = output.err.splitlines()
    assert "--with fedntd_table1_clients: writes no figures" in line
    assert line.endswith("leave out --no-titles, --colour-map")
    assert not list(mine.glob("with_*"))
    assert compare(mine, capsys, "--no-figures")[0] == 0


def test_methods_are_named_once_and_told_apart(tmp_path):
    """FedKA (H) stands for a selection of anchors. FedNTD(MSE) has one name for each beta."""
    table7, table14 = tmp_path / "fedka_table7", tmp_path / "fedntd_table14"
    given = ["experiment=fedka/cifar10", "algorithm=fedka", "algorithm.norm=per_anchor"]
    make_run(table7, [*given, "algorithm.beta=0.01", "algorithm.selection=hard"], [0.5])
    given = ["experiment=fedntd/cifar10_s2", "algorithm=fedntd", "algorithm.distance=mse"]
    for beta in (0.1, 0.3):
        make_run(table14, [*given, f"algorithm.beta={beta}"], [0.5])
    wanted = ["FedKA (H)", "FedNTD(MSE) algorithm.beta=0.1", "FedNTD(MSE) algorithm.beta=0.3"]
    found = []
    for folder in (table7, table14):
        with all_jobs(folder) as jobs:
            baselines, left_out = list_baselines(load_paper_sweep(folder.name), jobs)
        assert not left_out
        found += [each.method for each in baselines]
    assert found == wanted


def test_sweep_without_a_finished_run_is_refused(mine, capsys):
    mine.mkdir()
    code, output = compare(mine, capsys)
    assert (code, output.err.count("no finished run")) == (2, 1)
