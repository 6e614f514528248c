"""In the role of an attacker: what no run has made in the place of files that a run need not have.
A named pipe would be waited for, a few packed bytes stand for more than the memory, and a link
leads to a file of the reader's own."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedexp.analysis import report
from fedexp.analysis.view.__main__ import main as view
from fedexp.cli import multirun, preview, push
from fedexp.cli.job import is_finished
from fedexp.config.values import resolve
from fedexp.core.errors import FAILED, ConfigError
from fedexp.core.npz import load_npz
from fedexp.core.storage import regular
from fedexp.figures.__main__ import main as figures
from fedexp.metrics.history import load_history
from fedexp.rundir import files, lock, origin
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import SweepDirectory
from test_damaged_runs import write_job
from toy_federation import composed

pytestmark = pytest.mark.timeout(60)
OPTIONAL = (
    "error.txt",
    "partition.npz",
    "partition_task2.npz",
    "local_class_accuracy.npz",
    "fingerprint.json",
)
OPTIONAL = (
    *OPTIONAL,
    "elsewhere.json",
    ".lock",
    ".owner.json",
    "run.log",
    "clients.csv",
    "tasks.csv",
)


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Of two jobs: one is sound, one has pipes beside its tables."""
    folder = tmp_path / "multirun" / "theirs"
    for seed, name in enumerate(("sound", "hurt")):
        write_job(folder / name, seed)
    for name in OPTIONAL:
        (folder / "hurt" / name).unlink(missing_ok=True)
        os.mkfifo(folder / "hurt" / name)
    os.mkfifo(folder / "sweep.json")
    return folder


@pytest.mark.parametrize(
    "command", ["report", "view", "push", "push the table", "figures", "preview"]
)
def test_no_command_waits_for_a_pipe(sweep, command, capsys):
    hurt = sweep / "hurt"
    match command:
        case "report":
            assert report.main([str(sweep), "--out", str(sweep / "all")]) == 0
        case "view":
            assert view([str(sweep)]) == 0
        case "push":
            assert push.main([str(hurt), "--mode", "offline"]) == 2
        case "push the table":
            os.mkfifo(sweep / "table.csv")
            with pytest.raises(ConfigError, match=r"table\.csv: cannot be read"):
                push.read_table(sweep / "table.csv")
            with pytest.raises(ConfigError, match="neither a file nor a folder"):
                push.push(sweep, {})
        case "figures":
            assert figures([str(hurt)]) == 2
            assert "partition.npz: " in capsys.readouterr().err
        case "preview":
            planned = [preview.Planned(hurt, resolve(composed()))]
            preview.show(planned, preview.measurements([sweep.parent]))


def test_no_reader_waits_for_a_pipe(sweep, tmp_path):
    """The Python interface."""
    run, pipe = RunDirectory(sweep / "hurt"), sweep / "hurt/.owner.json"
    names = [
        name
        for name, value in vars(RunDirectory).items()
        if isinstance(value, property) or hasattr(value, "func")
    ]
    assert {"summary", "tasks", "clients", "class_names"} <= {*names}
    for name in names:
        getattr(run, name)
    assert {"partition.npz", "clients.csv", "tasks.csv"} <= {
        problem.file for problem in run.unreadable
    }
    assert SweepDirectory(sweep).name == "theirs"
    assert lock.owner_of(sweep / "hurt") == "another process"
    assert origin.read(sweep / "hurt") == {}
    assert multirun.failure_code(pipe) == FAILED
    assert multirun.error_in(pipe) == f"{pipe}: cannot be read"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_history(sweep / "hurt")
    for name in ("summary.json", "class_accuracy.csv"):
        (sweep / "sound" / name).unlink()
        os.mkfifo(sweep / "sound" / name)
    assert is_finished(sweep / "sound")  # whatever it is, no refused job writes over it
    with pytest.raises(ConfigError, match="is not a file"):
        load_history(sweep / "sound")


def test_what_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert regular(tmp_path / "link").read_text() == "x"
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises(OSError, match=str(path)):
            regular(path)


def test_a_few_bytes_that_stand_for_gigabytes_are_refused(tmp_path):
    """128 MB of zeros, packed to a thousandth."""
    path = tmp_path / "partition.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed,
        packed.open("counts.npy", "w") as file,
    ):
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (2**27,)}
        )
        for _ in range(2**7):
            file.write(bytes(2**20))
    assert path.stat().st_size < 2**19
    with pytest.raises(ConfigError, match=r"partition\.npz: cannot be read .* stand for 134,"):
        load_npz(path)


def test_packed_arrays_of_a_usual_size_are_read(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", counts=np.zeros((1000, 1000)))
    assert load_npz(tmp_path / "x.npz")["counts"].shape == (1000, 1000)


def test_a_page_shows_no_file_that_a_link_leads_to(tmp_path):
    (tmp_path / "secret").write_text("my password")
    run = write_job(tmp_path / "run", 0)
    (run / files.SUMMARY).write_text('{"status": "failed", "error": "x"}')
    (run / files.ERROR).write_text("a traceback")
    assert view([str(run)]) == 0
    assert "a traceback" in (run / "view.html").read_text(encoding="utf-8")
    (run / files.ERROR).unlink()
    (run / files.ERROR).symlink_to(tmp_path / "secret")
    assert view([str(run)]) == 0
    assert "my password" not in (run / "view.html").read_text(encoding="utf-8")


def test_a_push_of_a_run_whose_configuration_lacks_something_is_one_message(tmp_path, capsys):
    """Labels are made of it; the smallest job of these tests has no model."""
    run = write_job(tmp_path / "run", 0)
    assert push.main([str(run), "--mode", "offline"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "config.yaml: is not that of a whole run (KeyError('model'))" in told
    assert not (run / "wandb").exists()
