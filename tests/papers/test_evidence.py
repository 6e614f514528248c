"""Tables of runs: their content, comparisons made from them, and damaged tables."""

import json
import lzma
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tools.convert_evidence import convert

from fedexp.analysis.page import MARK
from fedexp.core.errors import ConfigError
from fedexp.data.partitioned import Partition
from fedexp.rundir.sweeps import write_sweep_name
from fedexp_papers import evidence
from fedexp_papers.cells import cells, select_curve
from fedexp_papers.command import main
from fedexp_papers.sweeps import load_paper_sweep
from quick_runs import make_run
from test_compare import RUN8


def remove_runs(sweep: Path) -> None:
    for path in sweep.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def test_comparison_from_the_table_of_runs_is_identical(tmp_path):
    """Without run directories. Converting twice gives the same bytes."""
    sweep = tmp_path / "fedntd_table8"
    for algorithm in ("fedavg", "fedntd", "scaffold"):
        make_run(sweep, [*RUN8[:2], f"algorithm={algorithm}"], [0.25, 1 / 3], seed=0)
    write_sweep_name(sweep, "fedntd_table8")
    assert convert(sweep, sweep) == 3
    assert main(["compare", str(sweep), "--no-figures"]) == 0
    names = ("comparison.csv", "comparison.md")
    before = {name: (sweep / name).read_text().partition(MARK)[0] for name in names}
    content = (sweep / evidence.TABLE).read_bytes()
    assert convert(sweep, sweep) == 3
    assert (sweep / evidence.TABLE).read_bytes() == content
    remove_runs(sweep)
    for name in names:
        (sweep / name).unlink()
    assert main(["compare", str(sweep), "--no-figures"]) == 0
    after = {name: (sweep / name).read_text().partition(MARK)[0] for name in names}
    assert after == before
    table = pd.read_csv(sweep / "comparison.csv")
    assert set(table.loc[table["n"] == 1, "method"]) == {"FedAvg", "FedNTD", "SCAFFOLD"}


def test_line_has_the_cells_of_the_tables_but_no_local_paths(tmp_path):
    """Losses have seven digits, seconds three, and the times of phases are left out."""
    make_run(tmp_path / "a", ["data_dir=/home/me/data"], [0.5], config={"data_dir": "/home/me/x"})
    run = tmp_path / "a" / "run0"
    (run / "rounds.csv").write_text(
        "round,test_accuracy,train_loss,seconds,training_seconds\n"
        "0,0.1,,,\n1,0.30000000000000004,1.23456789,12.345,9\n"
    )
    counts, classes = np.array([[1, 2], [0, 3]]), np.array(["a", "b"])
    kept = {"counts": counts, "classes": classes, "info": np.array("{}"), "hash": np.array("h")}
    np.savez(run / "partition.npz", indices=np.arange(6), **kept)
    convert(tmp_path / "a", tmp_path / "a")
    (line,) = evidence.read_table(tmp_path / "a").values()
    assert line["overrides"] == ["data_dir=data"]
    assert line["config"]["data_dir"] == "x"
    assert line["tables"]["rounds.csv"] == {
        "round": "0,1",
        "test_accuracy": "0.1,0.30000000000000004",
        "train_loss": ",1.234568",
        "seconds": ",12.3",
    }
    assert line["origin"] == {
        **{"identity": "1f", "started": "2026-11-28T12:00:00+00:00", "sweep": None},
        **{"shape": [32, 32, 3], "parts": [], "values": {}},
    }
    assert {"class_accuracy.csv", "class_accuracy_augmented.csv"} < set(line["tables"])
    partition = {"counts": [[1, 2], [0, 3]], "classes": ["a", "b"], "info": {}, "hash": "h"}
    assert line["partitions"] == {"partition.npz": partition}
    remove_runs(tmp_path / "a")
    with evidence.all_jobs(tmp_path / "a") as (job,):
        again = Partition.load(job.directory / "partition.npz")
    assert [part.tolist() for part in again.parts] == [[0, 1, 2], [3, 4, 5]]
    assert again.counts.tolist() == counts.tolist()


def test_reasons_not_to_judge_are_read_from_the_line(tmp_path):
    """The converter finds the data of 9 classes. Another reason, written into the line, is kept."""
    sweep = tmp_path / "fedntd_table8"
    data = {"train": 50_000, "test": 10_000, "classes": 9, "clients": 100}
    make_run(sweep, RUN8, [0.25], data=data)
    convert(sweep, sweep)
    (line,) = evidence.read_table(sweep).values()
    assert line["not_judged"] == ["data: 9 classes, not 10"]
    text = json.dumps(line | {"not_judged": ["older code: reason"]})
    (sweep / evidence.TABLE).write_bytes(lzma.compress(text.encode()))
    remove_runs(sweep)
    assert main(["compare", str(sweep), "--no-figures"]) == 0
    table = pd.read_csv(sweep / "comparison.csv", keep_default_na=False)
    (row,) = table[(table["n"] == 1) & (table["metric"] == "accuracy")].to_dict("records")
    assert (row["changes"], row["verdict"]) == (
        "older code: reason",
        "not judged: reduced protocol",
    )


def test_curve_of_a_task_has_the_rounds_of_the_task(tmp_path):
    """The run directory is finished, so it is preferred to its line."""
    make_run(tmp_path / "a", ["algorithm=cfed"], [0.25, 0.5, 0.75])
    convert(tmp_path / "a", tmp_path / "a")
    path = tmp_path / "a" / "run0" / "rounds.csv"
    pd.read_csv(path).assign(task=[0, 1, 1, 2]).to_csv(path, index=False)
    with evidence.all_jobs(tmp_path / "a") as (job,):
        table = job.table
    assert select_curve(table, task=1).to_dict() == {1: 0.25, 2: 0.5}
    assert select_curve(table).tolist() == [0.25, 0.5, 0.75]
    assert select_curve(table, view="augmented").tolist() == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("started", [None, "no file"])
def test_run_without_its_start_is_refused(started, tmp_path):
    """Nothing shows that a prediction is older than such a run. The table stays as it was."""
    make_run(tmp_path / "a", ["seed=0"], [0.5])
    assert convert(tmp_path / "a", tmp_path / "a") == 1
    before = (tmp_path / "a" / evidence.TABLE).read_bytes()
    make_run(tmp_path / "b", ["seed=1"], [0.6])
    path = tmp_path / "b" / "run0" / "origin.json"
    origin = json.loads(path.read_text())
    path.unlink()
    if started is None:
        path.write_text(json.dumps(origin | {"started": None}))
    reason = "made by fedexp 0.1" if started else "did not store its start time"
    with pytest.raises(ConfigError, match=reason):
        convert(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / evidence.TABLE).read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"no archive",
        lzma.compress(b"{}"),  # no name
        lzma.compress(b'{"run": "x", "overrides": [], "config": {}, "tables": {}}'),  # no summary
    ],
)
def test_damaged_table_of_runs_gives_one_message(content, tmp_path, capsys):
    sweep = tmp_path / "fedntd_table1"
    sweep.mkdir()
    (sweep / evidence.TABLE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"runs\.jsonl\.xz: "):
        cells(load_paper_sweep(sweep.name), sweep)
    assert main(["compare", str(sweep), "--no-figures"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
