"""Fetching the original files of a data set, checked by md5, with a message that says how to do it
by hand."""

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from fedexp.core.errors import ConfigError, require
from fedexp.data.archive import unpack

log = logging.getLogger("fedexp")
TIMEOUT = 60  # seconds without an answer


@dataclass(frozen=True)
class Download:
    """Original files of a data set on public hosts; each is fetched, and unpacked where it is
    packed, in `folder`."""

    hosts: tuple[str, ...]  # folders on the web, tried in order
    files: tuple[tuple[str, str], ...]  # (file name, md5)
    folder: Path
    note: str = ""
    packed: bool = True  # False: the files are used as they are

    def fetch(self, name: str, mirror: str | None) -> None:
        """Put the unpacked files into `folder`. `mirror` replaces the hosts: a web folder, or a
        single file's address.

        A file that is there with the right md5 is not fetched again. Raises ConfigError when that
        is impossible.
        """
        if mirror is not None:
            require(
                mirror.startswith(("http://", "https://")),
                "dataset.url",
                mirror,
                "an http:// or https:// address",
            )
        new = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _alone(self.folder / f".{name}.lock") as waited:
                if waited and self._are_whole():
                    # the other one has unpacked them, and others may be reading them already
                    return
                for filename, md5 in self.files:
                    self._fetch_file(name, filename, md5, mirror)
                    if self.packed:
                        _unpack(self.folder / filename, self.folder)
        except Exception as error:  # network, disk, md5 and archive errors have no common type
            with contextlib.suppress(OSError):  # not empty: an earlier file is there
                for path in new:
                    path.rmdir()
            raise ConfigError(self._by_hand(name, mirror, error)) from error

    def _are_whole(self) -> bool:
        from torchvision.datasets.utils import check_integrity

        return all(check_integrity(self.folder / filename, md5) for filename, md5 in self.files)

    def _fetch_file(self, name: str, filename: str, md5: str, mirror: str | None) -> None:
        from torchvision.datasets.utils import check_integrity, download_url

        if check_integrity(self.folder / filename, md5):
            return
        addresses = (
            [self._address(mirror, filename)]
            if mirror
            else [f"{host}{filename}" for host in self.hosts]
        )
        for attempt, address in enumerate(addresses, start=1):
            log.info(
                "%s: fetching %s into %s%s",
                name,
                address,
                self.folder,
                self.note and f" ({self.note})",
            )
            try:
                with _timeout(TIMEOUT), _beside(self.folder) as temporary:
                    download_url(address, temporary, filename, md5)
                    os.replace(temporary / filename, self.folder / filename)
                return
            except Exception as error:
                if attempt == len(addresses):
                    raise
                log.info("%s: %s; trying the next host", name, error)

    def _address(self, mirror: str, filename: str) -> str:
        if len(self.files) == 1 and not mirror.endswith("/"):
            return mirror
        return f"{mirror.rstrip('/')}/{filename}"

    def _by_hand(self, name: str, mirror: str | None, error: Exception) -> str:
        files = "\n".join(f"  {filename}  (md5 {md5})" for filename, md5 in self.files)
        kind = (
            "the address of this file" if len(self.files) == 1 else "the web folder of these files"
        )
        unpacked = " (they are unpacked there by the next run)" * self.packed
        return (
            f"dataset={name}: its files are missing or incomplete and could not be fetched from"
            f" {mirror or ' or '.join(self.hosts)}"
            f" ({error}).{self.note and f' Note: {self.note}.'}\nPut into"
            f" {self.folder.absolute()}{unpacked}:\n{files}\nor"
            f" name a mirror: dataset.url=<{kind}>"
        )


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Allow one process at a time, of the jobs of a sweep that may all need the same files; yield
    whether it had to wait."""
    lock = FileLock(path)
    waited = False
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
    socket.setdefaulttimeout(seconds)  # torchvision offers no other way, and waits for ever without
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack beside the archive, then move: an interrupted run leaves no half of a data set in its
    place."""
    with _beside(folder) as temporary:
        unpack(archive, temporary)
        for item in temporary.iterdir():
            target = folder / item.name
            if target.is_dir():
                shutil.copytree(item, target, dirs_exist_ok=True)
            else:
                os.replace(item, target)


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder on the same disk as the files that will be moved out of it."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as temporary:
        yield Path(temporary)
