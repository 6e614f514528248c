"""`fedexp import`: accuracies of other programs become run directories."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedexp
from fedexp.analysis.view.collect import problems_of
from fedexp.cli.commands import call
from fedexp.core.errors import ConfigError
from fedexp.figures.load import load_history
from fedexp.metrics.task_matrix import MEASURES
from fedexp.papers.report import task_measures
from fedexp.rundir.reader import RunDirectory
from quick_runs import SMALL

NAMES = ("--algorithm", "theirs", "--dataset", "cifar10", "--partition", "iid")
# after tasks 1, 2, 3; the tasks that follow were not tested
TRIANGLE = "0.75\n0.875,0.5\n0.25,0.625,1.0\n"


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw figures only in the fixture `compared`, since they take most of the time."""
    monkeypatch.setattr("fedexp.figures.make_figures", lambda directory: [])


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def make(file: Path, *flags: str, columns: str = "tasks") -> RunDirectory:
    """Import a file as the run `run` beside it."""
    target = file.parent / "run"
    assert call("import", [str(file), str(target), "--columns", columns, *NAMES, *flags]) == 0
    return RunDirectory(target)


def measure(run: RunDirectory) -> dict[str, float]:
    return task_measures(run, list(MEASURES))


def test_forgetting_between_tasks_is_computed_from_an_imported_matrix(tmp_path):
    run = make(write(tmp_path / "a.csv", TRIANGLE), "--every", "10")
    assert run.status == "completed"
    assert not run.problems
    found = measure(run)
    # task 1 falls from its best 0.875 to 0.25, task 2 rises from 0.5 to 0.625
    assert found["forgetting_from_best"] == (0.625 - 0.125) / 2
    assert found["forgetting_from_any"] == (0.625 + 0.0) / 2  # 0.625 is now the best of task 2
    assert found["backward_transfer"] == ((0.25 - 0.75) + (0.625 - 0.5)) / 2
    assert found["last_accuracy"] == 1.875 / 3
    assert found["average_incremental_accuracy"] == pytest.approx((0.75 + 0.6875 + 0.625) / 3)
    assert np.isnan(found["forward_transfer"])  # task 2 was not tested before it was learned
    assert run.summary["task_forgetting"] == -found["backward_transfer"]
    assert run.summary["rounds"] == 30
    assert run.rounds["round"].tolist() == [0, 10, 20, 30]
    assert run.values("average_accuracy") == [0.75, 0.6875, 0.625]
    assert run.values("task_forgetting") == [-0.125, 0.1875]  # 0.75 - 0.875; ((0.5) - (0.125)) / 2
    # all tasks were tested only after the last one
    assert run.values("test_accuracy") == [0.625]


def test_forward_transfer_is_computed_if_the_initial_model_is_imported(tmp_path):
    rows = [[0.25, 0.125], [0.75, 0.375], [0.5, 1.0]]
    run = make(write(tmp_path / "a.json", json.dumps(rows)), "--initial")
    assert measure(run)["forward_transfer"] == 0.375 - 0.125
    assert run.tasks["accuracy"].tolist() == np.ravel(rows).tolist()
    assert run.rounds["test_accuracy"].tolist() == [0.1875, 0.5625, 0.75]


def test_forgetting_is_computed_from_imported_class_accuracies(tmp_path):
    text = "cat,dog\n1,0.25\n0.5,0.5\n0.25,0.75\n"
    run = make(write(tmp_path / "a.csv", text), columns="classes")
    # cat falls from its best 1 to 0.25, dog rises from its best 0.5 to 0.75
    assert run.summary["forgetting"] == (0.75 - 0.25) / 2
    # cat falls by 0.5, then by 0.25; dog never falls
    assert run.summary["round_forgetting"] == (0.5 / 2 + 0.25 / 2) / 2
    assert "consistency" not in run.summary  # needs the initial model
    assert run.values("test_accuracy") == [0.625, 0.5, 0.5]
    assert fedexp.load_run(run.directory).class_accuracy["name"][:2].tolist() == ["cat", "dog"]
    assert load_history(run).rounds == [0, 1, 2, 3]
    assert not run.problems


