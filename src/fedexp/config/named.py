"""Replace names of options in a configuration by the options' nodes.

Such names are in `scenario.domains`, `surrogate.dataset`, and the members of `tracker` and
`analysis`. For a data set, only the option's node `dataset` is used. The rest of the option, the
protocol of runs on the data set, is ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf

from fedexp.config.options import SEVERAL, list_options
from fedexp.config.overrides import is_path
from fedexp.core.errors import ConfigError, nearest

OPTIONS = "values by name, such as {root: photos}"
SHARED = ("rounds", "every")  # keys of `analysis=several` that are copied to each member


def with_named_members(config: DictConfig, group: str) -> DictConfig:
    """Return a copy of the configuration with the names in `<group>.members` replaced by nodes.

    `<group>.options` changes values of the nodes. Raises ConfigError for invalid names or options.
    """
    members = OmegaConf.select(config, f"{group}.members")
    if not isinstance(members, ListConfig) or not all(isinstance(name, str) for name in members):
        return config
    options = OmegaConf.select(config, f"{group}.options", default=OmegaConf.create({}))
    are_nodes = isinstance(options, DictConfig) and all(
        isinstance(each, DictConfig) for each in options.values()
    )
    if not are_nodes:
        examples = {"tracker": "{wandb: {project: mine}}"}
        example = examples.get(group, "{local_epochs: {clients: 3}}")
        raise ConfigError(f"{group}.options={options}: must be nodes by name, such as {example}")
    if unknown := {str(key) for key in options} - set(members):
        raise ConfigError(f"{group}.{min(unknown)}: must be one of {group}.members={list(members)}")
    if "none" in members:
        raise ConfigError(
            f"{group}=[{','.join(members)}]: none cannot be combined with other options; remove it"
        )
    shared = {key: value for key, value in config[group].items() if key in SHARED}
    nodes = []
    for name in members:
        node = load_node(name, f"{group}.members", group)
        if "members" in node:
            raise ConfigError(
                f"{group}.members={list(members)}: {name} must not be a {SEVERAL[group]}"
            )
        taken = {key: value for key, value in shared.items() if key in node}
        nodes.append(with_changes(node | taken, options.get(name, {}), f"{group}.{name}", name))
    node = {"_target_": config[group]._target_, **shared, "members": nodes}
    return with_node(config, group, node)


def with_named_datasets(config: DictConfig) -> DictConfig:
    """Return a copy of the configuration with names of data sets replaced by their nodes."""
    if domains := OmegaConf.select(config, "scenario.domains"):
        nodes = [
            load_node(name, "scenario.domains") if isinstance(name, str) else name
            for name in domains
        ]
        config = with_node(config, "scenario.domains", nodes)
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


def with_node(config: DictConfig, key: str, node: Any) -> DictConfig:
    """Return a copy of the configuration with the node at `key` replaced. Its keys may be new."""
    config = config.copy()
    OmegaConf.set_struct(config, False)
    OmegaConf.update(config, key, node, merge=False)
    return config


def with_changes(
    node: dict[str, Any], changes: Mapping[str, Any], key: str, name: str
) -> dict[str, Any]:
    """Return an option's node with changed values.

    name: the option's name. Raises ConfigError for a key that the node does not have.
    """
    known = [each for each in node if each != "_target_"]
    if wrong := [each for each in changes if each not in known]:
        raise ConfigError(f"{key}.{wrong[0]}: {name} has no such key{nearest(wrong[0], known)}")
    return OmegaConf.to_container(OmegaConf.merge(node, changes))  # type: ignore[return-value]


def load_node(name: str, key: str, group: str = "dataset", resolve: bool = False) -> dict[str, Any]:
    """Return the node of a group's option. Raises ConfigError if there is no such option.

    key: the configuration key that has the name. resolve: whether to resolve interpolations; they
    must then refer to values in the option's file.
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
    paths = [folder / group / f"{name}.yaml" for folder in folders]
    loaded = OmegaConf.load(next(path for path in paths if path.exists()))
    node = OmegaConf.select(loaded, group, default=loaded)
    return OmegaConf.to_container(node, resolve=resolve)  # type: ignore[return-value]


def search_path() -> list[Path]:
    """Return the directories with config groups: those that Hydra searches, then fedexp's."""
    from fedexp.config.options import conf_directory

    found = []
    if HydraConfig.initialized():
        sources = HydraConfig.get().runtime.config_sources
        found = [Path(source.path) for source in sources if source.schema == "file"]
    return list(dict.fromkeys([*found, conf_directory()]))
