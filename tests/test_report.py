"""`fedexp report --out`: one table of many runs; `fedexp report RUN`: the tables of one run."""

import csv
import json
import os
import time

import numpy as np
import pandas as pd
import pytest

import fedexp
from fedexp.cli.main import main
from fedexp.rundir import files
from quick_runs import SMALL

BEFORE = (  # the columns that each table has
    *(
        "dataset",
        "algorithm",
        "seed",
        "status",
        "rounds",
        "accuracy",
        "last5_accuracy",
        "best_accuracy",
    ),
    *("forgetting", "seconds_per_round", "mb_up_per_client", "mb_down_per_client"),
)
PLAIN = {
    "status": "completed",
    "algorithm": "fedavg",
    "dataset": "digits",
    "seed": 0,
    "rounds": 2,
    "accuracy": 0.5,
    "best_accuracy": 0.75,
    "forgetting": 0.125,
    "round_forgetting": None,
}


def make_run(directory, **summary):
    """Make a run with two clients in each of two rounds."""
    directory.mkdir(parents=True)
    (directory / files.SUMMARY).write_text(json.dumps(PLAIN | summary))
    rows = "0,0.125,,,\n1,0.25,4e6,2e6,1.5\n2,0.5,4e6,2e6,2.5\n"
    (directory / files.ROUNDS).write_text(
        f"round,test_accuracy,bytes_up,bytes_down,seconds\n{rows}"
    )
    if "tasks" in summary:
        write_tasks(directory)
    (directory / "class_accuracy.csv").write_text(
        "round,class,accuracy\n0,0,0.125\n1,0,0.25\n2,0,0.5\n"
    )
    (directory / files.CONFIG).write_text("choices: {}\n")
    (directory / files.OVERRIDES).parent.mkdir()
    (directory / files.OVERRIDES).write_text("[]\n")
    (directory / files.CLIENTS).write_text("round,client\n1,0\n1,1\n2,0\n2,1\n")


def write_tasks(directory):
    """Write tasks.csv of a run in which one task was evaluated."""
    (directory / files.TASKS).write_text("round,task,evaluated_task,accuracy\n2,1,1,0.5\n")


def stream(*averages, new=0.9):
    """Return the keys of the summary of a run with tasks."""
    tasks = [
        {
            "task": t,
            "average_accuracy": a,
            "new_task_accuracy": new,
            "accuracies": [a] * len(averages),
        }
        for t, a in enumerate(averages, 1)
    ]
    forgetting = 0.25 if len(averages) > 1 else None
    return {
        "scenario": "class_incremental",
        "partition": "equal_shards",
        "tasks": tasks,
        "task_forgetting": forgetting,
    }


