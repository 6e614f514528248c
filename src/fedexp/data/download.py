"""Download the published files of a data set and check their md5 checksums.

If a download fails, the error message explains how to download the files manually.
"""

import contextlib
import gzip
import logging
import os
import shutil
import socket
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from filelock import FileLock

from fedexp.core.errors import ConfigError, reject_password
from fedexp.core.limits import Limit
from fedexp.data.types import DataSource

log = logging.getLogger("fedexp")
TIMEOUT = 60  # seconds to wait for a response
Address = Annotated[
    str, Limit("an http:// or https:// address", lambda v: v.startswith(("http://", "https://")))
]


class Published(DataSource):
    """Base class of data sets whose published files are downloaded if they are missing."""

    url: (
        Address | None
    )  # mirror to use instead of the hosts: a web folder or, if there is only one file, its address

    def __post_init__(self) -> None:
        """Reject a password before another message shows the address."""
        reject_password("dataset.url", self.url or "")
        super().__post_init__()

    @property
    @abstractmethod
    def hosts(self) -> Sequence[str]:
        """Return the web folders that have the files, in the order in which they are tried."""

    @property
    @abstractmethod
    def published(self) -> Sequence[tuple[str, str]]:
        """Return the name and md5 checksum of each file."""

    @property
    def download_folder(self) -> Path:
        """Return the folder in which the files are stored and unpacked."""
        return Path(self.data_dir)

    @property
    def is_present(self) -> bool:
        """Return whether all unpacked files exist."""
        return bool(self.paths) and all(path.is_file() for path in self.paths)

    def fetch_missing(self) -> None:
        """Download and unpack the files if they are missing.

        A file that exists and has the correct md5 checksum is not downloaded again. Raises
        ConfigError if the files cannot be downloaded or unpacked.
        """
        if self.is_present:
            return
        folder = self.download_folder
        try:
            with _locked(folder, f".{self.name}.lock"):  # several jobs may need the same files
                self._fetch_files(folder)
        except Exception as error:  # network, disk, md5 and archive errors have no common type
            raise ConfigError(self._instructions(folder, error)) from error

    def _fetch_files(self, folder: Path) -> None:
        from torchvision.datasets.utils import check_integrity

        if self.is_present:
            return  # another process has downloaded them
        for file, md5 in self.published:
            if not check_integrity(folder / file, md5):
                self._fetch_file(folder, file, md5)
            unpack(folder / file, folder)

    def _fetch_file(self, folder: Path, file: str, md5: str) -> None:
        from torchvision.datasets.utils import download_url

        addresses = [f"{host}{file}" for host in self.hosts]
        if self.url:
            is_file = len(self.published) == 1 and not self.url.endswith("/")
            addresses = [self.url if is_file else f"{self.url.rstrip('/')}/{file}"]
        for address in addresses:
            log.info("%s: downloading %s to %s", self.name, address, folder)
            try:
                with _timeout(TIMEOUT), _temporary(folder) as temporary:
                    download_url(address, temporary, file, md5)
                    os.replace(temporary / file, folder / file)
                return
            except Exception as error:
                if address == addresses[-1]:
                    raise
                log.info("%s: the download failed (%s); trying the next host", self.name, error)

    def _instructions(self, folder: Path, error: Exception) -> str:
        files = "\n".join(f"  {file}  (md5 {md5})" for file, md5 in self.published)
        return (
            f"dataset={self.name}: its files are missing and could not be downloaded from"
            f" {self.url or ' or '.join(self.hosts)} ({error})\n"
            f"Put these files into {folder.absolute()}; the next run unpacks archives:\n{files}\n"
            "Or download them from a mirror: dataset.url=<web folder with these files; if there is"
            " only one file, its address also works>"
        )


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Create a folder, and hold the lock `name` in it.

    If the block fails, the folders that were created are removed if they are empty. This is done
    before the lock is released, so that no other job has the lock.
    """
    path, new = folder / name, set[Path]()
    lock = FileLock(path)
    while not lock.is_locked:
        new |= {each for each in (folder, *folder.parents) if not each.exists()}
        # another job that failed may remove the folder while this one waits for the lock
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError):  # rmdir fails for a folder that is not empty
            path.unlink()
            for each in sorted(new, reverse=True):
                each.rmdir()
        raise
    finally:
        path.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)  # torchvision has no timeout option and could wait forever
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a temporary folder, then move the files to `folder`.

    The data set is therefore never incomplete, even if unpacking is interrupted. No file is written
    outside `folder`, and links that point outside `folder` are rejected.
    """
    with _temporary(folder) as temporary:
        if archive.suffix == ".gz" and ".tar" not in archive.name:
            with gzip.open(archive) as source, open(temporary / archive.stem, "wb") as file:
                shutil.copyfileobj(source, file)
        elif archive.suffix == ".zip":
            shutil.unpack_archive(archive, temporary)
        else:
            shutil.unpack_archive(archive, temporary, filter="data")
        for item in temporary.iterdir():
            target = folder / item.name
            if target.is_dir():
                shutil.copytree(item, target, dirs_exist_ok=True)
            else:
                os.replace(item, target)


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside `folder`, so that files can be moved without a copy."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as temporary:
        yield Path(temporary)
