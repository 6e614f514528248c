"""Download the published files of a data set and check their md5 checksums.

If a download fails, the error message explains how to download the files manually.
"""

import contextlib
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
    @abstractmethod
    def is_present(self) -> bool:
        """Return whether the unpacked files exist."""

    def find(self) -> str:
        names = ", ".join(name for name, _ in self.published)
        return "" if self.is_present else f"downloads {names} to {self.download_folder}"

    def fetch_missing(self) -> None:
        """Download and unpack the files if they are missing.

        A file that exists and has the correct md5 checksum is not downloaded again. Raises
        ConfigError if the files cannot be downloaded or unpacked.
        """
        if self.is_present:
            return
        folder = self.download_folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # several jobs may need the same files
            with FileLock(folder / f".{self.name}.lock"), _timeout(TIMEOUT):
                if not self.is_present:
                    self._fetch_files(folder)
        except Exception as error:  # network, disk, md5 and archive errors have no common type
            raise ConfigError(self._instructions(folder, error)) from error

    def _fetch_files(self, folder: Path) -> None:
        from torchvision.datasets.utils import check_integrity

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
                return download_url(address, folder, file, md5)
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
def _timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)  # torchvision has no timeout option and could wait forever
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive with a correct checksum into a temporary folder, then move its files.

    The data set is therefore never incomplete, even if unpacking is interrupted.
    """
    from torchvision.datasets.utils import extract_archive

    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as temporary:
        extract_archive(str(archive), temporary)
        for item in Path(temporary).iterdir():
            target = folder / item.name
            if target.is_dir():
                shutil.copytree(item, target, dirs_exist_ok=True)
            else:
                os.replace(item, target)
