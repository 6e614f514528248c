"""The checksums of a finished run's files (checksums.json).

They are written with the results, so that a number that was changed later is noticed wherever the
file is read. Runs of earlier versions have no such file, and their files are read unchecked.
"""

from pathlib import Path

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.rundir import files

NAME = files.CHECKSUMS
CHECKED = (files.SUMMARY, files.CONFIG, files.OVERRIDES, *files.TABLES)


def write(directory: Path) -> None:
    """Write the checksum of each file that the run has."""
    found = {name: checksum(directory / name) for name in CHECKED if (directory / name).exists()}
    storage.write_json(directory / NAME, found)


def check(directory: Path, name: str) -> None:
    """Raise ConfigError if a file is not as the run wrote it. name: the name of the file."""
    if not (directory / NAME).exists():
        return
    known = storage.read_mapping(directory / NAME).get(name)
    if known is not None and checksum(directory / name) != known:
        raise ConfigError(
            f"{directory / name}: is not as the run wrote it ({NAME}); put the original file back,"
            f" run it again, or remove {NAME} to use the file as it is"
        )


def checksum(path: Path) -> str:
    """Return the CRC-32 checksum of a file."""
    with storage.reading(path):
        return f"{storage.crc_of(path, path.stat().st_size):08x}"
