"""The command `fedexp`: subcommands, help, and messages for names that do not exist."""

import subprocess
import sys
from pathlib import Path

import pytest

import fedexp
from fedexp.cli import main
from fedexp.cli.commands import SUBCOMMANDS, is_subcommand
from fedexp.cli.removed import REMOVED
from fedexp.config.options import list_groups, list_options
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


@pytest.mark.parametrize(("name", "use"), REMOVED.items())
def test_removed_name_is_rejected_with_its_replacement(name: str, use: str, here, capsys):
    """The name of a subcommand, a key or an option of a group."""
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
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr
    assert all(f"\n  fedexp {name} " in done.stdout for name in SUBCOMMANDS)
    assert (
        "\npartition: dirichlet, equal_shards, file, iid, lda, natural, sharding\n" in done.stdout
    )
    assert "_target_: fedexp.algorithms.fedntd.FedNTD" in done.stdout
    assert f"\nfedexp {fedexp.__version__}\ntorch " in done.stdout, "its own, installed or not"
    assert not list(tmp_path.iterdir()), "no command leaves anything behind"


def test_nearest_name_ignores_case():
    assert nearest("FedNTTD", ["fedavg", "fedntd"]) == " (nearest: 'fedntd')"
    assert nearest("minst", ["MNIST", "CIFAR10"]) == " (nearest: 'MNIST')"
    assert nearest("zzz", ["fedavg"]) == ""


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["algorithm="], "algorithm=: must be one option of the group"),
        (["partition=[iid,lda]"], "partition=[iid,lda]: must be one option of the group"),
        (["tracker=[]"], "tracker=[]: must name options; use tracker=none or leave it out"),
        (["tracker=null"], "tracker=null: must name options; use tracker=none or leave it out"),
        (["tracker=[wandb,none]"], "tracker=[wandb,none]: none cannot be combined with other"),
        (
            ["tracker=wandb", "tracker.project=x"],
            "tracker.project: is now written with the name of the option: tracker.wandb.project\n",
        ),
        (
            ["forgetting_metric=all", "forgetting_metric.xi=1"],
            "forgetting_metric.xi: is now written with the name of the option:"
            " forgetting_metric.degree.xi\n",
        ),
        (
            ["tracker.tensorboard.logdir=x"],
            "tracker.tensorboard.logdir: only exists with tracker=t",
        ),
        (["hydra.run.dir="], "hydra.run.dir=: must name a directory"),
        (["seeds=3"], "seeds=3: must be a node with the keys seeds.partition, seeds.sampling, "),
        (["clients=10"], "clients: no such option or key (nearest: 'num_clients'); "),
        (["lr=1"], "lr: no such option or key (nearest: 'local.lr'); "),
        (["targets=0.5"], "targets=0.5: must be a list of values, each a number, "),
        (["resume="], "resume=: must name a directory"),
        (["hydra/job_logging=foo"], "hydra/job_logging=foo: no such option; options: default, "),
        (["objective=nothing"], "objective=nothing: summary.json has no such number"),
        (["figures=false", "figures.titles=false"], "figures.titles: cannot be combined with "),
        (["preview=true"], "preview=true: needs --multirun"),
        (["--multirun", "seed=0,1", "seed=2"], "seed=0,1 and seed=2: both set seed; give all of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_empty_or_incompatible_options_are_one_message(arguments, message, here, capsys):
    assert main.main(["rounds=1", *arguments]) == 2
    out, error = capsys.readouterr()
    assert error.startswith(f"fedexp: {message}")
    assert "Traceback" not in out + error
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
