"""Unpacking: what data sets have arrives whole; what would leave the folder, is a link or a bomb
does not."""

import gzip
import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fedexp.core.errors import ConfigError
from fedexp.data import archive
from fedexp.data.archive import ArchiveError, unpack
from fedexp.data.download import Download

FILES = {"set/a.txt": b"one", "set/deep/b.bin": bytes(range(256)) * 20, "c": b""}


def write_tar(path: Path, files: dict[str, bytes], *special: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info in special:
            tar.addfile(info)
    return path


def write_zip(path: Path, files: dict[str, bytes], links: tuple[str, ...] = ()) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if name in links:
                info.external_attr = 0o120777 << 16
            packed.writestr(info, content)
    return path


def write_gz(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content, mtime=0))
    return path


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def below(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where to unpack; a neighbour of what must stay as it is."""
    (tmp_path / "keep.txt").write_text("mine")
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tgz", "x.zip"])
def test_files_and_folders_arrive(name, folder, tmp_path):
    write: Callable = write_zip if name.endswith("zip") else write_tar
    unpack(write(tmp_path / name, FILES), folder)
    assert below(folder) == FILES


def test_a_single_file_arrives(folder, tmp_path):
    unpack(write_gz(tmp_path / "labels-idx1-ubyte.gz", b"abc" * 1000), folder)
    assert below(folder) == {"labels-idx1-ubyte": b"abc" * 1000}


OUTSIDE = [
    "../keep.txt",
    "a/../../keep.txt",
    "/fedexp-never",
    "..",
    "..\\keep.txt",
    "C:\\never",
    "//host/never",
]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("suffix", ["tar", "zip"])
def test_what_lies_outside_is_refused(name, suffix, folder, tmp_path):
    write: Callable = write_zip if suffix == "zip" else write_tar
    made = write(tmp_path / f"x.{suffix}", {name: b"stolen"})
    with pytest.raises(ArchiveError, match="lies outside the archive's own folder") as error:
        unpack(made, folder)
    assert str(made) in str(error.value)
    assert below(folder) == {}
    assert (tmp_path / "keep.txt").read_text() == "mine"
    assert not Path("/fedexp-never").exists()


@pytest.mark.parametrize(
    "info",
    [
        special("link", tarfile.SYMTYPE, "/etc/passwd"),
        special("link", tarfile.SYMTYPE, "set"),
        special("link", tarfile.LNKTYPE, "set/a.txt"),
        special("pipe", tarfile.FIFOTYPE),
        special("disk", tarfile.BLKTYPE),
    ],
)
def test_links_and_devices_are_refused(info, folder, tmp_path):
    with pytest.raises(ArchiveError, match=f"the member '{info.name}' is a link or device"):
        unpack(write_tar(tmp_path / "x.tar", FILES, info), folder)
    assert not [path for path in folder.rglob("*") if path.is_symlink()]


def test_a_link_in_a_zip_is_refused(folder, tmp_path):
    with pytest.raises(ArchiveError, match="the member 'link' is a link"):
        unpack(write_zip(tmp_path / "x.zip", {"link": b"/etc/passwd"}, links=("link",)), folder)
    assert below(folder) == {}


@pytest.mark.parametrize("name", ["x.tar.gz", "x.zip", "x.gz"])
def test_a_bomb_is_stopped_long_before_its_end(name, folder, tmp_path):
    zeros = bytes(20 * 2**20)
    made = tmp_path / name
    if name == "x.gz":
        write_gz(made, zeros)
    else:
        (write_zip if name == "x.zip" else write_tar)(made, {"zeros": zeros})  # type: ignore[operator]
    with pytest.raises(ArchiveError, match="unpacks to far more than a data set has"):
        unpack(made, folder)
    assert (
        sum(path.stat().st_size for path in folder.rglob("*"))
        <= archive.RATIO * made.stat().st_size
    )


def test_too_many_members_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MEMBERS", 3)
    unpack(write_tar(tmp_path / "x.tar", {str(i): b"" for i in range(3)}), folder)
    with pytest.raises(ArchiveError, match="has more than 3 members"):
        unpack(write_tar(tmp_path / "y.tar", {str(i): b"" for i in range(4)}), folder)


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip", "x.gz"])
def test_a_damaged_archive_is_named(name, folder, tmp_path):
    good = tmp_path / name
    content = os.urandom(5000)
    if name == "x.gz":
        write_gz(good, content)
    else:
        (write_zip if name == "x.zip" else write_tar)(good, {"a": content, "b": content})  # type: ignore[operator]
    whole = good.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"<html>not found</html>"):
        good.write_bytes(broken)
        if broken or name != "x.gz":  # there it stands for nothing, compressed
            with pytest.raises(ArchiveError, match=f"{name}: cannot be unpacked"):
                unpack(good, folder)


def test_other_kinds_are_refused(folder, tmp_path):
    (tmp_path / "x.rar").write_bytes(b"Rar!")
    with pytest.raises(ArchiveError, match=r"x\.rar: must be a \.tar"):
        unpack(tmp_path / "x.rar", folder)


def test_a_data_set_with_such_an_archive_is_refused_and_nothing_is_left(folder, tmp_path):
    """Also where its md5 is the right one."""
    made = write_tar(folder / "x.tar", {"good.txt": b"good", "../keep.txt": b"stolen"})
    files = (("x.tar", hashlib.md5(made.read_bytes()).hexdigest()),)
    with pytest.raises(ConfigError, match=r"dataset=x: .*lies outside the archive's own folder"):
        Download(("http://localhost:1/",), files, folder).fetch("x", None)
    assert [path.name for path in folder.iterdir()] == ["x.tar"]
    assert (tmp_path / "keep.txt").read_text() == "mine"
