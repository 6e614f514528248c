"""Record how a run started (fingerprint.json), and compare a resumed run with this record.

{"fingerprint": "2:...",          `fingerprint` of the configuration and the marks "marks":
 {"dataset.files": ...}, checksums of the data and of the code of users' classes "data": {"train":
 ..., ...},     description of the loaded data "way": {"precision": ...},       how steps are
 computed "directory": "..."}              the working directory that relative paths refer to
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.data.marks import (
    BYTES,
    checksum,
    checksums,
    content_mark,
    count_changed_files,
    join_marks,
)
from fedexp.rundir.fingerprint import (
    FILES,
    data_marks,
    essential,
    fingerprint,
    flatten,
)

if TYPE_CHECKING:
    from fedexp.data.types import Data, DataSource  # imports torch

log = logging.getLogger("fedexp")

NAME = "fingerprint.json"
PATHS = (
    *("data_dir", "dataset.root", "surrogate.options.data_dir", "surrogate.options.root"),
    *("partition.path", "cohorts.path", "model.weights"),
)


def current_marks(
    container: Mapping[str, Any],
    sources: Mapping[str, "DataSource"],
    data: "Data | None" = None,
) -> dict[str, str]:
    """Return the marks of a run's code and data. Unreadable code and data have no mark.

    sources: the data sources by configuration key. data: the loaded data. Inputs that do not come
        from files get a mark.
    """
    found = data_marks(container)
    for key, source in sources.items():
        if not any(BYTES in found.get(f"{key}.{name}", "") for name in ("root", "path")):
            mark = content_mark(partial(getattr, source, "files"), source.data_dir)
            found |= {} if mark is None else {key + FILES: mark}
    inputs = None if data is None else data.checksum
    return found if inputs is None else found | {"inputs": f"arrays{BYTES}{inputs})"}


def record(
    directory: Path,
    container: Mapping[str, Any],
    data: "Data",
    marks: Mapping[str, str],
    way: Mapping[str, str] | None = None,
    resumed: bool = True,
) -> None:
    """Write fingerprint.json, or update it for a resumed run.

    If the code or data have changed, the marks combine the old and the new checksums. Then the run
    never counts as equal to a run that was made with only one version.

    marks: the run's `current_marks`. way: how steps are computed. A resumed run keeps the recorded
    way. resumed: False if the run has no completed rounds. In this case, the record of an earlier
    attempt is ignored.
    """
    found = read(directory)
    before = recorded_marks(directory) if resumed else {}
    recorded = get_mapping(found, "way") if resumed else {}
    begun_in = found.get("directory")
    kept = before | dict(marks) | {key: mark for key, mark in before.items() if checksums(mark)}
    kept |= {key: join_marks(then, now) for key, (then, now) in find_changes(before, marks).items()}
    content = {
        "fingerprint": fingerprint(container, kept),
        "marks": kept,
        "data": describe_data(data),
        "way": {k: v for k, v in recorded.items() if isinstance(v, str)} or dict(way or {}),
        "directory": begun_in if isinstance(begun_in, str) else str(Path.cwd()),
    }
    if content != found:
        storage.write_json(directory / NAME, content)


def read(directory: Path) -> dict[str, Any]:
    """Return the content of fingerprint.json, or an empty dict if the file cannot be read."""
    try:
        found = storage.read_json(directory / NAME)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def fingerprint_of(directory: Path) -> dict[str, Any]:
    """Return a dict with the recorded fingerprint of a run, for summary.json."""
    return {"fingerprint": read(directory).get("fingerprint")}


def describe_data(data: "Data") -> dict[str, Any]:
    """Describe data by sizes, number of classes, input shape, and a checksum of the labels.

    The checksum also covers the class names.
    """
    labels = [y.cpu().numpy().astype("<i8").tobytes() for y in (data.y_train, data.y_test)]
    sizes = {"train": len(data.y_train), "test": len(data.y_test), "classes": data.num_classes}
    shape = [int(n) for n in data.x_train.shape[1:]]
    return sizes | {"shape": shape, "labels": checksum("\n".join(data.classes), *labels)}


def recorded_marks(directory: Path) -> dict[str, str]:
    """Return the marks recorded in a run directory."""
    found = get_mapping(read(directory), "marks")
    return {key: mark for key, mark in found.items() if isinstance(mark, str)}


def differences(
    directory: Path, saved: Mapping[str, Any], container: Mapping[str, Any]
) -> list[str]:
    """Describe the values that affect the result and differ from the saved run, one per line.

    saved: the run's config.yaml. container: the configuration of the command.

    `check_data` compares data that have a recorded mark. If only the run or only the command has
    the data, because files were moved or are missing, the partitions are compared instead. Changed
    code of a class is not a difference here, see `find_changes`.
    """
    recorded = recorded_marks(directory)
    there, asked = recorded or data_marks(saved), data_marks(container)
    before, now = essential(saved, there), essential(container, asked)
    unknown = there.keys() ^ asked.keys()
    unknown |= {key for key, mark in asked.items() if have_same_source(recorded.get(key, ""), mark)}
    return [
        f"{key}: {before.get(key, '(absent)')} in the run, {now.get(key, '(absent)')} now"
        for key in sorted((now.keys() | before.keys()) - unknown)
        if now.get(key) != before.get(key)
    ]


def find_changes(recorded: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return (recorded mark, current mark), by key, for data and users' classes that have changed.

    The latest recorded checksum is compared with the current one.
    """
    found = {}
    for key in sorted(recorded.keys() & now.keys()):
        then, mark = recorded[key], now[key]
        known = checksums(then) and have_same_source(then, mark)
        if known and checksums(then)[-1] != checksums(mark)[-1]:
            found[key] = then, mark
    return found


