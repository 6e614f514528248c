"""A run that is continued, or asked for twice; tests/e2e/test_processes.py kills some."""

import errno
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import SMALL, assert_same_run

from fedexp.cli.job import record_failure
from fedexp.cli.sweeps import failed, failures
from fedexp.core import storage
from fedexp.training import job

RUN = ("algorithm=scaffold", "rounds=2", *SMALL, "local.batch_size=200")  # one step a client


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture
def run(fedexp, shelf, tmp_path) -> Path:
    """A complete run, made once for all tests."""
    if not (shelf / "run").exists():
        assert fedexp(*RUN, f"hydra.run.dir={shelf}/run").code == 0
    return Path(shutil.copytree(shelf / "run", tmp_path / "run"))


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_a_complete_run_is_left_alone(fedexp, run):
    """Also when its checkpoints are damaged, since it needs none."""
    for name in ("latest.pt", "previous.pt"):
        (run / "checkpoint" / name).write_bytes(b"no checkpoint")
    before = snapshot(run)
    answer = fedexp("resume=run")
    assert answer.code == 0
    assert "complete (2 rounds); nothing to do" in answer.err
    assert snapshot(run) == before


@pytest.mark.slow
def test_a_run_that_died_over_its_figures_is_not_complete(fedexp, tmp_path, monkeypatch):
    """summary.json comes last."""
    figures = ("rounds=1", *SMALL, "figures=true", "hydra.run.dir=run")

    def die(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedexp.training.results.make_figures", die)
        assert fedexp(*figures).code == 130
    assert not (tmp_path / "run/summary.json").exists()
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    assert len(list((tmp_path / "run/figures").glob("*.png"))) == 5
    assert (tmp_path / "run/summary.json").exists()


def test_resume_with_another_configuration_is_refused(fedexp, run):
    before = snapshot(run)
    answer = fedexp(
        "resume=run", "algorithm=fedprox", "rounds=3", "seed=1", "hardware.precision=bf16"
    )
    assert answer.code == 2
    for key in ("algorithm.mu", "rounds", "seeds.training", "hardware.precision"):
        assert f"  {key}: " in answer.err
    assert "Traceback" not in answer.err
    assert snapshot(run) == before


def test_a_new_run_does_not_overwrite_an_old_one(fedexp, run):
    before = snapshot(run)
    answer = fedexp(*RUN, "hydra.run.dir=run")
    assert answer.code == 2
    assert "resume=" in answer.err
    assert snapshot(run) == before


def test_a_damaged_checkpoint_is_replaced_by_the_one_before_it(fedexp, run, shelf):
    """What is lost is said; tests/test_checkpoint.py has more damages."""
    (run / "summary.json").unlink()
    latest = bytearray((run / "checkpoint/latest.pt").read_bytes())
    latest[len(latest) // 2] ^= 1
    (run / "checkpoint/latest.pt").write_bytes(latest)
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    assert "latest.pt: damaged (the checksum of" in answer.err
    assert "the checkpoint before it is used" in answer.err
    assert "resuming after round 1; round 2 is run again" in answer.err
    assert (run / "checkpoint/damaged.pt").read_bytes() == latest
    assert_same_run(run, shelf / "run")


def test_without_a_whole_checkpoint_a_run_is_refused_and_without_any_it_begins_anew(
    fedexp, run, shelf, monkeypatch
):
    (run / "summary.json").unlink()
    for name in ("latest.pt", "previous.pt"):
        (run / "checkpoint" / name).write_bytes(b"no checkpoint")
    before = snapshot(run)
    answer = fedexp("resume=run")
    assert answer.code == 2
    assert "Traceback" not in answer.err
    for word in (
        "latest.pt: damaged",
        "previous.pt: damaged",
        "no checkpoint is whole",
        "to begin again",
    ):
        assert word in answer.err
    assert snapshot(run) == before
    shutil.rmtree(run / "checkpoint")  # as if killed before it was written for the first time
    # nor the way of computing, which is then chosen as in a new run
    (run / "fingerprint.json").unlink()
    before, prepare = [], job.prepare
    monkeypatch.setattr(
        job, "prepare", lambda built, share, way: before.append(way) or prepare(built, share, way)
    )
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    assert "no round was saved" in answer.err
    assert_same_run(run, shelf / "run")
    assert before == [None]


def test_no_run_directory(fedexp, tmp_path):
    (tmp_path / "empty").mkdir()
    for directory in ("empty", "nowhere"):
        answer = fedexp(f"resume={directory}")
        assert answer.code == 2
        assert "not a run directory" in answer.err
        assert "Traceback" not in answer.err


def test_data_that_changed_since_are_noticed(fedexp, run):
    (run / "summary.json").unlink()
    arrays = dict(np.load(run / "partition.npz"))
    order = np.argsort(arrays["sizes"])
    np.savez(run / "partition.npz", **arrays | {"sizes": arrays["sizes"][order]})
    answer = fedexp("resume=run")
    assert answer.code == 2
    assert "partition" in answer.err


def test_a_run_whose_table_was_changed_begins_again(fedexp, run, shelf):
    """As by an editor that writes CRLF. What was there is kept, and nothing ends in the middle of a
    row."""
    (run / "summary.json").unlink()
    changed = (run / "rounds.csv").read_bytes().replace(b"\n", b"\r\n")
    (run / "rounds.csv").write_bytes(changed)
    answer = fedexp("resume=run")
    assert answer.code == 0, answer.err
    (said,) = [line for line in answer.err.splitlines() if "rounds.csv" in line]
    assert "changed since its checkpoint was written; the run begins again" in said
    assert (run / "damaged/rounds.csv").read_bytes() == changed
    assert (run / "damaged/latest.pt").exists()
    assert_same_run(run, shelf / "run")


def test_a_console_that_cannot_be_written_fails_no_run(fedexp, tmp_path, monkeypatch):
    """The terminal has been closed: every line of it is an input/output error."""

    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", Closed())
        patched.setattr("sys.stderr", Closed())
        assert fedexp("rounds=1", *SMALL, "hydra.run.dir=run").code == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "completed"
    assert (tmp_path / "run/run.log").read_text().count(
        "the console cannot be written (Input/output error)"
    ) == 1


@pytest.mark.parametrize("subdirectory", ["run", "${hydra.job.num}"])
def test_a_refused_job_of_a_sweep_leaves_a_complete_run_as_it_is(
    subdirectory, fedexp, run, tmp_path
):
    """Where hydra.sweep.subdir names a run that has other options."""
    sweep = tmp_path if subdirectory == "run" else tmp_path / "numbered"
    sweep.mkdir(exist_ok=True)
    target = run if subdirectory == "run" else run.rename(sweep / "0")
    before = snapshot(target)
    again = (
        *RUN,
        "algorithm=fedavg",
        "local.lr=0.01",
        f"hydra.sweep.dir={sweep}",
        f"hydra.sweep.subdir={subdirectory}",
    )
    answer = fedexp("--multirun", *again)
    assert answer.code == 2
    assert "another configuration" in answer.err
    assert snapshot(target) == before
    assert not (sweep / ".failed").exists()


@pytest.mark.parametrize("folder", [".hydra", "."])
@pytest.mark.parametrize(
    "mode", [(), ("--multirun", "hydra.sweep.subdir=run", "hydra.sweep.dir=.")]
)
def test_a_refusal_leaves_hydra_s_files_of_a_run(folder, mode, fedexp, run):
    """Hydra itself would write over them, before anything can be refused."""
    before = snapshot(run)
    answer = fedexp(
        *mode, *RUN, "local.lr=0.01", "hydra.run.dir=run", f"hydra.output_subdir={folder}"
    )
    assert answer.code == 2
    assert snapshot(run) == before


@pytest.mark.parametrize(
    "name",
    [
        "a\\${seed}",
        "it's",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("${seed}", "a\\b", "end\\")),
    ],
)
def test_a_run_directory_of_any_name_can_be_resumed(name, fedexp, run, tmp_path):
    (run / "summary.json").unlink()
    odd = run.rename(tmp_path / name)
    answer = fedexp(f"resume={name}")
    assert answer.code == 0, answer.err
    assert (odd / "summary.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow
def test_a_job_of_a_sweep_that_is_resumed_keeps_its_sweep(fedexp, tmp_path):
    assert fedexp("--multirun", "rounds=1", "seed=0", *SMALL, "hydra.sweep.dir=many").code == 0
    (job,) = tmp_path.glob("many/digits_*")
    before = json.loads((job / "summary.json").read_text())
    (job / "summary.json").unlink()
    assert fedexp(f"resume={job}").code == 0
    after = json.loads((job / "summary.json").read_text())
    assert before["sweep"] == after["sweep"] == "many"


@pytest.mark.slow
def test_figures_that_a_full_disk_has_lost_are_drawn_when_asked_again(
    fedexp, tmp_path, monkeypatch
):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    command = ("--multirun", "rounds=1", *SMALL, "figures=true", "hydra.sweep.dir=many")
    with monkeypatch.context() as patched:
        patched.setattr("fedexp.training.results.make_figures", full)
        assert fedexp(*command).code == 0
    (job,) = tmp_path.glob("many/digits_*")
    assert not list(job.glob("figures/*.png"))
    written = (job / "summary.json").read_bytes()
    answer = fedexp(*command)
    assert answer.code == 0, answer.err
    assert "5 figures are drawn now" in answer.err
    assert len(list(job.glob("figures/*.png"))) == 5
    assert (job / "summary.json").read_bytes() == written
    assert "drawn now" not in fedexp(*command).err


def test_each_span_of_rounds_is_listed_with_its_setting(fedexp, tmp_path, monkeypatch):
    """A run that is resumed with another engine is not equal bit for bit to one with either of
    them."""
    with monkeypatch.context() as patched:
        patched.setattr("fedexp.training.job.write_results", lambda *arguments: 1 / 0)
        assert fedexp("rounds=2", *SMALL, "hydra.run.dir=run").code == 1
    before = tmp_path / "run/checkpoint/previous.pt"  # as if killed after round 1
    assert storage.load_tree(before)["round"] == 1
    shutil.copy(before, tmp_path / "run/checkpoint/latest.pt")
    answer = fedexp("resume=run", "hardware.engine=vectorised")
    assert answer.code == 0, answer.err
    said = json.loads((tmp_path / "run/summary.json").read_text())["determinism"]
    first, second = said["spans"]
    assert (first["rounds"], first["engine"]) == ([0, 1], "sequential")
    assert (second["rounds"], second["engine"]) == ([2, 2], "vectorised")
    assert "chunk" in second
    assert "engine" not in said
    assert said["threads"] == first["threads"] == second["threads"] == 1


def test_a_job_whose_directory_is_removed_leaves_a_note_for_the_launching_process(tmp_path, capsys):
    """joblib's processes have no other way to tell; the note is said, counted and removed."""
    sweep = tmp_path / "many"
    sweep.mkdir()
    before = failures(sweep)
    job = SimpleNamespace(directory=sweep / "gone", choices={})
    record_failure(job, "rounds.csv: it was removed", 1, sweep)
    assert failed(sweep, before, elsewhere=True) == [1]
    assert f"{sweep / 'gone'}: rounds.csv: it was removed" in capsys.readouterr().err
    assert not list(sweep.iterdir())


@pytest.mark.parametrize(
    ("algorithm", "words"), [("fedewc", "SGD diverges where"), ("fedalign", "batch norm")]
)
def test_a_method_says_what_to_change_where_it_fails(algorithm, words, fedexp, tmp_path):
    """In the console, run.log and summary; a rate of 1e6 makes any run diverge."""
    scenario = ("scenario=class_incremental",) if algorithm == "fedewc" else ()
    answer = fedexp(
        f"algorithm={algorithm}", *scenario, "rounds=1", "local.lr=1e6", *SMALL, "hydra.run.dir=run"
    )
    assert answer.code == 0, answer.err
    assert words in json.loads((tmp_path / "run/summary.json").read_text())["hint"]
    assert f"algorithm={algorithm}: " in answer.err