def table(folder):
    """Return (columns, rows) of the csv file, and check that the markdown file has the same."""
    assert main(["report", str(folder), "--out", str(folder / "table")]) == 0
    with (folder / "table.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    text = (folder / "table.md").read_text().splitlines()
    assert text[0] == f"| {' | '.join(reader.fieldnames)} |"
    assert len(text) == 2 + len(rows)
    return reader.fieldnames, rows


def test_table_without_tasks_has_no_task_columns(tmp_path, capsys):
    make_run(tmp_path / "b", scenario="none", partition="lda")
    make_run(tmp_path / "a", algorithm="fedntd")  # an older run: no scenario, no partition
    columns, rows = table(tmp_path)
    assert columns == ["dataset", "scenario", "partition", *BEFORE[1:]]
    assert [row["algorithm"] for row in rows] == ["fedavg", "fedntd"]
    text = (tmp_path / "table.md").read_text()
    assert (
        text.splitlines()[2]
        == "| digits | none | lda | fedavg | 0 | completed | 2 | 0.5000 | 0.3750 | 0.7500 | 0.125 |"
        " 2.00 | 2.00 | 1.00 |"
    )
    paths = "".join(f"  {tmp_path / name}\n" for name in ("table.csv", "table.md"))
    assert capsys.readouterr().out == text + paths


def test_traffic_is_that_of_clients_that_took_part(tmp_path):
    """Three of six clients started: one whose message arrived, one whose message was lost, and one
    that had no batch. Together they sent 12 MB in two rounds and received 6 MB."""
    make_run(tmp_path / "run")
    (tmp_path / "run" / files.ROUNDS).write_text(
        "round,test_accuracy,bytes_up,bytes_down\n0,0.125,,\n1,0.25,8e6,4e6\n2,0.5,4e6,2e6\n"
    )
    (tmp_path / "run" / files.CLIENTS).write_text(
        "round,client,steps,arrived\n1,0,3,1\n1,1,3,0\n1,2,0,0\n2,0,0,1\n2,1,0,0\n2,2,0,0\n"
    )
    _, rows = table(tmp_path)
    assert [rows[0][f"mb_{way}_per_client"] for way in ("up", "down")] == ["4.0", "2.0"]


def test_table_has_each_run_once(tmp_path):
    """The directories overlap. One sweep has links to a run elsewhere and to one of the other."""
    for name in ("all/a/x", "all/b/y", "z"):
        make_run(tmp_path / name, algorithm=name[-1])
    for name in ("z", "all/a/x"):
        (tmp_path / "all/b" / f"linked_{name[-1]}").symlink_to(tmp_path / name)
    given = [str(tmp_path / name) for name in ("all/a", "all", "all")]
    assert main(["report", *given, "--out", str(tmp_path / "table")]) == 0
    assert pd.read_csv(tmp_path / "table.csv")["algorithm"].tolist() == ["x", "y", "z"]


def test_table_has_the_accuracies_after_each_task(tmp_path):
    make_run(tmp_path / "cfed", algorithm="cfed", **stream(0.9, 0.625, 0.5))
    columns, (row,) = table(tmp_path)
    after = ["average_task2", "new_task2", "average_task3", "new_task3"]
    place = BEFORE.index("forgetting") + 1
    of_runs = [*BEFORE[1:place], "task_forgetting", *BEFORE[place:]]
    assert columns == ["dataset", "scenario", "partition", *of_runs, *after]
    assert (row["scenario"], row["partition"]) == ("class_incremental", "equal_shards")
    assert [float(row[name]) for name in after] == [0.625, 0.9, 0.5, 0.9]
    assert float(row["task_forgetting"]) == 0.25
    assert (tmp_path / "table.md").read_text().endswith("| 0.6250 | 0.9000 | 0.5000 | 0.9000 |\n")


TASKS = """round,task,evaluated_task,accuracy
0,0,1,0.25
0,0,2,0.5
2,1,1,0.75
2,1,2,0.125
4,2,1,0.25
4,2,2,1.0
"""


@pytest.mark.parametrize(("order", "above"), [("shared", ""), ("per_client", "12.50")])
def test_report_of_a_run_has_the_accuracy_after_each_task(order, above, tmp_path, capsys):
    """Two tasks of two rounds: after task 1, the mean is 0.75, or (0.75 + 0.125) / 2 if some
    clients have begun with task 2; after task 2, it is (0.25 + 1) / 2."""
    run = tmp_path / "a"
    make_run(run, **stream(0.75, 0.625))
    (run / files.TASKS).write_text(TASKS)
    (run / files.CONFIG).write_text(f"scenario: {{order: {order}}}\n")
    assert main(["report", str(run)]) == 0
    told, mean = capsys.readouterr().out, "43.75" if above else "75.00"
    assert f"| 1 | 75.00 | {above} | {mean} |\n| 2 | 25.00 | 100.00 | 62.50 |" in told
    values = pd.read_csv(run / "task_matrix.csv")
    wanted = [[1, 0.75, 0.125 if above else np.nan, float(mean) / 100], [2, 0.25, 1.0, 0.625]]
    np.testing.assert_array_equal(values, wanted)
    assert f"1 & 75.00 & {above} & {mean} " in (run / "task_matrix.tex").read_text()
    assert (run / "figures/task_matrix.png").exists()


def test_report_of_a_run_without_tables_names_what_they_need(tmp_path, capsys):
    make_run(tmp_path / "a")
    assert main(["report", str(tmp_path / "a")]) == 2
    assert "tables need two learned tasks, or the results of clients" in capsys.readouterr().err
    # the second task has begun, but only the first is complete
    (tmp_path / "a" / files.TASKS).write_text(TASKS.replace("4,2", "3,2"))
    assert main(["report", str(tmp_path / "a"), "--no-figures"]) == 0
    assert len(pd.read_csv(tmp_path / "a/task_matrix.csv")) == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["run"], "run is a run"),
        ([".", "--out", "all"], "--out writes one row per run"),
    ],
)
@pytest.mark.parametrize(
    "flag", [["--sort", "name"], ["--transpose"], ["--baseline", "a"], ["--latex"], ["--appendix"]]
)
def test_flag_of_a_sweeps_table_is_not_ignored(given, reason, flag, tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *given, *flag]) == 2
    message = f"fedexp: {flag[0]}: is for the table of a sweep, but {reason}\n"
    assert capsys.readouterr().err == message