def test_consistency_is_computed_if_the_initial_model_is_imported(tmp_path):
    text = "0,1\n0.75,1\n1,0.75\n"
    run = make(write(tmp_path / "a.csv", text), "--initial", columns="classes")
    # cosines: (0, 1) and (0.75, 1): 1 / 1.25; (0.75, 1) and (1, 0.75): 1.5 / 1.25^2
    assert run.summary["consistency"] == pytest.approx((1 / 1.25 + 1.5 / 1.5625) / 2, abs=1e-15)
    assert run.summary["rounds"] == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "0.75,,\n0.875,0.5,\n0.25,0.625,1.0\n"),
        ("a.csv", "\ufefffirst,second,third\r\n0.75,,\r\n0.875,0.5,nan\r\n0.25,0.625,1e0\r\n"),
        ("a.csv", "1,2,3\n0.75,,\n0.875,0.5,\n0.25,0.625,1.0\n"),
        ("a.json", "[[0.75], [0.875, 0.5, NaN], [0.25, 0.625, 1]]"),
        ("a.json", "[[0.75, null, null], [0.875, 0.5, null], [0.25, 0.625, 1.0]]"),
    ],
)
def test_every_file_format_gives_the_same_run(tmp_path, name, text):
    (tmp_path / "plain").mkdir()
    expected = make(write(tmp_path / "plain/a.csv", TRIANGLE))
    run = make(write(tmp_path / name, text))
    assert measure(run) == pytest.approx(measure(expected), abs=0, nan_ok=True)


def test_percent_flag_divides_accuracies_by_100(tmp_path):
    run = make(write(tmp_path / "a.csv", "75\n25,50\n"), "--percent")
    assert run.tasks["accuracy"].dropna().tolist() == [0.75, 0.25, 0.5]


# The lines that CSVLogger prints, with four digits. Experience 1 is tested before it is learned.
AVALANCHE = """\
eval_exp,training_exp,eval_accuracy,eval_loss,forgetting
0,None,0.1250,2.3026,0
1,None,0.2500,2.3026,0
0,0,0.7500,0.6931,0
1,0,0.3750,2.1972,0
0,1,0.5000,1.0986,0.2500
1,1,0.8750,0.4055,0
"""


def test_log_of_avalanche_is_read(tmp_path):
    run = make(write(tmp_path / "eval_results.csv", AVALANCHE))
    assert run.tasks["accuracy"].tolist() == [0.125, 0.25, 0.75, 0.375, 0.5, 0.875]
    assert run.tasks["task"].tolist() == [0, 0, 1, 1, 2, 2]
    # Avalanche's own forgetting of experience 0, in the log
    assert measure(run)["forgetting_from_learning"] == 0.25
    assert measure(run)["forward_transfer"] == 0.375 - 0.25


def test_log_of_avalanche_without_the_initial_model_is_read(tmp_path):
    lines = [line for line in AVALANCHE.splitlines(keepends=True) if ",None," not in line]
    run = make(write(tmp_path / "eval_results.csv", "".join(lines)))
    assert run.tasks["accuracy"].dropna().tolist() == [0.75, 0.375, 0.5, 0.875]


