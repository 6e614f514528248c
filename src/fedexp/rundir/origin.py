"""origin.json: what a run was started with, and the versions and machines that computed it.

{"format": 2,               of the run directory
 "identity": "...",         the hash of "values"
 "started": "...",          the time at which the run started, in UTC; it stays when the run is
                            resumed, and is null if the run was started by a version without it
 "directory": "...",        the working directory that relative paths refer to
 "shape": [32, 32, 3],      of the stored inputs
 "parameters": {"all": 74, "trained": 10},    numbers of the initial model
 "sweep": "...",            the sweep that started the run; null for a single run
 "commands": [{"first_round": 0, "argv": ["fedexp", ...], "directory": "...",
               "PYTHONPATH": ...}],         another one if the run was resumed with another one
 "parts": [{"first_round": 0, "versions": {...}, "commit": ..., "source": <hash of the code>,
            "hardware": {...}, "packages": {...}, "data": {"arrays": <checksum>, ...},
            "own_files": {<name>: <hash>}}],   another part if a resumed run differs; see
                            `fedexp.training.own_files`
 "values": {...}}           see `fedexp.rundir.identity.essential`
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.rundir.identity import DATASETS, digest

NAME, FORMAT = "origin.json", 2
KEYS = ("identity", "directory", "shape", "parts", "values")
OPTIONAL = ("started", "sweep", "parameters", "commands")  # runs of earlier versions lack some
INVENTORY = ("packages", "own_files")  # keys of a part that are only in origin.json
# Keys that name files. They may name another place when a run is resumed if the content of the file
# is compared.
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
        optional = {key: found.get(key) for key in OPTIONAL}
        return {key: found[key] for key in KEYS} | optional


def write(
    directory: Path,
    values: Mapping[str, Any],
    shape: Sequence[int],
    part: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    sweep: str | None = None,
    parameters: Mapping[str, int] | None = None,
    command: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write origin.json, or update it for a resumed run, and return its content.

    values: the result of `essential`. part: the entry of "parts" for the next rounds. before: the
    content until now; None if the run has no completed rounds, so that no earlier part counts.
    sweep: the name of the sweep that starts the run. parameters: numbers of the initial model.
    command: how this process was started.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    begun: dict[str, Any] = {"started": started, "directory": str(Path.cwd()), "sweep": sweep}
    if before is not None:
        begun = dict(before)
    first = part["first_round"]
    given = [] if command is None else [{"first_round": first, **command}]
    content = {
        "format": FORMAT,
        "identity": digest(values),
        "started": begun["started"],
        "directory": begun["directory"],
        "shape": list(shape),
        "parameters": begun.get("parameters") or parameters,
        "sweep": begun["sweep"],
        "commands": continued(begun.get("commands"), given),
        "parts": continued(begun.get("parts"), [dict(part)]),
        "values": dict(values),
    }
    storage.write_json(directory / NAME, content)
    return content


def continued(
    before: Sequence[Mapping[str, Any]] | None, new: Sequence[dict[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return a list whose items begin in a round, with another one if it differs from the last.

    Items whose rounds are computed again are left out.
    """
    found = list(before or ())
    for each in new:
        found = [item for item in found if item["first_round"] < each["first_round"]]
        if not found or {**found[-1], "first_round": each["first_round"]} != each:
            found.append(each)
    return found


def in_short(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part as summary.json has it, without the lists of packages and own files."""
    return {key: value for key, value in part.items() if key not in INVENTORY}


def differences(known: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Describe the values that affect the result and differ from those of a run, by key.

    known: the run's origin. values: the result of `essential` for the command.
    """
    before = known["values"]
    return {
        key: f"{key}: {before.get(key, '(absent)')} in the run, {values.get(key, '(absent)')} now"
        for key in sorted(before.keys() | values.keys())
        if before.get(key) != values.get(key) and not is_moved(known, key, values.get(key))
    }


def with_names_of(known: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a command with the names that a run has for files that have moved.

    So its identity does not depend on where its files are. known, values: as for `differences`.
    """
    return {
        key: known["values"][key] if is_moved(known, key, value) else value
        for key, value in values.items()
    }


def is_moved(known: Mapping[str, Any], key: str, value: object) -> bool:
    """Return whether a value is another name for a file of a run, or for its data.

    The name may be the absolute path now. Another place counts only if the content is compared.
    """
    before = known["values"].get(key)
    if not (PATH.fullmatch(key) and isinstance(before, str) and isinstance(value, str)):
        return False
    if Path(known["directory"], before) == Path(value):
        return True
    is_compared = key.startswith(DATASETS) or key in known["parts"][-1]["data"]
    return is_compared and Path(value).exists()


def changed_data(known: Mapping[str, Any], data: Mapping[str, str]) -> list[str]:
    """Return the names of data that differ from those of a run's last rounds.

    Runs of earlier versions lack the checksums of some files. known: the run's origin. data: the
    checksums of the data, by name.
    """
    before = known["parts"][-1]["data"]
    return [name for name, value in before.items() if data.get(name) != value]


def check_data(
    directory: Path, known: Mapping[str, Any], data: Mapping[str, str], accepts: bool
) -> None:
    """Raise ConfigError if the data differ from the data of the run's last rounds.

    known: the run's origin. data: the checksums of the data, by name. accepts: whether the data may
    differ (`accept_changed_data`).
    """
    before, changed = known["parts"][-1]["data"], changed_data(known, data)
    if changed and not accepts:
        lines = [f"{name}: {before[name]} in the run, {data.get(name)} now" for name in changed]
        raise ConfigError(
            f"{directory}: the data have changed since the run started (checksums of"
            f" {'; '.join(lines)})\naccept_changed_data=true continues with the changed data and"
            " records the change"
        )
