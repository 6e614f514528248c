"""Drop what an experiment sets for its option of a group if the user selects another option."""

from collections.abc import Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from fedexp.config.named import search_path
from fedexp.config.options import (
    ALIASES,
    MULTIPLE,
    conf_directory,
    find_option,
    known_keys,
    values_of_option,
)
from fedexp.config.overrides import key_of
from fedexp.core.errors import ConfigError


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
    kept, conf, folders = config.copy(), conf_directory(), search_path()
    for group, first in chosen.items():
        name = str(hydra.runtime.choices.get(group))
        selected = ALIASES.get(name, name)
        if group in typed and group not in MULTIPLE and selected != first:
            own = values_of_option(find_option(group, selected, folders), group)
            known = known_keys(conf, [path for path in folders if path != conf])
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
    values = values_of_option(find_option("experiment", name, search_path()), "experiment")
    for entry in values.pop("defaults", []):
        if isinstance(entry, dict):
            chosen |= {key.removeprefix("override /"): each for key, each in entry.items()}
        elif entry != "_self_":
            others, more = read_experiment(entry)
            chosen, found = others | chosen, more | found
    return chosen, found | values
