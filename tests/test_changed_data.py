"""Marks of data cover the bytes of every file. Files are read again only if their size or time has
changed.
"""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from fedexp.core.errors import ConfigError
from fedexp.data import marks
from fedexp.data.marks import SourceFile, checksums, content_mark, count_changed_files, join_marks
from fedexp.rundir import origin
from fedexp.rundir.fingerprint import data_marks, fingerprint
from test_datasets import (
    dataset,
    leaf_json,
    mnist_files,  # noqa: F401
    pixels,
    write_image,
    write_leaf,
    write_raw,
    write_tiny,
    write_tree,
)
from test_text import TXT, write, write_vocabulary
from toy_federation import make_simulation

CLASSES = {"a": 2, "b": 2}


def write_femnist(root: Path) -> None:
    for split in ("train", "test"):
        write_leaf(root / "femnist" / split, one=leaf_json({"w": (pixels(0, 2, 28, 28), [1, 2])}))


def write_caltech(root: Path) -> None:
    for name in ("001.ak47", "002.flag"):
        for i in range(5):
            folder = root / "caltech256/256_ObjectCategories" / name
            write_image(folder / f"{i}.png", pixels(i, 4, 4, 3))


def write_texts(root: Path) -> None:
    folder = write(root, **TXT, posts_csv="content\nabc\n")
    write_vocabulary(folder, ["a", "b"], embeddings=np.ones((2, 2)))


NEWS = ("dataset.name=news",)
WITH_FILES = ("dataset.vocabulary=vocab.json", "dataset.vectors=vectors.npz")
WITHOUT = ("dataset.vocabulary=null", "dataset.vectors=null")
# option, overrides, what writes its files below a data_dir, names of files that only name classes
# or labels, which have a checksum of their own
SETS = [
    ("cifar10", (), lambda root: write_tree(root / "cifar10", CLASSES), ()),
    ("image_folder", (), lambda root: write_tree(root / "images", CLASSES), ()),
    (
        "tiny_imagenet",
        (),
        lambda root: write_tiny(root / "tiny_imagenet"),
        ("val_annotations.txt", "words.txt"),
    ),
    ("caltech256", (), write_caltech, ()),
    ("femnist", (), write_femnist, ()),
    ("thucnews", (*NEWS, *WITH_FILES), write_texts, ()),
    ("thucnews", (*NEWS, *WITHOUT), write_texts, ()),
    ("weibo", ("dataset.file=news/posts.csv",), write_texts, ()),
]
opened: list[str] | None = None


def note_opened(event: str, arguments: tuple) -> None:
    if opened is not None and event == "open" and isinstance(arguments[0], str | os.PathLike):
        opened.append(os.fspath(arguments[0]))


@pytest.fixture
def recorded(monkeypatch):
    """Return a list of the paths that are opened from now on."""
    if not getattr(sys, "fedexp_test_hook", False):
        sys.addaudithook(note_opened)  # stays for good
        sys.fedexp_test_hook = True
    found: list[str] = []
    monkeypatch.setitem(globals(), "opened", found)
    return found


def source_of(name, overrides, root):
    if name == "weibo":
        from fedexp.data.text import UnlabelledTexts

        return UnlabelledTexts(
            name="weibo",
            data_dir=str(root),
            file="news/posts.csv",
            length=9,
            max_words=9,
            vocabulary=None,
            vectors=None,
        )
    place = (f"dataset.root={root}/images",) if name == "image_folder" else ()
    return dataset(name, root, *place, *overrides)


def change(path: Path) -> None:
    """Flip the last bit of a file, which keeps its name and size."""
    content, time = path.read_bytes(), path.stat().st_mtime_ns + 1
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(time, time))  # the file system's clock may stand still


@pytest.mark.parametrize(("name", "overrides", "write", "naming"), SETS)
def test_data_mark_covers_every_file_that_is_read(
    name, overrides, write, naming, tmp_path, recorded
):
    write(tmp_path)
    source = source_of(name, overrides, tmp_path)
    recorded.clear()
    data = source.load()
    assert data.checksum is None
    read = {path for path in recorded if path.startswith(str(tmp_path)) and ".fedexp_c" not in path}
    files = {file.path for file in source.files}
    assert files <= read
    assert {Path(path).name for path in read - files} <= {*naming}
    (before,) = origin.current_marks({}, {"dataset": source}).values()
    assert before.startswith(f"{len(files)} file")
    for path in sorted(files):
        change(Path(path))
        source = source_of(name, overrides, tmp_path)
        (now,) = origin.current_marks({}, {"dataset": source}).values()
        assert checksums(now) != checksums(before)
        assert count_changed_files(before, now, str(tmp_path)) == 1
        before = now


