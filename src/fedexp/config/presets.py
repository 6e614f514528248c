"""Drop the keys that an experiment sets for its partition if the user selects another one."""

from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from fedexp.config.named import search_path
from fedexp.config.options import ALIASES, conf_directory, known_keys
from fedexp.config.overrides import key_of
from fedexp.core.errors import ConfigError


def without_presets(config: DictConfig) -> DictConfig:
    """Return the configuration without keys of a partition that the command line replaces.

    For example, an experiment with partition=sharding sets shards_per_client, and partition=lda has
    no such key. Raises ConfigError if the command line sets such a key.
    """
    if not HydraConfig.initialized():
        return config
    hydra: Any = HydraConfig.get()
    written: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    typed = [key_of(text) for text in written]
    if not hydra.runtime.choices.get("experiment") or "partition" not in typed:
        return config
    chosen = hydra.runtime.choices.partition
    selected = f"partition={ALIASES.get(chosen, chosen)}"
    kept = config.copy()
    conf = conf_directory()
    for key, owners in known_keys(conf, [path for path in search_path() if path != conf]).items():
        of_partition = owners and all(each.startswith("partition=") for each in owners)
        if not of_partition or selected in owners:
            continue
        if key in typed:
            raise ConfigError(f"{key}: only exists with {' or '.join(owners)}")
        node, _, name = key.rpartition(".")
        parent = OmegaConf.select(kept, node) if node else kept
        if OmegaConf.is_config(parent):
            with open_dict(parent):
                parent.pop(name, None)
    return kept
