"""origin.json: what a run was started with, and the versions and machines that computed it.

{"format": 2,               of the run directory
 "identity": "...",         the hash of "values"
 "started": "...",          the time at which the run started, in UTC; it stays when the run is
                            resumed, and is null if the run was started by a version without it
 "directory": "...",        the working directory that relative paths refer to
 "shape": [32, 32, 3],      of the stored inputs
 "sweep": "...",            the sweep that started the run; null for a single run
 "parts": [{"first_round": 0, "versions": {...}, "commit": ..., "source": <hash of the code>,
            "hardware": {...}, "data": {"arrays": <checksum>, ...}}],   another part if a resumed
                            run differs
 "values": {...}}           see `fedexp.rundir.identity.essential`
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.rundir.identity import digest

NAME, FORMAT = "origin.json", 2
KEYS = ("identity", "directory", "shape", "parts", "values")
# Keys that name files. They may name another place when a run is resumed, since the content of the
# files is compared.
PATH = re.compile(r".*\.(root|path|weights)")


def read(directory: Path) -> dict[str, Any]:
    """Return the content of origin.json. Raises ConfigError if the run has another format."""
    path = directory / NAME
    if not path.exists():
        raise ConfigError(f"{directory}: made by fedexp 0.1; read or continue it with that version")
    found = storage.read_mapping(path)
    with storage.reading(path):
        if found["format"] != FORMAT:
            raise ValueError(f"has format {found['format']}, not {FORMAT}")
        optional = {key: found.get(key) for key in ("started", "sweep")}
        return {key: found[key] for key in KEYS} | optional


def write(
    directory: Path,
    values: Mapping[str, Any],
    shape: Sequence[int],
    part: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    sweep: str | None = None,
) -> dict[str, Any]:
    """Write origin.json, or update it for a resumed run, and return its content.

    values: the result of `essential`. part: the entry of "parts" for the next rounds. before: the
    content until now; None if the run has no completed rounds, so that no earlier part counts.
    sweep: the name of the sweep that starts the run.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    begun: dict[str, Any] = {"started": started, "directory": str(Path.cwd()), "sweep": sweep}
    begun["parts"] = []
    if before is not None:
        begun = dict(before)
    parts = [each for each in begun["parts"] if each["first_round"] < part["first_round"]]
    if not parts or parts[-1] | {"first_round": part["first_round"]} != part:
        parts.append(dict(part))
    content = {
        "format": FORMAT,
        "identity": digest(values),
        "started": begun["started"],
        "directory": begun["directory"],
        "shape": list(shape),
        "sweep": begun["sweep"],
        "parts": parts,
        "values": dict(values),
    }
    storage.write_json(directory / NAME, content)
    return content


def differences(known: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Describe the values that affect the result and differ from those of a run, by key.

    known: the run's origin. values: the result of `essential` for the command.
    """
    before = known["values"]
    return {
        key: f"{key}: {before.get(key, '(absent)')} in the run, {values.get(key, '(absent)')} now"
        for key in sorted(before.keys() | values.keys())
        if before.get(key) != values.get(key) and not is_moved(key, values.get(key))
    }


def is_moved(key: str, value: object) -> bool:
    return PATH.fullmatch(key) is not None and isinstance(value, str) and Path(value).exists()


def check_data(
    directory: Path, known: Mapping[str, Any], data: Mapping[str, str], accepts: bool
) -> None:
    """Raise ConfigError if the data differ from the data of the run's last rounds.

    known: the run's origin. data: the checksums of the data, by name. accepts: whether the data may
    differ (`accept_changed_data`).
    """
    before = known["parts"][-1]["data"]
    changed = [name for name in {**before, **data} if before.get(name) != data.get(name)]
    if changed and not accepts:
        lines = [f"{name}: {before.get(name)} in the run, {data.get(name)} now" for name in changed]
        raise ConfigError(
            f"{directory}: the data have changed since the run started (checksums of"
            f" {'; '.join(lines)})\naccept_changed_data=true continues with the changed data and"
            " records the change"
        )
