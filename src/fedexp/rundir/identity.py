"""The identity of a run: a hash of every value of its configuration that can change a result.

Classes are identified by their full path and their `version` (see `fedexp.core.limits.Checked`).
A correction that changes a method's numbers raises the version of its class. An option that is
added later declares the value that keeps the earlier behaviour, and is left out at this value only:

    lr_min: float = field(default=0.0, metadata={"neutral": 0.0})

Such a declaration is never edited. A callback belongs to the identity only if its class declares
that it may end runs (`ends_runs`). The content of the data is compared separately, see
`fedexp.rundir.origin`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from fedexp.core.limits import NEUTRAL

# Keys that do not change a result, or only within the tolerance of rounding. Their values may
# change when a run is resumed.
FREE = (
    "resume",
    "accept_changed_data",
    "tracker",
    "callback",
    "checkpoint_interval",
    "figures",
    "data_dir",
    "choices",
    "expected",
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
    "hardware.cuda_graphs",
)
MISSING = object()
FREE_OF_DATASETS = ("data_dir", "url")  # fields of a data set
DATASETS = ("dataset.", "surrogate.dataset.", "surrogate.options.", "scenario.domains.")

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


def value_of(container: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, or None if the key does not exist."""
    node: Any = container
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def is_free(key: str) -> bool:
    """Return whether the value of this dotted key does not affect the result."""
    if key.rpartition(".")[2] in FREE_OF_DATASETS and key.startswith(DATASETS):
        return True
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def result_values(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a resolved configuration that are not free, by dotted key.

    Paths in the `data_dir` are relative to it, since the data may be moved. Options that runs of
    earlier versions lack are left out at their neutral value, so hashes of the values stay.
    """
    start = f"{container.get('data_dir')}/"
    found = {}
    for key, value in flatten(dict(container)).items():
        if isinstance(value, str) and value.startswith(start):
            value = f"${{data_dir}}/{value.removeprefix(start)}"
        if not is_free(key) and NEUTRAL.get(key, MISSING) != value:
            found[key] = value
    return found


def essential(built: Any) -> dict[str, Any]:
    """Return all values that determine the results of a run, by dotted key.

    built: the parts of the run's configuration (`fedexp.config.build.Built`).
    """
    found = result_values(built.values)
    # The other scalars on the top level are also fields of the partition.
    top = {field.name for field in fields(built.settings)}
    found = {key: value for key, value in found.items() if "." in key or key in top}
    for name, part in vars(built).items():
        if name == "callback":
            found |= essential_callbacks(built.values[name], part)
        elif not is_free(name) and name != "values":
            prefix = "" if name == "settings" else f"{name}."
            add_versions(found, prefix, part)
            if isinstance(part, list):  # the keys of its values have the names of the options
                for option, item in zip(built.values[name], part, strict=True):
                    drop_neutral(found, f"{prefix}{option}.", item)
            else:
                drop_neutral(found, prefix, part)
    return found


def essential_callbacks(nodes: Mapping[str, Any], callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the options of the callbacks that may end a run, by dotted key.

    Runs without such a callback have the identity that they had before `ends_runs` existed.

    nodes: name of the option -> its node, in the order of `callbacks`.
    """
    found: dict[str, Any] = {}
    for (name, node), part in zip(nodes.items(), callbacks, strict=True):
        if part.ends_runs:
            found |= flatten(node, f"callback.{name}")
            add_versions(found, f"callback.{name}.", part)
            drop_neutral(found, f"callback.{name}.", part)
    return found


def classes_in(prefix: str, part: object) -> Iterator[tuple[str, Any]]:
    """Yield a part and all parts in it, each with the text before its fields in dotted keys."""
    if isinstance(part, list):
        for number, item in enumerate(part):
            yield from classes_in(f"{prefix}{number}.", item)
    elif is_dataclass(part):
        yield prefix, part
        for field in fields(part):
            yield from classes_in(f"{prefix}{field.name}.", getattr(part, field.name))


def add_versions(found: dict[str, Any], prefix: str, part: object) -> None:
    """Add the versions of a part's classes to `found`. prefix: see `classes_in`."""
    for start, each in classes_in(prefix, part):
        for cls in type(each).__mro__:
            if vars(cls).get("version", 1) != 1:
                found[f"{start}{cls.__name__}.version"] = vars(cls)["version"]


def drop_neutral(found: dict[str, Any], prefix: str, part: object) -> None:
    """Remove a part's options at their neutral value from `found`. prefix: see `classes_in`."""
    for start, each in classes_in(prefix, part):
        for field in fields(each):
            key = f"{start}{field.name}"
            if "neutral" in field.metadata and found.get(key) == field.metadata["neutral"]:
                found.pop(key, None)


def digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 hash of plain values, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def setting(container: Mapping[str, Any]) -> str:
    """Return the short name <algorithm>_<dataset>_<partition>, which is the same for all seeds.

    The name ends with the value of alpha or shards_per_client if the partition has one of them.

    container: the configuration, including `choices`, the chosen option of each group.
    """
    choices = container["choices"]
    number = next(iter(partition_numbers(container).values()), "")
    return f"{choices['algorithm']}_{choices['dataset']}_{choices['partition']}{number}"


def partition_numbers(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return alpha and shards_per_client, if the partition has them.

    The partition's own value counts, which may be set beside the key that it refers to.
    """
    own = container.get("partition") or {}
    found = {key: own.get(key, container.get(key)) for key in PARTITION_NUMBERS}
    return {key: value for key, value in found.items() if value is not None}


def group_name(container: Mapping[str, Any]) -> str:
    """Return the name of the group of runs that differ only in their seeds."""
    unseeded = {key: value for key, value in container.items() if key not in ("seed", "seeds")}
    return f"{setting(container)}_{digest(result_values(unseeded))[:8]}"