def have_same_source(then: str, now: str) -> bool:
    """Return whether two marks for a key describe the same data or class, ignoring checksums."""
    same = then.partition(" (")[0] == now.partition(" (")[0]
    return bool(then and checksums(now)) and (same or BYTES in now)


def check_data(
    directory: Path,
    marks: Mapping[str, str],
    container: Mapping[str, Any],
    data: "Data | None" = None,
) -> None:
    """Raise ConfigError if the data differ from the data that the run was made with.

    With `accept_changed_data`, the inputs may differ. Sizes and labels must always be equal, since
    the partition depends on them.

    marks: the `current_marks`. data: the loaded data, or None if the data are not loaded.
    """
    before, now = get_mapping(read(directory), "data"), {} if data is None else describe_data(data)
    lines = [
        f"{key}: {before[key]} in the run, {now[key]} now"
        for key in now
        if before.get(key, now[key]) != now[key]
    ]
    advice = (
        ""
        if lines
        else "\naccept_changed_data=true continues with the changed data and records the change"
    )
    found = find_changes(recorded_marks(directory), marks)
    if not lines and container.get("accept_changed_data"):
        return
    lines += [
        f"{key}: {describe_difference(*found[key], container, key)}"
        for key in found
        if BYTES in marks[key]
    ]
    if lines:
        raise ConfigError(
            f"{directory}: the data have changed since the run started\n  "
            + "\n  ".join(lines)
            + advice
        )


def log_changes(directory: Path, marks: Mapping[str, str], container: Mapping[str, Any]) -> None:
    """Log which code and data have changed since the previous rounds."""
    for key, (then, now) in find_changes(recorded_marks(directory), marks).items():
        if BYTES in now:
            words = f"the data have changed, {describe_difference(then, now, container, key)}"
        else:
            words = f"the code of {now.partition(' ')[0]} has changed"
        log.warning("%s: %s since the previous rounds", key, words)


def describe_difference(then: str, now: str, container: Mapping[str, Any], key: str) -> str:
    """Describe how two marks of data differ. If possible, give the number of changed files."""
    data_dir = flatten(container).get(f"{key.rpartition('.')[0]}.data_dir", "")
    number = count_changed_files(then, now, str(data_dir))
    if number is None:
        return f"{then} in the run, {now} now"
    return f"{number:,} of {now.partition(' (')[0]} differ"


def get_mapping(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = node.get(key)
    return found if isinstance(found, dict) else {}


def with_original_paths(config: DictConfig, directory: Path, typed: Sequence[str]) -> DictConfig:
    """Return a resumed run's configuration with absolute data paths.

    A stored relative path refers to the working directory of the command that started the run. A
    path given in the command that resumes the run is not changed.

    typed: the keys given in the command that resumes the run.
    """
    place = read(directory).get("directory")
    if not isinstance(place, str):
        return config
    changed = config.copy()
    with open_dict(changed):
        for key in PATHS:
            value = OmegaConf.select(changed, key, throw_on_resolution_failure=False)
            if (
                key in typed
                or not isinstance(value, str)
                or (key != "data_dir" and is_interpolated(changed, key))
            ):
                continue
            if not Path(value).is_absolute() and Path(place, value).exists():
                OmegaConf.update(changed, key, str(Path(place, value)))
    return changed


def is_interpolated(config: DictConfig, key: str) -> bool:
    """Return whether the value of a key refers to other keys, as in ${data_dir}/photos."""
    parent, _, name = key.rpartition(".")
    return OmegaConf.is_interpolation(OmegaConf.select(config, parent), name)
