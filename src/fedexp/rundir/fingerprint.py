"""Compute a run's fingerprint from the configuration values that determine the result.

The fingerprint identifies classes and data as follows. For a class of fedexp, it uses the name
without the module. For a user's class, it uses the module and the code. For a data set, it uses the
content of the files, not their path. The names of groups of runs contain a similar hash.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedexp.data.marks import content_mark, file_mark
from fedexp.rundir.code_hash import code_mark
from fedexp.rundir.revisions import recorded_revisions, value_of

FORMAT = 2  # version of the fingerprint's format
OWN = "fedexp."  # prefix of the classes of fedexp
TARGET = "_target_"

# Keys that do not affect the result, such as the device and the tracker. Their values may change
# when a run is resumed.
FREE = (
    "resume",
    "accept_changed_data",
    "tracker",
    "checkpoint_interval",
    "figures",
    "profile",  # in older configurations
    "data_dir",
    "choices",
    "expected",
    "revisions",  # `essential` copies these numbers into the parts
    "keep_models",
    "keep_local_models",
    "stop.minutes",
    "objective",
    "objective_direction",
    "hardware.device",  # but not hardware.precision
    "hardware.engine",
    "hardware.threads",
    "hardware.workers",
    "hardware.chunk",
    "hardware.jobs_per_gpu",  # in older configurations
    "hardware.jobs_together",  # in older configurations
)
SOURCE = re.compile(r"(?:dataset|surrogate\.dataset|scenario\.domains\.\d+)\.(\w+)")  # a data set
SINGLE = ("partition.path", "cohorts.path", "model.weights")  # one file
FILES = ".files"  # suffix of the key for data whose files are not named in the configuration

# Keys that were added later, with the value that keeps the earlier behaviour. The hash includes a
# key only if it has a different value, so older runs keep their fingerprint.
NEUTRAL = {
    "test_views": ["plain"],
    "evaluate": ["global"],
    "validation.fraction": 0.0,
    "validation.per_client": False,
    "evaluate_on": None,
    "test_per_client": 0.0,
    "surrogate.examples": None,
    "stop.patience": None,
    "stop.metric": None,
    "local_evaluation.every": None,
    "local_evaluation.examples": None,  # in older configurations
    "cohorts.path": None,
    "cohorts.draw": "seed",
    "partition.numpy_seed": None,
    "model.weights": None,
    "model.unit_features": None,
    "model.batch_norm": False,
    "model.lora.rank": 0,
    "model.lora.alpha": None,
    "model.lora.targets": [],
    "model.lora.freeze_a": False,
    "local.schedule": "exponential",
    "local.step_rounds": 10,
    "local.lr_min": 0.0,
    "local.warmup": 0,
    "local.drop_last": False,
    "local.keep_optimizer": False,
    "server.optimizer": None,
    "server.lr": None,
    "server.momentum": 0.0,
    "server.beta1": None,
    "server.beta2": 0.99,
    "server.tau": 0.001,
    "analysis._target_": "NoAnalysis",
    "schedule.partition": None,
    "schedule.classes": None,
    "schedule.clients": None,
    "partition.choice": "random",
    "scenario.replay": 0,
    "scenario.replay_policy": "reservoir",
    "scenario.order": "shared",
    "scenario.blur": 0.0,
    "algorithm.fisher": "old_tasks",
    "algorithm.new_model": "initial",
    "algorithm.reduction": "sum",
    "algorithm.norm": "squared",
    "algorithm.federations": 0,
}
# Removed keys with their former default, which all runs now use.
FORMER = {"hardware.convolution": "auto"}
EMPTY = ("schedule.partition", "schedule.classes")  # an empty list means null
SPLIT = "test_fraction"  # if null, the hash includes neither this key nor `split_seed`

PARTITION_NUMBERS = ("alpha", "shards_per_client")


def flatten(node: object, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts to one dict with dotted keys.

    If a list contains a dict, its items get the keys "0", "1", ... Any other list is a value.
    """
    if isinstance(node, list) and any(isinstance(item, dict) for item in node):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return {prefix: node}
    items: dict[str, Any] = {}
    for key, value in node.items():
        items |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return items


