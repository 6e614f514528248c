"""Files of a run that cannot be read or were changed: one message with the name, exit code 2."""

import re
import shlex

import pytest
import torch

import fedexp
from fedexp.cli.main import main
from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.rundir import checksums
from fedexp.rundir.reader import RunDirectory
from quick_runs import write_run

DAMAGES = {
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a number": lambda path: path.write_text("17\n"),
}
FILES = ("summary.json", "config.yaml", ".hydra/overrides.yaml", "rounds.csv")


@pytest.fixture
def sweep(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "s" / f"job{seed}", {"algorithm": "fedavg", "seed": str(seed)})
    return tmp_path / "s"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_report_names_the_file_that_cannot_be_read(sweep, name, damage, capsys):
    if (damage, name) == ("a number", "rounds.csv"):
        return  # a table with one column
    DAMAGES[damage](sweep / "job1" / name)
    assert main(["report", str(sweep), "--no-figures"]) == 2
    printed = capsys.readouterr().err
    assert f"job1/{name}: " in printed
    assert "Traceback" not in printed


def test_no_message_advises_to_run_the_code_in_a_file(tmp_path):
    (tmp_path / "partition.npz").write_bytes(b"damaged")
    torch.save({"a": tmp_path}, tmp_path / "latest.pt")
    for read, name in ((storage.load_npz, "partition.npz"), (storage.load_tree, "latest.pt")):
        words = rf"{name}: cannot be read \((damaged|has values)"
        with pytest.raises(ConfigError, match=words) as raised:
            read(tmp_path / name)
        assert "pickle" not in str(raised.value)


def test_commands_in_messages_can_be_typed(tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "my run", {})
    (run / "partition.npz").unlink()
    assert main(["report", str(run)]) == 2
    assert "partition.npz: is missing; figures of classes and clients are left out" in caplog.text
    assert "`fedexp figures 'my run'`" in capsys.readouterr().err
    with pytest.raises(ConfigError) as raised:
        fedexp.run(["tracker=none"], directory=run)
    typed = str(raised.value).partition("continue it with ")[2].rpartition(", or")[0]
    assert shlex.split(typed) == ["resume='my run'"]


@pytest.mark.parametrize("read", [storage.read_csv, storage.read_table])
def test_floats_are_read_exactly(tmp_path, read):
    """By default, pandas before 3.1 reads these floats as their neighbours."""
    values = [0.1184668989547038, 0.25891675029296335]
    (tmp_path / "rounds.csv").write_text("\n".join(["loss", *map(str, values), ""]))
    assert read(tmp_path / "rounds.csv")["loss"].tolist() == values


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("round,loss\n2,0.5\n1,0.7\n", [[1, 0.7], [2, 0.5]]),
        ("round,client,loss\n1,3,7\n1,2,6\n", [[1, 2, 6], [1, 3, 7]]),
        ("round,client,role,loss\n1,2,b,6\n1,2,a,7\n", [[1, 2, "b", 6], [1, 2, "a", 7]]),
        ("loss,round\n7,10.0\n6,9.0\n", [[6, 9], [7, 10]]),
        ("round,layer,l1\n2,x,1\n2,b,2\n1,x,3\n", [[1, "x", 3], [2, "x", 1], [2, "b", 2]]),
        ("round,epoch,client\n1,1,0\n1,0,1\n", [[1, 0, 1], [1, 1, 0]]),
        ("round\n", "the column round has cells that are not"),
        ("round,loss\n1,0.5\n1,0.7\n", "a row appears twice: round 1"),
        ("round,layer\n1,a\n2,b\n1,a\n", "a row appears twice: round 1, layer a"),
        ("round,loss\n1.5,0.5\n", "the column round has cells that are not integers"),
        ("round,loss\n,0.5\n", "the column round has cells that are not integers"),
    ],
)
def test_rows_are_read_in_the_order_of_their_keys(text, rows, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(text)
    if isinstance(rows, str):
        with pytest.raises(ConfigError, match=rf"table\.csv: cannot be read \({rows}"):
            storage.read_table(path)
    else:
        assert storage.read_table(path).to_numpy().tolist() == rows


def test_half_a_row_is_left_out(sweep):
    path = sweep / "job0" / "rounds.csv"
    whole = RunDirectory(path.parent).rounds
    path.write_text(path.read_text()[:-3])
    (path.parent / "summary.json").unlink()  # as if the run had been killed
    assert len(RunDirectory(path.parent).rounds) == len(whole) - 1


EDITS = {
    "summary.json": [('"best_accuracy": 0.', '"best_accuracy": 0.9'), ('"seed": 1', '"seed": 7')],
    "rounds.csv": [("\n3,0.", "\n3,0.9"), ("\n", "\r\n"), ("1.5\n", "1."), ("\n6,", "\n7,")],
    "class_accuracy.csv": [("\n2,1,0.", "\n2,1,0.9")],
    "config.yaml": [("epochs: 5", "epochs: 50")],
}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [(name, *edit) for name, edits in EDITS.items() for edit in edits],
)
def test_file_that_was_changed_after_the_run_is_named(sweep, name, before, after, capsys):
    path = sweep / "job1" / name
    checksums.write(path.parent)
    whole = path.read_text()
    path.write_bytes(whole.replace(before, after).encode())
    assert path.read_bytes() != whole.encode()
    words = f"{path}: is not as the run wrote it (checksums.json); put the original file back"
    command = ["report", str(sweep), "--no-figures"]
    if name == "class_accuracy.csv":
        command = ["compare", str(sweep / "job0"), str(sweep / "job1")]
    assert main(command) == 2
    assert words in capsys.readouterr().err
    python = {"summary.json": "runs", "rounds.csv": "rounds", "config.yaml": "options"}
    if name in python:
        with pytest.raises(ConfigError, match=re.escape(words)):
            getattr(fedexp.load_sweep(sweep), python[name])
    path.write_bytes(whole.encode())
    assert main(["report", str(sweep), "--no-figures"]) == 0


def test_run_without_checksums_that_lacks_its_last_round_is_named(sweep, capsys):
    """An earlier version made the run."""
    path = sweep / "job0" / "rounds.csv"
    path.write_text(path.read_text()[:-3])
    assert main(["report", str(sweep), "--no-figures"]) == 2
    last = RunDirectory(path.parent).summary["rounds"]
    assert f"rounds.csv: has no whole row of round {last}, with which" in capsys.readouterr().err


def test_metric_of_runs_without_numbers_is_refused(tmp_path, capsys):
    (tmp_path / "s/other").mkdir(parents=True)
    (tmp_path / "s/other/summary.json").write_text('{"status": "completed"}')
    assert main(["report", str(tmp_path / "s"), "--metrics", "accuracy"]) == 2
    words = "--metrics accuracy: no run has this value; summary.json has no number"
    assert words in capsys.readouterr().err


def test_finished_run_without_its_rounds_is_named(sweep, capsys):
    (sweep / "job0" / "rounds.csv").unlink()
    assert main(["report", str(sweep), "--no-figures"]) == 2
    assert "job0/rounds.csv: is missing" in capsys.readouterr().err


def test_column_with_text_is_named(sweep, capsys):
    path = sweep / "job0" / "rounds.csv"
    path.write_text(path.read_text().replace("\n1,", "\n1,x", 1))
    assert main(["report", str(sweep), "--no-figures"]) == 2
    assert "rounds.csv: cannot be read (the column" in capsys.readouterr().err