def test_values_of_a_run_are_shown(tmp_path, capsys):
    make_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--metrics", "best_accuracy,forgetting"]) == 0
    text = (
        "| | Best accuracy (%) | Forgetting |\n| --- | --- | --- |\n| FedAvg | 75.00 | 0.125 |\n\n"
    )
    assert capsys.readouterr().out == text
    assert main(["report", str(tmp_path / "run"), "--metrics", "best_acuracy"]) == 2
    assert (
        "--metrics best_acuracy: no run has this value (nearest: 'best_" in capsys.readouterr().err
    )


def test_run_that_two_directories_reach_has_one_row(tmp_path):
    """The second directory has a link to the run, the third is the first by another name."""
    make_run(tmp_path / "a" / "run")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "link").symlink_to(tmp_path / "a" / "run")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    out = ["--out", str(tmp_path / "table")]
    assert main(["report", *(str(tmp_path / name) for name in "bac"), *out]) == 0
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 2


def test_report_names_the_runs_that_are_deeper_than_those_of_its_table(tmp_path, caplog):
    """Another sweep inside the directory is one line. The folder of W&B has no runs."""
    for name in ("run", "inner/x/one", "inner/x/two"):
        make_run(tmp_path / "sweep" / name)
    (tmp_path / "sweep" / "inner" / "again").symlink_to(tmp_path / "sweep" / "run")
    (tmp_path / "sweep/wandb/run-1-a/files").mkdir(parents=True)
    (tmp_path / "sweep/wandb/run-1-a/files/config.yaml").touch()
    assert main(["report", str(tmp_path / "sweep"), "--no-figures"]) == 0
    told = [line for line in caplog.messages if " in inner" in line]
    assert told == [f"{tmp_path / 'sweep'}: left out: 2 runs in inner/x"]
    text = (tmp_path / "sweep" / "table.md").read_text()
    assert "\nNot in the tables: 2 runs in inner/x\n" in text
    assert "wandb" not in text
    caplog.clear()
    assert len(fedexp.load_sweep(tmp_path / "sweep")) == 1
    assert told[0] in caplog.messages
    assert len(fedexp.load_sweep(tmp_path / "sweep" / "inner" / "x")) == 2


def test_directory_without_runs_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "table")]) == 2
    assert "no finished run in" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_options_column_omits_options_that_other_columns_show(tmp_path):
    """Options that other columns show are left out."""
    given = (
        ("a", ["local.lr=0.1", "seed=0"]),
        ("b", ["local.lr=0.1", "algorithm=cfed", "algorithm.lambda_d=1", "rounds=9"]),
    )
    for name, overrides in given:
        make_run(tmp_path / name)
        (tmp_path / name / files.OVERRIDES).write_text(json.dumps(overrides) + "\n")
    columns, rows = table(tmp_path)
    assert columns[:3] == ["dataset", "algorithm", "options"]
    assert sorted(row["options"] for row in rows) == ["", "algorithm.lambda_d=1"]


