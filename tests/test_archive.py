"""Archives are unpacked completely, and nothing is written or linked outside the folder."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from fedexp.core.errors import ConfigError
from fedexp.data.download import Published, unpack

FILES = {"set/a.txt": b"one", "set/deep/b.bin": bytes(range(256)) * 20, "c": b""}


def write_archive(path: Path, files: dict[str, bytes], *special: tarfile.TarInfo) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, content in files.items():
                packed.writestr(name, content)
        return path
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for info in special:
            tar.addfile(info)
    return path


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def below(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() or path.is_symlink()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder to unpack into, beside a file that must not change."""
    (tmp_path / "keep.txt").write_text("mine")
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip"])
def test_unpack_writes_all_files(name, folder, tmp_path):
    (folder / "set").mkdir()  # of an earlier attempt
    (folder / "set" / "a.txt").write_bytes(b"half")
    unpack(write_archive(tmp_path / name, FILES), folder)
    assert below(folder) == FILES


def test_gz_file_is_unpacked(folder, tmp_path):
    (tmp_path / "labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"abc" * 1000))
    unpack(tmp_path / "labels-idx1-ubyte.gz", folder)
    assert below(folder) == {"labels-idx1-ubyte": b"abc" * 1000}


@pytest.mark.parametrize("name", ["../keep.txt", "a/../../keep.txt", "/fedexp-never"])
@pytest.mark.parametrize("suffix", ["tar", "zip"])
def test_unpack_writes_nothing_outside_the_folder(name, suffix, folder, tmp_path):
    made = write_archive(tmp_path / f"x.{suffix}", {name: b"stolen"})
    try:
        unpack(made, folder)
    except tarfile.FilterError:
        assert below(folder) == {}
    assert (tmp_path / "keep.txt").read_text() == "mine"
    assert not Path("/fedexp-never").exists()


@pytest.mark.parametrize(
    "info",
    [
        special("link", tarfile.SYMTYPE, "/etc/passwd"),
        special("link", tarfile.SYMTYPE, "../../keep.txt"),
        special("link", tarfile.LNKTYPE, "../keep.txt"),
        special("pipe", tarfile.FIFOTYPE),
        special("disk", tarfile.BLKTYPE),
    ],
)
def test_links_that_leave_the_folder_and_devices_are_rejected(info, folder, tmp_path):
    with pytest.raises(tarfile.FilterError):
        unpack(write_archive(tmp_path / "x.tar", FILES, info), folder)
    assert below(folder) == {}


def test_zip_links_become_text_files(folder, tmp_path):
    info = zipfile.ZipInfo("link")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as packed:
        packed.writestr(info, "/etc/passwd")
    unpack(tmp_path / "x.zip", folder)
    assert not (folder / "link").is_symlink()
    assert below(folder) == {"link": b"/etc/passwd"}


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip", "x.gz"])
@pytest.mark.parametrize("content", [b"<html>not found</html>", b"\x1f\x8b\x08", b"PK\x03\x04"])
def test_damaged_archives_are_rejected(name, content, folder):
    """The archive is damaged although its md5 is correct."""
    (folder / name).write_bytes(content)

    class Archived(Published):
        hosts = ("http://localhost:1/",)
        published = ((name, hashlib.md5(content).hexdigest()),)
        is_present = False

        def load(self):
            raise NotImplementedError

    with pytest.raises(ConfigError, match=rf"(?s)dataset=x: its files .*{name}  \(md5"):
        Archived(name="x", data_dir=str(folder), url=None).fetch_missing()
    assert [path.name for path in folder.iterdir()] == [name]
