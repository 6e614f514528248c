"""Download a data set's original files, with md5 checks and instructions for a manual download."""

import contextlib
import gzip
import logging
import os
import shutil
import socket
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from fedexp.core.errors import ConfigError, require

log = logging.getLogger("fedexp")
TIMEOUT = 60  # seconds without a response


@dataclass(frozen=True)
class Download:
    """A data set's original files on public hosts, downloaded to `folder` and unpacked there."""

    hosts: tuple[str, ...]  # folders on the web, tried in order
    files: tuple[tuple[str, str], ...]  # (file name, md5)
    folder: Path
    note: str = ""
    packed: bool = True  # False: the files are used as they are

    def fetch(self, name: str, mirror: str | None) -> None:
        """Download the files to `folder` and unpack them.

        A file that already has the correct md5 is not downloaded again.

        mirror: replaces the hosts by a web folder, or by the address of a single file.

        Raises ConfigError if the files cannot be downloaded or unpacked.
        """
        good = mirror is None or mirror.startswith(("http://", "https://"))
        require(good, "dataset.url", mirror, "an http:// or https:// address")
        new = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _alone(self.folder / f".{name}.lock") as waited:
                # another process has unpacked the files, and others may already be reading them
                if waited and all(map(self._is_whole, self.files)):
                    return
                for file in self.files:
                    if not self._is_whole(file):
                        self._fetch_file(name, file, mirror)
                    if self.packed:
                        unpack(self.folder / file[0], self.folder)
        except Exception as error:  # network, disk, md5 and archive errors have no common type
            with contextlib.suppress(OSError):  # not empty: it has an earlier file
                for path in new:
                    path.rmdir()
            raise ConfigError(self._by_hand(name, mirror, error)) from error

    def _is_whole(self, file: tuple[str, str]) -> bool:
        from torchvision.datasets.utils import check_integrity

        return check_integrity(self.folder / file[0], file[1])

    def _fetch_file(self, name: str, file: tuple[str, str], mirror: str | None) -> None:
        from torchvision.datasets.utils import download_url

        addresses = [f"{host}{file[0]}" for host in self.hosts]
        if mirror:
            one = len(self.files) == 1 and not mirror.endswith("/")
            addresses = [mirror if one else f"{mirror.rstrip('/')}/{file[0]}"]
        for attempt, address in enumerate(addresses, start=1):
            note = f" ({self.note})" if self.note else ""
            log.info("%s: fetching %s into %s%s", name, address, self.folder, note)
            try:
                with _timeout(TIMEOUT), _beside(self.folder) as temporary:
                    download_url(address, temporary, *file)
                    os.replace(temporary / file[0], self.folder / file[0])
                return
            except Exception as error:
                if attempt == len(addresses):
                    raise
                log.info("%s: %s; trying the next host", name, error)

    def _by_hand(self, name: str, mirror: str | None, error: Exception) -> str:
        files = "\n".join(f"  {filename}  (md5 {md5})" for filename, md5 in self.files)
        one = len(self.files) == 1
        kind = "the address of this file" if one else "the web folder of these files"
        unpacked = " (they are unpacked there by the next run)" if self.packed else ""
        note = f" Note: {self.note}." if self.note else ""
        return (
            f"dataset={name}: its files are missing or incomplete and could not be fetched from"
            f" {mirror or ' or '.join(self.hosts)} ({error}).{note}\n"
            f"Put into {self.folder.absolute()}{unpacked}:\n{files}\n"
            f"or name a mirror: dataset.url=<{kind}>"
        )


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Let one process at a time run the block, and yield whether this process had to wait.

    The jobs of a sweep may all need the same files.
    """
    lock, waited = FileLock(path), False
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that fetches the same files (%s)", path)
        waited = True
        lock.acquire()
    try:
        yield waited
    finally:
        path.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)  # torchvision has no timeout option and would wait forever
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive in a temporary folder, then move the files to `folder`.

    An interrupted run leaves no partial data set. Nothing is written outside the folder: tarfile
    refuses such members, and zipfile renames them and creates no links.
    """
    with _beside(folder) as temporary:
        if ".tar" in archive.name:
            with tarfile.open(archive) as tar:
                tar.extractall(temporary, filter="data")
        elif archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(temporary)
        else:
            with gzip.open(archive) as source, open(temporary / archive.stem, "wb") as file:
                shutil.copyfileobj(source, file)
        for item in temporary.iterdir():
            target = folder / item.name
            if target.is_dir():
                shutil.copytree(item, target, dirs_exist_ok=True)
            else:
                os.replace(item, target)


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside `folder`, so that its files can be moved on the same disk."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as temporary:
        yield Path(temporary)
