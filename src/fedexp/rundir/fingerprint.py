"""Fingerprint of a run: the part of its configuration that decides its result, and the names that
follow.

A class of fedexp counts by its own name and not by the module that it lies in, one of a user's by
its module and its code, data count by what they are and not by their path.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedexp.data.marks import checksums, content_mark, file_mark
from fedexp.rundir.code_hash import CODE, marked
from fedexp.rundir.revisions import noted

FORMAT = 2  # of fingerprints
OWN = "fedexp."
TARGET = "_target_"

# What does not decide the result: where a run is computed and how it is watched. It may change when
# a run is resumed.
FREE = (
    *(
        "resume",
        "accept_changed_data",
        "tracker",
        "checkpoint_interval",
        "figures",
        "profile",
        "data_dir",
        "choices",
        "expected",
    ),
    "revisions",  # which `with_revisions` puts into the parts that they are of
    *("keep_models", "keep_local_models"),
    *("stop.minutes", "objective", "objective_direction"),
    # not .precision
    *(
        "hardware.device",
        "hardware.engine",
        "hardware.threads",
        "hardware.workers",
        "hardware.chunk",
    ),
    # configurations of earlier runs have .jobs_together
    *("hardware.jobs_per_gpu", "hardware.jobs_together"),
)
# The nodes that are data sets, and the values that are paths of data.
DATASET = re.compile(r"(dataset|surrogate\.dataset|scenario\.domains\.\d+)\.(data_dir|url|root)")
# a name on a hub, or a folder
HUB = re.compile(r"(dataset|surrogate\.dataset|scenario\.domains\.\d+)\.path")
SINGLE = ("partition.path", "cohorts.path", "model.weights", "algorithm.embeddings")
FILES = ".files"  # ends the key of a mark of data whose files the configuration does not name

# Options with which a run is what it was before there were any: the hash counts them only where
# they say otherwise.
NEUTRAL = {
    "test_views": ["plain"],
    "evaluate": ["global"],
    "validation.fraction": 0.0,
    "validation.per_client": False,
    "evaluate_on": None,
    "surrogate.examples": None,
    "stop.patience": None,
    "stop.metric": None,
    "local_evaluation.every": None,
    "local_evaluation.examples": None,
    "cohorts.path": None,
    "cohorts.draw": "seed",
    "partition.numpy_seed": None,
    "model.weights": None,
    "model.unit_features": None,
    "model.batch_norm": False,
    "model.lora._target_": "fedexp.models.lora.LoRA",
    "model.lora.rank": 0,
    "model.lora.alpha": None,
    "model.lora.targets": [],
    "model.lora.freeze_a": False,
    "local.schedule": "exponential",
    "local.step_rounds": 10,
    "local.lr_min": 0.0,
    "local.warmup": 0,
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
    "algorithm.federations": 0,
}
# Options that are no more, with the value that all runs now have, and former ones had by default.
FORMER = {"hardware.convolution": "auto"}
EMPTY = ("schedule.partition", "schedule.classes")  # an empty list is null
SPLIT = "test_fraction"  # null, likewise, and `split_seed` beside it
# null, likewise
LAYOUT = re.compile(r"(dataset|surrogate\.dataset|scenario\.domains\.\d+)\.layout")

PARTITION_NUMBERS = ("alpha", "shards_per_client")


def flatten(node: object, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts to one dict with dotted keys."""
    if not isinstance(node, dict):
        return {prefix: node}
    items: dict[str, Any] = {}
    for key, value in node.items():
        items |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return items


