"""Drop the keys of an experiment's partition from a configuration if another one is selected.

The default name of a run contains a hash of its configuration, so the keys must be dropped before
Hydra names the directory. Only Hydra's loader sees the configuration then, also in the processes
that a launcher starts, so this module replaces the loader.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from fedexp.config.options import conf_directory, known_keys
from fedexp.config.overrides import key_of
from fedexp.core.errors import ConfigError
from fedexp.core.private import hydra_internals


class Loader(hydra_internals.ConfigLoaderImpl):
    """Hydra's configuration loader, followed by `drop_presets`."""

    def load_configuration(self, *arguments: Any, **options: Any) -> DictConfig:
        config = super().load_configuration(*arguments, **options)
        drop_presets(config)
        return config


def install() -> None:
    """Replace Hydra's loader."""
    hydra_internals.replace_loader(Loader)


@contextmanager
def use_loader() -> Iterator[None]:
    """Use fedexp's loader inside the block, and restore the previous loader afterwards."""
    before = hydra_internals.current_loader()
    install()
    try:
        yield
    finally:
        hydra_internals.replace_loader(before)


def drop_presets(config: DictConfig) -> None:
    """Remove the keys that an experiment sets for a partition which the command line replaces.

    Raises ConfigError if the command line sets such a key.
    """
    choices = config.hydra.runtime.choices
    written: Any = OmegaConf.to_container(config.hydra.overrides.task)  # may contain `${`
    typed = list(map(key_of, written))
    if not choices.experiment or "partition" not in typed:
        return
    conf = conf_directory()
    known = known_keys(conf, [path for path in config_folders(config) if path != conf])
    with open_dict(config):
        for key, owners in known.items():
            of_partition = owners and all(each.startswith("partition=") for each in owners)
            if not of_partition or f"partition={choices.partition}" in owners:
                continue
            if key in typed:
                raise ConfigError(f"{key}: only exists with {' or '.join(owners)}")
            node, _, name = key.rpartition(".")
            parent = OmegaConf.select(config, node) if node else config
            if OmegaConf.is_config(parent):
                parent.pop(name, None)


def config_folders(config: DictConfig) -> list[Path]:
    """Return the directories with config groups that a configuration was composed from."""
    sources = config.hydra.runtime.config_sources
    return [Path(each.path) for each in sources if each.schema == "file"]