def test_unwritable_table_gives_one_message(tmp_path, capsys):
    """A file has the name of the folder, or a directory the name of the table."""
    make_run(tmp_path / "sweep" / "a")
    (tmp_path / "file").touch()
    assert main(["report", str(tmp_path / "sweep"), "--out", str(tmp_path / "file" / "table")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    (tmp_path / "sweep" / "table.md").mkdir()
    assert main(["report", str(tmp_path / "sweep"), "--no-figures"]) == 1
    assert f"{tmp_path / 'sweep' / 'table.md'}: cannot be written" in capsys.readouterr().err


def test_report_removes_what_a_killed_report_has_left(tmp_path):
    """New files stay, as another machine may be writing, and files that a report does not write."""
    make_run(tmp_path / "sweep" / "a")
    long_ago = time.time() - 3700
    left = [".table.csv.123.tmp", ".table.md.123.tmp", ".index.html.123.tmp"]
    stays = [".table.csv.124.tmp", ".mine.csv.123.tmp", ".table.csv.x.tmp"]
    for name in (*left, *stays):
        (tmp_path / "sweep" / name).touch()
    for name in (*left, *stays[1:]):
        os.utime(tmp_path / "sweep" / name, (long_ago, long_ago))
    assert main(["report", str(tmp_path / "sweep"), "--no-figures"]) == 0
    assert sorted(path.name for path in (tmp_path / "sweep").glob(".*.tmp")) == sorted(stays)
    table = tmp_path / ".all.csv.123.tmp"
    table.touch()
    os.utime(table, (long_ago, long_ago))
    assert main(["report", str(tmp_path / "sweep"), "--out", str(tmp_path / "all")]) == 0
    assert not table.exists()


def test_name_of_the_table_of_all_runs_may_have_dots(tmp_path, capsys):
    """It was cut at the last one, and the table of alpha=0.5 replaced that of alpha=0.1."""
    make_run(tmp_path / "sweep" / "run", algorithm="fedavg")
    for name in ("alpha0.1", "alpha0.5.csv", "runs.md"):
        assert main(["report", str(tmp_path / "sweep"), "--out", str(tmp_path / name)]) == 0
    assert "alpha0.5.csv\n" in capsys.readouterr().out
    files = [f"{name}{end}" for name in ("alpha0.1", "alpha0.5", "runs") for end in (".csv", ".md")]
    assert sorted(path.name for path in tmp_path.glob("*.*")) == sorted(files)


def test_report_of_a_run_has_the_results_of_every_client(tmp_path, capsys):
    """The personal model is the global one. A client's accuracy is the mean of the class accuracies
    with the shares of its classes."""
    options = [*SMALL, "rounds=3", "evaluate=[global,personal]", "figures=false"]
    run = fedexp.run(options, directory=tmp_path / "run")
    assert main(["report", str(run.directory), "--size", "3,2", "--no-titles"]) == 0
    table = pd.read_csv(run.directory / "client_results.csv")
    counts = np.load(run.directory / "partition.npz")["counts"]
    classes = pd.read_csv(run.directory / "class_accuracy.csv").pivot(
        index="round", columns="class", values="accuracy"
    )
    shares = counts / counts.sum(1, keepdims=True)
    np.testing.assert_allclose(table["personal_accuracy"], shares @ classes.loc[3], rtol=1e-12)
    drops = classes.loc[1:2].max() - classes.loc[3]
    np.testing.assert_allclose(table["personal_forgetting"], shares @ drops, atol=1e-12)
    assert table["examples"].tolist() == counts.sum(1).tolist()
    assert table["classes"].tolist() == (counts > 0).sum(1).tolist()
    rounds = run.clients["client"].value_counts().reindex(range(8), fill_value=0)
    assert table["rounds"].tolist() == rounds.tolist()
    told = capsys.readouterr().out
    names = ["personal_accuracy_worst", "personal_forgetting_worst"]
    worst = " | ".join(f"{100 * run.summary[name]:.2f}" for name in names)
    assert f"| worst tenth |  |  |  | {worst} |" in told
    assert (run.directory / "figures/clients.png").exists()


def test_run_without_a_global_model_has_no_results_of_one(tmp_path):
    given = [*SMALL, "rounds=2", "algorithm=local_only", "evaluate=personal"]
    run = fedexp.run(given, directory=tmp_path / "run")
    for names in (run.rounds, run.summary):
        found = [name for name in names if name.startswith("personal")]
        assert "personal_accuracy" in found
        assert not [name for name in found if "global" in name]
    assert main(["report", str(run.directory)]) == 0
    table = pd.read_csv(run.directory / "client_results.csv")
    assert [name for name in table if "accuracy" in name] == ["personal_accuracy"]
