"""Prepare a composed configuration, before its values are read.

An experiment's values for an option give way if the user selects another option of the group. Names
of data sets in `scenario.domains` and `surrogate.dataset` are replaced with these options, from
which only the node `dataset` is used. The changes in `schedule`, which users list by
round, become nodes with `_target_`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from fedexp.config.options import (
    ALIASES,
    MULTIPLE,
    conf_directories,
    find_option,
    known_keys,
    list_groups,
    list_options,
    values_in,
)
from fedexp.config.overrides import is_path, key_of
from fedexp.core.errors import ConfigError, nearest

OPTIONS = "a mapping, such as {root: photos}"


def with_named_datasets(config: DictConfig) -> DictConfig:
    """Return a copy of the configuration with names of data sets replaced with their nodes."""
    if domains := OmegaConf.select(config, "scenario.domains"):
        config = with_node(config, "scenario.domains", list(map(domain_node, domains)))
    surrogate = OmegaConf.select(config, "surrogate.dataset")
    if isinstance(surrogate, str):
        node, options = (
            load_node(surrogate, "surrogate.dataset"),
            config.surrogate.get("options", {}),
        )
        if not isinstance(options, DictConfig | dict):
            raise ConfigError(f"surrogate.options={options}: must be {OPTIONS}")
        node = with_changes(node, options, "surrogate.options", surrogate)
        config = with_node(config, "surrogate.dataset", node)
    return config


def domain_node(domain: Any) -> Any:
    """Return the node of a data set in `scenario.domains`.

    domain: a name, a mapping of one name to changed values, or a node. A node is returned
    unchanged.
    """
    key = "scenario.domains"
    if isinstance(domain, str):
        return load_node(domain, key)
    if not isinstance(domain, DictConfig) or "_target_" in domain:
        return domain
    if len(domain) != 1 or not all(isinstance(values, DictConfig) for values in domain.values()):
        raise ConfigError(
            f"{key}={domain}: must be the name of a data set, or a mapping of one name to"
            " changed values, such as {domainnet: {domain: real}}"
        )
    ((given, changes),) = domain.items()
    name = str(given)
    return with_changes(load_node(name, key), changes, f"{key}.{name}", name)


def with_node(config: DictConfig, key: str, node: Any) -> DictConfig:
    """Return a copy of the configuration with the node at `key` set to `node`.

    The node may have keys that the configuration did not have before.
    """
    config = config.copy()
    OmegaConf.set_struct(config, False)
    OmegaConf.update(config, key, node, merge=False)
    return config


def with_changes(
    node: dict[str, Any], changes: Mapping[str, Any], key: str, name: str
) -> dict[str, Any]:
    """Return the node of an option with changed values.

    name: the name of the option. Raises ConfigError for a key that the node does not have.
    """
    known = [each for each in node if each != "_target_"]
    if wrong := [each for each in changes if each not in known]:
        raise ConfigError(f"{key}.{wrong[0]}: {name} has no such key{nearest(wrong[0], known)}")
    return OmegaConf.to_container(OmegaConf.merge(node, changes))  # type: ignore[return-value]


def load_node(name: str, key: str, group: str = "dataset", resolve: bool = False) -> dict[str, Any]:
    """Return the node that an option of a group defines.

    key: the configuration key whose value is `name`, for messages. resolve: whether to resolve
    interpolations. If so, they must refer to values in the option's file.

    Raises ConfigError if the group does not have this option.
    """
    kind = {"dataset": "data set"}.get(group, group)
    if is_path(name):
        raise ConfigError(f"{key}={name}: is a path; must be the name of a {kind}")
    folders = search_path()
    options = list_options(group, folders)
    if name not in options:
        raise ConfigError(
            f"{key}={name}: no such {kind}{nearest(name, options)}; options: {', '.join(options)}"
        )
    loaded = OmegaConf.load(str(find_option(group, name, folders)))
    node = OmegaConf.select(loaded, group, default=loaded)
    return OmegaConf.to_container(node, resolve=resolve)  # type: ignore[return-value]


def describe_groups() -> str:
    """Return a line `group: option, ...` for each group, for experiments and for named sweeps."""
    folders = search_path()
    groups = {name: name for name in [*list_groups(folders), "experiment", "sweep"]}
    groups |= {f"hydra/{name}": name for name in ("launcher", "sweeper")}
    lines = (f"{shown}: {', '.join(list_options(name, folders))}" for shown, name in groups.items())
    return "\n".join(lines)


def search_path() -> list[Path]:
    """Return the directories with config groups: the user's first, then fedexp's."""
    found = []
    if HydraConfig.initialized():
        sources = HydraConfig.get().runtime.config_sources
        found = [Path(source.path) for source in sources if source.schema == "file"]
    return user_first(found)


def user_first(folders: Sequence[Path]) -> list[Path]:
    """Return directories with config groups, without fedexp's, and then fedexp's."""
    ours = conf_directories()
    known = {each.resolve() for each in ours}
    return [*(each for each in dict.fromkeys(folders) if each.resolve() not in known), *ours]


def without_presets(config: DictConfig) -> DictConfig:
    """Return the configuration without an experiment's values for options that the user replaces.

    For example, an experiment with dataset=cifar10 sets dataset.mean, and `dataset=mnist` has its
    own mean. Raises ConfigError if the command line sets a key that only the replaced option has.
    """
    if not HydraConfig.initialized():
        return config
    hydra: Any = HydraConfig.get()
    written: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    typed = [key_of(text) for text in written]
    if not (experiment := hydra.runtime.choices.get("experiment")):
        return config
    chosen, preset = read_experiment(experiment)
    kept, folders = config.copy(), search_path()
    for group, first in chosen.items():
        name = str(hydra.runtime.choices.get(group))
        selected = ALIASES.get(name, name)
        if group in typed and group not in MULTIPLE and selected != first:
            own = values_of_option(group, selected)
            known = known_keys(folders)
            of_group = {
                key: known[key]
                for key in preset
                if known.get(key) and all(each.startswith(f"{group}=") for each in known[key])
            }
            for key, owners in of_group.items():
                if key not in own and key in typed:
                    raise ConfigError(f"{key}: only exists with {' or '.join(owners)}")
                if key not in typed:
                    give_way(kept, key, own)
    return kept


def values_of_option(group: str, name: str) -> dict[str, Any]:
    """Return the values in an option's file, if any, by dotted key. Mappings are also values."""
    path = find_option(group, name, search_path())
    return {} if path is None else values_in(path, group)


