"""Check a composed configuration before Hydra instantiates any class named in it.

Hydra instantiates the classes of `hydra.callbacks`, `hydra.launcher`, `hydra.sweeper` and its two
logging nodes before fedexp sees the configuration. This module replaces Hydra's loader, also in the
processes that a launcher starts. The new loader rejects every class that is neither in KNOWN nor
named in a yaml file in a user's config directory, wherever the configuration gets the name.
"""

import copy
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict

from fedexp.config.options import conf_directory, known_keys
from fedexp.config.overrides import key_of, leaves
from fedexp.config.trust import NAMES, find_naming_file
from fedexp.core.errors import ConfigError
from fedexp.core.private import hydra_internals
from fedexp.core.private.hydra_internals import CORE_PLUGINS, ConfigLoaderImpl, ConfigRepository

PLUGINS = "hydra_plugins.hydra"
KNOWN = {
    "fedexp.cli.sweeps.Sweeps",
    "hydra_plugins.fedexp_optuna.OptunaSweeper",
    "hydra.experimental.callbacks.LogJobReturnCallback",
    "hydra.experimental.callbacks.PickleJobInfoCallback",
    f"{CORE_PLUGINS}.basic_launcher.BasicLauncher",
    f"{CORE_PLUGINS}.basic_sweeper.BasicSweeper",
    f"{PLUGINS}_joblib_launcher.joblib_launcher.JoblibLauncher",
    f"{PLUGINS}_submitit_launcher.submitit_launcher.LocalLauncher",
    f"{PLUGINS}_submitit_launcher.submitit_launcher.SlurmLauncher",
    f"{PLUGINS}_ray_launcher.ray_launcher.RayLauncher",
    "logging.Formatter",
    "logging.StreamHandler",
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.handlers.RotatingFileHandler",
    "logging.handlers.TimedRotatingFileHandler",
    "logging.handlers.WatchedFileHandler",
    "rich.logging.RichHandler",
    "colorlog.ColoredFormatter",
    "ext://sys.stdout",
    "ext://sys.stderr",
}
# nodes whose classes Hydra instantiates
CALLED = ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")
# references that occur in the config files of Hydra, its plugins and fedexp; they refer to values
REFERENCES = {
    "${data_dir}",
    "${fedexp.gpus:}",
    "${hydra.job.name}",
    "${hydra.sweep.dir}/.submitit/%j",
    "${hydra.runtime.output_dir}/${hydra.job.name}.log",
    "hydra-${hydra.job.name}.log",
}


class CheckedRepository(ConfigRepository):
    """Hydra's repository of config groups, limited to files in the configuration directories."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "CheckedRepository":
        """Return a shallow copy. This is enough, since Hydra only replaces the list of sources."""
        return copy.copy(self)

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Load a config file. Raises ConfigError if its path leaves the configuration directory."""
        normal = posixpath.normpath(config_path.replace("\\", "/"))
        if normal.startswith(("/", "..")):
            raise ConfigError(
                f"{config_path}: is outside the configuration directories; add"
                " the directory of the file with --config-dir"
            )
        return super().load_config(config_path)


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's configuration loader, extended by a check of each composed configuration."""

    def __init__(self, config_search_path: ConfigSearchPath):
        super().__init__(config_search_path)
        self.repository = CheckedRepository(config_search_path)

    def load_configuration(self, *arguments: Any, **options: Any) -> DictConfig:
        """Compose the configuration. Raises ConfigError if Hydra would call an untrusted class."""
        config = super().load_configuration(*arguments, **options)
        check_classes(config)
        drop_presets(config)
        return config


def install() -> None:
    """Replace Hydra's loader with the checked loader."""
    hydra_internals.replace_loader(CheckedLoader)


@contextmanager
def use_checked_loader() -> Iterator[None]:
    """Use the checked loader inside the block, and restore the previous loader afterwards."""
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


def check_classes(config: DictConfig) -> None:
    """Raise ConfigError unless every class that Hydra imports is in KNOWN or named by the user.

    The nodes in CALLED are checked. The nodes that they refer to are checked too, since such a node
    could contain a class name.
    """
    folders = config_folders(config)
    written: dict[str, Any] = OmegaConf.to_container(config.hydra)  # type: ignore[assignment]
    # a launcher's node refers to data_dir
    if OmegaConf.is_config(OmegaConf.select(config, "data_dir")):
        raise ConfigError("data_dir: must be the name of a directory")
    for node in CALLED:
        for key, value in leaves(written.get(node), f"hydra.{node}"):
            text, name = str(value), key.rpartition(".")[2]
            refers = "${" in text
            if not (refers or name in NAMES or text.startswith("ext://")):
                continue
            if text in KNOWN | REFERENCES:
                continue
            if text.startswith("ext://") or not find_naming_file(
                text, folders, None if refers else NAMES
            ):
                raise ConfigError(
                    f"{key}={text}: is not a class or reference that Hydra may use; name your"
                    " own classes and those of plugins in a yaml file in a directory given with"
                    " --config-dir"
                )
