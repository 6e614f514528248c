"""The examples of docs/guide/your_own_parts.md: the files are written to a directory, and the
commands are run.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_digits

from fedexp.cli.main import main
from fedexp.engine.sequential import Sequential
from fedexp.testing import ENGINES

Command = Callable[..., subprocess.CompletedProcess[str]]
PAGE = Path(__file__).parents[1] / "docs" / "guide" / "your_own_parts.md"
FILES = re.compile(r"^`([^`\n]+)`\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(PYTHONPATH=\. fedexp .*?)\n```$", re.MULTILINE)
CHECKS = re.compile(r"^```python\n(from fedexp.testing import check\n.*?)^```$", re.M | re.S)
# Small runs that can be compared.
SMALL = ["tracker=none", "figures=false", "rounds=2", "local.epochs=1", "min_size=1"]
SMALL += ["hardware=cpu", "hardware.engine=sequential", "hardware.threads=1"]


def start(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as the page does: in the user's directory, with PYTHONPATH=."""
    environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedexp", *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )


def fedexp(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, in the user's directory and with its modules."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(directory)
        patch.syspath_prepend(directory)
        try:
            code = main(arguments)
        except SystemExit as stop:  # of a subcommand
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def follow(
    directory: Path, group: str, *more: str, run: Command = fedexp
) -> subprocess.CompletedProcess[str]:
    """Run the page's command that chooses an option of `group`."""
    (line,) = [
        c
        for c in COMMANDS.findall(PAGE.read_text(encoding="utf-8"))
        if re.search(rf"conf_mine '?{group}=", c)
    ]
    variable, program, *arguments = shlex.split(line)
    assert (variable, program) == ("PYTHONPATH=.", "fedexp")
    return run(directory, *arguments, *SMALL, *more)


def rounds(directory: Path) -> pd.DataFrame:
    """Return rounds.csv without the columns that depend on the clock."""
    table = pd.read_csv(directory / "rounds.csv")
    return table[
        [c for c in table if not c.endswith(("_seconds", "_per_second")) and c != "seconds"]
    ]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory with the package and the yaml files of the page."""
    directory = tmp_path_factory.mktemp("out_of_tree")
    written = FILES.findall(PAGE.read_text(encoding="utf-8"))
    assert written
    for path, text in written:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text, encoding="utf-8")
    yield directory
    for name, module in [*sys.modules.items()]:  # other tests may use the same names
        if str(getattr(module, "__file__", "")).startswith(str(directory)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def few_digits() -> dict[str, np.ndarray]:
    """Return the arrays of the data set of the page: the digits 0 to 3."""
    images, labels = load_digits(return_X_y=True)
    few = labels < 4
    x = (images[few] * 15).astype(np.uint8).reshape(-1, 8, 8, 1)
    arrays = {"classes": np.array(["zero", "one", "two", "three"])}
    arrays |= {"x_train": x[99:], "y_train": labels[few][99:]}
    return arrays | {"x_test": x[:99], "y_test": labels[few][:99]}


@pytest.fixture(scope="module")
def reference(workplace: Path) -> pd.DataFrame:
    """Return the rounds of FedAvg with the default options."""
    done = fedexp(workplace, *SMALL, "hydra.run.dir=reference")
    assert done.returncode == 0, done.stderr
    return rounds(workplace / "reference")


@pytest.mark.slow  # a process
def test_algorithm_example_of_the_page_can_be_run(workplace: Path, reference: pd.DataFrame):
    done = follow(workplace, "algorithm", "hydra.run.dir=smoothed", run=start)
    assert done.returncode == 0, done.stderr
    smoothed = rounds(workplace / "smoothed")
    # The initial model is the same; the loss differs from the first round on.
    assert smoothed["test_loss"][0] == reference["test_loss"][0]
    assert (smoothed["train_loss"][1:] != reference["train_loss"][1:]).all()


@pytest.mark.parametrize("name", ["anchored", "reminded", "plain_prox"])
def test_algorithm_examples_that_keep_state_can_be_run(
    workplace: Path, reference: pd.DataFrame, name: str
):
    choice = ["--config-dir", "conf_mine", f"algorithm={name}"]
    done = fedexp(workplace, *choice, *SMALL, f"hydra.run.dir={name}")
    assert done.returncode == 0, done.stderr
    found = rounds(workplace / name)
    assert found["test_loss"][0] == reference["test_loss"][0]
    assert (found["train_loss"][1:] != reference["train_loss"][1:]).all()


@pytest.mark.slow  # 10 s
def test_check_examples_of_the_page_pass(
    workplace: Path, few_digits: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(ENGINES, "workers", Sequential())
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)
    np.savez("npz_images.npz", **few_digits)
    examples = CHECKS.findall(PAGE.read_text(encoding="utf-8"))
    assert len(examples) == 7  # of each kind of part
    for code in examples:
        exec(code, {})
    Path("npz_images.npz").unlink()


def test_metric_example_adds_a_column(workplace: Path, reference: pd.DataFrame):
    # The metric adds a column, and smoothing=0 equals FedAvg.
    done = follow(
        workplace,
        "forgetting_metric",
        "algorithm=smoothed",
        "algorithm.smoothing=0",
        "hydra.run.dir=measured",
        "figures=true",
    )
    assert done.returncode == 0, done.stderr
    (workplace / "measured" / "figures" / "drops.png").unlink()
    (workplace / "measured" / "figures" / "curves.png").unlink()
    done = fedexp(workplace, "figures", "measured")
    assert (
        "without the figures of its metrics: forgetting_metric.worst_class._target" in done.stderr
    )
    assert "curves.png" in done.stdout
    done = fedexp(workplace, "figures", "measured", "--config-dir", "conf_mine")
    assert (done.returncode, done.stderr) == (0, "")
    assert "measured/figures/drops.png" in done.stdout
    table = rounds(workplace / "measured")
    pd.testing.assert_frame_equal(
        table.drop(columns="worst_class_forgetting"), reference, check_exact=True
    )
    accuracy = pd.read_csv(workplace / "measured" / "class_accuracy.csv").pivot(
        index="round", columns="class", values="accuracy"
    )
    # The only earlier model is that of round 1; the initial model does not count.
    assert table["worst_class_forgetting"].isna().tolist() == [True, True, False]
    assert table["worst_class_forgetting"][2] == (accuracy.loc[1] - accuracy.loc[2]).max()


def test_data_set_example_is_read(workplace: Path, few_digits: dict[str, np.ndarray]):
    missing = follow(workplace, "dataset", "hydra.run.dir=missing")
    assert missing.returncode == 2
    assert "npz_images.npz cannot be read" in missing.stderr
    assert not (workplace / "missing").exists()

    np.savez(workplace / "npz_images.npz", **few_digits)
    done = follow(workplace, "dataset", "participation=1", "hydra.run.dir=images")
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(workplace / "images" / "class_accuracy.csv")
    assert table["class"].nunique() == 4
    clients = pd.read_csv(workplace / "images" / "clients.csv")
    assert clients["client"].nunique() == 10, "num_clients of the yaml"
    assert clients[clients["round"] == 1]["examples"].sum() == len(few_digits["y_train"])


def test_partition_example_sets_the_client_sizes(workplace: Path):
    (line,) = [c for c in COMMANDS.findall(PAGE.read_text(encoding="utf-8")) if "partition=" in c]
    small = [option for option in SMALL if not option.startswith("min_size")]  # lda's alone
    done = fedexp(
        workplace, *shlex.split(line)[2:], *small, "hydra.run.dir=power_law", "num_clients=4"
    )
    assert done.returncode == 0, done.stderr
    with np.load(workplace / "power_law" / "partition.npz") as saved:
        # 1,437 training digits; 1,433 of them by 1, 1/2, 1/3, 1/4 of 25/12: 687.84, 343.92, 229.28,
        # 171.96
        assert saved["sizes"].tolist() == [688, 344, 230, 172]
        assert json.loads(str(saved["info"]))["exponent_used"] == 1.0


def test_law_of_participation_example_prefers_large_clients(workplace: Path):
    shared = ["participation=0.05", "cohorts.exponent=100", "rounds=3"]  # one of 20 clients
    done = follow(workplace, "cohorts", *shared, "hydra.run.dir=by_size")
    assert done.returncode == 0, done.stderr
    with np.load(workplace / "by_size" / "partition.npz") as saved:
        largest = saved["sizes"].argmax()
    clients = pd.read_csv(workplace / "by_size" / "clients.csv")
    assert clients["client"].tolist() == [largest] * 3


def test_model_example_trains(workplace: Path):
    done = follow(workplace, "model", "hydra.run.dir=perceptron", "model.freeze=[hidden]")
    assert done.returncode == 0, done.stderr
    assert "are frozen (requires_grad=False)" in done.stderr
    wrong = fedexp(workplace, "--config-dir", "conf_mine", "model=mlp", "model.head=fd", *SMALL)
    assert wrong.returncode == 2
    assert "model.head=fd: must be the name of the last layer" in wrong.stderr


def test_callback_example_keeps_the_best_models(workplace: Path):
    done = follow(workplace, "callback", "rounds=4", "hydra.run.dir=best")
    assert done.returncode == 0, done.stderr
    accuracy = rounds(workplace / "best")["test_accuracy"]
    wanted = sorted(accuracy.index, key=lambda number: (accuracy[number], number))[-2:]
    kept = {int(path.stem) for path in (workplace / "best" / "best").iterdir()}
    assert kept == set(wanted)


@pytest.mark.slow  # a process, and that of W&B
def test_tracker_example_writes_its_file(workplace: Path):
    shared = [option for option in SMALL if not option.startswith("tracker")]
    command = ["--config-dir", "conf_mine", "tracker=[lines,wandb]", "tracker.wandb.mode=offline"]
    done = start(workplace, *command, *shared, "hydra.run.dir=lines")
    assert done.returncode == 0, done.stderr
    lines = (workplace / "lines" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row.get("round") for row in rows] == [0, 1, 2, None]
    table = pd.read_csv(workplace / "lines" / "rounds.csv")
    assert [row["test_accuracy"] for row in rows[:3]] == table["test_accuracy"].tolist()
    assert list((workplace / "lines" / "wandb").glob("offline-run-*"))
