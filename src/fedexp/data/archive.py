"""Unpacking archives: only plain files and folders, below the target, and no more than is sound."""

import gzip
import tarfile
import zipfile
from pathlib import Path, PurePosixPath, PureWindowsPath

MEMBERS = 2_000_000  # CINIC-10 has 270,000
# Bytes unpacked for one that is packed; of the data sets here, MNIST's images have the most: 5.
RATIO = 200
SMALL = 2**20  # bytes that are harmless whatever their ratio
CHUNK = 2**20


class ArchiveError(ValueError):
    """The archive is damaged, or holds what no data set has. `str(error)` names the archive and the
    member."""


class Check:
    """Raises ArchiveError for a member that is not a plain file or folder below the target, and for
    too many members or bytes."""

    def __init__(self, archive: Path):
        self.archive, self.members = archive, 0
        self.room = max(archive.stat().st_size * RATIO, SMALL)

    def admit(self, name: str, kind: str, size: int) -> None:
        """kind: "file or folder", or what else the member is; size: its bytes."""
        if kind != "file or folder":
            raise ArchiveError(
                f"{self.archive}: the member {name!r} is {kind}, not a file or folder"
            )
        for path in (PurePosixPath(name), PureWindowsPath(name)):
            if path.anchor or ".." in path.parts:
                raise ArchiveError(
                    f"{self.archive}: the member {name!r} lies outside the archive's own folder"
                )
        self.members += 1
        if self.members > MEMBERS:
            raise ArchiveError(f"{self.archive}: has more than {MEMBERS:,} members")
        self.room -= size
        if self.room < 0:
            raise ArchiveError(
                f"{self.archive}: unpacks to far more than a data set has (at {name!r})"
            )


def unpack(archive: Path, folder: Path) -> None:
    """Write what a .tar, .tar.gz, .tgz, .zip or .gz file holds into `folder`.

    Raises ArchiveError; what comes before the faulty member has been written by then."""
    name = archive.name.lower()
    if not name.endswith((".tar", ".tar.gz", ".tgz", ".zip", ".gz")):
        raise ArchiveError(f"{archive}: must be a .tar, .tar.gz, .tgz, .zip or .gz file")
    try:
        check = Check(archive)
        if name.endswith((".tar", ".tar.gz", ".tgz")):
            unpack_tar(archive, folder, check)
        elif name.endswith(".zip"):
            unpack_zip(archive, folder, check)
        else:
            unpack_gz(archive, folder / archive.name[: -len(".gz")], check)
    except ArchiveError:
        raise
    except Exception as error:  # tarfile, zipfile, zlib and the disk raise many types
        raise ArchiveError(f"{archive}: cannot be unpacked ({error})") from error


def unpack_tar(archive: Path, folder: Path, check: Check) -> None:
    def admit(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        plain = member.isfile() or member.isdir()
        kind = "file or folder" if plain else "a link or device"
        check.admit(member.name, kind, member.size)
        return tarfile.data_filter(member, path)

    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter=admit)


def unpack_zip(archive: Path, folder: Path, check: Check) -> None:
    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            is_link = member.external_attr >> 28 == 0o12  # S_IFLNK of the mode that Unix writes
            kind = "a link" if is_link else "file or folder"
            check.admit(member.filename, kind, member.file_size)
        packed.extractall(folder)


def unpack_gz(archive: Path, target: Path, check: Check) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(archive) as source, open(target, "wb") as file:
        while chunk := source.read(CHUNK):
            check.admit(target.name, "file or folder", len(chunk))
            file.write(chunk)
