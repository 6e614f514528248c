"""Replace option names in a configuration with the nodes that the options define.

Such names occur in `scenario.domains` and `surrogate.dataset`. Only the option's node `dataset` is
used. Its other keys set the protocol for runs on the data set and are ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fedexp.config.options import conf_directories, find_option, list_groups, list_options
from fedexp.config.overrides import is_path
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
    return list(dict.fromkeys([*found, *conf_directories()]))
