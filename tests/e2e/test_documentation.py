"""The commands of README.md and the other pages are valid and run.

A command is a line of a shell block, or inline code that starts with a program. All commands are
composed and checked. Slow tests also run those of fedexp in an empty directory, with `REDUCED` and
small data sets. `NOT_EXECUTED` has the other commands.
"""

import contextlib
import importlib.util
import io
import itertools
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedexp.analysis.sweep import expand, launches, load_named_sweep
from fedexp.cli.commands import SUBCOMMANDS, call
from fedexp.config.arguments import hydra_arguments
from fedexp.config.build import build
from fedexp.config.composition import composed, without_hydra
from fedexp.config.options import conf_directories, known_keys, list_options
from fedexp.config.removed import REMOVED
from fedexp.core.errors import ConfigError
from fedexp.metrics.forgetting_metric import Metrics
from fedexp.training.checks import check_config

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
CONFS = conf_directories()
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Pages of the repository. The pages of algorithms are generated.
WRITTEN = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "benchmarks/*.md", "docs/[!r]*/*.md", "docs/*.md")
    for path in sorted(ROOT.glob(pattern))
]

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
# a subcommand without its arguments
NAME = re.compile("fedexp (report|evaluate|figures|dashboard)")
PROGRAMS = (
    "fedexp",
    "python",
    "python3",
    "make",
    "pip",
    "wandb",
    "export",
    "PYTHONPATH=.",
)
# Placeholder in a command -> example.
EXAMPLES = {
    "sweep=<name>": "sweep=fedntd_table1",
    "multirun/<sweep>": "multirun/fedntd_table1",
    "<run directory>": "run",
    "fedexp report <dir>": "fedexp report multirun/fedntd_table1",
    "fedexp report <directory> --metrics": "fedexp report multirun/cfed --metrics",
    "--metrics <name>": "--metrics forgetting_from_best",
    "fedexp compare <dir> <dir>": "fedexp compare run run",
    "fedexp figures <dir>": "fedexp figures run",
    "fedexp evaluate <dir>": "fedexp evaluate run",
    "<entity>/<project>": "team/fedexp",
    "<project>": "team/fedexp",
    "<name>": "fedavg",
}
# Directory in a command -> the command that makes it.
BEFORE = {
    "run": "rounds=1 hydra.run.dir=run",
    "outputs/2026-11-21/13-54-41.559336_digits_fedavg_seed0": "rounds=1 hydra.run.dir={}",
    "multirun/fedntd_table1": "--multirun sweep=fedntd_table1 algorithm=fedavg,fedntd",
    "multirun/algorithms": "--multirun algorithm=fedavg,fedprox hydra.sweep.dir={}",
    "multirun/cfed": (
        "scenario=class_incremental algorithm=fedlwf partition=equal_shards hydra.run.dir={}/fedlwf"
    ),
}
# Each run has one client of five, one epoch, one round.
REDUCED = {
    "rounds": "1",
    "local.epochs": "1",
    "num_clients": "5",
    "participation": "0.2",
    "figures": "false",
}
REDUCED |= {"hardware.engine": "sequential"}
# The part of a named sweep that is run, unless the command restricts it.
PART = {
    "fedntd_table1": {"experiment": "fedntd/mnist_s2", "algorithm": "fedavg"},
    "fedntd_table12": {"algorithm.lambda_": "0,1"},
    "benchmark_search": {"algorithm": "fedavg", "alpha": "0.1", "local.lr": "0.05"},
    "flashback_table1": {"algorithm": "fedavg,flashback"},
    "fedka_table1": {"experiment": "fedka/cifar10"},
    "cfed_table1": {"experiment": "cfed/text_class", "algorithm": "fedavg,cfed"},
}
# Commands that are not run: pattern of the whole command -> reason.
NOT_EXECUTED = {
    "make (test|lint|test lint|test-slow|docs)": ".ci/run does it, in a fresh environment",
    r"make bench\S*|python -m benchmarks\S*( .*)?": ("takes minutes to hours, or needs a GPU"),
    "python tools/gpu_day.py --out OUT": "fills a GPU for half an hour; it is tried on a CPU",
    "make (audit|test-data|test-gpu)": "needs a network, real data or a GPU",
    "make (constraints|reproduction)|python tests/test_(build|golden).py --write": (
        "writes a committed file"
    ),
    "python tests/test_golden.py --write (NAME|smoothed)": "writes a committed file",
    "python tools/compare_commits.py.*": "trains with two checkouts; takes minutes",
    r"make (PYTHON=\S+ )?run( .*)?": "needs a new environment; it is `fedexp`, which is run",
    "(uv )?pip (install|wheel) .*": (
        "needs a package index; tests/test_packaging.py installs the wheel"
    ),
    r"PYTHONPATH=\. fedexp --config-dir conf_mine .*": "tests/test_contributing.py runs it",
    r"fedexp model=timm(_lora)? .*|fedexp dataset=huggingface dataset.path=\w+/.*": (
        "needs a network; tests/test_own_models.py, test_lora.py and test_hub.py use smaller ones"
    ),
    r"(sh|fedexp report) multirun/benchmark.*": (
        "needs the runs of a night; tests/papers/test_benchmark_sweep.py checks the commands"
    ),
    "fedexp dataset=(imagenet_r|domainnet) .*": (
        "needs images that are not downloaded; tests/test_mapped.py uses small ones"
    ),
    "fedexp dataset=torchvision .*": "a download",
    "fedexp dataset=domain(_folder|net_domains) .*": (
        "needs images that are not downloaded; tests/test_domains.py uses small ones"
    ),
    "fedexp dataset=pfllib .*|fedexp .*partition.path=clients.json.*": (
        "needs files of other programs; tests/test_coming_from.py writes and uses small ones"
    ),
    "(torchrun|srun) .* fedexp .*": "several machines; tests/e2e/test_processes.py uses torchrun",
    "fedexp hardware=gpu .*": "needs a GPU",
    "fedexp hardware.engine=workers .*": "other processes; tests/e2e/test_processes.py uses ranks",
    f"fedexp ({'|'.join(REMOVED)})": "the changelog names subcommands that were removed",
    "fedexp .*experiment=lorm/.*": "needs pretrained weights",
    r"fedexp ('?tracker=\[wandb,tensorboard\]|tracker=tensorboard).*": (
        "an extra; tests/test_more_trackers.py runs it"
    ),
    "fedexp .*hardware=gpu.*": "needs GPUs",
    "fedexp .*hydra/launcher=submitit_slurm .*": "needs Slurm",
    "export RAY_AUTH_MODE=token|ray start .*|fedexp .*hydra/launcher=ray .*": "needs Ray",
    "wandb login|fedexp dashboard .*": "needs an account",
    "wandb sync( .*)?": "needs a server",
    "wandb leet .*": "needs a terminal; tests/e2e/test_wandb.py reads a run back",
    "fedexp-papers .*": "tests/papers runs the command",
    "python tools/convert_evidence.py .*": "tests/papers/test_evidence.py does it",
}


