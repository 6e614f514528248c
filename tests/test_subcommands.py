"""The subcommands of `fedexp`."""

from pathlib import Path

import pytest

from fedexp.cli import main
from fedexp.cli.commands import SUBCOMMANDS, is_subcommand
from fedexp.cli.removed import REMOVED


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_subcommand_has_help(name: str, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main([name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: fedexp {name} [-h]")


def test_subcommands_return_exit_codes(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "multirun").mkdir()
    for command in (
        ["report", "multirun"],
        ["figures", "multirun"],
        ["evaluate", "multirun"],
    ):
        assert main.main(command) == 2
        said = capsys.readouterr()
        assert "multirun" in said.err
        assert not said.out
    assert main.main(["requirements"]) == 0
    assert capsys.readouterr().out.startswith("| algorithm |")


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


@pytest.mark.parametrize(("name", "use"), REMOVED.items())
def test_removed_name_is_rejected_with_its_replacement(name: str, use: str, capsys):
    """The name of a subcommand, a key or an option of a group."""
    words = ["--multirun", name if "=" in name else f"{name}=1"]
    words = [name] if name in ("view", "import", "push", "reproduction") else words
    assert main.main(words) == 2
    assert capsys.readouterr().err == f"fedexp: {name}: no longer exists; use {use}\n"


@pytest.mark.parametrize("first", ["rounds=1", "--multirun", "~tracker", "+new=1", "a/b", "[", ""])
def test_other_first_arguments_are_overrides(first: str):
    assert not is_subcommand([first, "report"])


def test_help_lists_subcommands(capsys):
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  fedexp {name}" in text for name in SUBCOMMANDS)


def test_completion_offers_options_and_keys(monkeypatch, capsys):
    """Hydra completes command lines, so this only tests that it is reached."""
    for line, found in (
        ("algorithm=fedn", "algorithm=fednova algorithm=fedntd"),
        ("alp", "alpha="),
    ):
        monkeypatch.setenv("COMP_LINE", f"fedexp {line}")
        assert main.main(["--shell-completion", "query=bash"]) == 0
        assert capsys.readouterr().out == f"{found}\n"