def give_way(config: DictConfig, key: str, own: Mapping[str, Any]) -> None:
    """Replace an experiment's value by the value in `own`, or remove it."""
    node, _, last = key.rpartition(".")
    parent = OmegaConf.select(config, node) if node else config
    if parent is None or isinstance(own.get(key), dict):
        return  # it was removed with an earlier key, or its entries follow
    with open_dict(parent):
        if key in own:
            parent[last] = own[key]
        else:
            parent.pop(last, None)


def read_experiment(name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the options that an experiment chooses (group -> option), and the values it sets.

    The values are those of the experiment's file and of the files that its defaults list names.
    """
    chosen: dict[str, str] = {}
    found: dict[str, Any] = {}
    values = values_of_option("experiment", name)
    for entry in values.pop("defaults", []):
        if isinstance(entry, dict):
            chosen |= {key.removeprefix("override /"): each for key, each in entry.items()}
        elif entry != "_self_":
            others, more = read_experiment(entry)
            chosen, found = others | chosen, more | found
    return chosen, found | values


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
        changes = changes_by_round(key, written)
        make = partition_node if key == "partition" else shares_node
        made[key] = [make(number, value) for number, value in sorted(changes.items())]
    return values | {"schedule": schedule | made}


def changes_by_round(key: str, written: Any) -> dict[int, Any]:
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