def is_executed(command: str) -> bool:
    return not any(re.fullmatch(pattern, command) for pattern in NOT_EXECUTED)


# --- finding the commands


@cache
def texts() -> dict[str, str]:
    """Return path -> text of all pages, README.md first."""
    sys.path.insert(0, str(ROOT / "docs"))  # not part of the package
    from build_pages import pages

    return {"README.md": README} | pages()


def lines_of(text: str) -> Iterator[str]:
    """Yield the shell lines of a page."""
    for language, body in FENCE.findall(text):
        if language in ("sh", "bash", "shell", "console"):
            yield from body.splitlines()
    for span in SPAN.findall(FENCE.sub("", text)):
        if span.split()[0] in PROGRAMS and len(span.split()) > 1 and not NAME.fullmatch(span):
            yield span


def normal(line: str) -> str:
    """Return a command without comments and dots, with an example for each placeholder."""
    for placeholder, example in EXAMPLES.items():
        line = line.replace(placeholder, example)
    line = re.sub(r"(^|\s+)#.*", "", line).replace("...", "")
    return re.sub(r"\s+", " ", line).strip()


def commands_of(text: str) -> list[str]:
    """Return the commands of a page, each once."""
    return list(dict.fromkeys(filter(None, map(normal, lines_of(text)))))


