"""`fedexp --help` is complete and correct, and imports no slow modules."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import fedexp
from fedexp.cli.arguments import config_folders, split_flags
from fedexp.cli.help import EXAMPLES, KNOBS, help_text, version_text
from fedexp.config.build import build
from fedexp.config.options import list_groups, list_options
from fedexp.config.spelling import normalise

CONF = Path(__file__).parents[1] / "conf"
TEXT = help_text(CONF, [])
KNOB = re.compile(r"(?<!\S)([a-z_][a-z_.]*)=(\S+)")
# Options that a knob needs.
COMPANIONS = {"shards_per_client": ["partition=sharding"], "algorithm.beta": ["algorithm=fedntd"]}
COMPANIONS |= {"server.lr": ["server.optimizer=adam"]}
COMPANIONS |= {"algorithm.tau": ["algorithm=fedntd"], "algorithm.mu": ["algorithm=fedprox"]}


def section(group: str) -> list[str]:
    """Return the lines of a group in the help."""
    after = TEXT.split(f"\n  {group}\n", 1)[1]
    return re.match(r"(?:   .*\n)*", after).group().splitlines()


def check(overrides: list[str]) -> None:
    """Compose and check a configuration as a run would."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        build(compose("config", overrides))


@pytest.mark.parametrize("group", list_groups([CONF]))
def test_every_option_has_a_description(group: str):
    lines = section(group)
    for option in list_options(group, [CONF]):
        (line,) = [line for line in lines if line[4:].startswith(f"{option} ")]
        assert len(line[4:].split()) > 3, line


def test_stars_mark_the_defaults():
    starred = {
        group: line.split()[0].lstrip("*")
        for group in list_groups([CONF])
        for line in section(group)
        if "*" in line[:4]
    }
    with initialize_config_dir(str(CONF), version_base="1.3"):
        choices = compose("config", return_hydra_config=True).hydra.runtime.choices
    assert starred == {group: choices[group] for group in list_groups([CONF])}


def test_lines_fit_into_100_columns():
    assert max(map(len, TEXT.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("knob", KNOB.findall(KNOBS), ids="=".join)
def test_every_listed_option_accepts_its_value(knob: tuple[str, str]):
    key, value = knob
    if key.startswith("hydra."):
        pytest.skip("Hydra's own")
    check(normalise([*COMPANIONS.get(key, []), f"{key}={value}"], [CONF]))


def test_examples_are_valid():
    commands = re.findall(r"^  fedexp ?(.*?)(?:  .*)?$", EXAMPLES, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        words = [word for word in command.split() if word != "--multirun"]
        check(normalise([word.split(",")[0] for word in words], [CONF]))


def test_user_groups_are_listed(tmp_path: Path):
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "mine.yaml").write_text(
        "# A method of my own.\n_target_: mine.Mine\n"
    )
    for flag in (
        ["--config-dir", str(tmp_path)],
        [f"--config-dir={tmp_path}"],
        ["-cd", str(tmp_path)],
    ):
        text = help_text(CONF, config_folders(split_flags(["algorithm=mine", *flag, "--help"])[0]))
        assert re.search(r"^ +mine +A method of my own\.$", text, re.MULTILINE), flag


def test_help_imports_no_heavy_modules(tmp_path: Path):
    """Importing torch would make the start slow. Measuring time would depend on the machine."""
    code = """
import sys
from fedexp.cli.main import main
heavy = {"torch", "torchvision", "pandas", "sklearn", "matplotlib", "wandb", "numpy"}
for line in ("--help", "-h", "algorithm=fedntd --cfg job"):
    sys.argv = ["fedexp", *line.split()]
    print(main(), heavy & sys.modules.keys())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    *texts, end = done.stdout.split("0 set()\n")
    assert (len(texts), end) == (3, ""), done.stdout + done.stderr
    assert all(texts)
    assert not list(tmp_path.iterdir()), "neither leaves anything behind"


def test_version_text_names_packages_and_python():
    text = version_text()
    for name in ("fedexp ", "torch ", "hydra-core ", "Python ", "CUDA "):
        assert f"\n{name}" in f"\n{text}"
    assert text.splitlines()[0] == f"fedexp {fedexp.__version__}", "its own, installed or not"