def test_mnist_mark_covers_four_files(mnist_files, tmp_path):  # noqa: F811
    write_raw(tmp_path / "MNIST/raw", mnist_files)
    source = dataset("mnist", tmp_path)
    (mark,) = origin.current_marks({}, {"dataset": source}).values()
    assert mark.startswith("4 files (bytes ")
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte").unlink()
    assert origin.current_marks({}, {"dataset": source}) == {}, "they are fetched by the run"


@pytest.fixture
def read(monkeypatch):
    """Return a list of the paths whose checksums are computed."""
    calls, original = [], marks.file_checksum
    monkeypatch.setattr(marks, "file_checksum", lambda path: calls.append(path) or original(path))
    return calls


def files_in(folder: Path) -> list[SourceFile]:
    return [SourceFile.of(path) for path in folder.rglob("*") if path.is_file()]


def test_unchanged_files_are_not_read_again(read, tmp_path):
    for name in ("a/1", "a/2", "b/1"):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "data").mkdir()
    files = files_in(tmp_path / "set")
    before = content_mark(lambda: files, str(tmp_path / "data"))
    assert len(read) == 3
    assert content_mark(lambda: files[::-1], str(tmp_path / "data")) == before
    assert len(read) == 3
    os.utime(tmp_path / "set/a/1", ns=(0, 0))
    assert content_mark(lambda: files_in(tmp_path / "set"), str(tmp_path / "data")) == before
    assert len(read) == 6
    assert len(list((tmp_path / "data/.fedexp_cache").iterdir())) == 1, "the older list is removed"
    (tmp_path / "set").rename(tmp_path / "moved")
    assert content_mark(lambda: files_in(tmp_path / "moved"), str(tmp_path / "data")) == before
    (tmp_path / "moved/a/1").write_text("a/9")
    now = content_mark(lambda: files_in(tmp_path / "moved"), str(tmp_path / "data"))
    assert now != before
    assert count_changed_files(before, now, str(tmp_path / "data")) == 1
    (tmp_path / "moved/b/1").rename(tmp_path / "moved/b/2")
    (tmp_path / "moved/b/3").write_text("new")
    later = content_mark(lambda: files_in(tmp_path / "moved"), str(tmp_path / "data"))
    assert count_changed_files(now, later, str(tmp_path / "data")) == 3, "renamed: two names"
    assert count_changed_files(now, later, str(tmp_path / "none")) is None


def test_malformed_marks_name_no_file(tmp_path):
    for odd in ("../../x", "*", "x (bytes ../../etc/passwd)", "x (bytes *)", ""):
        assert count_changed_files(odd, odd, str(tmp_path)) is None
        assert checksums(odd) == []


# --- what a run is

PHOTOS = {"dataset": {"_target_": "fedexp.data.datasets.ImageFolder", "train_splits": ["train"]}}


def photos(tmp_path: Path) -> dict:
    write_tree(tmp_path / "photos", CLASSES)
    place = {"root": str(tmp_path / "photos"), "data_dir": str(tmp_path)}
    return {"dataset": PHOTOS["dataset"] | place}


def note(directory: Path, config: dict, found: dict[str, str]) -> None:
    directory.mkdir(exist_ok=True, parents=True)
    origin.record(directory, config, make_simulation().runtime.data, found)


def test_fingerprint_depends_on_bytes(tmp_path):
    config = photos(tmp_path)
    before, found = fingerprint(config), data_marks(config)
    change(tmp_path / "photos/train/a/000.png")
    assert fingerprint(config) != before
    assert fingerprint(config, found) == before


def test_changed_data_are_rejected_unless_accepted(tmp_path, caplog):
    config, directory = photos(tmp_path), tmp_path / "run"
    first = origin.current_marks(config, {})
    note(directory, config, first)
    change(tmp_path / "photos/train/a/000.png")
    now = origin.current_marks(config, {})
    with pytest.raises(ConfigError, match=r"dataset\.root: 1 of 8 files differ\naccept_changed_"):
        origin.check_data(directory, now, config)
    accepted = config | {"accept_changed_data": True}
    origin.check_data(directory, now, accepted)
    origin.log_changes(directory, now, accepted)
    assert "dataset.root: the data have changed, 1 of 8 files differ since" in caplog.text
    note(directory, config, now)
    both = join_marks(first["dataset.root"], now["dataset.root"])
    assert origin.recorded_marks(directory) == {"dataset.root": both}
    assert origin.read(directory)["fingerprint"] not in (
        fingerprint(config, first),
        fingerprint(config, now),
    )
    origin.check_data(directory, now, config)
    note(directory, config, now)  # resumed once more: the first rounds were made with other bytes
    assert origin.recorded_marks(directory) == {"dataset.root": both}
    change(tmp_path / "photos/train/a/000.png")  # as it was
    with pytest.raises(ConfigError, match="1 of 8 files differ"):
        origin.check_data(directory, origin.current_marks(config, {}), config)