@cache
def commands() -> dict[str, str]:
    """Return command -> the first page that has it."""
    found: dict[str, str] = {}
    for page, text in texts().items():
        for command in commands_of(text):
            found.setdefault(command, page)
    return found


def ours(command: str) -> bool:
    """Return whether a command runs fedexp."""
    return command.split()[0] == "fedexp"


def runnable() -> dict[str, str]:
    """Return the commands that the tests run, each with the first page that has it."""
    return {c: page for c, page in commands().items() if ours(c) and is_executed(c)}


def arguments_of(command: str) -> list[str] | None:
    """Return the arguments of `fedexp` in a command; None for another program."""
    words = shlex.split(command)
    if words[0] == "make":
        return next((w.removeprefix("ARGS=").split() for w in words if w[:5] == "ARGS="), None)
    if "fedexp" not in words or words[0] in ("pip", "export"):
        return None
    return words[words.index("fedexp") + 1 :]


def subcommand(arguments: Sequence[str]) -> str | None:
    """Return the subcommand that these arguments call, if any."""
    return arguments[0] if arguments and arguments[0] in SUBCOMMANDS else None


@cache
def help_of(name: str) -> str:
    """Return the help of a subcommand."""
    found = io.StringIO()
    with contextlib.redirect_stdout(found), pytest.raises(SystemExit):
        call(name, ["--help"])
    return found.getvalue()


# --- checking them without running them