def essential(
    container: Mapping[str, Any], data: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the values that determine the result, by dotted key.

    container: the resolved configuration. data: the recorded `data_marks`. By default, the marks
    are computed from the files that the configuration names. If files are missing, their path is
    used instead.
    """
    marks = data_marks(container) if data is None else data
    flat = flatten(dict(container))
    for part, number in recorded_revisions(container).items():
        if isinstance(value_of(container, part), Mapping):
            flat[f"{part}.revision"] = number
    values: dict[str, Any] = FORMER | {k: mark for k, mark in marks.items() if k.endswith(FILES)}
    for key, value in flat.items():
        if key.rpartition(".")[2] == TARGET:
            value = class_name(value)
        if not (is_free(key) or is_neutral(key, value, flat) or is_unused(key, flat)):
            values[key] = marks.get(key, value)
    return values


def is_free(key: str) -> bool:
    """Return whether the value of this dotted key does not affect the result."""
    return source_field(key) in ("data_dir", "url") or any(
        key == free or key.startswith(f"{free}.") for free in FREE
    )


def is_neutral(key: str, value: object, flat: Mapping[str, Any]) -> bool:
    """Return whether a run with this value gives the same result as a run without the key.

    flat: the values of all keys.
    """
    if value is None and source_field(key) in ("layout", "test_splits"):
        return True
    if value == ["train"] and is_joinable(key, flat):
        return True
    if value == [] and key in EMPTY:
        value = None
    return key in NEUTRAL and bool(value == NEUTRAL[key])


def is_joinable(key: str, flat: Mapping[str, Any]) -> bool:
    """Return whether the key is `train_splits` of a data set that did not have it at first.

    Image folders, which have a root, always had it.
    """
    node = key.rpartition(".")[0]
    return source_field(key) == "train_splits" and f"{node}.root" not in flat


def is_unused(key: str, flat: Mapping[str, Any]) -> bool:
    """Return whether the key has no effect, given the values of the other keys."""
    node, _, name = key.rpartition(".")
    if name in (SPLIT, "split_seed"):  # image folders with a test part
        return flat.get(f"{node}.{SPLIT}", 0) is None
    # the node of the data set already has the options
    return key.startswith("surrogate.options") and f"surrogate.dataset.{TARGET}" in flat


def source_field(key: str) -> str | None:
    """Return the field name if a dotted key is a field of a data set, otherwise None."""
    found = SOURCE.fullmatch(key)
    return None if found is None else found[1]


def class_name(target: object) -> Any:
    """Return a class's name in the fingerprint: without the module if fedexp defines the class."""
    text = str(target)
    return text.rpartition(".")[2] if text.startswith(OWN) else target


def is_own_class(key: str, value: object) -> bool:
    """Return whether the value of a key names a class outside fedexp."""
    return key.rpartition(".")[2] == TARGET and isinstance(value, str) and not value.startswith(OWN)


def code_marks(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the code marks of users' classes by key. Classes without a mark are left out."""
    values = flatten(dict(container))
    marks = {key: code_mark(value) for key, value in values.items() if is_own_class(key, value)}
    return {key: mark for key, mark in marks.items() if mark is not None}


def data_marks(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the marks of data paths and users' classes by key.

    A mark identifies the content of the data or the code. Data or code that cannot be read are left
    out.
    """
    from fedexp.data.image_files import list_files, list_tree_files

    values = flatten(dict(container))
    marks: dict[str, str | None] = {}
    for key, value in values.items():
        if not isinstance(value, str):
            continue
        node = key.rpartition(".")[0]
        data_dir, field = str(values.get(f"{node}.data_dir", value)), source_field(key)
        if field == "root" and f"{node}.url" in values:
            # published data, which may not exist before the first run downloads them
            marks[key] = Path(value).name
        elif field == "root":
            splits = values.get(f"{node}.train_splits", ["train"])
            test = values.get(f"{node}.test_splits") or ["test"]
            undivided = values.get(f"{node}.{SPLIT}") is not None
            find = partial(list_tree_files, Path(value), splits, test, undivided)
            marks[key] = content_mark(find, data_dir)
        elif field == "path" and Path(value).is_dir():  # otherwise the name of a data set on a hub
            marks[key] = content_mark(partial(list_files, Path(value)), data_dir)
        elif key in SINGLE:
            marks[key] = file_mark(Path(value))
    return code_marks(container) | {key: mark for key, mark in marks.items() if mark is not None}


def fingerprint(container: Mapping[str, Any], data: Mapping[str, str] | None = None) -> str:
    """Return `<format>:<SHA-256 in hexadecimal>`, equal for configurations with the same result.

    container, data: see `essential`. Run directories store the fingerprint (see
    `fedexp.rundir.origin`). To compute the fingerprint again from config.yaml, you need the image
    folders that it names.
    """
    text = json.dumps(essential(container, data), sort_keys=True, default=str)
    return f"{FORMAT}:{hashlib.sha256(text.encode()).hexdigest()}"


def short_hash(container: Mapping[str, Any], data: Mapping[str, str] | None = None) -> str:
    """Return the first eight hexadecimal digits of the fingerprint."""
    return fingerprint(container, data).partition(":")[2][:8]


def setting(container: Mapping[str, Any]) -> str:
    """Return the short name <algorithm>_<dataset>_<partition>, which is the same for all seeds.

    The name ends with the value of alpha or shards_per_client if the partition has one of them.

    container: the configuration, including `choices`, the chosen option of each group.
    """
    choices = container["choices"]
    number = next(
        (f"{container[key]}" for key in PARTITION_NUMBERS if container.get(key) is not None), ""
    )
    return f"{choices['algorithm']}_{choices['dataset']}_{choices['partition']}{number}"


def group_name(container: Mapping[str, Any]) -> str:
    """Return the name of the group of runs that differ only in their seeds.

    The name consists of `setting` and a hash of the values that determine the result, without the
    seeds. For this hash, data are identified by their path, so that the name can be computed on a
    machine that does not have the data.
    """
    unseeded = {key: value for key, value in container.items() if key not in ("seed", "seeds")}
    return f"{setting(container)}_{short_hash(unseeded, {})}"
