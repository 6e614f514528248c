"""Kept runs: their content, tables made from them, and damaged files."""

import json
import lzma
import shutil
from pathlib import Path

import pandas as pd
import pytest

import fedexp
from fedexp.cli import main
from fedexp.cli.commands import call
from fedexp.core.errors import ConfigError
from fedexp.core.npz import load_npz, save_npz
from fedexp.data.partition_file import read_clients
from fedexp.figures.load import load_run_data
from fedexp.rundir import evidence
from fedexp.rundir.reader import RunDirectory
from fedexp.rundir.sweeps import write_sweep_name
from quick_runs import FEDERATION
from test_reproduction import EARLY, run_directory


def remove_runs(sweep: Path) -> None:
    for path in sweep.iterdir():
        if path.is_dir() and path.name != evidence.FOLDER:
            shutil.rmtree(path)


def reuse_run(job: Path, note: str, overrides: str | None = None) -> None:
    """Make a job from a run directory that uses another run instead."""
    for name in ("summary.json", "rounds.csv"):
        (job / name).unlink()
    (job / "elsewhere.json").write_text(json.dumps({"run": note}))
    if overrides:
        (job / ".hydra" / "overrides.yaml").write_text(overrides)


@pytest.mark.parametrize(
    "count", [3, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_report_from_kept_files_is_identical(tmp_path, capsys, count):
    """Without run directories. Keeping twice gives the same bytes."""
    sweep, runs = tmp_path / "multirun" / "fedntd_table1", list(EARLY)[:count]
    for i, run in enumerate(runs):
        run_directory(sweep / f"run{i}", run)
    write_sweep_name(sweep, "fedntd_table1")
    assert call("report", [str(sweep), "--keep", "--no-figures"]) == 0
    assert f"Saved {len(runs)} runs to " in capsys.readouterr().out
    first = {path.name: path.read_bytes() for path in evidence.keep_runs(sweep)}
    names = ("table.csv", "table.md", "table.tex", "rounds_to_target.csv")
    before = {name: (sweep / name).read_bytes() for name in names}
    remove_runs(sweep)
    for name in names:
        (sweep / name).unlink()
    assert call("report", [str(sweep), "--no-figures"]) == 0
    assert {name: (sweep / name).read_bytes() for name in names} == before
    assert {path.name: path.read_bytes() for path in (sweep / evidence.FOLDER).iterdir()} == first


@pytest.mark.slow  # a small run
def test_run_file_has_tables_and_summary_but_no_local_paths(here, capsys):
    """Tables (with fewer digits of times and losses), summary and class names, but no directory of
    this machine."""
    small = [
        *FEDERATION,
        "rounds=2",
        f"data_dir={here}",
        "hydra.sweep.dir=multirun/a",
        "test_views=[plain,augmented]",
        "dataset.augmentation.crop_padding=1",
    ]
    assert main.main(["--multirun", *small]) == 0
    sweep = here / "multirun" / "a"
    (path,) = evidence.keep_runs(sweep)
    (run,) = sweep.glob("digits_*")
    text = lzma.decompress(path.read_bytes()).decode()
    assert str(here) not in text
    assert f"data_dir={here.name}" in json.loads(text)["overrides"]
    evidence.unpack(path, here / "again")
    for name in ("class_accuracy.csv", "class_accuracy_augmented.csv"):
        assert (here / "again" / name).read_bytes() == (run / name).read_bytes()
    before, after = pd.read_csv(run / "rounds.csv"), pd.read_csv(here / "again" / "rounds.csv")
    assert list(after) == [
        name for name in before if not name.endswith(("_seconds", "_per_second"))
    ]
    for column in after:
        tolerance = 0.005 if column == "seconds" else 5e-7 if "_loss" in column else 0
        assert (
            (before[column] - after[column]).abs() <= tolerance * before[column].abs()
        ).sum() == (before[column].notna().sum()), column
    assert json.loads((here / "again" / "summary.json").read_text()) == json.loads(
        (run / "summary.json").read_text()
    )
    one, other = load_run_data(run), load_run_data(here / "again")
    assert one.classes == other.classes
    assert (one.counts == other.counts).all()
    assert (one.history.matrix == other.history.matrix).all()
    # The same report with its figures, when the run itself is gone.
    assert call("report", [str(sweep)]) == 0
    written = {
        path.name: path.read_bytes() for path in [*sweep.glob("table.*"), *sweep.glob("figures/*")]
    }
    assert len(written) > 6
    remove_runs(sweep)
    assert call("report", [str(sweep)]) == 0
    assert {
        path.name: path.read_bytes() for path in [*sweep.glob("table.*"), *sweep.glob("figures/*")]
    } == written


def test_files_with_counts_of_correct_examples_are_read():
    """135 of 1135 and 0 of 1135, 490 of 980 and 7 of 980."""
    table = {"round": "0,0,1,1", "class": "0,1,0,1", "accuracy": "135,490,0,7", "of": "1135,980"}
    cells = [135 / 1135, 0.5, 0.0, 7 / 980]
    expected = {"round": "0,0,1,1", "class": "0,1,0,1", "accuracy": ",".join(map(repr, cells))}
    assert evidence.as_accuracies(table) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "x.json.xz: not a valid run file ("),
        (lzma.compress(b"{}"), "x.json.xz: not a valid run file ("),
        (lzma.compress(b'{"format": 1}'), "x.json.xz: not a valid run file ("),
        (lzma.compress(b'{"format": 1}' * 99)[:-40], "x.json.xz: not a valid run file ("),
        (
            lzma.compress(b'{"format": 2}'),
            "x.json.xz: has format 2; this version of fedexp reads formats up to 1",
        ),
        (
            lzma.compress(b'{"format": 1, "overrides": [], "elsewhere": "../../../etc/passwd"}'),
            "x.json.xz: not a valid run file (",
        ),
    ],
)
def test_unreadable_run_file_is_rejected(content, message, tmp_path, capsys):
    path = tmp_path / "multirun" / "a" / "runs" / "x.json.xz"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        evidence.unpack(path, tmp_path / "run")
    assert call("report", [str(path.parent.parent)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


KEPT = {"counts": [[1, 1], [0, 2]], "classes": ["a", "b"], "info": {}, "hash": "abc"}
RUN = {
    "format": 1,
    "overrides": [],
    "config": {},
    "origin": {},
    "summary": {},
    "tables": {},
    "partitions": [KEPT],
}
INVALID_PARTITIONS = [
    (
        {"counts": [[10**12, 0]]},
        "counts is 1,000,000,000,000 examples; at most 67,108,864",
    ),
    ({"counts": [[10**30, 0]]}, "examples; at most"),
    ({"counts": [[2**26, 0], [0, 1]]}, "counts is 67,108,865 examples"),
    ({"counts": [[-5, 5]]}, "counts must be one non-negative integer"),
    ({"counts": [[0.5, 1]]}, "counts must be one non-negative integer"),
    ({"counts": [[True, 1]]}, "counts must be one non-negative integer"),
    ({"counts": [[1]]}, "counts must be one non-negative integer per class"),
    ({"counts": 5}, "not a valid run file"),
    ({"counts": []}, "not a valid run file"),
    ({"classes": ["a", "b" * 10**6]}, "class names must be a list of texts of at most 1,000"),
    ({"classes": "ab"}, "class names must be a list"),
    ({"info": 5}, "not a valid run file"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *(({"partitions": [KEPT | changed]}, message) for changed, message in INVALID_PARTITIONS),
        ({"overrides": {}}, "`overrides` is not a list"),
        ({"summary": []}, "`summary` is not a dict"),
        ({"config": None}, "`config` is not a dict"),
        (
            {"partitions": [KEPT] * 2 + [KEPT | {"counts": [[2**26, 0]]}]},
            "counts is 67,108,872",
        ),
        ({"tables": {"rounds.csv": ["round"]}}, "not a valid run file"),
        ({"tables": {"rounds.csv": {"a": "1,2", "b": "1"}}}, "columns of different lengths"),
        (
            {"tables": {"class_accuracy.csv": dict.fromkeys(("round", "class", "of"), "1")}},
            "not a valid run file",
        ),
        ({"partitions": None, "elsewhere": 5}, "not a valid run file"),
    ],
)
def test_run_file_with_invalid_content_is_rejected(changed, message, tmp_path):
    """Class counts are rejected before an array is made from them, and nothing is written."""
    path = tmp_path / "x.json.xz"
    path.write_bytes(lzma.compress(json.dumps(RUN).encode()))
    evidence.unpack(path, tmp_path / "sound")
    assert load_npz(tmp_path / "sound/partition.npz")["counts"].tolist() == KEPT["counts"]
    path.write_bytes(lzma.compress(json.dumps(RUN | changed).encode()))
    with pytest.raises(ConfigError, match=message):
        evidence.unpack(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(60)
def test_decompression_bomb_is_rejected(tmp_path):
    """Blanks that take 64 MiB and one byte, and a header that asks for a dictionary of 128 MiB."""
    path = tmp_path / "x.json.xz"
    path.write_bytes(lzma.compress(b" " * (evidence.LIMIT + 1), preset=0))
    assert path.stat().st_size < 20_000
    with pytest.raises(ConfigError, match="ends too early, or is too large"):
        evidence.read(path)
    wide = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": evidence.MEMORY}]
    path.write_bytes(lzma.compress(json.dumps(RUN).encode(), filters=wide))
    with pytest.raises(ConfigError, match="Memory usage limit exceeded"):
        evidence.read(path)


def test_finished_run_directory_is_preferred_to_its_file(tmp_path):
    """An unfinished directory is not. A note on another sweep does not count as a kept run."""
    sweep = tmp_path / "a"
    for name, run in zip(("over", "begun"), EARLY, strict=False):
        run_directory(sweep / name, run)
    evidence.keep_runs(sweep)
    note = {"format": 1, "overrides": [], "elsewhere": "../../b/run"}
    (sweep / "runs/noted.json.xz").write_bytes(lzma.compress(json.dumps(note).encode()))
    path = sweep / "over/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mine": 1}))
    (sweep / "begun/summary.json").unlink()
    with evidence.all_jobs(sweep) as jobs:
        begun, over = [job.summary for job in jobs]
    assert over["mine"] == 1
    assert begun["status"] == "completed"