def test_summary_names_the_imported_file_and_its_hash(tmp_path):
    file = write(tmp_path / "a.csv", "0.5\n")
    # sha256sum of the four bytes
    sha256 = "8d5c1b5a87c51f970807fc0c2057b3ab3aaf11638ab667dc5956edc8f5bcf138"
    run = make(file, "--seed", "3")
    assert run.summary["imported"]["file"] == "a.csv"
    assert run.summary["imported"]["sha256"] == sha256
    assert run.summary["seed"] == 3


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("75\n25,50\n", (), "accuracy 75 must be between 0 and 1; use --percent if"),
        ("0.5\n0.25,-0.5\n", (), "accuracy -0.5 must be between 0 and 1"),
        ("0.5\n0.25,inf\n", (), "accuracy inf must be between 0 and 1"),
        ("101\n", ("--percent",), "accuracy 101 must be between 0 and 100"),
        ("0.5\n0.25,0.75\n", ("--percent",), "has no value above 1"),
        ("0.5\nnan,0.75\n", (), "row 2 has no accuracy in column 1"),
        ("0.5,0.5\n0.25,\n", (), "row 2 has no accuracy in column 2"),
        ("0.5\n0.25\n", (), "row 2 has no accuracy in column 2"),
        ("0.5,0.5,0.5\n0.5,0.5,0.5\n", (), "row 1 has 3 values, but the table has 2 columns"),
        ("0.5,0.5\n0.5,0.5\n", ("--initial",), "row 1 has 2 values, but the table has 1 column"),
        ("0.5\n0.25,half\n", (), "row 2 has an invalid number"),
        ("0.5 0.5\n0.5 0.5\n", (), "row 1 has an invalid number"),
        ("", (), "has no accuracies"),
        ("a,b\n", (), "has no accuracies"),
        ("0.5\n", ("--initial",), "has no accuracies"),
        ("0.5\n", ("--every", "0"), "--every=0: must be at least 1"),
        ("0.5\n", ("--seed", "x"), "invalid int value: 'x'"),
        (AVALANCHE + "1,1,0.5,0,0\n", (), "experience 1 is tested twice after experience 1"),
        (AVALANCHE + "x,1,0.5,0,0\n", (), "has an experience (task) that is not an integer"),
        (AVALANCHE + "2,1,0.5,0,0\n", (), "row 1 has 3 values, but the table has 2 columns"),
    ],
)
def test_invalid_matrices_are_rejected(tmp_path, text, flags, message, capsys):
    file = write(tmp_path / "a.csv", text)
    code = call("import", [str(file), str(tmp_path / "run"), "--columns", "tasks", *NAMES, *flags])
    said = capsys.readouterr().err
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "0.5,0.5\n0.5\n", "row 2 has 1 values, but the table has 2 columns"),
        ("a.csv", "0.5,0.5\n0.5,\n", "row 2 has no accuracy in column 2"),
        ("a.csv", "cat,dog\n0.5\n", "row 1 has 1 values, but the table has 2 columns"),
        ("a.json", '{"accuracy": [[0.5]]}', "must be a list of rows"),
        ("a.json", "[0.5, 0.5]", "must be a list of rows"),
        ("a.json", "[[[0.5]]]", "row 1 has an invalid number"),
        ("a.json", "[[0.5", "is not a valid csv file or .json file"),
        ("a.json", "[" * 100_000, "is not a valid csv file or .json file"),
        ("a.json", f"[[1{'0' * 400}]]", "row 1 has an invalid number"),
    ],
)
def test_invalid_files_of_class_accuracies_are_rejected(tmp_path, name, text, message, capsys):
    file = write(tmp_path / name, text)
    target = tmp_path / "run"
    assert call("import", [str(file), str(target), "--columns", "classes", *NAMES]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]


def test_existing_directories_and_missing_files_are_rejected(tmp_path, capsys):
    file = write(tmp_path / "a.csv", "0.5\n")
    (tmp_path / "run").mkdir()
    flags = ["--columns", "tasks", *NAMES]
    assert call("import", [str(file), str(tmp_path / "run"), *flags]) == 2
    assert "run: already exists; choose another directory" in capsys.readouterr().err
    assert call("import", [str(tmp_path / "b.csv"), str(tmp_path / "new"), *flags]) == 2
    assert "b.csv: cannot be read (No such file or directory)" in capsys.readouterr().err
    assert call("import", [str(tmp_path), str(tmp_path / "new"), *flags]) == 2
    assert "cannot be read (Is a directory)" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_imported_runs_cannot_be_resumed(tmp_path):
    directory = make(write(tmp_path / "a.csv", TRIANGLE)).directory
    with pytest.raises(ConfigError) as error:
        fedexp.run([f"resume={directory}"])
    assert str(error.value) == f"resume={directory}: this run was imported; it has no checkpoint"