def jobs(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield the overrides of jobs that together have every value of a multirun.

    For a named sweep, yield the first jobs.
    """
    if {"--help", "--config-dir", "--shell-completion", "--version"} & set(arguments):
        return
    for written in hydra_arguments(arguments):
        mine = [o for o in written if not o.startswith(("hydra.", "hydra/", "resume=", "-"))]
        mine = [o for o in mine if "=" in o]  # without the values of flags
        named = [o for o in written if o.startswith("hydra.sweeper.sweep=")]
        grids = [mine]
        if named:
            grids = launches(load_named_sweep(named[0].partition("=")[2], CONFS), mine)
        for grid in grids:
            axes = [[job[0] for job in expand([override])] for override in grid]
            longest = 1 if named else max(map(len, axes), default=1)
            for i in range(longest):
                yield [axis[i % len(axis)] for axis in axes]


# left out, so that fewer configurations are composed
ALWAYS_FITS = re.compile(r"(seed|rounds)=\d+|tracker=none")


@cache
def compose_and_check(job: frozenset[str]) -> None:
    """Check that all options, keys and values exist and can be combined, without reading data."""
    with composed(sorted(job)) as config:
        built = build(without_hydra(config))
    check_config(built, Metrics(members=built.forgetting_metric))


def check_options(command: str) -> None:
    if name := subcommand(arguments_of(command) or ()):
        flags = [word.partition("=")[0] for word in shlex.split(command) if word.startswith("--")]
        assert all(re.search(rf"{flag}\b", help_of(name)) for flag in flags), command
        return
    for job in jobs(arguments_of(command) or ()):
        compose_and_check(frozenset(option for option in job if not ALWAYS_FITS.fullmatch(option)))


@pytest.mark.parametrize("command", [c for c in commands_of(README) if arguments_of(c)])
def test_commands_of_the_readme_are_valid(command):
    check_options(command)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # all in one test
def test_commands_that_are_not_run_are_valid():
    """These are in NOT_EXECUTED or on the pages of algorithms."""
    for command, page in commands().items():
        if page.startswith("docs/algorithms/") or not is_executed(command):
            try:
                check_options(command)
            except Exception as error:
                error.add_note(f"{page}: {command}")
                raise


def test_every_skipped_command_has_a_reason():
    left_out = [c for c in commands() if not ours(c) and is_executed(c)]
    assert not left_out, "run it, or say in NOT_EXECUTED why not"


# of other programs or of examples
FOREIGN = "shuffle=False|smooth|--shell-completion|allow_pickle|train_transform"


def test_options_in_text_exist():
    """For `key=value` in a sentence, the key must exist.

    A value of a group must be one of its options. The changelog names what was removed.
    """
    groups = {path.name for conf in CONFS for path in conf.iterdir() if path.is_dir()}
    known = {*known_keys(), *groups}
    # the page of a group names its keys without the group
    short = {key.rpartition(".")[2] for key in known}
    others = ("hydra", "wandb", "pip", "make", "eval", "resume", "key=value", "group=option")
    # arguments of Python functions, and what SECURITY.md quotes
    others += ("overwrite", "run(", "overrides", "gradient", "weights_only", "x=", "check(")
    for page, text in texts().items():
        for span in SPAN.findall(FENCE.sub("", text)):
            for key, value in re.findall(r"(?<!\S)([a-z_][a-z_.]*)=(\S+)", span):
                if page == "CHANGELOG.md" and {key, f"{key}={value}"} & REMOVED.keys():
                    continue
                if not span.startswith(others) and not re.search(FOREIGN, span):
                    assert key in known or key in short, f"{page}: `{span}`"
                    attack = ".." in value  # quoted in SECURITY.md
                    option = re.fullmatch(r"[\w./-]+", value) and key in groups and value != "null"
                    names = list_options(key, CONFS) if option else []
                    known_option = not option or value in names
                    assert attack or known_option, f"{page}: `{span}`"


def test_make_pip_and_python_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    targets |= {f"{name}=" for name in re.findall(r"^([A-Z]+) \?=", makefile, re.MULTILINE)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for command, page in commands().items():
        words = shlex.split(command)
        if words[0] == "make":
            named = {re.sub("=.*", "=", word) for word in words[1:]}
            assert named <= targets, (page, command)
        if words[0] == "pip":
            extras = ",".join(re.findall(r"\[(.*?)\]", command)).split(",")
            assert set(filter(None, extras)) <= project["optional-dependencies"].keys(), command
        if words[:2] == ["python", "-m"] and words[2] != "build":
            assert importlib.util.find_spec(words[2]), (page, command)


# --- running them


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write small data sets under the names of real ones: images of 10 classes, and texts with
    three classes per task.
    """
    directory, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, size in (
        ("mnist", 28),
        ("fashion_mnist", 28),
        ("cifar10", 32),
        ("caltech256", 32),
        ("photos", 32),
    ):
        for split, label, k in itertools.product(("train", "test"), range(10), range(22)):
            # MNIST's classes have the names of those of the digits
            folder = directory / name / split / (f"{label}" if name == "mnist" else f"{label:03}")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
            image = Image.fromarray(pixels)
            (image.convert("L") if "mnist" in name else image).save(folder / f"{k}.png")
    texts = directory / "thucnews"
    texts.mkdir()
    rows = [f"{chr(0x4E00 + n % 10)}{chr(0x4E20 + n // 10)}\t{n % 10}\n" for n in range(220)]
    for split in ("train", "test"):
        (texts / f"{split}.txt").write_text("".join(rows), encoding="utf-8")
    (texts / "class.txt").write_text("\n".join("0123456789"), encoding="utf-8")
    words = [chr(0x4E00 + k) for k in range(60)]
    vocabulary = json.dumps({word: k for k, word in enumerate(words)})
    (texts / "vocab.json").write_text(vocabulary, encoding="utf-8")
    vectors = rng.normal(size=(len(words), 20)).astype(np.float32)
    np.savez(texts / "embedding_Tencent.npz", embeddings=vectors)
    posts = [f"{chr(0x4E00 + k % 40)},0" for k in range(220)]
    (texts / "weibo_surrogate.csv").write_text("\n".join(["content,target", *posts]), "utf-8")
    return directory


def reduced(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments for small data and one round."""
    if subcommand(arguments) or any(
        a.startswith("resume=") or a in ("--help", "--cfg") for a in arguments
    ):
        return [re.sub(r"^rounds=\d+$", "rounds=2", a) for a in arguments]
    launcher = importlib.util.find_spec("joblib") is None
    kept = [
        a
        for a in arguments
        if not (launcher and a.startswith(("hydra/launcher", "hydra.launcher")))
    ]
    # one or two values of a list
    most = "" if "sweep=" in str(kept) else ",[^,]+"
    kept = [
        re.sub(rf"^((?:seed|algorithm|cohorts.dropout)=[^,]+{most}),.*", r"\1", a) for a in kept
    ]
    kept = [re.sub(r"(n_trials)=\d+$", r"\1=2", a) for a in kept]
    given = dict(a.split("=", 1) for a in kept if "=" in a)
    changes = dict(REDUCED)
    if any(key.startswith(("schedule.", "analysis.", "keep_")) for key in given):
        del changes["rounds"]  # these need a second round
    if given.get("experiment", "").startswith("fedka/") or "fedka" in given.get("sweep", ""):
        changes["local.drop_last"] = "false"  # no client has a whole batch
    if "local.warmup" in given:
        changes["rounds"] = str(int(given["local.warmup"]) + 1)
    if "local.steps" in given:
        del changes["local.epochs"]
    if "cohorts.stragglers" in given:
        changes["local.epochs"] = "2"
    if (sweep := given.get("sweep")) is not None:
        changes |= {key: value for key, value in PART.get(sweep, {}).items() if key not in given}
    if "surrogate.dataset" in given or "cfed/" in given.get(
        "experiment", changes.get("experiment", "")
    ):
        changes["surrogate.total_shards"] = "10"
    return [a for a in kept if a.split("=")[0] not in changes] + [
        f"{k}={v}" for k, v in changes.items()
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a page is one test
@pytest.mark.parametrize("page", [each for each in WRITTEN if each in runnable().values()])
def test_commands_of_each_page_run(page, fedexp, fresh_processes, data, tmp_path, monkeypatch):
    """Run all commands of a page in one directory."""
    monkeypatch.setenv("FEDEXP_DATA", str(data))
    (tmp_path / "photos").symlink_to(data / "photos")
    (tmp_path / "flowers").symlink_to(data / "photos" / "train")  # no test folder
    mine = [command for command, first in runnable().items() if first == page]
    words = [word for command in mine for word in shlex.split(command)]
    for name, before in BEFORE.items():
        if any(word.split("=")[-1] in (name, f"{name}/partition.npz") for word in words):
            done = fedexp(*reduced(before.format(name).split()))
            assert done.code == 0, done.err
    done_already: set[tuple[str, ...]] = set()
    for command in mine:
        # several examples are one when they are reduced
        same = tuple(sorted(reduced(shlex.split(command))))
        if same not in done_already:
            done = fedexp(*reduced(shlex.split(command)[1:]))
            assert done.code == 0, f"{command}\n{done.err}"
            done_already.add(same)


@pytest.mark.parametrize("command", ["fedexp algorithm=cfed", "fedexp local.lr=quick"])
def test_wrong_option_is_found(command):
    """The checks above can fail."""
    with pytest.raises(ConfigError):
        check_options(command)