def test_restored_partition_keeps_the_original_hash():
    info = json.loads(str(evidence.arrays_of(KEPT)["info"]))
    assert info == {"indices": evidence.NOT_KEPT, "hash": "abc"}


def test_reused_run_of_another_sweep_is_kept(tmp_path):
    """A job of sweep b uses a run of sweep a. Both are files, and the table of b has the run."""
    for name in "ab":
        run_directory(tmp_path / "multirun" / name / "one")
    reuse_run(tmp_path / "multirun" / "b" / "one", "../../a/one")
    for name in "ab":
        evidence.keep_runs(tmp_path / "multirun" / name)
        remove_runs(tmp_path / "multirun" / name)
        assert call("report", [str(tmp_path / "multirun" / name), "--no-figures"]) == 0
    tables = [pd.read_csv(tmp_path / "multirun" / name / "table.csv") for name in "ab"]
    assert tables[0].equals(tables[1])
    assert tables[0]["n"].tolist() == [1]


def test_restore_makes_run_directories(tmp_path, capsys):
    """Two runs of sweep a, and a job of sweep b that uses one of them."""
    multirun, out = tmp_path / "multirun", tmp_path / "out"
    for name, run in zip(("one", "two"), EARLY, strict=False):
        run_directory(multirun / "a" / name, run)
    shutil.copytree(multirun / "a" / "one", multirun / "b" / "other")
    reuse_run(multirun / "b" / "other", "../../a/one", "[seed=7]")
    sweeps = [multirun / name for name in "ab"]
    before = {
        path.name: RunDirectory(path).values("test_accuracy") for path in multirun.glob("a/*")
    }
    assert len(before["one"]) > 1
    for sweep in sweeps:
        evidence.keep_runs(sweep)
        remove_runs(sweep)
    with pytest.raises(
        ConfigError,
        match=r"2 runs are saved as files: `fedexp report .*/a --restore DIR` restores",
    ):
        fedexp.load_sweep(sweeps[0])
    assert call("report", [*map(str, sweeps), "--restore", str(out)]) == 0
    assert f"Restored 2 runs to {out / 'a'}" in capsys.readouterr().out
    found = {run.directory.name: run.rounds for run in fedexp.load_sweep(out / "a").members}
    # from round 1
    assert {name: rounds["test_accuracy"].tolist()[1:] for name, rounds in found.items()} == before
    assert RunDirectory(out / "b" / "other").overrides == ["seed=7"]
    assert RunDirectory(out / "b" / "other").values("test_accuracy") == before["one"]
    assert call("report", [str(out), "--out", str(tmp_path / "all")]) == 0
    assert len(pd.read_csv(tmp_path / "all.csv")) == 3


