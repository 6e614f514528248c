"""`fedexp --shell-completion` offers groups, options, keys and paths that exist."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fedexp.cli import main
from fedexp.cli.completion import SCRIPTS, answer_shell, complete, settable_keys
from fedexp.config.options import list_options
from fedexp.core.errors import ConfigError
from fedexp.rundir.fingerprint import flatten
from toy_federation import CONF, composed

ROOT = Path(__file__).parents[1]


def offered(line: str) -> list[str]:
    """Return the completions of a command line, given without its first word."""
    return sorted(set(complete(line.split(" "), [CONF])))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["partition=sharding", "dataset=cifar10", "scenario=class_incremental"],
        ["algorithm=cfed_c", "tracker=none"],
    ],
    ids=lambda overrides: " ".join(overrides) or "defaults",
)
def test_completes_the_keys_of_the_configuration(overrides):
    config = flatten(OmegaConf.to_container(composed(*overrides), resolve=False))
    expected = {
        key for key in config if not key.endswith("_target_") and not key.startswith("hydra.")
    }
    empty = {"surrogate.options"}
    assert set(settable_keys(overrides, [CONF])) == expected | empty


def test_completes_groups_and_options():
    assert offered("al") == ["algorithm.", "algorithm=", "alpha="]
    assert offered("partition=sharding al") == ["algorithm.", "algorithm="]
    assert offered("algorithm=fedn") == ["algorithm=fednova", "algorithm=fedntd"]
    assert offered("dataset=") == [f"dataset={name}" for name in list_options("dataset", [CONF])]
    assert offered("experiment=fedntd/mnist_s2") == ["experiment=fedntd/mnist_s2"]
    assert offered("partition=equal_shards shards") == ["shards_per_client="]
    assert offered("experiment=fedntd/mnist_s2 shards") == ["shards_per_client="]
    assert offered("experiment=fedntd/mnist_s2 partition=iid shards") == []


def test_completes_keys_up_to_the_next_dot():
    assert offered("loc") == ["local.", "local_evaluation."]
    assert "local.epochs=" in offered("local.")
    assert all(text.startswith("local.") for text in offered("local."))
    assert offered("algorithm=fedntd algorithm.b") == ["algorithm.beta="]
    assert offered("+alg") == ["+algorithm.", "+algorithm="]
    assert offered("nothing_like_it") == []


def test_completes_sweeps_and_lists_only_with_multirun():
    assert offered("sweep=") == []
    tables = ["cfed_table1", "cfed_table1_lr1e-6", "cfed_table1_titles", "cfed_table2"]
    assert offered("--multirun sweep=cfed_t") == [f"sweep={name}" for name in tables]
    assert offered("-m prev") == ["preview="]
    assert offered("prev") == []
    assert offered("-m algorithm=fedavg,fedn") == [
        "algorithm=fedavg,fednova",
        "algorithm=fedavg,fedntd",
    ]
    assert offered("algorithm=fedavg,fedn") == []


def test_completes_flags():
    assert offered("--m") == ["--multirun"]
    assert offered("--cfg ") == ["all", "hydra", "job"]


def test_completes_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/day/run").mkdir(parents=True)
    (tmp_path / "own.json").touch()
    (tmp_path / ".hidden").touch()
    assert offered("resume=") == ["resume=outputs/", "resume=own.json"]
    assert offered("resume=outputs/da") == ["resume=outputs/day/"]
    assert offered("partition=file partition.path=ow") == ["partition.path=own.json"]
    assert offered("--config-dir o") == ["outputs/", "own.json"]
    assert offered("resume=nowhere/") == []


def test_completes_user_groups(tmp_path):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/mine.yaml").write_text(
        "# A method of my own.\n_target_: mine.Mine\nsharpness: 2\n"
    )
    assert offered(f"--config-dir {tmp_path} algorithm=mi") == ["algorithm=mine"]
    assert offered(f"--config-dir={tmp_path} algorithm=mine algorithm.s") == [
        "algorithm.sharpness="
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-sc"], "needs install=<shell> or query=<shell>"),
        (
            ["-sc", "install=bsh"],
            r"install=bsh: must be one of bash, zsh, fish \(nearest: 'bash'\)",
        ),
    ],
)
def test_invalid_requests_are_rejected(arguments, message):
    with pytest.raises(ConfigError, match=message):
        answer_shell(arguments, [CONF])


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completions_have_the_format_of_each_shell(shell, monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", "fedexp model=cnn")
    assert main.main(["--shell-completion", f"query={shell}"]) == 0
    end = " " if shell == "bash" else ""
    assert capsys.readouterr().out == f"model=cnn{end}\nmodel=cnn_3fc{end}\nmodel=cnn_circle{end}\n"
    assert main.main(["-sc", f"install={shell}"]) == 0
    assert "fedexp" in capsys.readouterr().out


ASK = r"""
eval "$(fedexp --shell-completion install=bash)" || exit 1
ask() {  # the line, then its words as bash cuts them
  COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=(fedexp "${@:2}") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  _fedexp
  printf '%s|' "${#COMPREPLY[@]}" "${COMPREPLY[@]}"; echo
}
ask "fedexp algorithm=fedn" algorithm = fedn
ask "fedexp local.ep" local.ep
ask "fedexp resume=outputs/d" resume = outputs/d
ask "fedexp nothing_like_it" nothing_like_it
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
ask "fedexp algorithm=fedn" algorithm=fedn
complete -p fedexp
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
def test_completion_works_in_bash(tmp_path):
    program = tmp_path / "bin/fedexp"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom fedexp.cli.main import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    (tmp_path / "outputs/day 1").mkdir(parents=True)
    environment = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "2|fednova |fedntd |",
        "1|local.epochs=|",
        "1|outputs/day 1/|",
        "0|",
        "2|algorithm=fednova |algorithm=fedntd |",
        "complete -o nospace -F _fedexp fedexp",
    ]
