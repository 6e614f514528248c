"""A sample of the stops at file operations (`make test-faults` tries all), and the journal."""

import subprocess
import sys
from pathlib import Path

import journal
import pytest
from stops import EXPERIMENTS, Stops

WRITES = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from journal import record

record(Path("box"), Path("journal"))
os.mkdir("box/run")
with open("box/run/a.tmp", "wb") as file:
    file.write(b"abcd")
    file.flush()
    os.fsync(file.fileno())
os.replace("box/run/a.tmp", "box/run/a")
for folder in ("box/run", "box"):
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
descriptor = os.open("box/run/a", os.O_WRONLY | os.O_APPEND)
os.write(descriptor, b"efgh")
os.unlink("box/run/a")
"""


@pytest.fixture
def moments(tmp_path) -> list[journal.Moment]:
    (tmp_path / "box").mkdir()
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", WRITES, here], cwd=tmp_path, check=True)
    return journal.read(tmp_path / "journal")


def after(moments, name: str, which: int = 0) -> dict[str, journal.Disk]:
    """Return kind of stop -> the files that it leaves after an operation."""
    places = [i for i, moment in enumerate(moments) if moment.operation.startswith(name)]
    return dict(journal.disks(moments[places[which] - 1], moments[places[which]]))


GONE, NAMES = "what was not synced is gone", "names are kept, what was not synced in files is gone"
REMOVED = "removals are kept, what was not synced is gone"


def test_each_kind_of_stop_leaves_the_expected_files(moments):
    synced = after(moments, "fsync")
    assert synced["killed"] == {"run": None, "run/a.tmp": b"abcd"}
    assert synced["half written"] == {"run": None, "run/a.tmp": b"ab"}
    assert synced["just opened"] == {"run": None, "run/a.tmp": b""}
    assert synced[GONE] == {}  # the file is synced, its name and its folder are not
    assert synced[NAMES] == synced["killed"]
    assert after(moments, "replace")[GONE] == {}
    assert after(moments, "fsync", 1)[GONE] == {}  # the run's folder has no name yet
    assert after(moments, "fsync", 2)[GONE] == {"run": None, "run/a": b"abcd"}
    appended = after(moments, "write")
    assert appended["killed"]["run/a"] == b"abcdefgh"
    assert appended["half written"]["run/a"] == b"abcdef"
    assert appended[NAMES]["run/a"] == appended[GONE]["run/a"] == b"abcd"
    removed = after(moments, "unlink")
    assert removed["killed"] == removed[REMOVED] == {"run": None}
    assert removed[GONE]["run/a"] == b"abcd"


# processes that import torch; test_faults.py stops a run within the writing of a checkpoint
@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "every"), [("fedavg", 60)])
def test_run_stopped_anywhere_equals_the_undisturbed_one(forks, tmp_path, experiment, every):
    tally = Stops(forks, tmp_path, experiment).run((every // 2, every))
    assert tally.operations > 50
    assert tally.disks > 0
    assert not tally.problems, "\n".join(tally.problems)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_run_of_each_experiment_survives_stops(forks, tmp_path, experiment):
    tally = Stops(forks, tmp_path, experiment).run((5, 12))
    assert tally.disks > 0
    assert not tally.problems, "\n".join(tally.problems)