def test_restored_partition_cannot_be_trained_on(tmp_path):
    """Its indices 0, 1, ... replace the original ones, which are not kept."""
    save_npz(tmp_path / "partition.npz", **evidence.arrays_of(KEPT))
    with pytest.raises(
        ConfigError,
        match=r"partition\.npz: this file contains no example indices",
    ):
        read_clients(tmp_path / "partition.npz")


@pytest.mark.parametrize("note", ["../one", "../../group/t/one"])
def test_reused_run_outside_of_other_sweeps_is_copied(note, tmp_path):
    """A note that cannot be kept must not make all files unreadable."""
    sweep = tmp_path / "multirun" / "a"
    job = sweep / "two"
    run_directory((job / note).parent / "one")
    run_directory(job)
    reuse_run(job, note, "[seed=7]")
    evidence.keep_runs(sweep)
    kept = evidence.read(sweep / "runs" / "two.json.xz")
    assert (kept["overrides"], "elsewhere" in kept) == (["seed=7"], False)
    shutil.rmtree(job)
    with evidence.all_jobs(sweep) as jobs:
        assert all(job.finished for job in jobs)
        assert jobs[-1].overrides == ["seed=7"]


def test_restored_directories_have_usual_permissions(tmp_path):
    sweep, out = tmp_path / "multirun" / "a", tmp_path / "out"
    run_directory(sweep / "one")
    evidence.keep_runs(sweep)
    (tmp_path / "usual").mkdir()
    evidence.restore(sweep, out)
    assert out.stat().st_mode == (out / "one").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_failed_restore_writes_nothing(tmp_path, capsys):
    """An existing directory, a damaged file, and a sweep without files give one line each."""
    sweep, out = tmp_path / "multirun" / "a", tmp_path / "out"
    for name, run in zip(("one", "two"), EARLY, strict=False):
        run_directory(sweep / name, run)
    first, second = evidence.keep_runs(sweep)
    (out / "a" / "two").mkdir(parents=True)
    assert call("report", [str(sweep), "--restore", str(out)]) == 2
    assert capsys.readouterr().err.endswith(
        "/out/a/two: already exists; choose another directory\n"
    )
    assert [path.name for path in out.glob("*/*")] == ["two"]
    shutil.rmtree(out)
    second.write_bytes(first.read_bytes()[:-50])
    assert call("report", [str(sweep), "--restore", str(out)]) == 2
    assert not out.exists()
    shutil.rmtree(sweep / evidence.FOLDER)
    assert call("report", [str(sweep), "--restore", str(out)]) == 2
    assert "no files match runs/*.json.xz" in capsys.readouterr().err
    assert call("report", [str(sweep), "--restore", str(out), "--keep"]) == 2
    assert not out.exists()
    assert call("report", [str(sweep), "--out", "."]) == 2
    assert "--out=.: must be a path without a suffix" in capsys.readouterr().err
