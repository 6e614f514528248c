"""Unpacking archives: only plain files and folders, below the target, and no more than is sound.

Members are copied out one by one rather than left to `extractall`: whatever the version of Python,
none of them can write outside the target, become a link or a device, or bring permissions along.
"""

import gzip
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, NamedTuple

MEMBERS = 2_000_000  # CINIC-10 has 270,000
# bytes unpacked for one that is packed; of the data sets here, MNIST's images have the most: 5
RATIO = 200
SMALL = 2**20  # bytes that are harmless whatever their ratio
CHUNK = 2**20


class ArchiveError(ValueError):
    """The archive is damaged, or holds what no data set has. `str(error)` names the archive and the
    member."""


class Member(NamedTuple):
    name: str
    kind: str  # file, folder, or what else it is
    open: Callable[[], IO[bytes]]


def unpack(archive: Path, folder: Path) -> None:
    """Write what a .tar, .tar.gz, .tgz, .zip or .gz file holds into `folder`.

    Raises ArchiveError; what stands before the faulty member has been written by then.
    """
    budget = max(archive.stat().st_size * RATIO, SMALL)
    try:
        for count, member in enumerate(members(archive)):
            target = folder / safe_name(archive, member)
            if count == MEMBERS:
                raise ArchiveError(f"{archive}: has more than {MEMBERS:,} members")
            if member.kind == "folder":
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with member.open() as source, open(target, "wb") as file:
                while chunk := source.read(CHUNK):
                    budget -= len(chunk)
                    if budget < 0:
                        raise ArchiveError(
                            f"{archive}: unpacks to far more than a data set has (at"
                            f" {member.name!r})"
                        )
                    file.write(chunk)
    except ArchiveError:
        raise
    except Exception as error:  # tarfile, zipfile, zlib and the disk raise many types
        raise ArchiveError(f"{archive}: cannot be unpacked ({error})") from error


def safe_name(archive: Path, member: Member) -> PurePosixPath:
    """Return the member's path below the target; ArchiveError where that is not below it, or is no
    file or folder."""
    if member.kind not in ("file", "folder"):
        raise ArchiveError(
            f"{archive}: the member {member.name!r} is {member.kind}, not a file or folder"
        )
    for name in (PurePosixPath(member.name), PureWindowsPath(member.name)):
        if name.anchor or ".." in name.parts:
            raise ArchiveError(
                f"{archive}: the member {member.name!r} lies outside the archive's own folder"
            )
    return PurePosixPath(member.name)


def members(archive: Path) -> Iterator[Member]:
    """Yield what an archive holds, in its order; each can be opened until the next is asked for."""
    name = archive.name.lower()
    if name.endswith((".tar", ".tar.gz", ".tgz")):
        with tarfile.open(archive) as tar:
            for entry in tar:
                kind = (
                    "folder" if entry.isdir() else "file" if entry.isfile() else "a link or device"
                )
                yield Member(entry.name, kind, partial(tar.extractfile, entry))  # type: ignore[arg-type]
    elif name.endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                linked = info.external_attr >> 28 == 0o12  # S_IFLNK of the mode that Unix writes
                kind = "a link" if linked else "folder" if info.is_dir() else "file"
                yield Member(info.filename, kind, partial(packed.open, info))
    elif name.endswith(".gz"):
        with gzip.open(archive) as unpacked:
            yield Member(archive.name[: -len(".gz")], "file", lambda: unpacked)  # type: ignore[arg-type,return-value]
    else:
        raise ArchiveError(f"{archive}: must be a .tar, .tar.gz, .tgz, .zip or .gz file")
