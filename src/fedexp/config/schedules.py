"""Convert the node `schedule`, where users list changes by round, into nodes with `_target_`."""

from typing import Any

from fedexp.config.named import load_node, with_changes
from fedexp.config.options import ALIASES
from fedexp.core.errors import ConfigError, nearest

KINDS = {
    "partition": "a map from rounds to partitions, such as {101: {name: dirichlet, alpha: 0.1}}",
    "classes": "a map from rounds to class shares, such as {50: {3: 0.1}}",
}
PARTITIONS = ("iid", "lda", "sharding", "equal_shards")  # partitions allowed in a schedule
TARGETS = {name: f"fedexp.data.changes.{name}" for name in ("NewPartition", "NewShares")}


def with_schedule(values: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved configuration with a schedule that consists of lists of nodes.

    The lists replace `schedule.partition` and `schedule.classes`.
    """
    schedule = values.get("schedule")
    if not isinstance(schedule, dict):
        return values
    made = {}
    for key in KINDS:
        written = schedule.get(key)
        # already a list of nodes
        if isinstance(written, list) and all(isinstance(each, dict) for each in written):
            continue
        changes = by_round(key, written)
        make = partition_node if key == "partition" else shares_node
        made[key] = [make(number, value) for number, value in sorted(changes.items())]
    return values | {"schedule": schedule | made}


def by_round(key: str, written: Any) -> dict[int, Any]:
    """Return a dict that maps each round to its change, as the user wrote it.

    Raises ConfigError unless the value is a mapping from rounds (2, 3, ...) to changes.
    """
    if written is None:
        return {}
    if not isinstance(written, dict):
        raise ConfigError(f"schedule.{key}={written}: must be {KINDS[key]}")
    found = {}
    for number, change in written.items():
        text = str(number)
        if not text.isdecimal() or int(text) < 2:
            raise ConfigError(f"schedule.{key}: {text} must be a round number of at least 2")
        found[int(text)] = change
    return found


def shares_node(number: int, change: Any) -> dict[str, Any]:
    """Return the node for a change of class shares, such as {3: 0.1}.

    Raises ConfigError for a label that is not a number or a share outside [0, 1].
    """
    where = f"schedule.classes.{number}"
    if not isinstance(change, dict) or not change:
        raise ConfigError(
            f"{where}={change}: must give a fraction for each class, such as {{3: 0.1}}, which"
            " keeps 10 % of class 3"
        )
    shares = {}
    for label, share in change.items():
        if not str(label).isdecimal():
            raise ConfigError(f"{where}: {label} is not a class; classes are numbered 0, 1, ...")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"{where}.{label}={share}: must be a fraction between 0 and 1")
        shares[int(label)] = float(share)
    return {"_target_": TARGETS["NewShares"], "round": number, "shares": shares}


def partition_node(number: int, change: Any) -> dict[str, Any]:
    """Return the node for a change of the partition, such as {name: dirichlet, alpha: 0.1}.

    Missing keys get their values from the option's file. Raises ConfigError for an unknown
    partition or key.
    """
    where = f"schedule.partition.{number}"
    if isinstance(change, str):
        change = {"name": change}
    if not isinstance(change, dict) or not isinstance(change.get("name"), str):
        raise ConfigError(
            f"{where}={change}: must be the name of a partition, or a mapping with its name"
            " and keys, such as {name: dirichlet, alpha: 1}"
        )
    name = str(ALIASES.get(change["name"], change["name"]))
    if name not in PARTITIONS:
        raise ConfigError(
            f"{where}.name={name}: must be one of"
            f" {', '.join(PARTITIONS)}{nearest(name, PARTITIONS)}"
        )
    given = {str(key): value for key, value in change.items() if key != "name"}
    node = with_changes(load_node(name, where, "partition", resolve=True), given, where, name)
    return {"_target_": TARGETS["NewPartition"], "round": number, "partition": node}
