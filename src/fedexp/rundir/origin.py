"""Origin of a run: what its directory notes of how it began (fingerprint.json), and what a resume
compares with it.

{"fingerprint": "2:...",          as `identity.fingerprint`
 "marks": {"dataset.root": ...},  what stands in it for data that the configuration names by a path,
 and for the code of
                                  a user's own classes
 "data": {"train": ..., ...},     what the data were when they had been loaded
 "way": {"precision": ...},       in which steps are computed, where that was left to timing
 "directory": "..."}              the working directory, in which relative paths begin
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict

from fedexp.core import storage
from fedexp.core.errors import ConfigError
from fedexp.rundir.fingerprint import code_marks, data_marks, essential, fingerprint
from fedexp.rundir.own_code import CODE, checksums, joined

if TYPE_CHECKING:
    from fedexp.data.types import Data  # imports torch

NAME = "fingerprint.json"
PATHS = (
    *("data_dir", "dataset.root", "surrogate.options.data_dir", "surrogate.options.root"),
    *("partition.path", "cohorts.path", "model.weights", "algorithm.embeddings"),
)


def note(
    directory: Path,
    container: Mapping[str, Any],
    data: "Data",
    way: Mapping[str, str] | None = None,
) -> None:
    """Write the file, where there is none. way: of computing, which a resumed run keeps."""
    if read(directory):
        return
    marks = data_marks(container)
    found = {"fingerprint": fingerprint(container, marks), "marks": marks, "data": describe(data)}
    storage.write_json(
        directory / NAME, found | {"way": dict(way or {}), "directory": str(Path.cwd())}
    )


def renew(directory: Path, container: Mapping[str, Any]) -> None:
    """Note the fingerprint of a run that was given other options which a resume may change."""
    if found := read(directory):
        marks = mapping_of(found, "marks") or data_marks(container)
        storage.write_json(directory / NAME, found | {"fingerprint": fingerprint(container, marks)})


def read(directory: Path) -> dict[str, Any]:
    """Return the content of the file; {} where there is none that can be read."""
    try:
        found = json.loads(storage.regular(directory / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def fingerprint_of(directory: Path) -> dict[str, Any]:
    """Return the fingerprint of the run there, for summary.json."""
    return {"fingerprint": read(directory).get("fingerprint")}


def describe(data: "Data") -> dict[str, Any]:
    """Describe data: sizes, number of classes, a checksum of class names and labels, and one of
    inputs that are no decoded pictures: the same JPEG may be decoded to other pixels by another
    version of Pillow."""
    digest = hashlib.sha256("\n".join(data.classes).encode("utf-8", "surrogateescape"))
    for labels in (data.y_train, data.y_test):
        digest.update(labels.cpu().numpy().astype("<i8").tobytes())
    shape = [int(n) for n in data.x_train.shape[1:]]
    sizes = {"train": len(data.y_train), "test": len(data.y_test), "classes": data.num_classes}
    inputs = {} if data.checksum is None else {"inputs": data.checksum}
    return sizes | {"shape": shape, "labels": digest.hexdigest()[:16]} | inputs


def differences(
    directory: Path, saved: Mapping[str, Any], container: Mapping[str, Any]
) -> list[str]:
    """Return a line for each value that decides the result and is another one in the run there.
    saved: its config.yaml.

    Data that are there on one side only (moved before they were noted, or missing now) are left to
    who loads them, to `check_data` and to the partition; other code of a class of a user's own is
    no difference, see `changed_code`."""
    noted = mapping_of(read(directory), "marks")
    there, asked = noted or data_marks(saved), data_marks(container)
    before, now = essential(saved, there), essential(container, asked)
    unknown = there.keys() ^ asked.keys() | {
        key for key, (then, now) in codes(noted, container).items() if same_class(then, now)
    }
    return [
        f"{key}: {before.get(key, '(absent)')} there, {now.get(key, '(absent)')} asked for"
        for key in sorted((now.keys() | before.keys()) - unknown)
        if now.get(key) != before.get(key)
    ]


def codes(noted: Mapping[str, str], container: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return key of each class of a user's own -> (mark noted, mark now)."""
    return {key: (noted[key], mark) for key, mark in code_marks(container).items() if key in noted}


def same_class(then: str, now: str) -> bool:
    """Return whether two marks are of the same class, whatever its code."""
    return then.partition(CODE)[0] == now.partition(CODE)[0]


def changed_code(directory: Path, container: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return `codes` of the classes whose code is another than that of the rounds before, as noted
    in the directory."""
    found = codes(mapping_of(read(directory), "marks"), container)
    return {
        key: (then, now)
        for key, (then, now) in found.items()
        if same_class(then, now) and checksums(then)[-1] != checksums(now)[-1]
    }


def note_changed_code(directory: Path, container: Mapping[str, Any]) -> None:
    """Note that rounds from here on are made with other code: the run stands for no run with one
    code alone."""
    found = read(directory)
    both = {key: joined(*marks) for key, marks in changed_code(directory, container).items()}
    marks = mapping_of(found, "marks") | both
    storage.write_json(
        directory / NAME, found | {"marks": marks, "fingerprint": fingerprint(container, marks)}
    )


def check_data(directory: Path, data: "Data") -> None:
    """Raise ConfigError where the data are other than those that the run there began with."""
    before, now = mapping_of(read(directory), "data"), describe(data)
    if wrong := [
        f"{key}: {before[key]} there, {now[key]} now"
        for key in now
        if before.get(key, now[key]) != now[key]
    ]:
        raise ConfigError(
            f"resume={directory}: the data are not those that this run began with\n  "
            + "\n  ".join(wrong)
        )


def mapping_of(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = node.get(key)
    return found if isinstance(found, dict) else {}


def from_where_it_began(config: DictConfig, directory: Path, typed: Sequence[str]) -> DictConfig:
    """Return the configuration of a resumed run, in which relative paths of data begin where they
    did: in the working directory of the run's first command, unless they have been typed anew.

    typed: keys of the command line that resumes it."""
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
    """Return whether the value follows from others, such as ${data_dir}/photos."""
    parent, _, name = key.rpartition(".")
    return OmegaConf.is_interpolation(OmegaConf.select(config, parent), name)
