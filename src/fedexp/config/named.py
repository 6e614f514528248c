"""Data sets that a configuration names beside the one of the group: `scenario.domains`, `surrogate.dataset`.

A name stands for the option of that name in the group `dataset`, of which the node `dataset` is taken and the rest (the
protocol of a run on it) left.
"""

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fedexp.config.options import list_options
from fedexp.config.overrides import is_path
from fedexp.core.errors import ConfigError, nearest

OPTIONS = "values by name, such as {root: photos}"


def with_named_datasets(config: DictConfig) -> DictConfig:
    """Return a copy of the configuration with the nodes of these data sets in place of their names."""
    domains = OmegaConf.select(config, "scenario.domains")
    surrogate = OmegaConf.select(config, "surrogate.dataset")
    if not domains and not isinstance(surrogate, str):
        return config
    config, folders = config.copy(), search_path()
    OmegaConf.set_struct(config, False)
    if domains:
        nodes = [node_of(name, folders, "scenario.domains") if isinstance(name, str) else name for name in domains]
        config.scenario.domains = nodes
    if isinstance(surrogate, str):
        node, options = node_of(surrogate, folders, "surrogate.dataset"), config.surrogate.get("options", {})
        if not isinstance(options, DictConfig | dict):
            raise ConfigError(f"surrogate.options={options}: must be {OPTIONS}")
        if unknown := options.keys() - node.keys():
            name = min(unknown)
            raise ConfigError(f"surrogate.options.{name}: {surrogate} has no such value{nearest(name, node)}")
        config.surrogate.dataset = OmegaConf.merge(node, options)
    return config


def node_of(name: str, folders: list[Path], key: str) -> Any:
    """Return the node `dataset` of an option of the group."""
    if is_path(name):
        raise ConfigError(f"{key}={name}: is a path; must be the name of a data set")
    for folder in folders:
        if (path := folder / "dataset" / f"{name}.yaml").exists():
            loaded = OmegaConf.load(path)
            return OmegaConf.select(loaded, "dataset", default=loaded)
    options = list_options("dataset", folders)
    raise ConfigError(f"{key}={name}: no such data set{nearest(name, options)}; options: {', '.join(options)}")


def search_path() -> list[Path]:
    """Return the directories with groups: those that Hydra searches, and fedexp's own."""
    from fedexp.config.options import conf_directory

    found = []
    if HydraConfig.initialized():
        sources = HydraConfig.get().runtime.config_sources
        found = [Path(source.path) for source in sources if source.schema == "file"]
    return list(dict.fromkeys([*found, conf_directory()]))