# --- beside fedexp's own runs


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """A run of fedexp, and its matrices imported as two further runs."""
    sweep = tmp_path_factory.mktemp("multirun") / "compared"
    tasks = ("scenario=class_incremental", "partition=equal_shards", "rounds=2")
    options = [option for option in SMALL if not option.startswith("min_size")]
    own = fedexp.run([*options, *tasks], directory=sweep / "own")
    names = ["--algorithm", "fedavg", "--dataset", "digits", "--partition", "equal_shards"]
    flags = [*names, "--initial", "--seed", "1"]
    ends = own.tasks[own.tasks["round"] % 2 == 0]
    matrix = ends.pivot(index="round", columns="evaluated_task", values="accuracy")
    (sweep.parent / "tasks.json").write_text(json.dumps(matrix.to_numpy().tolist()))
    files = [str(sweep.parent / "tasks.json"), str(sweep / "tasks")]
    assert call("import", [*files, "--columns", "tasks", "--every", "2", *flags]) == 0
    table = own.class_accuracy.pivot(index="round", columns="class", values="accuracy")
    table.to_csv(sweep.parent / "classes.csv", index=False)
    files = [str(sweep.parent / "classes.csv"), str(sweep / "classes")]
    assert call("import", [*files, "--columns", "classes", *flags]) == 0
    return sweep


def test_run_imported_from_its_accuracies_has_the_same_metrics(compared):
    own, tasks, classes = (RunDirectory(compared / name) for name in ("own", "tasks", "classes"))
    assert (tasks.directory / "figures/tasks.png").exists()
    assert (classes.directory / "figures/class_accuracy.png").exists()
    assert own.summary["round_forgetting"] > 0
    assert measure(own)["forgetting_from_best"] > 0
    assert measure(tasks) == measure(own)
    for key in ("average_accuracy", "new_task_accuracy", "task_forgetting", "tasks", "rounds"):
        assert tasks.summary[key] == own.summary[key]
    for key in ("forgetting", "round_forgetting", "rounds"):
        assert classes.summary[key] == own.summary[key]
    for key in ("round", "forgetting", "round_forgetting"):
        pd.testing.assert_series_equal(classes.rounds[key], own.rounds[key], check_exact=True)
    pd.testing.assert_frame_equal(classes.class_accuracy(), own.class_accuracy(), check_exact=True)


def test_imported_runs_are_seeds_of_the_same_setting(compared, capsys):
    assert call("report", [str(compared), "--no-figures"]) == 0
    said = capsys.readouterr()
    assert not said.err
    table = pd.read_csv(compared / "table.csv")
    assert table["setting"].tolist() == ["digits equal_shards"]
    assert table["method"].tolist() == ["fedavg"]
    assert table["n"].tolist() == [3]
    assert call("view", [str(compared)]) == 0
    assert not any(problems_of(RunDirectory(compared / name)) for name in ("tasks", "classes"))


def test_imported_runs_can_be_saved_as_run_files(compared, tmp_path):
    assert call("report", [str(compared), "--no-figures", "--keep"]) == 0
    assert call("report", [str(compared), "--restore", str(tmp_path)]) == 0
    for name in ("tasks", "classes"):
        there, kept = RunDirectory(compared / name), RunDirectory(tmp_path / "compared" / name)
        assert kept.summary == there.summary
        pd.testing.assert_frame_equal(kept.rounds, there.rounds)
        assert not kept.problems
