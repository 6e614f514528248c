"""Options that a configuration names beside the one of a group: `scenario.domains`,
`surrogate.dataset`, and the members of `tracker` and `analysis`.

A name stands for the option of that name in the group, in which of a data set the node `dataset` is
taken and the rest (the protocol of a run on it) left.
"""

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf

from fedexp.config.options import SEVERAL, list_options
from fedexp.config.overrides import is_path
from fedexp.core.errors import ConfigError, nearest

OPTIONS = "values by name, such as {root: photos}"


SHARED = ("rounds", "every")  # keys of several analyses, which each of them takes over


def with_named_members(config: DictConfig, group: str) -> DictConfig:
    """Return a copy of the configuration with nodes in place of the names in `<group>.members`,
    changed as `<group>.options` says."""
    members = OmegaConf.select(config, f"{group}.members")
    if not isinstance(members, ListConfig) or not all(isinstance(name, str) for name in members):
        return config
    config, folders = config.copy(), search_path()
    options = OmegaConf.select(config, f"{group}.options", default=OmegaConf.create({}))
    OmegaConf.set_struct(config, False)
    if not isinstance(options, DictConfig) or not all(
        isinstance(each, DictConfig) for each in options.values()
    ):
        example = (
            "{wandb: {project: mine}}" if group == "tracker" else "{local_epochs: {clients: 3}}"
        )
        raise ConfigError(f"{group}.options={options}: must be nodes by name, such as {example}")
    if unknown := {str(key) for key in options} - set(members):
        raise ConfigError(f"{group}.{min(unknown)}: is none of {group}.members={list(members)}")
    if "none" in members:
        raise ConfigError(
            f"{group}=[{','.join(members)}]: none goes alone ({group}=none); leave it out"
        )
    shared = {key: value for key, value in config[group].items() if key in SHARED}
    nodes = []
    for name in members:
        node, changes = node_of(name, folders, f"{group}.members", group), options.get(name, {})
        if "members" in node:
            raise ConfigError(
                f"{group}.members={list(members)}: {name} is itself a {SEVERAL[group]}"
            )
        if wrong := [key for key in changes if key not in node or key == "_target_"]:
            raise ConfigError(
                f"{group}.{name}.{wrong[0]}: {name} has no such key{nearest(wrong[0], node)}"
            )
        taken = {key: value for key, value in shared.items() if key in node}
        nodes.append(OmegaConf.merge(node, taken, changes))
    config[group] = {"_target_": config[group]._target_, **shared, "members": nodes}
    return config


def with_named_datasets(config: DictConfig) -> DictConfig:
    """Return a copy of the configuration with the nodes of these data sets in place of their
    names."""
    domains = OmegaConf.select(config, "scenario.domains")
    surrogate = OmegaConf.select(config, "surrogate.dataset")
    if not domains and not isinstance(surrogate, str):
        return config
    config, folders = config.copy(), search_path()
    OmegaConf.set_struct(config, False)
    if domains:
        nodes = [
            node_of(name, folders, "scenario.domains") if isinstance(name, str) else name
            for name in domains
        ]
        config.scenario.domains = nodes
    if isinstance(surrogate, str):
        node, options = (
            node_of(surrogate, folders, "surrogate.dataset"),
            config.surrogate.get("options", {}),
        )
        if not isinstance(options, DictConfig | dict):
            raise ConfigError(f"surrogate.options={options}: must be {OPTIONS}")
        if unknown := options.keys() - node.keys():
            name = min(unknown)
            raise ConfigError(
                f"surrogate.options.{name}: {surrogate} has no such value{nearest(name, node)}"
            )
        config.surrogate.dataset = OmegaConf.merge(node, options)
    return config


def node_of(name: str, folders: list[Path], key: str, group: str = "dataset") -> Any:
    """Return the node of an option of a group."""
    kind = {"dataset": "data set"}.get(group, group)
    if is_path(name):
        raise ConfigError(f"{key}={name}: is a path; must be the name of a {kind}")
    for folder in folders:
        if (path := folder / group / f"{name}.yaml").exists():
            loaded = OmegaConf.load(path)
            return OmegaConf.select(loaded, group, default=loaded)
    options = list_options(group, folders)
    raise ConfigError(
        f"{key}={name}: no such {kind}{nearest(name, options)}; options: {', '.join(options)}"
    )


def search_path() -> list[Path]:
    """Return the directories with groups: those that Hydra searches, and fedexp's own."""
    from fedexp.config.options import conf_directory

    found = []
    if HydraConfig.initialized():
        sources = HydraConfig.get().runtime.config_sources
        found = [Path(source.path) for source in sources if source.schema == "file"]
    return list(dict.fromkeys([*found, conf_directory()]))
