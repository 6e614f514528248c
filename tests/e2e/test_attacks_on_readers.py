"""Attacks on commands that only read a directory (report, view)."""

import time

import pytest
import yaml
from test_attacks import BOMB

import fedexp
from fedexp.cli.help import version_text
from fedexp.core import storage
from fedexp.core.errors import StorageError
from fedexp.figures import save
from fedexp.rundir import origin, run_reuse
from fedexp.rundir.lock import LOCK, is_occupied
from fedexp.rundir.reader import RunDirectory


@pytest.fixture
def thesis(tmp_path):
    path = tmp_path / "mine" / "thesis.txt"
    path.parent.mkdir()
    path.write_text("years of work\n")
    return path


def test_is_occupied_does_not_truncate_a_linked_file(tmp_path, thesis):
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK).symlink_to(thesis)
    assert not is_occupied(run)
    assert thesis.read_text() == "years of work\n"


def test_link_is_replaced_when_a_table_is_written(tmp_path, thesis):
    table = tmp_path / "table.csv"
    table.symlink_to(thesis)
    storage.write_atomically(table, b"run\n")
    assert not table.is_symlink()
    assert table.read_bytes() == b"run\n"
    assert thesis.read_text() == "years of work\n"


def test_temporary_link_is_not_followed(tmp_path, thesis):
    with storage.temporary_path(tmp_path / "table.csv") as temporary:
        temporary.symlink_to(thesis)
        storage.write_atomically(tmp_path / "table.csv", b"run\n")
    assert thesis.read_text() == "years of work\n"


def test_figures_are_not_written_through_a_link(tmp_path, thesis):
    from matplotlib.figure import Figure

    (tmp_path / "figures").symlink_to(thesis.parent)
    with pytest.raises(StorageError, match="is a symbolic link"):
        save(Figure(), tmp_path / "figures/curves.png")
    assert [path.name for path in thesis.parent.iterdir()] == ["thesis.txt"]


def test_yaml_bomb_in_a_configuration_is_read_as_empty(tmp_path):
    (tmp_path / "config.yaml").write_text(BOMB)
    began = time.monotonic()
    assert RunDirectory(tmp_path).config == {}
    assert time.monotonic() - began < 5
    (tmp_path / "config.yaml").write_text("seed: &s 3\nrounds: *s\n")
    assert RunDirectory(tmp_path).config == {"seed": 3, "rounds": 3}


@pytest.mark.parametrize(
    "text", ["[]", "5", '"x"', "{", "[" * 100_000, '{"marks": 5, "data": [], "directory": {}}']
)
def test_invalid_origin_is_read_as_empty(tmp_path, text):
    (tmp_path / origin.NAME).write_text(text)
    found = origin.read(tmp_path)
    assert origin.get_mapping(found, "marks") == {}
    assert origin.get_mapping(found, "data") == {}


@pytest.mark.parametrize("value", [5, None, ["x"], "../../../../etc", "/etc", "\0", {"a": 1}])
def test_invalid_reuse_note_is_ignored(tmp_path, value):
    (tmp_path / run_reuse.NOTE).write_text(yaml.safe_dump({"run": value}, default_flow_style=True))
    assert run_reuse.reused_run(tmp_path) is None


def test_version_text_names_packages_and_python():
    text = version_text()
    for name in ("fedexp ", "torch ", "hydra-core ", "Python ", "CUDA "):
        assert f"\n{name}" in f"\n{text}"
    assert text.splitlines()[0] == f"fedexp {fedexp.__version__}", "its own, installed or not"