def essential(
    container: Mapping[str, Any], data: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the values that decide the result, by their dotted keys.

    container: the resolved configuration. data: `data_marks` of it where they were noted; by
    default they are taken from the files that it names, and a path stands for files that are not
    there.
    """
    marks = data_marks(container) if data is None else data
    of_files = {key: mark for key, mark in marks.items() if key.endswith(FILES)}
    values: dict[str, Any] = FORMER | of_files
    for key, value in flatten(numbered(without_neutral(with_revisions(container)))).items():
        if is_free(key):
            continue
        if key.rpartition(".")[2] == TARGET:
            value = class_name(value)
        values[key] = marks.get(key, value)
    # the options are in it already
    if isinstance(container.get("surrogate", {}).get("dataset"), dict):
        values = {
            key: value for key, value in values.items() if not key.startswith("surrogate.options")
        }
    return values


def with_revisions(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the numbers of corrections in the parts that they are of."""
    found = dict(container)
    for part, number in noted(container).items():
        *above, name = part.split(".")
        node = found
        for key in above:
            node[key] = node = dict(node.get(key) or {})
        if isinstance(node.get(name), Mapping):
            node[name] = {**node[name], "revision": number}
    return found


def is_free(key: str) -> bool:
    """Return whether the value of this dotted key does not decide the result."""
    found = DATASET.fullmatch(key)
    return f"{key}.".startswith(tuple(f"{free}." for free in FREE)) or (
        found is not None and found[2] != "root"
    )


def is_neutral(key: str, value: object) -> bool:
    """Return whether this value of an option leaves a run as it was before there was the option."""
    value = (
        class_name(value)
        if key.endswith("._target_")
        else None
        if value == [] and key in EMPTY
        else value
    )
    return (key in NEUTRAL and bool(value == NEUTRAL[key])) or (
        value is None and LAYOUT.fullmatch(key) is not None
    )


def without_neutral(node: object, prefix: str = "") -> Any:
    """Return nested dicts and lists without the values that `is_neutral`."""
    if isinstance(node, list):
        return [without_neutral(item, f"{prefix}{number}.") for number, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if not is_neutral(f"{prefix}{key}", value)}
    if SPLIT in kept and kept[SPLIT] is None:  # a tree of images that has a test part
        kept = {key: value for key, value in kept.items() if key not in (SPLIT, "split_seed")}
    return {key: without_neutral(value, f"{prefix}{key}.") for key, value in kept.items()}


def numbered(node: object) -> Any:
    """Return nested dicts and lists in which a list that holds dicts is a dict with the keys "0",
    "1", ..."""
    if isinstance(node, list) and any(isinstance(item, dict) for item in node):
        node = {str(number): item for number, item in enumerate(node)}
    return {key: numbered(value) for key, value in node.items()} if isinstance(node, dict) else node


def class_name(target: object) -> Any:
    """Return the name that a `_target_` counts as: fedexp's classes by their name alone, a user's
    own with its module."""
    text = str(target)
    return text.rpartition(".")[2] if text.startswith(OWN) else target


def is_own_class(key: str, value: object) -> bool:
    """Return whether this value names a class outside fedexp."""
    return key.rpartition(".")[2] == TARGET and isinstance(value, str) and not value.startswith(OWN)


def as_made(container: Mapping[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration of a run that was made, in which each class of a user's own and each
    path of data is what was noted of it, and not what is there now. A class of which nothing was
    noted is none that there is; one that has no mark, such as one of an installed package, stays
    what it is.

    marks: `data_marks` of the run."""

    def noted(node: Any, prefix: str) -> Any:
        if isinstance(node, list):
            return [noted(each, f"{prefix}{number}.") for number, each in enumerate(node)]
        if not isinstance(node, Mapping):
            return node
        kept = {key: noted(value, f"{prefix}{key}.") for key, value in node.items()}
        if is_own_class(f"{prefix}{TARGET}", kept.get(TARGET)) and marked(kept[TARGET]):
            kept[TARGET] += f"{CODE}unknown)"
        known = {key: marks.get(f"{prefix}{key}", "") for key in kept}
        return kept | {key: mark for key, mark in known.items() if checksums(mark)}

    found: dict[str, Any] = noted(container, "")
    return found


def code_marks(container: Mapping[str, Any]) -> dict[str, str]:
    """Return key of each class of a user's own -> what stands for its code; absent where it is not
    found."""
    values = flatten(numbered(dict(container)))
    marks = {key: marked(value) for key, value in values.items() if is_own_class(key, value)}
    return {key: mark for key, mark in marks.items() if mark is not None}


def data_marks(container: Mapping[str, Any]) -> dict[str, str]:
    """Return key of each path of data -> what stands for the data there, and key of each class of a
    user's own -> what stands for its code; a key is absent where they cannot be read."""
    from fedexp.data.image_files import files_of_tree, list_files

    values = flatten(numbered(dict(container)))
    marks: dict[str, str | None] = {}
    for key, value in values.items():
        if not isinstance(value, str):
            continue
        node, _, name = key.rpartition(".")
        data_dir = str(values.get(f"{node}.data_dir", value))
        if DATASET.fullmatch(key) and name == "root":
            # published data, which may not be there before the first run fetches them
            if f"{node}.url" in values:
                marks[key] = Path(value).name
                continue
            splits = values.get(f"{node}.train_splits", ["train"])
            undivided = values.get(f"{node}.{SPLIT}") is not None
            find = partial(files_of_tree, Path(value), splits, undivided)
            marks[key] = content_mark(find, data_dir)
        elif HUB.fullmatch(key) and Path(value).is_dir():
            marks[key] = content_mark(partial(list_files, Path(value)), data_dir)
        elif key in SINGLE:
            marks[key] = file_mark(Path(value))
    return code_marks(container) | {key: mark for key, mark in marks.items() if mark is not None}


def fingerprint(container: Mapping[str, Any], data: Mapping[str, str] | None = None) -> str:
    """Return <format>:<SHA-256 in hexadecimal digits>: equal for configurations that have the same
    result.

    container, data: as for `essential`. The fingerprint of a run that was begun stands in its
    directory, see `fedexp.rundir.origin`; made anew from its config.yaml, it needs the folders of
    images that the configuration names.
    """
    text = json.dumps(essential(container, data), sort_keys=True, default=str)
    return f"{FORMAT}:{hashlib.sha256(text.encode()).hexdigest()}"


def short_hash(container: Mapping[str, Any], data: Mapping[str, str] | None = None) -> str:
    """Return the first eight hexadecimal digits of the fingerprint."""
    return fingerprint(container, data).partition(":")[2][:8]


def setting(container: Mapping[str, Any]) -> str:
    """Return <algorithm>_<dataset>_<partition>, with the partition's one number: short, and the
    same for all seeds. container: with `choices`, the option of each group."""
    choices = container["choices"]
    number = next(
        (f"{container[key]}" for key in PARTITION_NUMBERS if container.get(key) is not None), ""
    )
    return f"{choices['algorithm']}_{choices['dataset']}_{choices['partition']}{number}"


def group_name(container: Mapping[str, Any]) -> str:
    """Return the name of a run and its repetitions with other seeds: setting, and hash of what
    decides the result but seeds.

    Paths of data count as they are, so that a run that is read back finds its group where its data
    are not."""
    unseeded = {key: value for key, value in container.items() if key not in ("seed", "seeds")}
    return f"{setting(container)}_{short_hash(unseeded, {})}"
