"""Files of a run: whole, written in the right order, and checked for damage."""

import os
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from fedexp.algorithms.base import FedAvg
from fedexp.algorithms.scaffold import Scaffold
from fedexp.core import storage
from fedexp.core.errors import ConfigError, StorageError
from fedexp.rundir import checkpoint, files
from fedexp.rundir.csv_files import CsvFile
from fedexp.rundir.reader import RunDirectory
from fedexp.training.rounds import play_round
from test_algorithms import record, tables
from toy_federation import make_simulation

ROUNDS = 4


def simulation():
    """Clients keep a state."""
    return make_simulation(
        Scaffold(divisor="steps", variates="uniform"), rounds=ROUNDS, participation=0.4
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    record(simulation(), directory, resume=False)
    return directory


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def turn_a_bit(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"archive/data/0") + 400] ^= 1
    path.write_bytes(content)


DAMAGES = {  # what happens, to which file of the latest state, and the message
    "cut short": (cut, "checkpoint/latest.pt", "cannot be read"),
    "one bit turned": (turn_a_bit, "checkpoint/latest.pt", "the checksum of archive/data/"),
    "empty": (lambda path: path.write_bytes(b""), "checkpoint/latest.pt", "cannot be read"),
    "removed": (os.unlink, "checkpoint/latest.pt", "is missing"),
    "a client's state cut short": (cut, "checkpoint/clients/*.4.pt", "cannot be read"),
    "a client's state removed": (os.unlink, "checkpoint/clients/*.4.pt", "is missing"),
    "rows lost": (
        lambda path: os.truncate(path, path.stat().st_size - 1),
        "rounds.csv",
        "has fewer bytes than",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_falls_back_to_previous(name, undisturbed, tmp_path):
    """One round runs again with the same result. The valid checkpoint is kept until the next one is
    written."""
    damage, where, words = DAMAGES[name]
    directory = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    damage(next(directory.glob(where)))
    saved = checkpoint.load(directory)
    assert words in saved.problem
    assert saved.state["round"] == ROUNDS - 1
    checkpoint.set_aside(directory)
    assert not (directory / files.CHECKPOINT).exists()
    assert checkpoint.load(directory).state["round"] == ROUNDS - 1
    record(simulation(), directory, resume=True)
    assert tables(directory) == tables(undisturbed)
    whole = checkpoint.load(directory)
    assert (whole.problem, whole.state["round"]) == (None, ROUNDS)
    torch.testing.assert_close(
        whole.state["server"], checkpoint.load(undisturbed).state["server"], rtol=0, atol=0
    )


def save_as_floats(path):
    """Save a table again, as a program does that turns numbers into floats."""
    pd.read_csv(path).astype(float).to_csv(path, index=False)


def with_other_line_ends(path):
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def turn_a_digit(path):
    first, after, rest = path.read_text().partition(".")
    path.write_text(first + after + str((int(rest[0]) + 1) % 10) + rest[1:])


def forget_checksums(directory):
    """Make the checkpoints those of an earlier version."""
    for name in (files.CHECKPOINT, files.PREVIOUS):
        state = storage.load_tree(directory / name)
        del state["checksums"]
        storage.save_tree(directory / name, state)


def contents(directory):
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("table", ["rounds.csv", "clients.csv", "class_accuracy.csv"])
@pytest.mark.parametrize(
    ("change", "earlier"),
    [
        (save_as_floats, False),
        (with_other_line_ends, False),
        (turn_a_digit, False),
        (save_as_floats, True),
        (with_other_line_ends, True),
    ],
)
def test_table_that_another_program_saved_again_is_refused(
    table, change, earlier, undisturbed, tmp_path
):
    """The table has as many bytes as the run wrote, or more."""
    directory = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    if earlier:
        forget_checksums(directory)
        assert checkpoint.load(directory).state["round"] == ROUNDS
    change(directory / table)
    before = contents(directory)
    with pytest.raises(ConfigError, match=rf"^\S+/{table}: is not as the run wrote it") as error:
        record(simulation(), directory, resume=True)
    assert "\n" not in str(error.value)
    assert contents(directory) == before


def test_rows_after_the_checkpoint_are_cut_whoever_saved_it(undisturbed, tmp_path):
    for earlier in (False, True):
        directory = Path(shutil.copytree(undisturbed, tmp_path / f"run{earlier}"))
        if earlier:
            forget_checksums(directory)
        os.replace(directory / files.PREVIOUS, directory / files.CHECKPOINT)
        record(simulation(), directory, resume=True)
        assert tables(directory) == tables(undisturbed)


def test_checksum_grows_with_the_rows_and_after_a_resume(tmp_path):
    path, rows = tmp_path / "a.csv", [{"round": number, "a": number / 3} for number in range(4)]
    table = CsvFile(path, ["round", "a"])
    assert table.state() == {"length": 0, "checksum": 0}
    for row in rows[:3]:
        kept = table.state()
        table.append([row])
    again = CsvFile(path, ["round", "a"], kept["length"])
    assert again.state() == kept
    again.append(rows[2:])
    assert again.checksum == zlib.crc32(path.read_bytes())


def test_two_damaged_checkpoints_are_both_named(undisturbed, tmp_path):
    directory = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    for name in (files.CHECKPOINT, files.PREVIOUS):
        cut(directory / name)
    with pytest.raises(
        ConfigError,
        match=r"(?s)latest\.pt: cannot be.*previous\.pt: cannot be.*remove .*to start again",
    ):
        checkpoint.load(directory)
    shutil.rmtree(directory / "checkpoint")
    assert checkpoint.load(directory) is None


def test_flipped_bit_is_rejected_or_harmless(tmp_path):
    path, value = (
        tmp_path / "tree.pt",
        {"a": torch.arange(9.0), "b": {"c": 3, "d": 0.5}, "e": torch.tensor([1, 2])},
    )
    storage.save_tree(path, value)
    content, rejected = path.read_bytes(), 0
    for place in range(0, len(content), 3):
        turned = bytearray(content)
        turned[place] ^= 1 << place % 8
        path.write_bytes(turned)
        try:
            loaded = storage.load_tree(path)
        except ConfigError:
            rejected += 1
        else:
            torch.testing.assert_close(loaded, value, rtol=0, atol=0)
    assert rejected > len(content) / 6


def test_files_are_synced_before_their_checkpoint(monkeypatch, tmp_path):
    """A power failure may happen between any two of these calls."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        path = (
            os.readlink(f"/proc/self/fd/{descriptor}")
            .removeprefix(str(tmp_path) + "/run")
            .strip("/")
        )
        calls.append(("sync", path))
        fsync(descriptor)

    def moved(source, target):
        calls.append(("move", str(target).removeprefix(str(tmp_path) + "/run").strip("/")))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    record(simulation(), tmp_path / "run", resume=False)
    *_, start, last = [
        i for i, call in enumerate(calls) if call == ("move", "checkpoint/latest.pt")
    ]
    before = calls[start + 1 : last]  # what is done for the last state
    for name in ("rounds.csv", "class_accuracy.csv", "clients.csv", "checkpoint/clients"):
        assert ("sync", name) in before
    states = [
        i
        for i, (what, path) in enumerate(before)
        if what == "move" and path.startswith("checkpoint/clients/")
    ]
    assert len(states) == 2  # of the cohort
    for i in states:
        name = before[i][1].rpartition("/")[2]
        assert before[i - 1] == ("sync", f"checkpoint/clients/.{name}.{os.getpid()}.tmp")
    assert before[-2:] == [
        ("move", "checkpoint/previous.pt"),
        ("sync", f"checkpoint/.latest.pt.{os.getpid()}.tmp"),
    ]
    assert calls[last + 1] == ("sync", "checkpoint")


def test_checkpoints_take_a_twentieth_of_the_time(monkeypatch, tmp_path):
    """A round takes 1.5 s and a checkpoint 0.25 s, so the next checkpoint is due 5 s later, after
    four rounds."""
    now, saved = [0.0], []
    monkeypatch.setattr(
        "fedexp.training.recorder.time", SimpleNamespace(perf_counter=lambda: now[0])
    )

    def taking(seconds, function, calls):
        def slow(*arguments):
            now[0] += seconds
            calls.append(arguments)
            return function(*arguments)

        return slow

    monkeypatch.setattr(checkpoint, "save", taking(0.25, checkpoint.save, saved))
    monkeypatch.setattr("fedexp.training.rounds.play_round", taking(1.5, play_round, []))
    short = make_simulation(FedAvg(), rounds=10, checkpoint_interval=None)
    record(short, tmp_path, resume=False)
    assert [state["round"] for _, state in saved] == [0, 4, 8, 10]  # the last in any case


def test_previous_checkpoint_is_copied_without_hard_links(monkeypatch, tmp_path, undisturbed):
    monkeypatch.setattr(
        os, "link", lambda *paths: (_ for _ in ()).throw(PermissionError(1, "no links here"))
    )
    record(simulation(), tmp_path / "run", resume=False)
    for name in (files.CHECKPOINT, files.PREVIOUS):
        ours, theirs = (
            storage.load_tree(directory / name) for directory in (tmp_path / "run", undisturbed)
        )
        torch.testing.assert_close(ours["server"], theirs["server"], rtol=0, atol=0)
    assert not list(tmp_path.rglob("*.tmp"))


# --- tidy files


def rows(count):
    return [{"round": number, "value": number / 3} for number in range(count)]


def test_csv_file_appears_with_its_rows(tmp_path, monkeypatch):
    """It is never empty."""
    replace = os.replace

    def moved(source, target):
        assert not target.exists()
        assert source.read_text() == "round,value\n0,0.0\n"
        replace(source, target)

    monkeypatch.setattr(os, "replace", moved)
    file = CsvFile(tmp_path / "a.csv", ("round", "value"))
    assert not (tmp_path / "a.csv").exists()
    file.append([])
    assert not (tmp_path / "a.csv").exists()
    file.append(rows(1))
    assert (tmp_path / "a.csv").read_text() == "round,value\n0,0.0\n"
    assert file.length == 18


def test_full_disk_leaves_no_partial_row(monkeypatch, tmp_path):
    """After some bytes the disk is full. The partial row is removed, and the row fits later."""
    file, write = CsvFile(tmp_path / "a.csv", ("round", "value")), os.write
    file.append(rows(2))
    before = (tmp_path / "a.csv").read_bytes()
    left = [5]

    def full(descriptor, content):
        if not left[0]:
            raise OSError(28, "No space left on device")
        count, left[0] = left[0], 0
        return write(descriptor, bytes(content[:count]))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(
            StorageError, match=r"a\.csv: cannot be written \(No space left on device\)"
        ):
            file.append(rows(1))
    assert (tmp_path / "a.csv").read_bytes() == before
    file.append(rows(1))
    assert (tmp_path / "a.csv").read_bytes() == before + b"0,0.0\n"


@pytest.mark.parametrize("remove", [os.unlink, lambda path: path.rename(path.with_name("b.csv"))])
def test_removed_or_moved_csv_file_raises(remove, tmp_path):
    file = CsvFile(tmp_path / "a.csv", ("round", "value"))
    file.append(rows(2))
    remove(tmp_path / "a.csv")
    for call in (lambda: file.append(rows(1)), file.sync):
        with pytest.raises(StorageError, match="removed or moved"):
            call()
    assert not (tmp_path / "a.csv").exists()


def test_last_round_ignores_partial_row(tmp_path):
    assert RunDirectory(tmp_path).last_round is None
    for text, last in (("round,x\n0,1\n1,2\n", 1), ("round,x\n0,1\n1,", 0)):
        (tmp_path / files.ROUNDS).write_text(text)
        assert RunDirectory(tmp_path).last_round == last
