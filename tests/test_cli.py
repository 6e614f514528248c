"""The command `fedexp`: subcommands, help, and messages for names that do not exist."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import fedexp
from fedexp.cli import main
from fedexp.cli.commands import SUBCOMMANDS, is_subcommand
from fedexp.config.composition import composed
from fedexp.config.options import conf_directories, list_groups, list_options
from fedexp.config.removed import REMOVED
from fedexp.core import packages
from fedexp.core.errors import nearest
from toy_federation import CONF


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_subcommand_has_help(name: str, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main([name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: fedexp {name} [-h]")


def test_subcommands_return_exit_codes(here: Path, capsys):
    (here / "multirun").mkdir()
    for command in ("report", "figures", "evaluate"):
        assert main.main([command, "multirun"]) == 2
        said = capsys.readouterr()
        assert "multirun" in said.err
        assert not said.out


@pytest.mark.parametrize(
    ("word", "hint"), [("reprot", " (nearest: 'report')"), ("Dashbord", " (nearest: 'dashboard')")]
)
def test_unknown_subcommand_is_rejected_with_a_hint(word: str, hint: str, capsys):
    assert main.main([word, "multirun/x"]) == 2
    assert (
        capsys.readouterr().err
        == f"fedexp: {word}: is neither key=value nor a subcommand{hint}; subcommands:"
        f" {', '.join(SUBCOMMANDS)}\n"
    )


@pytest.mark.parametrize("first", ["rounds=1", "--multirun", "~tracker", "+new=1", "a/b", "[", ""])
def test_other_first_arguments_are_overrides(first: str):
    assert not is_subcommand([first, "report"])


# a subcommand, a key, one of Hydra's node, and an option of a group
REPRESENTATIVES = ("view", "budget", "hydra.sweeper.pruner", "model=lstm")


@pytest.mark.parametrize(
    ("name", "use"),
    [
        pytest.param(
            *each, id=each[0], marks=() if each[0] in REPRESENTATIVES else pytest.mark.slow
        )
        for each in REMOVED.items()
    ],
)
def test_removed_name_is_rejected_with_its_replacement(name: str, use: str, here, capsys):
    words = ["--multirun", name if "=" in name else f"{name}=1"]
    subcommands = ("view", "import", "push", "reproduction", "requirements")
    words = [name] if name in subcommands else words
    assert main.main(words) == 2
    assert capsys.readouterr().err == f"fedexp: {name}: no longer exists; use {use}\n"


@pytest.mark.parametrize("group", list_groups([CONF]))
def test_every_option_has_a_description(group: str):
    for option in list_options(group, [CONF]):
        text = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if "@package" not in line]
        assert lines[0].startswith("# "), option
        assert len(lines[0].split()) > 3, option


def test_help_lists_subcommands_and_options_without_heavy_modules(tmp_path: Path):
    """Importing torch would make the start slow. Measuring time would depend on the machine."""
    code = """
import sys
from fedexp.cli.main import main
for line in ("--help", "algorithm=fedntd --cfg job", "--version"):
    try:
        main(line.split())
    except SystemExit as stop:
        assert not stop.code
heavy = {"torch", "torchvision", "pandas", "sklearn", "matplotlib", "wandb", "numpy"}
print(heavy & sys.modules.keys())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr
    assert all(f"\n  fedexp {name} " in done.stdout for name in SUBCOMMANDS)
    assert (
        "\npartition: dirichlet, domains, equal_shards, file, iid, lda, natural, sharding\n"
        in done.stdout
    )
    sweeps = ", ".join(list_options("sweep", conf_directories()))
    assert f"\nsweep: {sweeps}\n" in done.stdout, "the sweeps, not their files"
    assert "_target_: fedexp.algorithms.fedntd.FedNTD" in done.stdout
    assert f"\nfedexp {fedexp.__version__}\ntorch " in done.stdout, "its own, installed or not"
    assert not list(tmp_path.iterdir()), "no command leaves anything behind"


def test_nearest_name_ignores_case():
    assert nearest("FedNTTD", ["fedavg", "fedntd"]) == " (nearest: 'fedntd')"
    assert nearest("minst", ["MNIST", "CIFAR10"]) == " (nearest: 'MNIST')"
    assert nearest("zzz", ["fedavg"]) == ""


def test_nearest_name_is_similar():
    """Keys are also compared by their last word."""
    keys = ["tracker", "local.epochs", "rounds"]
    assert nearest("stragglers", keys) == ""
    assert nearest("epoch", keys) == nearest("local.epoch", keys) == " (nearest: 'local.epochs')"


def test_install_command_names_the_extra_and_its_versions(monkeypatch, tmp_path):
    (needed,) = packages.requirements("joblib")
    assert needed.startswith("hydra-joblib-launcher")
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    assert packages.how_to_install("joblib") == f"pip install 'fedexp[joblib]' ({needed})"
    (tmp_path / "src" / "fedexp").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    checkout = f"pip install -e '.[joblib]' (in {tmp_path}) ({needed})"
    assert packages.how_to_install("joblib") == checkout
    monkeypatch.chdir(tmp_path)
    assert packages.how_to_install("joblib") == f"pip install -e '.[joblib]' ({needed})"


def test_removed_working_directory_is_one_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main.main(["rounds=1", "tracker=none"]) == 2
    assert (
        capsys.readouterr().err
        == "fedexp: the working directory has been removed; change to an existing directory\n"
    )


@pytest.mark.parametrize("name", ["2026_01", "1e3", "007", "1.50", "2026"])
def test_paths_that_are_numbers_keep_their_spelling(name):
    keys = ("hydra.run.dir", "hydra.sweep.dir", "resume", "data_dir", "+surrogate.options.root")
    with composed([*(f"{key}={name}" for key in keys), "rounds=1_000"]) as config:
        for key in keys:
            assert str(OmegaConf.select(config, key.lstrip("+"))) == name
        assert config.rounds == 1000