def test_changed_labels_are_rejected_even_if_changed_data_are_accepted(tmp_path):
    """The partition was made with the labels, so the clients would have other classes."""
    config, directory, data = photos(tmp_path), tmp_path / "run", make_simulation().runtime.data
    note(directory, config, {})
    accepted = config | {"accept_changed_data": True}
    origin.check_data(directory, {}, accepted, data)
    other = replace(data, y_train=data.y_train.roll(1))
    assert not torch.equal(other.y_train, data.y_train)
    with pytest.raises(ConfigError, match=r"labels: \w+ in the run, \w+ now$"):
        origin.check_data(directory, {}, accepted, other)


def test_resume_resolves_relative_paths_from_the_first_directory(tmp_path, monkeypatch):
    """Paths that are given on the command line or no longer exist are not changed."""
    for folder in ("there/photos", "there/data", "here/data"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "there")
    note(tmp_path / "run", {}, {})
    monkeypatch.chdir(tmp_path / "here")
    note(tmp_path / "run", {"seed": 1}, {})  # by a command from elsewhere
    config = OmegaConf.create({"data_dir": "data", "dataset": {"root": "photos"}})

    def paths(*typed):
        found = origin.with_original_paths(config, tmp_path / "run", typed)
        return found.data_dir, found.dataset.root

    there = tmp_path / "there"
    assert paths() == (str(there / "data"), str(there / "photos"))
    assert paths("data_dir") == ("data", str(there / "photos"))
    (there / "photos").rmdir()
    assert paths("data_dir") == ("data", "photos")


def test_record_of_an_attempt_without_rounds_is_ignored(tmp_path):
    directory, data = tmp_path, make_simulation().runtime.data
    marks = [{"dataset.files": f"2 files (bytes {digit * 16})"} for digit in "01"]
    odd = {"way": {"precision": math.nan}, "directory": math.nan, "marks": marks[0]}
    (directory / origin.NAME).write_text(json.dumps(odd))
    origin.record(directory, {}, data, marks[1], {"precision": "fp64"}, resumed=False)
    found = origin.read(directory)
    assert (found["marks"], found["way"]) == (marks[1], {"precision": "fp64"})
    assert found["directory"] == str(Path.cwd())
    origin.record(directory, {}, data, marks[1], {"precision": "fp32"})
    assert origin.read(directory) == found


def test_marks_need_no_writable_data_dir(read, tmp_path):
    (tmp_path / ".fedexp_cache").write_text("a file in the way")
    (tmp_path / "x").write_text("1")
    found = [content_mark(lambda: files_in(tmp_path), str(tmp_path)) for _ in range(2)]
    assert found[0] == found[1] is not None
    assert len(read) == 4


def test_resume_records_missing_marks(tmp_path):
    """Nothing is known about the data of the earlier rounds; the data of later rounds are
    recorded.
    """
    config = photos(tmp_path)
    for former in ({}, {"dataset.root": "8 files 0123456789abcdef"}):
        directory = tmp_path / f"run{len(former)}"
        note(directory, config, former)
        assert origin.differences(directory, config, config) == []
        now = origin.current_marks(config, {})
        origin.check_data(directory, now, config)
        note(directory, config, now)
        assert origin.recorded_marks(directory) == now


def test_fingerprint_depends_on_recorded_files(tmp_path):
    found = []
    for digits in ("0" * 16, "1" * 16):
        note(tmp_path / digits, {}, {"dataset.files": f"2 files (bytes {digits})"})
        found.append(origin.read(tmp_path / digits)["fingerprint"])
    assert len({*found, fingerprint({})}) == 3


def test_a_moved_data_dir_keeps_its_checksums(read, tmp_path):
    folder = tmp_path / "data/set"
    folder.mkdir(parents=True)
    (folder / "a").write_text("1")
    before = content_mark(lambda: files_in(folder), str(tmp_path / "data"))
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = tmp_path / "moved"
    assert content_mark(lambda: files_in(moved / "set"), str(moved)) == before
    assert len(read) == 1
