"""Spellings of overrides, and hints for misspelt names."""

import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedexp.cli import main
from fedexp.cli.arguments import parse
from fedexp.config.spelling import normalise
from fedexp.core import packages
from fedexp.core.errors import ConfigError, nearest
from toy_federation import CONF


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("algorithm=FedNTD", "algorithm=fedntd"),
        ("algorithm=FedAvg,FEDNTD", "algorithm=fedavg,fedntd"),
        ("partition=dirichlet", "partition=lda"),
        ("partition=Dirichlet,iid", "partition=lda,iid"),
        ("experiment=FedNTD/cifar10_S2", "experiment=fedntd/cifar10_s2"),
        ("algorithm=fedx", "algorithm=fedx"),
        ("rounds", "rounds"),
        ("dataset.name=Digits", "dataset.name=Digits"),
        ("data_dir=daten/bücher", "data_dir='daten/bücher'"),
        ("dataset.root=中文,plain", "dataset.root='中文',plain"),
        ("dataset.root='ü'", "dataset.root='ü'"),
        ("dataset.classes=[ü]", "dataset.classes=[ü]"),
    ],
)
def test_spelling_is_normalised(given, read):
    assert normalise([given], [CONF]) == [read]


@pytest.mark.parametrize("value", ["outé/x", "l'été", "中文/${now:%H}", "a\\ü"])
def test_hydra_reads_any_letters(value):
    (text,) = normalise([f"hydra.run.dir={value}"], [CONF])
    assert str(OverridesParser.create().parse_override(text).value()) == value


def test_user_option_comes_before_an_alias(tmp_path):
    (tmp_path / "partition").mkdir()
    (tmp_path / "partition" / "dirichlet.yaml").write_text("")
    assert normalise(["partition=dirichlet"], [tmp_path, CONF]) == ["partition=dirichlet"]
    assert normalise(["partition=LDA"], [tmp_path, CONF]) == ["partition=lda"]


def test_nearest_name_ignores_case():
    assert nearest("FedNTTD", ["fedavg", "fedntd"]) == " (nearest: 'fedntd')"
    assert nearest("minst", ["MNIST", "CIFAR10"]) == " (nearest: 'MNIST')"
    assert nearest("zzz", ["fedavg"]) == ""


def test_install_command_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    assert packages.how_to_install("joblib") == "pip install 'fedexp[joblib]'"
    (tmp_path / "src" / "fedexp").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert packages.how_to_install("joblib") == f"pip install -e '.[joblib]' (in {tmp_path})"
    monkeypatch.chdir(tmp_path)
    assert packages.how_to_install("joblib") == "pip install -e '.[joblib]'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["algorithm="], "fedexp: algorithm=: must select an option of the group; options: "),
        (["~algorithm"], "fedexp: ~algorithm: must select an option of the group; options: "),
        (["hydra.run.dir="], "fedexp: hydra.run.dir=: must name a directory"),
        (
            ["seeds=1,2"],
            "fedexp: seeds=1,2: cannot be set as a whole; use fedexp --multirun seed=1,2, ",
        ),
        (
            ["--multirun", "seeds=1,2"],
            "fedexp: seeds=1,2: cannot be set as a whole; use fedexp --multirun seed=1,2, ",
        ),
        (["seeds=3"], "fedexp: seeds=3: cannot be set as a whole; use seed=3, "),
        (["--rounds=5"], "fedexp: --rounds=5: must be written without dashes: rounds=5\n"),
        (
            ["--batch-size=5"],
            "fedexp: --batch-size=5: must be written without dashes: local.batch_",
        ),
        (["--rounds", "5"], "fedexp: --rounds: must be written without dashes: rounds=<value>\n"),
        (["--mulitrun"], "fedexp: --mulitrun: no such flag (nearest: '--multirun'); "),
        (["clients=10"], "fedexp: clients: no such option or key (nearest: 'num_clients'); "),
        (["lr=1"], "fedexp: lr: no such option or key (nearest: 'local.lr'); "),
        (
            ["~rounds"],
            "fedexp: ~rounds: cannot be removed; leave it out to use the default, or set it",
        ),
        (
            ["local=3"],
            "fedexp: local=3: must be a node with the keys local.epochs, local.batch_size, ",
        ),
        (["targets=0.5"], "fedexp: targets=0.5: must be a list of values, each a number, "),
        (
            ["tracker=[wandb,none]"],
            "fedexp: tracker=[wandb,none]: none cannot be combined with other options; remove it\n",
        ),
        (["resume="], "fedexp: resume=: needs the path of a run directory"),
        (
            ["hydra/job_logging=foo"],
            "fedexp: hydra/job_logging=foo: no such option; options: default, disabled, none, ",
        ),
        (["objective=nothing"], "fedexp: objective=nothing: summary.json has no such number"),
        (
            ["figures=false", "figures.titles=false"],
            "fedexp: figures.titles: cannot be combined with figures=<value>",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_empty_or_incompatible_options_are_one_message(arguments, message, here, capsys):
    assert main.main(["tracker=none", "rounds=1", *arguments]) == 2
    out, error = capsys.readouterr()
    assert error.startswith(message)
    assert "Traceback" not in out + error
    assert list(here.iterdir()) == []
    names = error.partition("allowed: ")[2].split(", ")
    assert len(set(names)) == len(names)


def test_invalid_values_are_found_without_torch(tmp_path):
    script = """
import sys
from fedexp.cli.main import main
print(main(["rounds=0", "tracker=none", "local.lr=fast", "alpha=0.1"]), "torch" in sys.modules)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["2 False"]
    assert done.stderr.splitlines() == [
        "fedexp: local.lr=fast: must be a number",
        "rounds=0: must be at least 1",
    ]
    assert list(tmp_path.iterdir()) == []


def test_values_that_need_torch_are_reported_with_the_others(here, capsys):
    given = ["rounds=0", "tracker=none", "algorithm=fedprox", "algorithm.mu=-1"]
    assert main.main(given) == 2
    assert capsys.readouterr().err.splitlines() == [
        "fedexp: rounds=0: must be at least 1",
        "algorithm.mu=-1.0: must be finite and at least 0",
    ]
    assert list(here.iterdir()) == []


def test_removed_working_directory_is_one_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main.main(["rounds=1", "tracker=none"]) == 2
    assert (
        capsys.readouterr().err
        == "fedexp: the working directory has been removed; change to an existing directory\n"
    )


def test_resume_rejects_another_run_directory(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- rounds=1\n")
    (tmp_path / "config.yaml").write_text("rounds: 1\n")
    with pytest.raises(ConfigError, match=r"^hydra\.run\.dir=b: cannot be used with resume="):
        parse([f"resume={tmp_path}", "hydra.run.dir=b"])
